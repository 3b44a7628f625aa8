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

from meshwright.axes import vary, varying_axes
from meshwright.parallel.matmul_kernel import TILE_ROWS, row_unit, tile_columns, write_product
from meshwright.parallel.overlap_loops import dot, sum_scattered, tie

MULTIPROCESSORS = 132
"""Of an H100 or H200. One round of a matmul is one tile on each of them, all at once."""

_TILE_COLUMNS = 256
_FEW_ROUNDS = 32  # above, what a round more costs is little, and there would be many ways to look at


def cut(total: int, parts: Sequence[int], *, unit: int, tiles: int) -> list[tuple[int, int]]:
    """Returns the start and end of each part of `total`, about in proportion to `parts`, which do not shrink.

    Where a matmul has few rounds of tiles, parts are made of full ones, since a round that is half full takes as long;
    else of units. There may be fewer parts than asked for, and none is empty.

    Args:
        unit: parts are multiples of it if `total` is one, or is large; else they are of any size.
        tiles: how many tiles one unit makes.

    Example:
        >>> cut(2048, (1, 2, 4, 7), unit=16, tiles=14)  # 14 rounds of 132 tiles
        [(0, 144), (144, 432), (432, 1024), (1024, 2048)]
        >>> cut(3, (1, 2, 4, 7), unit=16, tiles=14)
        [(0, 1), (1, 3)]
    """
    units = total // unit
    rounds = -(-units * tiles // MULTIPROCESSORS)
    if len(parts) <= rounds <= _FEW_ROUNDS:
        sizes = [unit * size for size in _full_rounds(units, rounds, tuple(parts), tiles)]
        ends = list(itertools.accumulate(sizes))[:-1]
    else:
        whole = sum(parts)
        step = unit if total % unit == 0 or total >= unit * whole else 1
        ends = [round(end * total / whole / step) * step for end in itertools.accumulate(parts)][:-1]
    return [(start, end) for start, end in itertools.pairwise([0, *ends, total]) if end > start] or [(0, 0)]


@functools.lru_cache(maxsize=256)
def _full_rounds(units: int, rounds: int, parts: tuple[int, ...], tiles: int) -> list[int]:
    """Returns how many units each part has so that all take no more than `rounds`, as few as there can be."""

    def held(count: int) -> int:
        return count * MULTIPROCESSORS // tiles  # units in so many rounds

    wanted = [end * rounds / sum(parts) for end in itertools.accumulate(parts)]
    fitting = [
        counts
        for counts in _growing(rounds, len(parts))
        if held(counts[0]) and sum(held(count) for count in counts) >= units
    ]
    if not fitting:
        return _full_rounds(units, rounds, parts[1:], tiles) if len(parts) > 1 else [units]

    def distance(counts: tuple[int, ...]) -> tuple[float, int]:
        ends = itertools.accumulate(counts)
        return sum(abs(end - want) for end, want in zip(ends, wanted, strict=True)), counts[-1]

    *first, _ = min(fitting, key=distance)
    sizes = [held(count) for count in first]
    return [*sizes, units - sum(sizes)]


def _growing(total: int, count: int, least: int = 1) -> Iterator[tuple[int, ...]]:
    """Yields all ways to make `total` of `count` numbers, none less than the one before."""
    if count == 1:
        yield (total,)
        return
    for first in range(least, total // count + 1):
        for rest in _growing(total - first, count - 1, first):
            yield (first, *rest)


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
    tiles = unit * size * blocks // TILE_ROWS * -(-columns // tile_columns(columns))
    edges = cut(num_rows, parts, unit=unit, tiles=max(tiles, 1))
    cuts = [x[..., start:end, :].reshape(-1, width) for start, end in edges]
    found: list[list[Any]] = []
    outs: list[Any] = [None] * len(written)
    arriving = lax.all_gather(cuts[0], axis)
    for index, (start, end) in enumerate(edges):
        rows, last = arriving, index == len(edges) - 1
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
    whole = (*vary(outs, sorted(varying_axes(x))), *joined)
    return tuple(result.reshape(*lead, size * num_rows, result.shape[-1]) for result in whole)


def scatter_in_parts(
    operands: Sequence[Any], weights: Sequence[Any], axis: str, size: int, parts: Sequence[int], wire: Any
) -> Any:
    """Returns the sum over devices of `sum(x @ w)`, each device keeping its rows; columns are summed in parts.

    Args:
        operands: `[B, n * M, K]` each.
        weights: `[K, F]` each, one per operand.
        wire: the dtype in which partial sums travel.
    """
    rows = [_by_device(operand, size) for operand in operands]
    sums: list[Any] = []
    across = -(-math.prod(rows[0].shape[:-1]) // TILE_ROWS)
    edges = cut(weights[0].shape[-1], parts, unit=_TILE_COLUMNS, tiles=across)[::-1]
    for index, (start, end) in enumerate(edges):
        product = multiply_all(rows, [w[:, start:end] for w in weights], wire)
        if index < len(edges) - 1:
            weights, product = tie((weights, product))  # else the matmuls are merged
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
