"""Norms of trees that are split over devices: the true ones, not those of a device's slices."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from meshwright.mesh.axes import varying_axes
from meshwright.types import PyTree


def leaf_square_sums(tree: PyTree) -> Any:
    """Returns the sum of squares of every leaf, `[num_leaves]` in float32; in the local view, that of whole leaves.

    Leaves that are split alike are summed over devices together: one exchange of a few numbers for each way of
    splitting. A leaf whose slices are equal on some axis is counted once along it.
    """
    leaves = jax.tree.leaves(tree)
    sums = [jnp.sum(jnp.square(leaf.astype(jnp.float32))) for leaf in leaves]
    groups: dict[tuple[str, ...], list[int]] = {}
    for place, leaf in enumerate(leaves):
        groups.setdefault(tuple(sorted(varying_axes(leaf))), []).append(place)
    whole: list[Any] = [None] * len(leaves)
    for axes, places in groups.items():
        part = jnp.stack([sums[place] for place in places])
        total = lax.psum(part, axes) if axes else part
        for index, place in enumerate(places):
            whole[place] = total[index]
    return jnp.stack(whole)


def global_norm(tree: PyTree) -> Any:
    """Returns the root of the sum of all squares in a tree, in both views; optax's counts slices in the local one.

    Example:
        >>> float(global_norm({"a": jnp.array([3.0]), "b": jnp.array([4.0])}))
        5.0
    """
    return jnp.sqrt(leaf_square_sums(tree).sum())
