"""Cache folders: files made once from other data, and found again by a hash of it.

A cache folder holds a folder for each hash, with some files and a `meta.json`. It is written under a temporary name and
renamed when complete, so readers never see a partial cache. If several processes start at once, one writes and the
others wait for its lock. The lock only saves work: on a file system without locks, each writes its own copy and the
first to finish wins.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.bounded_reader import open_regular, read_json
from meshwright.errors import DataError
from meshwright.files import try_lock, wait_for_lock, write_atomically

Tell = Callable[[str], None]

FORMAT = 1
# Files up to this size are hashed whenever a cache is opened (about a second); larger ones are only checked for size.
HASHED_BYTES = 1 << 30
# A file written this shortly before its time stamp was read may change again and keep that time stamp.
_RACY_NS = 2_000_000_000
# An unfinished folder that was not touched for this long belongs to a dead process.
_DEAD_SECONDS = 3600


def default_cache() -> Path:
    """Returns the cache directory."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "meshwright"


def open_or_build(
    folder: Path, fingerprint: str, write: Callable[[Path], dict[str, Any]], *, tell: Tell
) -> tuple[Path, dict[str, Any]]:
    """Returns the folder of a cache and its `meta.json`, after building it if it is missing or damaged.

    Args:
        write: writes the files into a folder, and returns the contents of `meta.json` with their sizes and hashes under
            `files`.
        tell: called with a line of text about damage and waiting.
    """
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / fingerprint[:32]
    # Look without the lock first: this is the usual case, and the only one for a read-only cache.
    found = _checked(target, fingerprint, tell=None)
    if found is None:
        with _lock(folder / f"{target.name}.lock", tell):
            _remove_leftovers(target)
            found = _checked(target, fingerprint, tell=tell)
            if found is None:
                _build(write, target, fingerprint)
                found = _checked(target, fingerprint, tell=tell)
    if found is None:
        raise DataError(f"the token cache in {target} was written but cannot be read back.", hint="check the disk.")
    return target, found


@contextlib.contextmanager
def cache_errors(folder: str | os.PathLike[str]) -> Iterator[None]:
    """Turns errors of the file system into a `DataError` that names the cache folder."""
    try:
        yield
    except OSError as error:
        raise DataError(
            f"cannot write the token cache in {str(folder)!r}: {error.strerror or error}.",
            hint="choose another cache folder.",
        ) from error


def known_content(folder: Path, stamps: list[list[Any]], key: Any, compute: Callable[[], str]) -> str:
    """Returns a hash of files; reads only files that are new or have changed.

    Args:
        stamps: name, size and modification time of each file.
        key: JSON value on which the hash depends besides the files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    name = hashlib.sha256(json.dumps([FORMAT, stamps, key]).encode()).hexdigest()[:32]
    note = folder / f"{name}.known"
    try:
        known = read_json(note)
        content = str(known["content"])
        trusted = max(stamp[2] for stamp in stamps) < int(known["looked"]) - _RACY_NS
    except (OSError, ValueError, KeyError, TypeError):
        trusted = False
    if not trusted:
        looked = time.time_ns()
        content = compute()
        with contextlib.suppress(OSError):  # it only saves time at the next start
            write_atomically(note, json.dumps({"content": content, "looked": looked}))
    return content


def _checked(target: Path, fingerprint: str, *, tell: Tell | None) -> dict[str, Any] | None:
    """Returns the `meta.json` in a folder, or None if it is missing or damaged; reports damage to `tell`."""
    if not target.is_dir():
        return None
    try:
        meta: dict[str, Any] = read_json(target / "meta.json")
        if meta["fingerprint"] != fingerprint or meta["format"] != FORMAT:
            raise ValueError("meta.json describes other data")
        if meta.pop("check", None) != _digest(meta):
            raise ValueError("meta.json has changed, or is of an older release")
        for name, facts in meta["files"].items():
            _check_file(target / name, facts)
        return meta
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        if tell is not None:
            tell(f"the token cache in {target} is damaged ({error}); rebuilding it")
        return None


def _digest(meta: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(meta, sort_keys=True).encode()).hexdigest()


def _check_file(path: Path, facts: dict[str, Any]) -> None:
    size = path.stat().st_size
    if size != facts["bytes"]:
        raise ValueError(f"{path.name} has {size:,} bytes instead of {facts['bytes']:,}")
    if size <= HASHED_BYTES:
        with open_regular(path) as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != facts["sha256"]:
            raise ValueError(f"the contents of {path.name} have changed")


def mapped(path: Path, dtype: np.dtype[Any]) -> np.ndarray:
    """Returns the array in a file, mapped into memory."""
    # A plain view: every small slice of an np.memmap would keep the file open.
    return np.memmap(path, dtype, mode="r").view(np.ndarray)


def _build(write: Callable[[Path], dict[str, Any]], target: Path, fingerprint: str) -> None:
    making = Path(tempfile.mkdtemp(prefix=f"{target.name}.making-", dir=target.parent))
    try:
        facts = write(making)
        meta = {"format": FORMAT, "fingerprint": fingerprint, **facts}
        write_atomically(making / "meta.json", json.dumps({**meta, "check": _digest(meta)}, indent=1))
        try:
            making.rename(target)
        except OSError:
            if not target.is_dir():
                raise
            # Either the damaged cache that is being replaced, or, without locks, another process was faster.
            if _checked(target, fingerprint, tell=None) is None:
                shutil.rmtree(target)
                making.rename(target)
    finally:
        shutil.rmtree(making, ignore_errors=True)


def _remove_leftovers(target: Path) -> None:
    """Removes the unfinished folders of killed processes; the age protects writers on file systems without locks."""
    for leftover in target.parent.glob(f"{target.name}.making-*"):
        newest = max((path.stat().st_mtime for path in (leftover, *leftover.iterdir())), default=0.0)
        if time.time() - newest > _DEAD_SECONDS:
            shutil.rmtree(leftover, ignore_errors=True)


@contextlib.contextmanager
def _lock(path: Path, tell: Tell) -> Iterator[None]:
    """Holds a file lock, which ends with the process, if the file system has locks."""
    with path.open("w") as file:
        if try_lock(file) is False:
            tell("another process is tokenizing the same data; waiting for it")
            wait_for_lock(file)
        yield


class HashedFile:
    """A file that is hashed while it is written."""

    def __init__(self, path: Path) -> None:
        self.name = path.name
        self._file = path.open("wb", buffering=1 << 20)
        self._digest = hashlib.sha256()
        self._bytes = 0

    def write(self, array: np.ndarray) -> None:
        data = array.tobytes()
        self._file.write(data)
        self._digest.update(data)
        self._bytes += len(data)

    def facts(self) -> dict[str, Any]:
        """Returns the size and hash, for `meta.json`."""
        return {"bytes": self._bytes, "sha256": self._digest.hexdigest()}

    def __enter__(self) -> HashedFile:
        return self

    def __exit__(self, *_: object) -> None:
        with self._file as file:
            file.flush()
            os.fsync(file.fileno())
