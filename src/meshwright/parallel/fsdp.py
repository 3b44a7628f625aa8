"""FSDP collectives: all-gather parameters along a mesh axis, reduce-scatter their gradients.

You can choose a dtype for each direction, and for the sums. Gradients are sums over the axis, so divide the loss by
the global count before you differentiate it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from meshwright.dtypes import as_dtype, cast_target, is_float
from meshwright.errors import PlacementError, TreeError
from meshwright.hardware.chips import chip_family
from meshwright.mesh.axes import axis_size, pcast_alike, pcast_varying, summing_dtype, varying_axes
from meshwright.mesh.current import current_mesh
from meshwright.parallel.fp8.casting import E4M3, WEIGHT, from_wire, quantize, to_wire, widen
from meshwright.specs import check_spec_type, dim_axes, format_spec
from meshwright.tree import tree_path_to_string
from meshwright.types import PyTree


def gather_tree(
    params: PyTree,
    specs: PyTree,
    *,
    axis: str,
    gather_dtype: Any = None,
    grad_scatter_dtype: Any = None,
    grad_sum_dtype: Any = None,
) -> PyTree:
    """All-gathers the leaves whose specs name a mesh axis; other leaves are returned unchanged.

    Each gradient is this device's slice of the **sum** over the axis. See `gather_array` for the dtypes.

    Example:
        >>> import meshwright as mw
        >>> from jax.sharding import PartitionSpec as P
        >>> specs = {"w": P("fsdp"), "b": P()}
        >>> shapes = lambda p: jax.tree.map(jnp.size, gather_tree(p, specs, axis="fsdp"))
        >>> mw.parallel.local_map(shapes, mesh=mw.create_mesh("fsdp:8"), in_specs=(specs,), out_specs=P())(
        ...     {"w": jnp.ones(16), "b": jnp.ones(3)}
        ... )["w"].item()
        16
    """
    axis_size(axis, who="gather_tree")
    structure: Any
    leaves, structure = jax.tree.flatten_with_path(params)
    try:
        leaf_specs = structure.flatten_up_to(specs)
    except (ValueError, TypeError) as error:
        raise TreeError(f"gather_tree: params and specs differ in structure: {error}") from None

    back = {"grad_scatter_dtype": grad_scatter_dtype, "grad_sum_dtype": grad_sum_dtype}

    def gather(path: Any, leaf: Any, spec: Any) -> Any:
        spec = check_spec_type(spec, where="gather_tree")
        dim = dim_split_last_by(tuple(spec), axis, who=f"gather_tree: {format_spec(spec)}")
        with leaf_scope(path):
            return leaf if dim is None else gather_array(leaf, dim=dim, axis=axis, gather_dtype=gather_dtype, **back)

    return structure.unflatten([gather(*leaf, spec) for leaf, spec in zip(leaves, leaf_specs, strict=True)])


def leaf_scope(path: Any, prefix: str = "") -> Any:
    """Returns a named scope for the collectives of one parameter.

    `meshwright.plan.compiled.origin` reads the name from compiled programs, and profilers show it.
    """
    name = path if isinstance(path, str) else tree_path_to_string(path, sep="/")
    return jax.named_scope(f"params[{prefix}{name}]")


def gather_array(
    x: Any,
    *,
    dim: int,
    axis: str,
    gather_dtype: Any = None,
    grad_scatter_dtype: Any = None,
    grad_sum_dtype: Any = None,
    mean_grads: bool = False,
    fp8_amax: Any = None,
    sends: bool = True,
) -> Any:
    """All-gathers the slices of an array along one dim; its gradient is a reduce-scatter.

    Slices in fp8 have no gradient, and are sent as they are.

    Args:
        gather_dtype: dtype in which floats are sent; they are cast back on arrival (default: the dtype of `x`).
        grad_scatter_dtype: dtype in which gradients are sent (default: their own).
        grad_sum_dtype: dtype in which gradients are summed. If set, an all-to-all replaces the reduce-scatter: it moves
            the same bytes, and each device sums after arrival, so you can send bfloat16 and sum in float32.
        mean_grads: divide gradients by the axis size.
        fp8_amax: largest magnitude of the whole array. If given, values are sent in fp8 (e4m3), a quarter of the bytes
            of float32, and arrive as the fp8 values times their scale: for a weight that is multiplied in fp8, that
            changes nothing. They are cast to `gather_dtype` first.
        sends: whether to send anything. If False, the result is zeros, for an array that only receives a gradient.

    Example:
        >>> import meshwright as mw
        >>> def loss(x):
        ...     return (gather_array(x, dim=0, axis="fsdp") * jnp.arange(8.0)).sum()
        >>> mesh = mw.create_mesh("fsdp:8")
        >>> grad = mw.parallel.local_map(jax.grad(loss), mesh=mesh, in_specs=P("fsdp"), out_specs=P("fsdp"))
        >>> grad(jnp.ones(8)).tolist()  # summed over 8 devices
        [0.0, 8.0, 16.0, 24.0, 32.0, 40.0, 48.0, 56.0]
    """
    ways = axis_size(axis, who="gather_array")
    if ways == 1:
        return x
    dtype, dim = x.dtype, dim % x.ndim
    x, wire = pcast_varying(x, axis), cast_target(dtype, _dtype(gather_dtype))

    if dtype == E4M3:
        return from_wire(lax.all_gather(to_wire(x), axis, axis=dim, tiled=True), E4M3)

    def forward(x: Any, amax: Any = None) -> Any:
        if not sends:
            whole = jnp.zeros([size * (ways if place == dim else 1) for place, size in enumerate(x.shape)], dtype)
            return pcast_alike(whole, axes=sorted(varying_axes(x)))[0]
        if amax is None:
            return lax.all_gather(x.astype(wire), axis, axis=dim, tiled=True).astype(dtype)
        sent = quantize(x.astype(wire), amax, E4M3)
        arrived = lax.all_gather(to_wire(sent.value), axis, axis=dim, tiled=True)
        return widen(from_wire(arrived, E4M3), sent.scale, dtype)

    if not is_float(dtype):
        return forward(x)

    def scatter(amax: Any, grad: Any) -> tuple[Any, Any]:
        wire = grad.astype(cast_target(grad.dtype, _dtype(grad_scatter_dtype)))
        if grad_sum_dtype is None:
            total = _sum_scattered(wire, axis=axis, ways=ways, dim=dim)
        else:
            pieces = jnp.stack(jnp.split(wire, ways, axis=dim))
            arrived = lax.all_to_all(pieces, axis, split_axis=0, concat_axis=0)
            total = arrived.astype(_dtype(grad_sum_dtype)).sum(axis=0)
        total = total.astype(jnp.promote_types(total.dtype, dtype))
        mine = (total / ways if mean_grads else total).astype(dtype)
        return mine, None if amax is None else jnp.zeros_like(amax)

    gather = jax.custom_vjp(forward)
    gather.defvjp(lambda x, amax: (forward(x, amax), amax), scatter)
    if fp8_amax is None:
        return gather(x, None)
    x, fp8_amax = pcast_alike(x, fp8_amax)
    return gather(x, fp8_amax)


def _sum_scattered(x: Any, *, axis: str, ways: int, dim: int) -> Any:
    mesh = current_mesh()
    if chip_family(mesh) != "v5p":
        is_mixed = mesh is not None and set(mesh.axis_names) != set(mesh.manual_axes)
        # XLA's CPU backend cannot sum 16-bit floats if some axes are automatic.
        dtype = summing_dtype(x.dtype) if is_mixed else x.dtype
        return lax.psum_scatter(x.astype(dtype), axis, scatter_dimension=dim, tiled=True).astype(x.dtype)
    # The v5p compiler (libtpu 0.0.42) turns a scatter of rows into an all-reduce of twice the bytes for some widths
    # (11008 features on 64 chips; also 11264 and 28672 on 256), for unknown reasons. Scattering along a separate dim
    # avoided that for all shapes tried (benchmarks/scatter_forms.py), if the pieces are matrices: pieces of stacked
    # layers, which `sync="once"` scatters, became all-reduces on up to 16 chips.
    first = jnp.moveaxis(x, dim, 0)
    pieces = first.reshape(ways, first.shape[0] // ways, *((math.prod(first.shape[1:]),) if x.ndim > 1 else ()))
    total = lax.psum_scatter(pieces, axis, scatter_dimension=0)
    return jnp.moveaxis(total.reshape(total.shape[0], *first.shape[1:]), 0, dim)


def dim_split_last_by(names: tuple[Any, ...], axis: str, *, who: str) -> int | None:
    """Returns the dim that an axis splits, or None; raises if other axes split it further."""
    for dim, name in enumerate(names):
        axes = dim_axes(name)
        if axis in axes:
            if axes[-1] != axis:
                raise PlacementError(
                    f"{who}: dim {dim} is split over {axes}, and {axis!r} is not the last of them. Gathering only "
                    f"{axis!r} would join slices that are not adjacent.",
                    hint=f"gather {axes[-1]!r} first, or name {axis!r} last.",
                )
            return dim
    return None


def _dtype(spec: Any) -> Any:
    return None if spec is None else as_dtype(spec)


@dataclass(frozen=True)
class Gather:
    """All-gathers parts of a parameter tree on demand, for losses that gather layer by layer.

    Index it like the tree: `gather["layers"](params["layers"])` gathers that part. `layer()` gathers one layer of
    stacked layers. The gradient is a reduce-scatter.

    Args:
        dtypes: dtype in which each leaf is sent and returned (default: its own). Gradients have the dtype of the
            slices, so float32 slices sent in bfloat16 have float32 gradients.
        grad_scatter_dtype, grad_sum_dtype: see `gather_array`.
        name: path of this part in the parameter tree, for the named scopes of its collectives.
        amaxes: key of this part under which it holds the amaxes of its fp8 weights (see `Amaxes`). These weights are
            sent in fp8.
        casts: key of this part under which it holds these weights in fp8 (`CastWeight`), if they are cast already.
            Then these are sent instead, and the weights themselves arrive as zeros.
    """

    specs: PyTree
    axes: tuple[str, ...]
    dtypes: PyTree = None
    grad_scatter_dtype: Any = None
    grad_sum_dtype: Any = None
    name: str = ""
    amaxes: str | None = None
    casts: str | None = None

    def __getitem__(self, name: Any) -> Gather:
        dtypes = None if self.dtypes is None else self.dtypes[name]
        return replace(self, specs=self.specs[name], dtypes=dtypes, name=f"{self.name}{name}/")

    def layer(self) -> Gather:
        """Returns the `Gather` of one layer, for leaves that stack layers along their leading dim."""

        def of_one(spec: P) -> P:
            split = [axis for axis in dim_axes(spec[0]) if axis in self.axes] if len(spec) else []
            if split:
                raise PlacementError(
                    f"Gather: {self.name or 'layers'} of {format_spec(spec)} are split over {split[0]!r} along the "
                    "layer dim. Each device holds only some layers, so they cannot be gathered one at a time.",
                    hint="write rules that split another dim of the stacked layers, or use sync='once'.",
                )
            return P(*spec[1:])

        specs = jax.tree.map(of_one, self.specs, is_leaf=lambda node: isinstance(node, P))
        return replace(self, specs=specs)

    def __call__(self, params: PyTree) -> PyTree:
        structure: Any
        found, structure = jax.tree.flatten_with_path(params)
        paths, leaves = [path for path, _ in found], [leaf for _, leaf in found]
        specs = structure.flatten_up_to(self.specs)
        dtypes = [leaf.dtype for leaf in leaves] if self.dtypes is None else structure.flatten_up_to(self.dtypes)
        known = {} if self.amaxes is None else _by_path(params[self.amaxes])
        names = [str(tree_path_to_string(path, sep="/")) for path in paths]
        amaxes = [known.get(name) for name in names]
        return structure.unflatten(list(map(self._whole, names, leaves, specs, dtypes, amaxes)))

    def _whole(self, name: str, leaf: Any, spec: P, dtype: Any, amaxes: Any = None) -> Any:
        amax = None if amaxes is None else amaxes[..., WEIGHT]
        back = {"grad_scatter_dtype": self.grad_scatter_dtype, "grad_sum_dtype": self.grad_sum_dtype}
        if amaxes is not None and self.casts is not None:
            amax, back["sends"] = None, False
        if self.casts is not None and name.startswith(f"{self.casts}/"):  # the parameter's name, without "/value"
            name = name.removeprefix(f"{self.casts}/").rpartition("/")[0]
        with leaf_scope(name, self.name):
            for axis in reversed(self.axes):  # The last axis of a spec splits a dim last, so gather it first.
                dim = dim_split_last_by(tuple(spec), axis, who=f"Gather: {format_spec(spec)}")
                if dim is not None:
                    leaf = gather_array(leaf, dim=dim, axis=axis, gather_dtype=dtype, fp8_amax=amax, **back)
            return leaf.astype(dtype)


def _by_path(tree: PyTree) -> dict[str, Any]:
    return {str(tree_path_to_string(path, sep="/")): leaf for path, leaf in jax.tree.leaves_with_path(tree)}
