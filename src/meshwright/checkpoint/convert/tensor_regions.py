"""Regions of stored tensors, copied into the arrays that want them: read once, cast, and transposed in blocks.

A region is a rectangle of a tensor in a file, and a target is a view with the same shape, so a transposed target is the
`.T` of an array. Each worker reads some rows into a small buffer, and copies them from there, while they are in its
cache. Rows that are wanted as a whole are one read; of others, only the wanted columns are read.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import math
import mmap
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from meshwright.remote.ranges import RemoteFile

CHUNK = 2**21  # bytes of a read
_REMOTE_CHUNK = 2**23  # a request costs tens of milliseconds
_BLOCK, _GAP = 256, 8  # elements; the gap keeps the rows of a block from evicting each other from the cache
_MOST_WORKERS = 16
_OWN_PAGES = 2**20  # bytes
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE of Linux 5.14
_ALIGNMENT = 64  # bytes; XLA uses such host arrays on the CPU without a copy
Array = np.ndarray[Any, Any]
Span = tuple[int, int]


class StoredTensor(NamedTuple):
    """A tensor in a file, whose first byte is at `start`."""

    path: Path | RemoteFile
    shape: tuple[int, ...]
    dtype: Any
    start: int


class Region(NamedTuple):
    """Rows and columns of a tensor, and the array that they fill."""

    rows: Span
    columns: Span
    target: Array


class Task(NamedTuple):
    """Some rows of a tensor, to read in spans of columns; each span fills some regions."""

    tensor: StoredTensor
    rows: Span
    spans: list[tuple[Span, list[Region]]]

    @property
    def num_bytes(self) -> int:
        width = sum(stop - start for (start, stop), _ in self.spans)
        return (self.rows[1] - self.rows[0]) * width * int(self.tensor.dtype.itemsize)


def zero_array(shape: Sequence[int], dtype: Any) -> Array:
    """Returns an array of zeros that XLA can use on the CPU without a copy.

    Large arrays are mapped by themselves: numpy asks for huge pages, which take several times as long on a machine with
    little contiguous memory.

    Example:
        >>> zero_array((3, 5), "float32").ctypes.data % 64
        0
    """
    size = math.prod(shape) * np.dtype(dtype).itemsize
    if size >= _OWN_PAGES and hasattr(mmap, "MAP_ANONYMOUS"):
        pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        raw: Array = np.frombuffer(pages, np.uint8)
    else:
        raw = np.zeros(size + _ALIGNMENT, np.uint8)
        raw = raw[-raw.ctypes.data % _ALIGNMENT :]
    found: Array = raw[:size].view(dtype).reshape(shape)
    return found


def fill_regions(wanted: Iterable[tuple[StoredTensor, Sequence[Region]]], new: Sequence[Array] = ()) -> int:
    """Fills the targets of all regions; returns the number of bytes read.

    Args:
        new: arrays that contain the targets and have no memory yet.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp(), "data")
        >>> _ = path.write_bytes(np.arange(6, dtype="float32").tobytes())
        >>> tensor, out = StoredTensor(path, (2, 3), jnp.dtype("float32"), 0), np.empty((2, 2), "float32")
        >>> fill_regions([(tensor, [Region((0, 2), (1, 3), out.T)])]), out.tolist()
        (16, [[1.0, 4.0], [2.0, 5.0]])
    """
    tasks = [task for tensor, regions in wanted for task in _tasks(tensor, regions)]
    total = sum(task.num_bytes for task in tasks)
    if not tasks:
        return 0
    steps = [
        *(functools.partial(_populate, array) for array in new),
        *(functools.partial(_run, task) for task in tasks),
    ]
    counter, most = itertools.count(), max(task.num_bytes for task in tasks)

    def work(_: int) -> None:
        buffer = np.empty(most, np.uint8)
        while (place := next(counter)) < len(steps):
            steps[place](buffer)

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if any(isinstance(task.tensor.path, RemoteFile) for task in tasks):
        cores = _MOST_WORKERS  # they mostly wait
    workers = min(cores, _MOST_WORKERS, 1 + total // (2 * CHUNK))
    if workers == 1:
        work(0)
    else:
        with ThreadPoolExecutor(workers) as pool:
            list(pool.map(work, range(workers)))
    return total


def _populate(array: Array, _: Array) -> None:
    """Gives an array its memory at once, which takes half as long as one page after the other; only Linux can."""
    if array.nbytes >= _OWN_PAGES and sys.platform == "linux":
        start = array.ctypes.data // mmap.PAGESIZE * mmap.PAGESIZE
        # Other threads run during the call; a failure leaves the pages to their first use.
        _libc().madvise(ctypes.c_void_p(start), ctypes.c_size_t(array.nbytes), _POPULATE_WRITE)


@functools.cache
def _libc() -> Any:
    return ctypes.CDLL(None)


def _tasks(tensor: StoredTensor, regions: Sequence[Region]) -> Iterator[Task]:
    """Yields the reads for some regions of a tensor, whose row spans and column spans are equal or disjoint."""
    by_rows: dict[Span, list[Region]] = {}
    for region in sorted(regions, key=lambda region: (region.rows, region.columns)):
        by_rows.setdefault(region.rows, []).append(region)
    for (first, last), group in by_rows.items():
        spans: list[tuple[Span, list[Region]]] = []
        for region in group:
            start, stop = region.columns
            if spans and start <= spans[-1][0][1]:
                (begin, end), members = spans.pop()
                spans.append(((begin, max(end, stop)), [*members, region]))
            else:
                spans.append((region.columns, [region]))
        chunk = CHUNK
        if isinstance(tensor.path, RemoteFile):  # whole rows: a request for each row would take far longer
            spans, chunk = [((0, math.prod(tensor.shape[1:])), group)], _REMOTE_CHUNK
        width = sum(stop - start for (start, stop), _ in spans) * tensor.dtype.itemsize
        step = max(1, chunk // max(1, width))
        step = step if step < _BLOCK else step // _BLOCK * _BLOCK
        for row in range(first, last, step):
            yield Task(tensor, (row, min(last, row + step)), spans)


def _run(task: Task, buffer: Array) -> None:
    tensor, (first, last) = task.tensor, task.rows
    width = math.prod(tensor.shape[1:])
    with tensor.path.open("rb", buffering=0) as file:
        for (begin, end), regions in task.spans:
            held = buffer[: (last - first) * (end - begin) * tensor.dtype.itemsize].view(tensor.dtype)
            held = held.reshape(last - first, end - begin)
            pieces = [(first, held)] if end - begin == width else zip(range(first, last), held, strict=True)
            for row, piece in pieces:
                _read(file, tensor.start + (row * width + begin) * tensor.dtype.itemsize, piece)
            for region in regions:
                rows = slice(first - region.rows[0], last - region.rows[0])
                columns = slice(region.columns[0] - begin, region.columns[1] - begin)
                copy_blocks(region.target[rows], held[:, columns])


def _read(file: Any, start: int, target: Array) -> None:
    view = target.reshape(-1).view(np.uint8).data
    file.seek(start)
    while len(view):
        count = file.readinto(view)
        if not count:
            raise OSError(f"{file.name} ends early")
        view = view[count:]


def copy_blocks(target: Array, source: Array) -> None:
    """Copies and casts a matrix; a transposed target is filled in blocks, as its rows lie far apart in memory.

    Example:
        >>> out = np.empty((3, 2), "float32")
        >>> copy_blocks(out.T, np.ones((2, 3), jnp.bfloat16))
        >>> out.tolist()
        [[1.0, 1.0], [1.0, 1.0], [1.0, 1.0]]
    """
    if target.strides[0] >= target.strides[1] or 1 in target.shape:
        _cast(target, source)
        return
    small = np.empty((_BLOCK, _BLOCK + _GAP), target.dtype)[:, :_BLOCK]
    target_bits, small_bits = _bits(target), _bits(small)
    for row, column in itertools.product(*(range(0, size, _BLOCK) for size in target.shape)):
        piece = source[row : row + _BLOCK, column : column + _BLOCK]
        rows, columns = piece.shape
        _cast(small[:rows, :columns], piece)
        target_bits[row : row + rows, column : column + columns] = small_bits[:rows, :columns]


def _cast(target: Array, source: Array) -> None:
    """Copies with a cast; equal dtypes and bfloat16 to float32 by their bits, several times as fast as numpy's loop."""
    if target.dtype == source.dtype:
        _bits(target)[...] = _bits(source)
    elif (source.dtype, target.dtype) == (jnp.bfloat16, np.float32):
        np.left_shift(_bits(source), 16, out=_bits(target), dtype=np.uint32)
    else:
        target[...] = source


def _bits(array: Array) -> Array:
    return array.view(f"u{array.dtype.itemsize}")
