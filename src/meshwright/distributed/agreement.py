"""Agreement between the processes of a run: equal facts, one decision and one outcome on every rank.

These functions are collectives: call them on the main thread, between steps, in the same order on every process. With
one process they return at once.
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


def gather_texts(text: str) -> list[str]:
    """Returns the text of every process, by rank, each cut to 2,048 bytes."""
    if jax.process_count() == 1:
        return [text]
    from jax.experimental import multihost_utils

    data = text.encode()[:_TEXT_BYTES]
    row = np.zeros(_TEXT_BYTES, np.uint8)
    row[: len(data)] = np.frombuffer(data, np.uint8)
    rows = np.asarray(multihost_utils.process_allgather(row))
    return [bytes(row).rstrip(b"\0").decode(errors="ignore") for row in rows]


def as_first(text: str) -> str:
    """Returns the text of process 0."""
    return gather_texts(text)[0]


def bytes_from_first(data: bytes) -> bytes:
    """Returns the bytes of process 0, of any length.

    Example:
        >>> bytes_from_first(b"abc")
        b'abc'
    """
    if jax.process_count() == 1:
        return data
    from jax.experimental import multihost_utils

    row = np.zeros(from_first(len(data)), np.uint8)
    if is_first():
        row[:] = np.frombuffer(data, np.uint8)
    return bytes(np.asarray(multihost_utils.broadcast_one_to_all(row)))


def from_first(number: int) -> int:
    """Returns the number of process 0."""
    return int(as_first(str(int(number))))


def is_first() -> bool:
    """Returns whether this is process 0, which writes manifests and removes folders."""
    return jax.process_index() == 0


def together(what: str, act: Callable[[], T]) -> T:
    """Returns the result of `act`; if it raises on one process, raises on all. `what` describes it in the error.

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
    texts = gather_texts("" if problem is None else f"{type(problem).__name__}: {problem}")
    if problem is not None:
        raise problem
    for rank, text in enumerate(texts):
        if text:
            raise MeshwrightError(f"rank {rank} of {len(texts)} failed while {what}: {text}")
    return result


def agree(facts: Mapping[str, Any], *, job: Any = None) -> None:
    """Raises on every process if processes differ in a fact, their code or their versions; names the ranks.

    Args:
        facts: values that must be equal on all processes, by name, such as the configuration and the seed.
        job: the job whose source files are compared in addition to this package's.

    Example:
        >>> agree({"seed": 0, "config": {"steps": 100}})  # one process agrees with itself
    """
    if jax.process_count() == 1:
        return
    own = {
        "number of processes": jax.process_count(),
        "number of devices": jax.local_device_count(),
        "jax version": jax.__version__,
        "code": code_fingerprint(sources_of(job)),
    }
    require_agreement({**own, **facts})


def require_agreement(facts: Mapping[str, Any]) -> None:
    """Raises on every process if processes differ in one of these facts; names the fact and the ranks.

    Call it at the start of a run, with the configuration, the seed and the batch shapes.

    Example:
        >>> require_agreement({"seed": 0, "batch": (8, 128)})  # with one process there is nothing to compare
    """
    if jax.process_count() == 1:
        return
    from jax.experimental import multihost_utils

    names = sorted(facts)
    digests = np.stack([np.frombuffer(bytes.fromhex(fingerprint(facts[name])), np.uint8) for name in names])
    everywhere = np.asarray(multihost_utils.process_allgather(digests))
    report_disagreement(names, everywhere, {name: repr(facts[name])[:200] for name in names}, jax.process_index())


def fingerprint(*things: Any) -> str:
    """Returns a hash of values that must be equal on all processes: configurations, seeds, array shapes.

    Example:
        >>> fingerprint({"seed": 1}) == fingerprint({"seed": 1}), fingerprint({"seed": 1}) == fingerprint({"seed": 2})
        (True, False)
    """
    text = json.dumps([_plain(thing) for thing in things], sort_keys=True, default=repr)
    return hashlib.sha256(text.encode()).hexdigest()


def report_disagreement(names: list[str], digests: np.ndarray, own: Mapping[str, str], rank: int) -> None:
    """Raises for the first fact whose digests `[process, fact, byte]` differ; names the ranks in the minority."""
    for place, name in enumerate(names):
        rows = [bytes(row) for row in digests[:, place]]
        usual = max(dict.fromkeys(rows), key=rows.count)
        others = [str(index) for index, row in enumerate(rows) if row != usual]
        if others:
            raise MeshwrightError(
                f"the processes of this run differ in `{name}`: rank {', '.join(others)} of {len(rows)} does not match "
                f"the majority. On this rank ({rank}) it is {own[name]}.",
                hint="start every process with the same configuration, seed and code.",
            )


def code_fingerprint(files: Iterable[Path] = ()) -> str:
    """Returns a hash of the source files of this package and of `files`, wherever they are installed.

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
    """Returns the source files of a job's functions, except those of this package."""
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
