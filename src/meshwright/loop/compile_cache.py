"""JAX's persistent compilation cache for training runs: a folder per user, which a restarted run finds warm."""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax

MOST_BYTES = 8 << 30
"""Size at which the oldest programs are removed."""


def use_compile_cache(wanted: str, *, folder: Path, is_safe: bool, tell: Callable[[str], None]) -> Callable[[], None]:
    """Turns the cache on for this process unless the user has already set JAX up, and returns what undoes it.

    Args:
        wanted: a folder, "auto" for the user's own, or "off".
        folder: the user's cache folder.
        is_safe: whether programs may be loaded; XLA:CPU runs the collectives of loaded pipelines in another order, and
            hangs.

    Example:
        >>> import tempfile
        >>> undo = use_compile_cache("off", folder=Path(tempfile.mkdtemp()), is_safe=True, tell=print)
        >>> jax.config.jax_enable_compilation_cache
        False
        >>> undo()
    """
    if wanted == "off" or not is_safe:
        if wanted not in ("auto", "off"):
            tell("the compile cache is off: XLA:CPU cannot run pipelines from a cache")
        return _set(jax_enable_compilation_cache=False)
    settings: Any = jax.config
    if wanted == "auto" and (settings.jax_compilation_cache_dir or not settings.jax_enable_compilation_cache):
        return lambda: None
    path = folder / "compiled" / _host() if wanted == "auto" else Path(wanted).expanduser()
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        _require_own(path)
        _shrink(path)
    except OSError as error:
        tell(f"the compile cache is off: cannot use {path}: {error.strerror or error}")
        return lambda: None
    return _set(jax_enable_compilation_cache=True, jax_compilation_cache_dir=str(path))


def _set(**values: Any) -> Callable[[], None]:
    """Changes JAX's configuration, and returns a function that changes it back."""
    from jax.experimental.compilation_cache import compilation_cache

    before = {name: getattr(jax.config, name) for name in values}

    def change(wanted: dict[str, Any]) -> None:
        for name, value in wanted.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()  # it remembers its folder from its first use

    if before == values:
        return lambda: None
    change(values)
    return lambda: change(before)


def _host() -> str:
    """Names the processor of this machine: XLA compiles for its instructions, and homes are shared between machines."""
    flags = ""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                flags = line
                break
    return f"{platform.machine()}-{hashlib.sha256(flags.encode()).hexdigest()[:8]}"


def _require_own(path: Path) -> None:
    """Raises if somebody else can put programs there, which this process would run."""
    found = path.stat()
    if hasattr(os, "getuid") and found.st_uid not in (os.getuid(), 0):
        raise PermissionError(1, "it belongs to another user")
    if found.st_mode & stat.S_IWOTH:
        raise PermissionError(1, "every user can write into it")


def _shrink(path: Path) -> None:
    """Removes the oldest files until the folder is small enough."""
    files = sorted(_files(path), reverse=True)  # youngest first
    total = 0
    for _, size, name in files:
        total += size
        if total > MOST_BYTES:
            with contextlib.suppress(OSError):  # another process removes it too
                os.unlink(name)


def _files(path: Path) -> Iterator[tuple[float, int, str]]:
    with os.scandir(path) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                if entry.is_file(follow_symlinks=False):
                    found = entry.stat()
                    yield max(found.st_mtime, found.st_atime), found.st_size, entry.path
