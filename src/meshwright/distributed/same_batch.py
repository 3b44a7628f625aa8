"""Check that all processes give the same global batch, or their own rows of it."""

from __future__ import annotations

import hashlib
from typing import Any

import jax
import numpy as np

from meshwright.errors import DataError
from meshwright.tree import named_leaves
from meshwright.types import PyTree

HINT = (
    "draw the same global batch on every process, from the seed alone and not from the rank, the time or the host's "
    "files; or place each process's own rows with jax.make_array_from_process_local_data."
)


def content_digest(batch: PyTree) -> str:
    """Returns a hash of a batch's names, shapes, dtypes and values.

    Example:
        >>> same = content_digest({"x": np.arange(3)}) == content_digest({"x": np.arange(3)})
        >>> same, content_digest({"x": np.arange(3)}) == content_digest({"x": np.arange(3)[::-1]})
        (True, False)
    """
    found = hashlib.sha256()
    for leaf in named_leaves(batch):
        found.update(f"{leaf.name}\n".encode() + _digest(_host(leaf.value)))
    return found.hexdigest()


def require_same_batch(batch: PyTree, *, who: str) -> None:
    """Raises on every process if processes hold different values for the same rows; names the ranks.

    Arrays on the host must be equal everywhere. Of arrays on a mesh, only parts that several processes hold are
    compared, so each process may give its own rows. A collective: call it on all processes.

    Args:
        who: name of the caller, for the error.

    Example:
        >>> require_same_batch({"x": np.ones(4)}, who="step")  # with one process there is nothing to compare
    """
    if jax.process_count() == 1:
        return
    from jax.experimental import multihost_utils

    names: list[str] = []
    rows: list[bytes] = []
    for leaf in named_leaves(batch):
        for part, digest in _parts(leaf.value):
            names.append(f"`{leaf.name}`{part}")
            rows.append(digest)
    layout = hashlib.sha256("\n".join(names).encode()).digest()
    same_parts = np.asarray(multihost_utils.process_allgather(np.frombuffer(layout, np.uint8)))
    _require(same_parts[:, None], ["the names and shapes of the batch"], who)
    table = np.frombuffer(b"".join(rows), np.uint8).reshape(len(rows), 32)
    _require(np.asarray(multihost_utils.process_allgather(table)), names, who)


def _require(digests: np.ndarray[Any, Any], names: list[str], who: str) -> None:
    """Raises for the first part whose digests `[process, part, byte]` differ; zeros stand for parts not held."""
    for place, name in enumerate(names):
        held = {rank: bytes(row) for rank, row in enumerate(digests[:, place]) if row.any()}
        usual = max(dict.fromkeys(held.values()), key=list(held.values()).count, default=b"")
        first = next((rank for rank, row in held.items() if row == usual), 0)
        others = [str(rank) for rank, row in held.items() if row != usual]
        if others:
            raise DataError(
                f"{who}: the batch differs between processes: {name} on rank {', '.join(others)} of {len(digests)} is "
                f"not that of rank {first}.",
                hint=HINT,
            )


def _parts(value: Any) -> list[tuple[str, bytes]]:
    """Returns the distinct parts of an array, in the same order on every process, with zeros for parts not held."""
    sharding = getattr(value, "sharding", None)
    if not isinstance(value, jax.Array) or sharding is None or sharding.is_fully_addressable:
        array = _host(value)
        return [(f" {array.dtype}{list(array.shape)}", _digest(array))]
    held = {_text(shard.index, value.shape): _digest(_host(shard.data)) for shard in value.addressable_shards}
    every = dict.fromkeys(_text(index, value.shape) for index in sharding.devices_indices_map(value.shape).values())
    return [(part, held.get(part, bytes(32))) for part in sorted(every)]


def _text(index: tuple[slice, ...], shape: tuple[int, ...]) -> str:
    bounds = (entry.indices(size)[:2] for entry, size in zip(index, shape, strict=True))
    return f"[{', '.join(f'{start}:{stop}' for start, stop in bounds)}]"


def _host(value: Any) -> np.ndarray[Any, Any]:
    if isinstance(value, jax.Array) and jax.numpy.issubdtype(value.dtype, jax.dtypes.prng_key):
        value = jax.random.key_data(value)
    return np.asarray(value)


def _digest(array: np.ndarray[Any, Any]) -> bytes:
    return hashlib.sha256(f"{array.dtype}{array.shape}".encode() + np.ascontiguousarray(array).tobytes()).digest()
