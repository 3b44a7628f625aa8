"""Columns of a matrix as arrays of their own, all at once, at the speed of a copy.

Where a scatter sums columns in parts (`overlap_parts`), each part is made with columns of the weight, and XLA gives
cuBLAS whole arrays only. So it copies columns part by part, between the matmuls: small kernels, each of which waits for
a matmul to end and lets the next one wait: up to 4% of the matmuls' time.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from meshwright.parallel.kernels.dispatch import backed_by, call_kernel, uses_kernels

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
            functools.partial(_kernel, edges=edges, rows=rows, columns=columns),
            w,
            grid=(w.shape[0] // rows, w.shape[1] // columns),
            outs=[((w.shape[0], end - start), w.dtype) for start, end in edges],
            num_warps=4,
            name="cut_columns",
        )
        return tuple(parts)

    found: tuple[Any, ...] = backed_by(plain, cut)(w)
    return found


def _kernel(w: Any, *parts: Any, edges: Sequence[tuple[int, int]], rows: int, columns: int) -> None:
    from jax.experimental import pallas as pl

    down, across = pl.ds(pl.program_id(0) * rows, rows), pl.program_id(1) * columns
    block = w[down, pl.ds(across, columns)]
    for (start, end), part in zip(edges, parts, strict=True):

        @pl.when((start <= across) & (across < end))
        def _(part: Any = part, start: int = start) -> None:
            part[down, pl.ds(across - start, columns)] = block
