"""The snapshot of one rank: a file with its shards, and a table with their places and hashes, which is written last.

A shard is one leaf's part at one index of the global array. Devices that hold the same part store it once.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np

from meshwright.bounded_reader import open_regular
from meshwright.checkpoint.arrays import stored_leaves
from meshwright.errors import FileFormatError
from meshwright.files import write_atomically
from meshwright.launch.memory_folder import hash_table, read_table
from meshwright.layout import Layout
from meshwright.types import PyTree

Index = tuple[tuple[int, int], ...]
Key = tuple[str, Index]
"""The name of a leaf, and the start and end of the shard in each of its dims."""
_THREADS = 4


def index_of(slices: Iterable[slice], shape: tuple[int, ...]) -> Index:
    """Returns the starts and ends of a shard.

    Example:
        >>> index_of((slice(2, 4), slice(None)), (8, 3))
        ((2, 4), (0, 3))
    """
    return tuple(part.indices(size)[:2] for part, size in zip(slices, shape, strict=True))


def copy_to_host(state: PyTree, layout: Layout) -> dict[Key, np.ndarray]:
    """Returns copies of this process's shards, each once; the state may be donated afterwards."""
    shards: dict[Key, Any] = {}
    for leaf, array in zip(layout.leaves, stored_leaves(state), strict=True):
        for shard in array.addressable_shards:
            shards.setdefault((leaf.name, index_of(shard.index, array.shape)), shard.data)
    for data in shards.values():  # all copies at once, instead of one after another
        data.copy_to_host_async()
    # On CPUs, `asarray` would only be a view.
    copy = np.array if jax.local_devices()[0].platform == "cpu" else np.asarray
    return {key: copy(data) for key, data in shards.items()}


def write_rank(
    place: Path, shards: Mapping[Key, np.ndarray], *, rank: int, num_ranks: int, course: str, facts: Mapping[str, Any]
) -> None:
    """Writes the shards of a rank into a step's folder; `course` is the same on all ranks."""
    place.mkdir(mode=0o700, exist_ok=True)
    ends = list(itertools.accumulate((shard.nbytes for shard in shards.values()), initial=0))
    handle = os.open(place / f"rank-{rank}.data", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)

    def write(number: int, shard: np.ndarray) -> str:
        data = _bytes(shard)
        done = 0
        while done < len(data):  # a full memory raises here; writes through a mapping would end the process
            done += os.pwrite(handle, data[done:], ends[number] + done)
        return hashlib.sha256(data).hexdigest()

    try:
        with ThreadPoolExecutor(_THREADS, "snapshot") as pool:
            hashes = list(pool.map(write, range(len(shards)), shards.values()))
    finally:
        os.close(handle)
    items = [
        {"leaf": name, "index": index, "dtype": str(shard.dtype), "at": at, "sha256": sha256}
        for ((name, index), shard), at, sha256 in zip(shards.items(), ends, hashes, strict=False)
    ]
    body = {"step": int(place.name), "course": course, "rank": rank, "num_ranks": num_ranks, "bytes": ends[-1]}
    _write_table(place / f"rank-{rank}.json", body | {"shards": items, "facts": facts})


def _write_table(path: Path, body: dict[str, Any]) -> None:
    body = json.loads(json.dumps(body))  # as it will be read
    write_atomically(path, json.dumps(body | {"sha256": hash_table(body)}))


def move_to_course(place: Path, course: str) -> None:
    """Lets the snapshots of a step on this host belong to another course of the run, which begins with them."""
    for path in sorted(place.glob("rank-*.json")):
        table = read_table(path)
        if table is not None and table.get("course") != course:
            _write_table(path, table | {"course": course})


class HostStep:
    """The snapshots of a step on this host, of all ranks that were here.

    Args:
        course: the course of the run that they belong to. Shards of different courses do not fit together.
    """

    def __init__(self, place: Path, course: str) -> None:
        self.place = place
        tables = {path.stem: read_table(path) for path in sorted(place.glob("rank-*.json"))}
        whole = {name: table for name, table in tables.items() if table is not None and _has_form(table, place)}
        self.notes = [f"the table of {name} is damaged" for name in tables if name not in whole]
        known = {name: table for name, table in whole.items() if table["course"] == course}
        first = min(known.values(), key=lambda table: int(table["rank"]), default=None)
        self.first_rank: int | None = None if first is None else first["rank"]
        self.facts: dict[str, Any] = {} if first is None else first["facts"]
        self._places: dict[tuple[Key, str], list[tuple[str, int, str]]] = {}
        for name, table in known.items():
            for item in table["shards"]:
                key = (item["leaf"], tuple(tuple(ends) for ends in item["index"]))
                self._places.setdefault((key, item["dtype"]), []).append((name, item["at"], item["sha256"]))

    def read(self, key: Key, dtype: np.dtype[Any]) -> np.ndarray | None:
        """Returns a shard whose bytes match their hash, or None."""
        shape = tuple(end - start for start, end in key[1])
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        for name, at, sha256 in self._places.get((key, str(dtype)), ()):
            try:
                with open_regular(self.place / f"{name}.data") as file:
                    data = bytearray(size)
                    file.seek(at)
                    whole = file.readinto(data) == size
            except (OSError, FileFormatError):
                continue
            if whole and hashlib.sha256(data).hexdigest() == sha256:
                return np.frombuffer(data, dtype).reshape(shape)
            self.notes.append(f"`{key[0]}` of {name} is damaged")
        return None


def courses_of(place: Path) -> list[str]:
    """Returns the courses of the run to which the snapshots of a step on this host belong."""
    tables = [read_table(path) for path in sorted(place.glob("rank-*.json"))]
    return sorted({table["course"] for table in tables if table is not None and _has_form(table, place)})


def _has_form(table: Mapping[str, Any], place: Path) -> bool:
    try:
        for item in table["shards"]:
            if not (type(item["leaf"]) is type(item["dtype"]) is type(item["sha256"]) is str and item["at"] >= 0):
                return False
            if not all(0 <= start <= end for start, end in item["index"]):
                return False
        is_rank = type(table["rank"]) is int and table["rank"] >= 0
        is_rank = is_rank and isinstance(table["course"], str)
        return is_rank and table["step"] == int(place.name) and isinstance(table["facts"], dict)
    except (KeyError, TypeError, ValueError):
        return False


def _bytes(shard: np.ndarray) -> memoryview:
    return memoryview(np.ascontiguousarray(shard).reshape(-1).view(np.uint8).data)
