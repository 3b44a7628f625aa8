"""Copy kernels: split a matrix by columns, and stack arrays.

A scatter in parts (`collective_parts`) multiplies by some columns of the weight at a time. cuBLAS takes only contiguous
arrays, so XLA copies the columns in small kernels between the matmuls, which takes up to 4% of the matmuls' time.
`cut_columns` copies them all at once.

When XLA stacks arrays, it looks up the source of every element. For 16 bfloat16 arrays it reaches 0.85 TB/s on an H200,
a fifth of the memory bandwidth. In `stack`, every block of the grid copies a block of one array.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from meshwright.hardware.flops import register_cost
from meshwright.mesh.axes import pcast_alike
from meshwright.parallel.kernels.dispatch import (
    backed_by,
    block_index,
    call_kernel,
    is_interpreted,
    load_row,
    mosaic_gpu,
    uses_kernels,
)

# --- Columns of a matrix ---

_ROWS, _COLUMNS = 32, 256  # Largest tile that a block of the grid copies.
_FEW_ROWS, _FEW_COLUMNS = 8, 64  # For smaller blocks, XLA is as fast.


def cut_columns(w: Any, edges: Sequence[tuple[int, int]], *, kernels: bool | None = None) -> tuple[Any, ...]:
    """Returns `w[:, start:end]` for each pair of edges.

    Args:
        edges: start and end of each part. The parts must cover `w` without overlap.
        kernels: use a Pallas kernel (default: on GPUs, if the sizes fit its blocks).

    Example:
        >>> [part.tolist() for part in cut_columns(jnp.arange(6).reshape(2, 3), [(0, 1), (1, 3)])]
        [[[0], [3]], [[1, 2], [4, 5]]]
    """

    def plain(w: Any) -> tuple[Any, ...]:
        return tuple(w[:, start:end] for start, end in edges)

    rows = math.gcd(w.shape[0], _ROWS)
    columns = math.gcd(_COLUMNS, *(end for _, end in edges))
    fits = len(edges) > 1 and w.size > 0 and rows >= _FEW_ROWS and columns >= _FEW_COLUMNS
    if not fits or jnp.issubdtype(w.dtype, jnp.complexfloating) or not uses_kernels(kernels):
        return plain(w)

    def cut(w: Any) -> tuple[Any, ...]:
        parts = call_kernel(
            functools.partial(_cut_kernel, edges=edges, rows=rows, columns=columns),
            w,
            grid=(w.shape[0] // rows, w.shape[1] // columns),
            outs=[((w.shape[0], end - start), w.dtype) for start, end in edges],
            name="cut_columns",
            scratch=_tile_memory((rows, columns), w.dtype),
        )
        return tuple(parts)

    found: tuple[Any, ...] = backed_by(plain, cut)(w)
    return found


register_cost("cut_columns", linear_in=range(1))


def _tile_memory(shape: tuple[int, int], dtype: Any) -> list[Any]:
    if is_interpreted():
        return []
    mosaic = mosaic_gpu()

    return [mosaic.SMEM(shape, dtype), mosaic.Barrier()]


def _cut_kernel(w: Any, *refs: Any, edges: Sequence[tuple[int, int]], rows: int, columns: int) -> None:
    from jax.experimental import pallas as pl

    parts, memory = refs[: len(edges)], refs[len(edges) :]
    down, across = pl.ds(block_index(0) * rows, rows), block_index(1) * columns
    source = w.at[down, pl.ds(across, columns)]
    put = _through_shared_memory(source, *memory) if memory else _directly(source)
    for (start, end), part in zip(edges, parts, strict=True):

        @pl.when((start <= across) & (across < end))
        def _(part: Any = part, start: int = start) -> None:
            put(part.at[down, pl.ds(across - start, columns)])


def _through_shared_memory(source: Any, tile: Any, barrier: Any) -> Callable[[Any], None]:
    """Fetches a tile, and returns a function that writes it."""
    mosaic = mosaic_gpu()

    mosaic.copy_gmem_to_smem(source, tile, barrier)
    mosaic.barrier_wait(barrier)

    def put(target: Any) -> None:
        mosaic.copy_smem_to_gmem(tile, target)
        mosaic.wait_smem_to_gmem(0, wait_read_only=True)

    return put


def _directly(source: Any) -> Callable[[Any], None]:
    tile = source[...]

    def put(target: Any) -> None:
        target[...] = tile

    return put


# --- Stacking arrays ---

_BLOCK_BYTES, _SMALLEST_BLOCK = 16384, 1024
_FEW, _MOST = 4, 256  # For few arrays XLA is as fast, and the number of kernel arguments is limited.


def stack(arrays: Sequence[jax.Array], *, kernels: bool | None = None) -> jax.Array:
    """Returns `jnp.stack(arrays)`.

    Args:
        kernels: use a Pallas kernel (default: if possible and faster).

    Example:
        >>> stack([jnp.zeros(2), jnp.ones(2)]).tolist()
        [[0.0, 0.0], [1.0, 1.0]]
    """
    first = arrays[0]
    block = _block(first) if jnp.issubdtype(first.dtype, jnp.floating) else 0
    if not (block and _FEW < len(arrays) <= _MOST and uses_kernels(kernels)):
        return jnp.stack(arrays)
    (stacked,) = call_kernel(
        functools.partial(_stack_kernel, block=block),
        *pcast_alike(*(array.reshape(-1) for array in arrays)),
        grid=(first.size // block, len(arrays)),
        outs=[((len(arrays), first.size), first.dtype)],
        name="stack",
    )
    joined: jax.Array = stacked.reshape(len(arrays), *first.shape)
    return joined


register_cost("stack", linear_in=range(_MOST))


def _block(array: Any) -> int:
    """Returns the elements that a block copies, a power of two that divides the array, or 0 if that is too small."""
    largest = min(array.size & -array.size, _BLOCK_BYTES // array.dtype.itemsize)
    return int(largest) if largest >= _SMALLEST_BLOCK else 0


def _stack_kernel(*refs: Any, block: int) -> None:
    from jax.experimental import pallas as pl

    *arrays, stacked = refs
    piece, number = pl.ds(block_index(0) * block, block), block_index(1)
    for place, array in enumerate(arrays):

        @pl.when(number == place)
        def _(array: Any = array, place: int = place) -> None:
            stacked.at[place, piece][...] = load_row(array.at[piece])
