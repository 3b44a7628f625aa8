"""Splitting a batch by its rows into minibatches or microbatches."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from meshwright.errors import PlacementError
from meshwright.specs import round_up
from meshwright.tree import named_leaves
from meshwright.types import PyTree


class Parts(NamedTuple):
    """A batch cut into equal parts, stacked along a new leading dim; `join` builds one part from slices of `arrays`."""

    arrays: list[Any]
    join: Callable[[Sequence[Any]], PyTree]
    num_rows: int


def count_rows(batch: PyTree, *, who: str) -> int:
    """Returns the size of the leading dim that all arrays of a batch share, ignoring scalars."""
    sizes = {leaf.name: int(np.shape(leaf.value)[0]) for leaf in named_leaves(batch) if np.ndim(leaf.value)}
    if not sizes:
        raise PlacementError(f"{who} got a batch of scalars only; no array has rows.")
    (first, rows), *others = sizes.items()
    for name, size in others:
        if size != rows:
            raise PlacementError(
                f"{who} got a batch whose arrays differ in their leading dim: `{first}` has {rows} rows, `{name}` has "
                f"{size}.",
                hint="give every array one row per example, or pass values that all examples share as scalars.",
            )
    return rows


def split_rows(batch: PyTree, num_parts: int, *, who: str, part: str, num_blocks: int = 1) -> Parts:
    """Cuts the rows of a batch into equal parts; every part gets a copy of each scalar.

    Args:
        batch: a tree of arrays that share their leading dim, and scalars.
        num_parts: number of parts.
        who: name of the caller, for errors.
        part: name of a part in errors: "minibatch" or "microbatch".
        num_blocks: if above 1, each part takes an equal slice of every block of rows instead of contiguous rows. If
            each device holds one block, no rows move between devices.

    Example:
        >>> split_rows({"x": np.arange(4)}, 2, who="example", part="minibatch").arrays[0].tolist()
        [[0, 1], [2, 3]]
    """
    try:
        num_parts = operator.index(num_parts)
    except TypeError:
        raise PlacementError(f"{who} got num_{part}es={num_parts!r}, which is not an integer.") from None
    if num_parts < 1:
        raise PlacementError(f"{who} got num_{part}es={num_parts}.", hint="use 1 or more.")
    rows = count_rows(batch, who=who)
    if rows % (num_parts * num_blocks) or not rows:
        if num_blocks > 1:
            who = f"{who} (on {num_blocks} blocks of rows)"
        if rows % num_blocks:
            raise PlacementError(
                f"{who}: a batch of {rows} rows cannot be split over {num_blocks} devices.",
                hint=f"use {max(rows // num_blocks, 1) * num_blocks} or {round_up(rows, num_blocks)} rows.",
            )
        own = rows // num_blocks
        why = (
            f"cannot make {num_parts} {part}es of a batch of {own} rows: some would be empty."
            if num_parts > own
            else f"cannot cut a batch of {own} rows into {num_parts} {part}es: {own} % {num_parts} = {own % num_parts}."
        )
        raise PlacementError(f"{who} {why}", hint=_nearest(own, num_parts, part))
    leaves: list[Any]
    structure: Any
    leaves, structure = jax.tree.flatten(batch)
    has_rows = [np.ndim(leaf) > 0 for leaf in leaves]

    def cut(leaf: Any) -> Any:
        rest = np.shape(leaf)[1:]
        if num_blocks > 1:
            leaf = jnp.swapaxes(jnp.reshape(leaf, (num_blocks, num_parts, -1, *rest)), 0, 1)
        return jnp.reshape(leaf, (num_parts, -1, *rest))

    def join(slices: Sequence[Any]) -> PyTree:
        rest = iter(slices)
        return structure.unflatten(
            [next(rest) if split else leaf for leaf, split in zip(leaves, has_rows, strict=True)]
        )

    arrays = [cut(leaf) for leaf, split in zip(leaves, has_rows, strict=True) if split]
    return Parts(arrays, join, rows // num_parts)


def interleave_rows(batch: PyTree, num_parts: int, num_devices: int) -> PyTree:
    """Reorders rows so that the devices' slices of each part are together contiguous rows of the batch.

    The rows of a device are its slice of the first part, then of the second, and so on. A batch that cannot be cut
    evenly is returned as it is; `split_rows` raises for it.

    Example:
        >>> interleave_rows({"x": np.arange(8)}, 2, 2)["x"].tolist()  # the parts are rows 0 to 3 and 4 to 7
        [0, 1, 4, 5, 2, 3, 6, 7]
    """

    def move(leaf: Any) -> Any:
        if not np.ndim(leaf) or leaf.shape[0] % (num_parts * num_devices):
            return leaf
        cut = jnp.reshape(leaf, (num_parts, num_devices, -1, *leaf.shape[1:]))
        return jnp.reshape(jnp.swapaxes(cut, 0, 1), leaf.shape)

    return jax.tree.map(move, batch)


def _nearest(rows: int, num_parts: int, part: str) -> str:
    sizes = [size for size in (rows // num_parts * num_parts, round_up(rows, num_parts)) if size]
    counts = [count for count in range(1, rows + 1) if rows % count == 0]
    below = [count for count in counts if count < num_parts][-1:]
    above = [count for count in counts if count > num_parts][:1]
    text = f"use a batch of {' or '.join(map(str, sizes or [num_parts]))} rows"
    return f"{text}, or {' or '.join(map(str, below + above))} {part}es." if counts else f"{text}."
