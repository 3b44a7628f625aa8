"""Fully sharded data parallelism on boxed trees: parameters are stored in slices and gathered for use.

Boxes name the split dims, each device computes its own mean loss, and gradients are means over devices.
`meshwright.parallel.fsdp.gather_tree` does the same on plain trees, with specs instead of boxes and sums instead of
means.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import lax

from meshwright.dtypes import as_dtype, cast_target, is_float
from meshwright.errors import MeshwrightWarning, PlacementError
from meshwright.linen.stacking import close_box, is_box, open_box, split_array_over_mesh
from meshwright.mesh.axes import axis_size, pcast_varying, summing_dtype, varying_axes
from meshwright.mesh.current import current_mesh
from meshwright.parallel.fsdp import dim_split_last_by, gather_array, leaf_scope
from meshwright.specs import dim_axes
from meshwright.tree import tree_path_to_string
from meshwright.types import PyTree


def shard_params(params: PyTree, axis_name: str, min_weight_size: int = 2**18) -> PyTree:
    """Returns this device's slice of every large parameter, in a box that names the axis on the split dim.

    The split dim is the largest one without a name that the axis divides (the last of equal ones). On an axis of one
    device the boxes are the same, so that the tree has one structure on every mesh.

    Args:
        params: arrays in boxes or not.
        min_weight_size: parameters with at most this many elements, counted over all shards, stay replicated. A larger
            parameter that cannot be split stays replicated, with a warning.

    Example:
        >>> import meshwright as mw
        >>> shard = lambda w: shard_params(w, "fsdp", min_weight_size=1)
        >>> with jax.set_mesh(mw.create_mesh("fsdp:8")):
        ...     kept = jax.shard_map(shard, in_specs=mw.P(), out_specs=mw.P(None, "fsdp"))(jnp.ones((3, 16)))
        >>> kept.names, kept.value.addressable_shards[0].data.shape
        ((None, 'fsdp'), (3, 2))
    """
    ways = axis_size(axis_name, who="shard_params")
    mesh = current_mesh()
    assert mesh is not None
    sizes = dict(mesh.shape)

    def shard(path: Any, leaf: Any) -> Any:
        value, names = open_box(leaf)
        if any(axis_name in dim_axes(name) for name in names):
            return leaf
        # Names that are not mesh axes split nothing.
        num_shards = math.prod(sizes.get(axis, 1) for name in names for axis in dim_axes(name))
        num_elements = math.prod(jnp.shape(value)) * num_shards
        if num_elements <= min_weight_size:
            return leaf
        fitting = [dim for dim, name in enumerate(names) if name is None and value.shape[dim] % ways == 0]
        if not fitting and ways == 1:
            return leaf
        if not fitting:
            name = tree_path_to_string(path, sep="/")
            free = ", ".join(str(value.shape[dim]) for dim, name in enumerate(names) if name is None) or "none"
            warnings.warn(
                f"`{name}`, with {num_elements:,} elements, stays replicated on every device of axis {axis_name!r}: "
                f"its local shape is {jnp.shape(value)}, and {ways} divides none of its free dims ({free}).\n"
                f"hint: pad one of them to a multiple of {ways}, or raise min_weight_size.",
                MeshwrightWarning,
                stacklevel=2,
            )
            return leaf
        dim = max(fitting, key=lambda dim: (value.shape[dim], dim))
        mine = split_array_over_mesh(value, axis_name, dim)
        return close_box(leaf, mine, (*names[:dim], axis_name, *names[dim + 1 :]))

    return jax.tree_util.tree_map_with_path(shard, params, is_leaf=is_box)


def gather_params(params: PyTree, axis_name: str, gather_dtype: Any = None, grad_scatter_dtype: Any = None) -> PyTree:
    """Gathers every parameter that a mesh axis splits, and removes the axis from its box.

    The gradient of a gathered parameter is the mean over the axis, again in slices. So is the gradient of any other
    parameter that varies along the axis, or if `check_vma` is off. With `check_vma` on, JAX returns the gradient of a
    replicated parameter as a sum. Always call `sync_gradients` on the gradients: it handles each case.

    Args:
        params: arrays in boxes or not.
        gather_dtype: the dtype in which floats are sent and returned (default: their own). Parameters that the axis
            does not split keep their dtype.
        grad_scatter_dtype: the dtype in which gradients are sent back (default: that of the parameter).

    Example:
        >>> import meshwright as mw
        >>> full = lambda w: gather_params(nn.Partitioned(w, ("fsdp",)), "fsdp")[None]
        >>> with jax.set_mesh(mw.create_mesh("fsdp:8")):
        ...     jax.shard_map(full, in_specs=mw.P("fsdp"), out_specs=mw.P("fsdp"))(jnp.arange(8)).shape  # all 8 on each
        (8, 8)
    """
    axis_size(axis_name, who="gather_params")

    def gather(path: Any, leaf: Any) -> Any:
        value, names = open_box(leaf)
        dim = dim_split_last_by(names, axis_name, who="gather_params")
        with leaf_scope(path):
            if dim is None:
                whole = _with_mean_grads(value, axis_name)
                return leaf.replace(value=whole) if is_box(leaf) else whole
            whole = gather_array_with_mean_grads(value, dim, axis_name, gather_dtype, grad_scatter_dtype)
        return close_box(leaf, whole, (*names[:dim], _without(names[dim], axis_name), *names[dim + 1 :]))

    return jax.tree_util.tree_map_with_path(gather, params, is_leaf=is_box)


def gather_array_with_mean_grads(
    x: Any, axis: int, axis_name: str, gather_dtype: Any = None, grad_scatter_dtype: Any = None
) -> Any:
    """Gathers the slices of an array along a dim; the gradient of a slice is the mean over devices.

    Args:
        axis: the split dim.
        gather_dtype: the dtype in which floats are sent and returned (default: that of `x`), on any number of devices.
        grad_scatter_dtype: the dtype in which gradients are sent back (default: that of `x`, which is also the dtype of
            the gradient).

    Example:
        >>> import meshwright as mw
        >>> loss = lambda x: (gather_array_with_mean_grads(x, 0, "dp") * jax.lax.axis_index("dp")).sum()
        >>> with jax.set_mesh(mw.create_mesh("dp:8")):
        ...     grads = jax.shard_map(jax.grad(loss), in_specs=mw.P("dp"), out_specs=mw.P("dp"))(jnp.ones(8))
        >>> grads.tolist()[:2]  # the mean of 0..7
        [3.5, 3.5]
    """
    whole = gather_array(
        x, dim=axis, axis=axis_name, gather_dtype=gather_dtype, grad_scatter_dtype=grad_scatter_dtype, mean_grads=True
    )
    # The values are already rounded to this dtype, so XLA drops the cast back and forth.
    return whole.astype(cast_target(x.dtype, None if gather_dtype is None else as_dtype(gather_dtype)))


def shard_module_params(
    target: Callable[..., Any],
    axis_name: str,
    min_weight_size: int = 2**18,
    gather_dtype: Any = None,
    grad_scatter_dtype: Any = None,
) -> Callable[..., Any]:
    """Returns a linen module class (or constructor) that stores its parameters in slices and gathers them when called.

    Args:
        target: a module class, a partial of one, or any function that returns a module.
        min_weight_size: see `shard_params`.
        gather_dtype: see `gather_params`, as for `grad_scatter_dtype`.

    Example:
        >>> import meshwright as mw
        >>> layer = shard_module_params(nn.Dense, "fsdp", min_weight_size=1)(features=8)
        >>> mesh = mw.create_mesh("fsdp:8")
        >>> init = mw.parallel.local_map(layer.init, mesh=mesh, in_specs=mw.P(), out_specs=mw.P("fsdp"))
        >>> jax.eval_shape(init, jax.random.key(0), jnp.ones((1, 4)))["params"]["kernel"].names
        (None, 'fsdp')
    """
    if isinstance(target, nn.Module):
        raise PlacementError(
            f"shard_module_params needs a module class or constructor; got the module {type(target).__name__}(...).",
            hint=f"pass functools.partial({type(target).__name__}, ...) and construct the result.",
        )
    lift = functools.partial(
        nn.map_variables,
        mapped_collections="params",
        trans_in_fn=functools.partial(
            gather_params, axis_name=axis_name, gather_dtype=gather_dtype, grad_scatter_dtype=grad_scatter_dtype
        ),
        trans_out_fn=functools.partial(shard_params, axis_name=axis_name, min_weight_size=min_weight_size),
        mutable=True,
    )
    maker = target.func if isinstance(target, functools.partial) else target
    if isinstance(maker, type) and issubclass(maker, nn.Module):
        return lift(target)

    def construct(*args: Any, name: str | None = None, **kwargs: Any) -> nn.Module:
        return _ShardedModule(make=functools.partial(target, *args, **kwargs), lift=lift, name=name)

    return construct


class _ShardedModule(nn.Module):
    """The module from a constructor, with its variables mapped; the inner module adds no level to the tree."""

    make: Callable[[], nn.Module]
    lift: Callable[..., Any]

    @nn.compact
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        def run(module: _ShardedModule, *args: Any, **kwargs: Any) -> Any:
            inner = module.make()
            nn.share_scope(module, inner)
            return inner(*args, **kwargs)

        return self.lift(run)(self, *args, **kwargs)


def sync_gradients(grads: PyTree, axis_names: str | Sequence[str]) -> PyTree:
    """Returns the mean of the gradients over mesh axes, except the axes that split a leaf according to its box.

    The loss must be each device's own, not yet reduced over these axes. Works with `check_vma` on and off: if JAX
    already summed a gradient (that of a replicated parameter, with the check on), the sum is divided.

    Example:
        >>> import meshwright as mw
        >>> step = lambda w, x: sync_gradients(jax.grad(lambda w: (w * x).sum())(w), "dp")
        >>> with jax.set_mesh(mw.create_mesh("dp:8")):
        ...     jax.shard_map(step, in_specs=(mw.P(), mw.P("dp")), out_specs=mw.P())(1.0, jnp.arange(8.0))
        Array(3.5, dtype=float32, weak_type=True)
    """
    names = (axis_names,) if isinstance(axis_names, str) else tuple(axis_names)
    sizes = {axis: axis_size(axis, who="sync_gradients") for axis in names}

    def sync(leaf: Any) -> Any:
        value, dim_names = open_box(leaf)
        if value.dtype == jax.dtypes.float0:
            return leaf
        split_over = {axis for name in dim_names for axis in dim_axes(name)}
        varying = varying_axes(value)
        # Along an axis of one device there is nothing to sum, but a value that varies along it must not any more.
        axes = [axis for axis, size in sizes.items() if axis not in split_over and (size > 1 or axis in varying)]
        summed = [axis for axis in axes if _is_checked(axis) and axis not in varying]
        differing = tuple(axis for axis in axes if axis not in summed)
        mean = _mean(value, differing) if differing else value
        if summed:
            mean = mean / math.prod(sizes[axis] for axis in summed)
        return leaf.replace(value=mean) if is_box(leaf) else mean

    return jax.tree.map(sync, grads, is_leaf=is_box)


def _with_mean_grads(x: Any, axis: str) -> Any:
    """Makes the gradient of an array its mean over an axis, if its type allows that."""
    if axis_size(axis, who="gather_params") == 1 or not is_float(x.dtype):
        return x
    if _is_checked(axis) and axis not in varying_axes(x):
        # JAX sums the gradient of a replicated value in any case, so sync_gradients divides it.
        return pcast_varying(x, axis)
    identity = jax.custom_vjp(lambda x: x)
    identity.defvjp(lambda x: (x, None), lambda _, grad: (pcast_varying(_mean(grad, axis), axis),))
    return identity(x)


def _mean(x: Any, axes: Any) -> Any:
    return lax.pmean(x.astype(summing_dtype(x.dtype)), axes).astype(x.dtype)


def _is_checked(axis: str) -> bool:
    """Returns whether `check_vma` is on; only then does the type of an axis index vary."""
    return axis in varying_axes(lax.axis_index(axis))


def _without(name: Any, axis: str) -> Any:
    rest = tuple(other for other in dim_axes(name) if other != axis)
    return rest if len(rest) > 1 else rest[0] if rest else None
