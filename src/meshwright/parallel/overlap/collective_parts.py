"""Overlapped matmuls in parts: several collectives, each with a part of every shard, overlapped with large matmuls.

A ring multiplies one device's rows at a time. On a GPU such matmuls are small: their last round of tiles leaves
multiprocessors idle, and passing on a partial sum costs another pass over it. Here each collective carries a part of
every device's shard, so matmuls are as large as the parts, and NCCL does the sums. A gather cuts rows, smallest part
first, because the first transfer has no matmul to overlap with. A scatter cuts columns, smallest part last, for the
same reason at its end.

During transfers, devices are a separate leading dim, so rows lie in memory as the collective needs them, and other axes
may split the leading dims. Gathered rows are otherwise flat when they pass a barrier: with more dims, XLA would change
the layout of each part's product, which costs a pass over it.

Shapes: n devices, B = leading dims, M = rows of one device's shard, K, F = features.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from meshwright.hardware.chips import chip_family
from meshwright.mesh.axes import pcast_varying, varying_axes
from meshwright.mesh.current import current_mesh
from meshwright.parallel.kernels.copy_kernels import cut_columns
from meshwright.parallel.kernels.matmul_kernel import TILE_ROWS, row_unit, tile_columns, write_product
from meshwright.parallel.overlap.ring_loops import dot, sum_scattered, tie
from meshwright.specs import ceil_div

MULTIPROCESSORS = 132
"""Multiprocessors of an H100 or H200. One round of a matmul computes one tile on each."""

_TILE_COLUMNS = 256
_FEW_ROUNDS, _FEW_PARTS = 24, 8  # Above these, a partial round costs little and the search is slow.
_LAUNCH = 0.1  # Cost of a kernel launch, in rounds: about 10 us of 100 us.


def part_bounds(total: int, parts: Sequence[int], *, unit: int, tiles: int) -> list[tuple[int, int]]:
    """Returns the start and end of each part of `total`, roughly in proportion to `parts`.

    If a matmul has few rounds of tiles, all parts but the last have full rounds, because a partial round takes as long
    as a full one. Empty parts are dropped.

    Args:
        unit: parts are multiples of this if `total` is one or is large; otherwise they have any size.
        tiles: number of tiles in one unit.

    Example:
        >>> part_bounds(2048, (1, 2, 4, 7), unit=16, tiles=14)  # 14 rounds of 132 tiles
        [(0, 144), (144, 432), (432, 1024), (1024, 2048)]
        >>> part_bounds(3, (1, 2, 4, 7), unit=16, tiles=14)
        [(0, 1), (1, 2), (2, 3)]
    """
    units = total // unit
    if 1 < len(parts) <= _FEW_PARTS and 1 < _rounds(units, tiles) <= _FEW_ROUNDS:
        ends = [unit * end for end in itertools.accumulate(_quickest(units, tiles, tuple(parts)))][:-1]
    else:
        whole = sum(parts)
        step = unit if total % unit == 0 or total >= unit * whole else 1
        ends = [round(end * total / whole / step) * step for end in itertools.accumulate(parts)][:-1]
    return [(start, end) for start, end in itertools.pairwise([0, *ends, total]) if end > start] or [(0, 0)]


def _rounds(units: int, tiles: int) -> int:
    return ceil_div(units * tiles, MULTIPROCESSORS)


@functools.lru_cache(maxsize=256)
def _quickest(units: int, tiles: int, parts: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the number of units in each part that minimizes the total time, in rounds, with at most `len(parts)`.

    The largest growth between neighboring `parts` is taken as the ratio of matmul time to transfer time. The first
    transfer and the last matmul do not overlap.
    """
    growth = max(1.0, *(after / before for before, after in itertools.pairwise(parts)))
    sending = _rounds(units, tiles) / units / growth

    def time(sizes: tuple[int, ...]) -> float:
        beside = sum(max(_rounds(size, tiles), after * sending) for size, after in itertools.pairwise(sizes))
        return sizes[0] * sending + beside + _rounds(sizes[-1], tiles) + _LAUNCH * len(sizes)

    return min(_ways(units, tiles, len(parts)), key=time)


def _ways(units: int, tiles: int, most: int, least: int = 1) -> Iterator[tuple[int, ...]]:
    """Yields the ways to cut units into parts that do not shrink and, except for the last, have full rounds."""
    yield (units,)
    if most == 1:
        return
    for rounds in itertools.count(least):
        size = rounds * MULTIPROCESSORS // tiles
        if size >= units:
            return
        if size:
            for rest in _ways(units - size, tiles, most - 1, rounds):
                yield (size, *rest)


def gather_in_parts(
    x: Any,
    axis: str,
    size: int,
    parts: Sequence[int],
    columns: int,
    multiply: Callable[[Any], tuple[Any, ...]],
    *,
    written: Sequence[Any] = (),
) -> tuple[Any, ...]:
    """Gathers rows in parts, calls `multiply(rows)` on each and returns the results with all rows in order.

    Args:
        columns: columns of the largest product.
        multiply: maps `[n, B * M', K]`, with M' rows of each device, to arrays that differ only in their last dim.
        written: weights whose products a kernel writes (`matmul_kernel`); these products come first in the results.
    """
    *lead, num_rows, width = x.shape
    blocks = math.prod(lead)
    unit = row_unit(size * blocks)
    tiles = unit * size * blocks // TILE_ROWS * ceil_div(columns, tile_columns(columns))
    edges = part_bounds(num_rows, parts, unit=unit, tiles=max(tiles, 1))
    cuts = [x[..., start:end, :].reshape(-1, width) for start, end in edges]
    found: list[list[Any]] = []
    outs: list[Any] = [None] * len(written)
    arriving = lax.all_gather(cuts[0], axis)
    for index, (start, end) in enumerate(edges):
        rows, last = arriving, index == len(edges) - 1
        if index == 0:
            cuts, rows = tie((cuts, rows))  # Cut all parts during the first transfer, which has no matmul to overlap.
        if not last:
            # Otherwise XLA merges all transfers into one.
            following, rows = tie((cuts[index + 1], rows))
            arriving = lax.all_gather(following, axis)
        flat = rows.reshape(-1, width)
        outs = [
            write_product(out, flat, w, size=size, num_blocks=blocks, shard_rows=num_rows, start=start)
            for out, w in zip(outs, written, strict=True)
        ]
        results = multiply(rows)
        if not last:
            # Otherwise XLA merges the matmuls.
            arriving, results, outs = tie((arriving, results, outs))
        found.append([jnp.moveaxis(r.reshape(size, *lead, end - start, r.shape[-1]), 0, -3) for r in results])
    # XLA can fuse one concatenation into its consumer.
    joined = (jnp.concatenate(pieces, axis=-2) for pieces in zip(*found, strict=True))
    whole = (*pcast_varying(outs, sorted(varying_axes(x))), *joined)
    return tuple(result.reshape(*lead, size * num_rows, result.shape[-1]) for result in whole)


def scatter_in_parts(
    operands: Sequence[Any],
    weights: Sequence[Any],
    axis: str,
    size: int,
    parts: Sequence[int],
    wire: Any,
    *,
    kernels: bool | None = False,
) -> Any:
    """Returns the reduce-scatter of `sum(x @ w)` over rows, computed in parts of columns.

    Args:
        operands: `[B, n * M, K]` each.
        weights: `[K, F]` each, one per operand.
        wire: dtype in which partial sums are sent.
        kernels: use a kernel to cut the weights (`copy_kernels`).
    """
    # [B, n * M, K] to [n, B, M, K], which copies nothing without B.
    rows = [jnp.moveaxis(x.reshape(*x.shape[:-2], size, x.shape[-2] // size, x.shape[-1]), -3, 0) for x in operands]
    across = ceil_div(math.prod(rows[0].shape[:-1]), TILE_ROWS)
    edges = part_bounds(weights[0].shape[-1], parts, unit=_TILE_COLUMNS, tiles=across)[::-1]
    cuts = list(zip(*(cut_columns(w, edges, kernels=kernels) for w in weights), strict=True))
    sums: list[Any] = []
    for index in range(len(edges)):
        product = multiply_all(rows, cuts[index], wire)
        if index < len(edges) - 1:
            cuts[index + 1], product = tie((cuts[index + 1], product))  # Otherwise XLA merges the matmuls.
        if sums:
            sums[-1], product = tie((sums[-1], product))  # Otherwise XLA merges the transfers.
        sums.append(sum_scattered(product, axis, dim=0)[0])
    return jnp.concatenate(sums[::-1], axis=-1)


def multiply_all(operands: Sequence[Any], weights: Sequence[Any], dtype: Any) -> Any:
    """Returns the sum of `x @ w` over pairs of operand and weight, accumulated in float32."""
    if len(weights) == 1:
        return dot(operands[0], weights[0], dtype)
    products = [dot(x, w) for x, w in zip(operands, weights, strict=True)]
    if chip_family(current_mesh()) != "gpu":
        return sum(products).astype(dtype)
    # XLA:GPU adds inside a matmul only if that is the first operand and adds nothing yet, so put the newest first.
    # Otherwise the third product, of queries, keys and values, takes a float32 array and a pass over memory. On a v5p,
    # this order takes 2% more cycles.
    return functools.reduce(lambda total, product: product + total, products).astype(dtype)
