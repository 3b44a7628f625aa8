"""Slicing of an array over a mesh axis, and stacking of per-device arrays into one global array.

A stacked parameter has a new dim, of size 1 on each device and of the axis size globally, which a flax `Partitioned`
box names after the axis. So even unrelated shards have one global shape and one spec.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax import lax

from meshwright.errors import MeshwrightWarning, PlacementError
from meshwright.mesh.axes import axis_index, axis_size, pcast_varying
from meshwright.specs import dim_axes, round_up
from meshwright.types import PyTree


def split_array_over_mesh(x: Any, axis_name: str, split_axis: int) -> Any:
    """Returns this device's slice of a replicated array; raises if the axis does not divide the dim.

    If the dim is smaller than the number of devices, every slice is empty, with a warning. So a model that splits the
    rows of its inputs can be initialized with one row.

    Example:
        >>> import meshwright as mw
        >>> cut = lambda x: split_array_over_mesh(x, "tp", 0)
        >>> with jax.set_mesh(mw.create_mesh("tp:8")):
        ...     x = jax.shard_map(cut, in_specs=mw.P(), out_specs=mw.P("tp"))(jnp.arange(16))
        >>> x.addressable_shards[3].data.tolist()
        [6, 7]
    """
    ways = axis_size(axis_name, who="split_array_over_mesh")
    dim = _checked_dim(split_axis, jnp.ndim(x), who="split_array_over_mesh")
    size = jnp.shape(x)[dim]
    if 0 < size < ways:
        warnings.warn(
            f"split_array_over_mesh: dim {dim} of an array of shape {jnp.shape(x)} has size {size}; axis "
            f"{axis_name!r} has {ways} devices, so every slice is empty.\n"
            f"hint: pad to {ways}, unless you only initialize parameters.",
            MeshwrightWarning,
            stacklevel=2,
        )
        return pcast_varying(lax.slice_in_dim(x, 0, 0, axis=dim), axis_name)
    if size % ways:
        raise PlacementError(
            f"split_array_over_mesh: dim {dim} of an array of shape {jnp.shape(x)} has size {size}; axis "
            f"{axis_name!r} has {ways} devices: {size} % {ways} = {size % ways}.",
            hint=f"pad to {round_up(size, ways)}, or split another dim.",
        )
    if ways == 1:
        return pcast_varying(x, axis_name)  # the type of a slice, as on more devices
    width = size // ways
    return lax.dynamic_slice_in_dim(x, axis_index(axis_name, who="split_array_over_mesh") * width, width, axis=dim)


def stack_params(params: PyTree, axis_name: str, axis: int = 0, mask_except: jax.Array | int | None = None) -> PyTree:
    """Adds a dim for a mesh axis to every leaf, in a box: size 1 on each device, the axis size globally.

    Args:
        params: arrays in boxes or not; names in boxes are kept.
        axis: the position of the new dim; negative values count from the end of the new shape.
        mask_except: the only shard that keeps its values (default: all). The others become zero and get zero gradients.
            Negative values count from the last shard.

    Example:
        >>> import meshwright as mw
        >>> with jax.sharding.use_abstract_mesh(mw.create_abstract_mesh("tp:1")):
        ...     boxed = stack_params({"w": jnp.ones((3, 2))}, "tp")["w"]
        >>> boxed.names, boxed.value.shape
        (('tp', None, None), (1, 3, 2))
    """
    keep = masker(axis_name, mask_except, who="stack_params")

    def stack(leaf: Any) -> Any:
        value, names = open_box(leaf)
        if any(axis_name in dim_axes(name) for name in names):
            raise PlacementError(
                f"stack_params: an array of shape {jnp.shape(value)} is already split over axis {axis_name!r}: names "
                f"{names}.",
                hint="an axis can split only one dim; stack over another axis, or only once.",
            )
        dim = _checked_dim(axis, len(names) + 1, who="stack_params")
        names = (*names[:dim], axis_name, *names[dim:])
        # Without the cast, JAX would take equal shards such as zero biases for replicated, and sum their gradients.
        return close_box(leaf, pcast_varying(jnp.expand_dims(keep(value), dim), axis_name), names)

    return jax.tree.map(stack, params, is_leaf=is_box)


def unstack_params(params: PyTree, axis_name: str) -> PyTree:
    """Removes the dims that `stack_params` added for a mesh axis, and boxes without names.

    Example:
        >>> import meshwright as mw
        >>> with jax.sharding.use_abstract_mesh(mw.create_abstract_mesh("tp:1")):
        ...     unstack_params(stack_params({"w": jnp.ones((3, 2))}, "tp"), "tp")["w"].shape
        (3, 2)
    """
    axis_size(axis_name, who="unstack_params")

    def unstack(leaf: Any) -> Any:
        value, names = open_box(leaf)
        if axis_name not in names:  # stacking never adds the axis to a tuple of names
            return leaf
        dim = names.index(axis_name)
        if value.shape[dim] != 1:
            raise PlacementError(
                f"unstack_params: dim {dim} of an array of local shape {value.shape} is named {axis_name!r} and has "
                f"size {value.shape[dim]}; a stacked dim has size 1.",
                hint="call it inside shard_map, with the specs of the boxes as in_specs; for a dim that was split "
                "instead of stacked, use gather_params.",
            )
        return close_box(leaf, jnp.squeeze(value, dim), (*names[:dim], *names[dim + 1 :]))

    return jax.tree.map(unstack, params, is_leaf=is_box)


def is_box(node: Any) -> bool:
    """Returns whether this is an array with axis names."""
    return isinstance(node, nn.Partitioned)


def open_box(leaf: Any) -> tuple[Any, tuple[Any, ...]]:
    """Returns the array and one name (or None) per dim, without the sharding constraint of `leaf.unbox()`."""
    if not is_box(leaf):
        return leaf, (None,) * jnp.ndim(leaf)
    missing = jnp.ndim(leaf.value) - len(leaf.names)
    return leaf.value, (*leaf.names, *(None,) * missing)


def close_box(old: Any, value: Any, names: tuple[Any, ...]) -> Any:
    """Returns the array in a box like the old one, or without a box if it has no names."""
    if not any(names):
        return value
    return old.replace(value=value, names=names) if is_box(old) else nn.Partitioned(value, names)


def masker(axis: str, keep: jax.Array | int | None, *, who: str) -> Callable[[Any], Any]:
    """Returns a function that zeroes arrays on all devices along an axis but one, and keeps their dtype."""
    ways = axis_size(axis, who=who)
    if keep is None:
        return lambda x: x
    if isinstance(keep, (int, np.integer)):
        if not -ways <= keep < ways:
            raise PlacementError(
                f"{who}: shard {keep} is out of range for the {ways} shards along axis {axis!r}.",
                hint=f"use 0 to {ways - 1}.",
            )
        keep %= ways
    here = axis_index(axis, who=who) == keep
    # Unlike a product, `where` keeps integers and does not spread a NaN of a masked shard.
    return lambda x: jnp.where(here, x, jnp.zeros_like(x))


def _checked_dim(dim: int, num_dims: int, *, who: str) -> int:
    if not -num_dims <= dim < num_dims:
        hint = f"use 0 to {num_dims - 1}." if num_dims else "pass an array with at least one dim."
        raise PlacementError(f"{who}: dim {dim} is out of range for an array with {num_dims} dims.", hint=hint)
    return dim % num_dims
