"""The loops of the form in parts: whole collectives, each of a part of what travels, beside large matmuls.

A ring multiplies one device's rows at a time. On a GPU such matmuls are small: the last round of tiles leaves
multiprocessors idle, and each sum that is passed on is another pass over it. Here each collective carries a part of
every device's shard, so that the matmuls are as large as the parts, and the library that moves the data also adds it
up. A gather cuts rows, smallest part first: nothing can be multiplied before it is there. A scatter cuts columns,
smallest part last, since nothing is left to multiply beside it. Every other transfer has a matmul beside it.

Devices are a dim of their own while rows travel, the first one: so rows lie in memory as the transfer needs them, and
leading dims may be split over other axes. Gathered rows have no other dim beside it when they pass a barrier, since XLA
would use that freedom to lay out the products anew, part by part, which is a pass over all of them.

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

from meshwright.mesh.axes import pcast_varying, varying_axes
from meshwright.parallel.kernels.copy_kernels import cut_columns
from meshwright.parallel.kernels.matmul_kernel import TILE_ROWS, row_unit, tile_columns, write_product
from meshwright.parallel.overlap.ring_loops import dot, sum_scattered, tie
from meshwright.specs import ceil_div

MULTIPROCESSORS = 132
"""Of an H100 or H200. One round of a matmul is one tile on each of them, all at once."""

_TILE_COLUMNS = 256
_FEW_ROUNDS, _FEW_PARTS = 24, 8  # above, a round that is not full costs little, and there are many ways to look at
_LAUNCH = 0.1  # of a kernel, in rounds; about 10 us of 100


def cut(total: int, parts: Sequence[int], *, unit: int, tiles: int) -> list[tuple[int, int]]:
    """Returns the start and end of each part of `total`, about in proportion to `parts`.

    Where a matmul has few rounds of tiles, parts but the last are made of full ones, since a round that is half full
    takes as long; else of units. There may be fewer parts than asked for, and none is empty.

    Args:
        unit: parts are multiples of it if `total` is one, or is large; else they are of any size.
        tiles: how many tiles one unit makes.

    Example:
        >>> cut(2048, (1, 2, 4, 7), unit=16, tiles=14)  # 14 rounds of 132 tiles
        [(0, 144), (144, 432), (432, 1024), (1024, 2048)]
        >>> cut(3, (1, 2, 4, 7), unit=16, tiles=14)
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
    """Returns the units of each part, at most as many parts as asked for, in the least time.

    How fast `parts` grow says how fast transfers are: where they grow most, the transfer of a part takes as long as the
    matmul of the one before. All is counted in rounds. The first transfer and the last matmul have nothing beside them.
    """
    growth = max(1.0, *(after / before for before, after in itertools.pairwise(parts)))
    sending = _rounds(units, tiles) / units / growth

    def time(sizes: tuple[int, ...]) -> float:
        beside = sum(max(_rounds(size, tiles), after * sending) for size, after in itertools.pairwise(sizes))
        return sizes[0] * sending + beside + _rounds(sizes[-1], tiles) + _LAUNCH * len(sizes)

    return min(_ways(units, tiles, len(parts)), key=time)


def _ways(units: int, tiles: int, most: int, least: int = 1) -> Iterator[tuple[int, ...]]:
    """Yields the ways to cut units into parts, of which all but the last have full rounds, no fewer than before."""
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
    """Gathers rows in parts, calls `multiply(rows)` for each and returns its results with their rows in order.

    Args:
        columns: of the largest product that is made.
        multiply: from `[n, B * M', K]`, M' rows of each device, to arrays that differ in their last dim only.
        written: weights whose products a kernel writes (`matmul_kernel`); those come first among the results.
    """
    *lead, num_rows, width = x.shape
    blocks = math.prod(lead)
    unit = row_unit(size * blocks)
    tiles = unit * size * blocks // TILE_ROWS * ceil_div(columns, tile_columns(columns))
    edges = cut(num_rows, parts, unit=unit, tiles=max(tiles, 1))
    cuts = [x[..., start:end, :].reshape(-1, width) for start, end in edges]
    found: list[list[Any]] = []
    outs: list[Any] = [None] * len(written)
    arriving = lax.all_gather(cuts[0], axis)
    for index, (start, end) in enumerate(edges):
        rows, last = arriving, index == len(edges) - 1
        if index == 0:
            cuts, rows = tie((cuts, rows))  # all are cut while the first travels, beside which there is no matmul
        if not last:
            # One transfer after the other: XLA would make one of them all.
            following, rows = tie((cuts[index + 1], rows))
            arriving = lax.all_gather(following, axis)
        flat = rows.reshape(-1, width)
        outs = [
            write_product(out, flat, w, size=size, num_blocks=blocks, shard_rows=num_rows, start=start)
            for out, w in zip(outs, written, strict=True)
        ]
        results = multiply(rows)
        if not last:
            # The next part is used once these products are there: the matmuls would be merged.
            arriving, results, outs = tie((arriving, results, outs))
        found.append([jnp.moveaxis(r.reshape(size, *lead, end - start, r.shape[-1]), 0, -3) for r in results])
    # Left as one concatenation, the pass over the results can be part of whatever uses them next.
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
    """Returns the sum over devices of `sum(x @ w)`, each device keeping its rows; columns are summed in parts.

    Args:
        operands: `[B, n * M, K]` each.
        weights: `[K, F]` each, one per operand.
        wire: the dtype in which partial sums travel.
        kernels: whether a kernel cuts the weights (`copy_kernels`).
    """
    rows = [_by_device(operand, size) for operand in operands]
    across = ceil_div(math.prod(rows[0].shape[:-1]), TILE_ROWS)
    edges = cut(weights[0].shape[-1], parts, unit=_TILE_COLUMNS, tiles=across)[::-1]
    cuts = list(zip(*(cut_columns(w, edges, kernels=kernels) for w in weights), strict=True))
    sums: list[Any] = []
    for index in range(len(edges)):
        product = multiply_all(rows, cuts[index], wire)
        if index < len(edges) - 1:
            cuts[index + 1], product = tie((cuts[index + 1], product))  # else the matmuls are merged
        if sums:
            sums[-1], product = tie((sums[-1], product))  # else the transfers are
        sums.append(sum_scattered(product, axis, dim=0)[0])
    return jnp.concatenate(sums[::-1], axis=-1)


def _by_device(x: Any, size: int) -> Any:
    """Makes a first dim of the devices that rows belong to, [B, n * M, K] to [n, B, M, K]; no copy without B."""
    *lead, num_rows, width = x.shape
    return jnp.moveaxis(x.reshape(*lead, size, num_rows // size, width), -3, 0)


def multiply_all(operands: Sequence[Any], weights: Sequence[Any], dtype: Any) -> Any:
    """Returns the sum of `x @ w` over pairs of operand and weight, added up in float32."""
    if len(weights) == 1:
        return dot(operands[0], weights[0], dtype)
    return sum(dot(x, w) for x, w in zip(operands, weights, strict=True)).astype(dtype)
