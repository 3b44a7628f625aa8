"""Copies at the speed of memory: columns of a matrix as arrays of their own, and arrays put together as one.

Where a scatter sums columns in parts (`collective_parts`), each part is made with columns of the weight, and XLA gives
cuBLAS whole arrays only. So it copies columns part by part, between the matmuls: small kernels, each of which waits for
a matmul to end and lets the next one wait: up to 4% of the matmuls' time. `cut_columns` cuts them all at once.

To stack arrays, XLA finds for every element of the result which array it comes from. For 16 arrays in bfloat16 an H200
does that at 0.85 TB/s, a fifth of what its memory can do. In `stack`, every program copies a piece of one array.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from meshwright.hardware.flops import register_cost
from meshwright.mesh.axes import pcast_alike
from meshwright.parallel.kernels.dispatch import backed_by, call_kernel, uses_kernels

# --- Columns of a matrix ---

_ROWS, _COLUMNS = 32, 256  # that a program copies
_FEW_ROWS, _FEW_COLUMNS = 8, 64  # fewer, and XLA does as well


def cut_columns(w: Any, edges: Sequence[tuple[int, int]], *, kernels: bool | None = None) -> tuple[Any, ...]:
    """Returns `w[:, start:end]` for each pair of edges.

    Args:
        edges: what they cut does not overlap, and is all of `w`.
        kernels: whether a kernel of ours cuts; by default on GPUs, where the sizes fit its blocks.

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
            num_warps=4,
            name="cut_columns",
        )
        return tuple(parts)

    found: tuple[Any, ...] = backed_by(plain, cut)(w)
    return found


register_cost("cut_columns", linear_in=range(1))


def _cut_kernel(w: Any, *parts: Any, edges: Sequence[tuple[int, int]], rows: int, columns: int) -> None:
    from jax.experimental import pallas as pl

    down, across = pl.ds(pl.program_id(0) * rows, rows), pl.program_id(1) * columns
    block = w[down, pl.ds(across, columns)]
    for (start, end), part in zip(edges, parts, strict=True):

        @pl.when((start <= across) & (across < end))
        def _(part: Any = part, start: int = start) -> None:
            part[down, pl.ds(across - start, columns)] = block


# --- Arrays put together ---

_BLOCK_BYTES, _SMALLEST_BLOCK = 16384, 1024
# XLA is as fast where it need not look far, and a kernel has no room for any number of arguments.
_FEW, _MOST = 4, 256


def stack(arrays: Sequence[jax.Array], *, kernels: bool | None = None) -> jax.Array:
    """Returns `jnp.stack(arrays)`.

    Args:
        kernels: whether it is a kernel of ours; by default where that is possible and faster.

    Example:
        >>> stack([jnp.zeros(2), jnp.ones(2)]).tolist()
        [[0.0, 0.0], [1.0, 1.0]]
    """
    first = arrays[0]
    block = _block(first)
    if not (block and _FEW < len(arrays) <= _MOST and uses_kernels(kernels)):
        return jnp.stack(arrays)
    (stacked,) = call_kernel(
        functools.partial(_stack_kernel, block=block),
        *pcast_alike(*(array.reshape(-1) for array in arrays)),
        grid=(first.size // block, len(arrays)),
        outs=[((len(arrays), first.size), first.dtype)],
        num_warps=8,
        name="stack",
    )
    joined: jax.Array = stacked.reshape(len(arrays), *first.shape)
    return joined


register_cost("stack", linear_in=range(_MOST))


def _block(array: Any) -> int:
    """Returns how many elements a program copies: a power of two that divides the array; 0 where that is too few."""
    largest = min(array.size & -array.size, _BLOCK_BYTES // array.dtype.itemsize)
    return int(largest) if largest >= _SMALLEST_BLOCK else 0


def _stack_kernel(*refs: Any, block: int) -> None:
    from jax.experimental import pallas as pl

    *arrays, stacked = refs
    piece, number = pl.ds(pl.program_id(0) * block, block), pl.program_id(1)
    for place, array in enumerate(arrays):

        @pl.when(number == place)
        def _(array: Any = array, place: int = place) -> None:
            stacked[place, piece] = array[piece]
