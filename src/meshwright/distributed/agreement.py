"""Agreement between the processes of a run: the same facts, the same decision, the same outcome on every rank.

These are collectives: they belong on the main thread, between steps, in the same order on every process. With one
process, none of them does anything.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MethodType
from typing import Any, TypeVar

import jax
import numpy as np

from meshwright.errors import MeshwrightError

T = TypeVar("T")
_TEXT_BYTES = 2048
_PACKAGE = Path(__file__).parents[1]

# --- Telling each other ---


def gather_texts(text: str) -> list[str]:
    """Returns the text of every process, by rank; long ones are cut."""
    if jax.process_count() == 1:
        return [text]
    from jax.experimental import multihost_utils

    data = text.encode()[:_TEXT_BYTES]
    row = np.zeros(_TEXT_BYTES, np.uint8)
    row[: len(data)] = np.frombuffer(data, np.uint8)
    rows = np.asarray(multihost_utils.process_allgather(row))
    return [bytes(row).rstrip(b"\0").decode(errors="ignore") for row in rows]


def as_first(text: str) -> str:
    """Returns the text that process 0 has."""
    return gather_texts(text)[0]


def from_first(number: int) -> int:
    """Returns the number that process 0 has."""
    return int(as_first(str(int(number))))


def is_first() -> bool:
    """Returns whether this is the process that writes manifests and removes folders."""
    return jax.process_index() == 0


# --- Acting together ---


def together(what: str, act: Callable[[], T]) -> T:
    """Returns what `act` returns; raises on every process where it raises on one.

    Example:
        >>> together("counting", lambda: 3)
        3
    """
    if jax.process_count() == 1:
        return act()
    problem: Exception | None = None
    try:
        result = act()
    except Exception as error:
        problem = error
    told = gather_texts("" if problem is None else f"{type(problem).__name__}: {problem}")
    if problem is not None:
        raise problem
    for rank, text in enumerate(told):
        if text:
            raise MeshwrightError(f"rank {rank} of {len(told)} stopped while {what}. {text}")
    return result


# --- Meaning the same ---


def agree(facts: Mapping[str, Any], *, job: Any = None) -> None:
    """Raises, on every process, where processes differ in a fact, in their code or versions; names the ranks.

    Args:
        facts: what must be the same everywhere, by name: the configuration, the seed.
        job: whose source files belong to the code, besides this package's.

    Example:
        >>> agree({"seed": 0, "config": {"steps": 100}})  # one process agrees with itself
    """
    if jax.process_count() == 1:
        return
    own = {
        "number of processes": jax.process_count(),
        "number of devices": jax.local_device_count(),
        "version of jax": jax.__version__,
        "code": code_fingerprint(sources_of(job)),
    }
    require_agreement({**own, **facts})


def require_agreement(facts: Mapping[str, Any]) -> None:
    """Raises, on every process, where processes differ in one of these facts; names the fact and the ranks.

    Call it at the start of a run, with the configuration, the seed and the shapes of a batch.
    """
    if jax.process_count() == 1:
        return
    from jax.experimental import multihost_utils

    names = sorted(facts)
    digests = np.stack([np.frombuffer(bytes.fromhex(fingerprint(facts[name])), np.uint8) for name in names])
    everywhere = np.asarray(multihost_utils.process_allgather(digests))
    report_disagreement(names, everywhere, {name: repr(facts[name])[:200] for name in names}, jax.process_index())


def fingerprint(*things: Any) -> str:
    """Returns a hash of what must be the same on all processes: configurations, seeds, shapes.

    Example:
        >>> fingerprint({"seed": 1}) == fingerprint({"seed": 1}), fingerprint({"seed": 1}) == fingerprint({"seed": 2})
        (True, False)
    """
    text = json.dumps([_plain(thing) for thing in things], sort_keys=True, default=repr)
    return hashlib.sha256(text.encode()).hexdigest()


def report_disagreement(names: list[str], digests: np.ndarray, own: Mapping[str, str], rank: int) -> None:
    """Raises for the first fact whose digests `[process, fact, byte]` are not all those of the majority."""
    for place, name in enumerate(names):
        rows = [bytes(row) for row in digests[:, place]]
        usual = max(dict.fromkeys(rows), key=rows.count)
        others = [str(index) for index, row in enumerate(rows) if row != usual]
        if others:
            raise MeshwrightError(
                f"the processes of this run differ in `{name}`: rank {', '.join(others)} of {len(rows)} has another "
                f"value than the rest. Here, on rank {rank}, it is {own[name]}.",
                hint="start every process with the same configuration, seed and code.",
            )


def code_fingerprint(files: Iterable[Path] = ()) -> str:
    """Returns a hash of this package's source files, and of others; where they lie does not matter.

    Example:
        >>> code_fingerprint() == code_fingerprint(), code_fingerprint() == code_fingerprint([Path(__file__)])
        (True, False)
    """
    found = hashlib.sha256()
    own = {path: path.relative_to(_PACKAGE).as_posix() for path in sorted(_PACKAGE.rglob("*.py"))}
    for path in [*own, *sorted(set(files))]:
        name, content = own.get(path, path.name), path.read_bytes()
        found.update(f"{name} {len(content)}\n".encode() + content)
    return found.hexdigest()


def sources_of(job: Any) -> list[Path]:
    """Returns the files in which a job's functions are written; those of this package are left out."""
    files = []
    for name in ("init", "loss", "make_batch"):
        function = getattr(job, name, None)
        while isinstance(function, (functools.partial, MethodType)):
            function = function.func if isinstance(function, functools.partial) else function.__func__
        if not (inspect.isfunction(function) or inspect.isclass(function)):
            function = type(function)
        try:
            path = Path(inspect.getsourcefile(function) or "").resolve()
        except TypeError:  # built in
            continue
        if path.is_file() and _PACKAGE not in path.parents and path not in files:
            files.append(path)
    return files


def _plain(thing: Any) -> Any:
    if isinstance(thing, Mapping):
        return {str(key): _plain(value) for key, value in thing.items()}
    if isinstance(thing, (list, tuple)):
        return [_plain(item) for item in thing]
    if hasattr(thing, "shape") and hasattr(thing, "dtype"):
        return [str(thing.dtype), list(thing.shape)]
    return thing
