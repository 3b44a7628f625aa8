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

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import jax.numpy as jnp
from jax import lax

from meshwright.parallel.overlap_loops import dot, sum_scattered, tie

TILE_ROWS, TILE_COLUMNS, MULTIPROCESSORS = 128, 256, 132
"""What a matmul on an H100 or H200 is made of. One round of it is one tile per multiprocessor, all at once."""


def cut(total: int, parts: Sequence[int], *, tile: int, across: int) -> list[tuple[int, int]]:
    """Returns the start and end of each part of `total`, about in proportion to `parts`.

    Parts are made of full rounds of tiles where there are some rounds, since a round that is half full takes as long;
    else of tiles, else of anything. A part that would be empty is left out.

    Args:
        tile: the size of a tile along the dim that is cut.
        across: how many tiles there are along the other.

    Example:
        >>> cut(2048, (1, 2, 4, 9), tile=16, across=14)  # 9 x 14 tiles make a round of 132: 144 of 2048
        [(0, 144), (144, 432), (432, 864), (864, 2048)]
        >>> cut(3, (1, 2, 4, 9), tile=16, across=14)
        [(0, 1), (1, 3)]
    """
    unit = total / sum(parts)
    full = max(MULTIPROCESSORS // across, 1) * tile
    multiple = full if total >= 4 * full else tile if unit >= tile else 1
    ends = [round(sum(parts[: index + 1]) * unit / multiple) * multiple for index in range(len(parts) - 1)]
    return [(start, end) for start, end in pairwise([0, *ends, total]) if end > start] or [(0, 0)]


def gather_in_parts(
    x: Any, axis: str, size: int, parts: Sequence[int], columns: int, multiply: Callable[[Any], tuple[Any, ...]]
) -> tuple[Any, ...]:
    """Gathers rows in parts, calls `multiply(rows)` for each and returns its results with their rows in order.

    Args:
        columns: of the largest product that `multiply` makes.
        multiply: from `[n, B * M', K]`, M' rows of each device, to arrays that differ in their last dim only.
    """
    *lead, num_rows, width = x.shape
    together = size * math.prod(lead)  # rows in a matmul for each one that is cut here
    edges = cut(num_rows, parts, tile=max(TILE_ROWS // together, 1), across=-(-columns // TILE_COLUMNS))
    cuts = [x[..., start:end, :].reshape(-1, width) for start, end in edges]
    arriving = lax.all_gather(cuts[0], axis)
    found: list[list[Any]] = []
    for index, (start, end) in enumerate(edges):
        rows, last = arriving, index == len(edges) - 1
        if not last:
            # One transfer after the other: XLA would make one of them all.
            following, rows = tie((cuts[index + 1], rows))
            arriving = lax.all_gather(following, axis)
        results = multiply(rows)
        if not last:
            # The next part is used once these products are there: the matmuls would be merged.
            arriving, results = tie((arriving, results))
        found.append([jnp.moveaxis(r.reshape(size, *lead, end - start, r.shape[-1]), 0, -3) for r in results])
    # Left as one concatenation, the pass over the results can be part of whatever uses them next.
    joined = (jnp.concatenate(pieces, axis=-2) for pieces in zip(*found, strict=True))
    return tuple(whole.reshape(*lead, size * num_rows, whole.shape[-1]) for whole in joined)


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
    edges = cut(weights[0].shape[-1], parts, tile=TILE_COLUMNS, across=across)[::-1]
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
