"""Norms of sharded gradients, and clipping by the global norm."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from meshwright.errors import MeshwrightError
from meshwright.mesh.axes import varying_axes
from meshwright.types import PyTree


def leaf_square_sums(tree: PyTree) -> Any:
    """Returns the sum of squares of every leaf, `[num_leaves]` in float32, of whole leaves also in the local view.

    Leaves split over the same axes share one psum. A leaf is counted once along axes that it is replicated over.
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
    """Returns the global norm of a tree in both views; `optax.global_norm` sees only shards in the local view.

    Example:
        >>> float(global_norm({"a": jnp.array([3.0]), "b": jnp.array([4.0])}))
        5.0
    """
    return jnp.sqrt(leaf_square_sums(tree).sum())


def check_clip(clip: float | None) -> None:
    """Raises if gradients cannot be clipped to this norm; None does not clip them."""
    if clip is not None and not clip > 0:
        raise MeshwrightError(f"clip must be above 0; got {clip}.", hint="pass a norm such as 1.0, or None.")


def clipped(grads: PyTree, norm: Any, clip: float) -> PyTree:
    """Returns gradients scaled down to the global norm `clip` if their own, `norm`, is larger.

    Example:
        >>> grads = {"a": jnp.array([3.0]), "b": jnp.array([4.0])}
        >>> round(float(global_norm(clipped(grads, global_norm(grads), 1.0))), 4)
        1.0
    """
    return jax.tree.map(lambda leaf: leaf * jnp.minimum(1.0, clip / (norm + 1e-6)), grads)
