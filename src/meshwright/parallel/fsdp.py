"""Gathering arrays that are split over a mesh axis, with the reduction of their gradients as the way back.

Dtypes can be chosen per direction, for what travels and for what is added up. On trees, a layout's specs say which
leaves are split, and gradients are sums: what a loss that is already divided by the global count needs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from meshwright.dtypes import as_dtype, cast_target, is_float
from meshwright.errors import PlacementError, TreeError
from meshwright.hardware.chips import chip_family
from meshwright.mesh.axes import axis_size, pcast_varying, summing_dtype
from meshwright.mesh.build import current_mesh
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
    """Gathers, along one mesh axis, the leaves of a local tree whose specs name it; the others stay as they are.

    The gradient is the dual: slices of the **sum** over the axis. See `gather_array` for the dtypes.

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
    structure: Any  # jax's treedef has no type of its own to name
    leaves, structure = jax.tree.flatten_with_path(params)
    try:
        leaf_specs = structure.flatten_up_to(specs)
    except (ValueError, TypeError) as error:
        raise TreeError(f"gather_tree: params and specs differ in structure: {error}") from None

    dtypes = {
        "gather_dtype": gather_dtype,
        "grad_scatter_dtype": grad_scatter_dtype,
        "grad_sum_dtype": grad_sum_dtype,
    }

    def gather(path: Any, leaf: Any, spec: Any) -> Any:
        spec = check_spec_type(spec, where="gather_tree")
        dim = dim_split_last_by(tuple(spec), axis, who=f"gather_tree: {format_spec(spec)}")
        with leaf_scope(path):
            return leaf if dim is None else gather_array(leaf, dim=dim, axis=axis, **dtypes)

    return structure.unflatten([gather(*leaf, spec) for leaf, spec in zip(leaves, leaf_specs, strict=True)])


def leaf_scope(path: Any, prefix: str = "") -> Any:
    """Returns a scope that names a parameter in compiled programs, for what is sent on its behalf, both ways.

    `meshwright.plan.compiled.origin` reads it back, and profilers show it. It changes nothing that is computed.
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
) -> Any:
    """Gathers the slices of an array along a dim; the gradient is the reduce-scatter of the whole's.

    Args:
        gather_dtype: floats travel in this dtype, and arrive in their own.
        grad_scatter_dtype: gradients travel back in this one.
        grad_sum_dtype: gradients are added in this dtype, on arrival: an all-to-all moves the same bytes that a
            reduce-scatter would, and each device sums what it receives. So they can travel in bfloat16 and be
            added in float32.
        mean_grads: divides gradients by the axis size.
    """
    ways = axis_size(axis, who="gather_array")
    if ways == 1:
        return x
    dtype, dim = x.dtype, dim % x.ndim
    x, wire = pcast_varying(x, axis), cast_target(dtype, _dtype(gather_dtype))

    def forward(x: Any) -> Any:
        return lax.all_gather(x.astype(wire), axis, axis=dim, tiled=True).astype(dtype)

    if not is_float(dtype):
        return forward(x)

    def scatter(_: None, grad: Any) -> tuple[Any]:
        wire = grad.astype(cast_target(grad.dtype, _dtype(grad_scatter_dtype)))
        if grad_sum_dtype is None:
            total = _sum_scattered(wire, axis=axis, ways=ways, dim=dim)
        else:
            total = _sum_after_arrival(wire, axis=axis, ways=ways, dim=dim, dtype=_dtype(grad_sum_dtype))
        total = total.astype(jnp.promote_types(total.dtype, dtype))
        return ((total / ways if mean_grads else total).astype(dtype),)

    gather = jax.custom_vjp(forward)
    gather.defvjp(lambda x: (forward(x), None), scatter)
    return gather(x)


def _sum_scattered(x: Any, *, axis: str, ways: int, dim: int) -> Any:
    mesh = current_mesh()
    if chip_family(mesh) != "v5p":
        is_mixed = mesh is not None and set(mesh.axis_names) != set(mesh.manual_axes)
        # What was asked for travels, but where it cannot be added up.
        dtype = summing_dtype(x.dtype) if is_mixed else x.dtype
        return lax.psum_scatter(x.astype(dtype), axis, scatter_dimension=dim, tiled=True).astype(x.dtype)
    # Compiled for v5p (libtpu 0.0.42), a scatter of rows becomes an all-reduce of twice the bytes for some widths:
    # 11008 features on 64 chips; 11264 and 28672 too on 256. Why is not known. Scattered as pieces along a dim of their
    # own, all shapes that were tried stay scatters (benchmarks/scatter_forms.py).
    first = jnp.moveaxis(x, dim, 0)
    pieces = first.reshape(ways, first.shape[0] // ways, *first.shape[1:])
    return jnp.moveaxis(lax.psum_scatter(pieces, axis, scatter_dimension=0), 0, dim)


def _sum_after_arrival(x: Any, *, axis: str, ways: int, dim: int, dtype: Any) -> Any:
    pieces = jnp.stack(jnp.split(x, ways, axis=dim))
    return lax.all_to_all(pieces, axis, split_axis=0, concat_axis=0).astype(dtype).sum(axis=0)


def dim_split_last_by(names: tuple[Any, ...], axis: str, *, who: str) -> int | None:
    """Returns the dim that an axis splits, or None; raises where other axes split it further."""
    for dim, name in enumerate(names):
        axes = dim_axes(name)
        if axis in axes:
            if axes[-1] != axis:
                raise PlacementError(
                    f"{who}: dim {dim} is split over {axes}, and {axis!r} is not the last of them: gathering it alone "
                    "would leave slices that are not next to each other.",
                    hint=f"gather {axes[-1]!r} first, or name {axis!r} last.",
                )
            return dim
    return None


def _dtype(spec: Any) -> Any:
    return None if spec is None else as_dtype(spec)


@dataclass(frozen=True)
class Gather:
    """How parts of a tree of slices become whole where they are used: what a loss gets that gathers layer by layer.

    Indexing follows the tree, so that `gather["layers"]` belongs to `params["layers"]`; `layer()` is for one layer of
    stacked ones, whose leading dim is gone. Calling it gathers; the gradient is the reduce-scatter.

    Args:
        dtypes: for each leaf, the dtype it travels in and arrives in; its own by default. Gradients come back in that
            of the slices: of float32 slices that travel in bfloat16, sums are float32.
        grad_scatter_dtype, grad_sum_dtype: see `gather_array`.
        name: where in the tree of parameters this part is, for the names of what is sent.
    """

    specs: PyTree
    axes: tuple[str, ...]
    dtypes: PyTree = None
    grad_scatter_dtype: Any = None
    grad_sum_dtype: Any = None
    name: str = ""

    def __getitem__(self, name: Any) -> Gather:
        dtypes = None if self.dtypes is None else self.dtypes[name]
        return replace(self, specs=self.specs[name], dtypes=dtypes, name=f"{self.name}{name}/")

    def layer(self) -> Gather:
        """Returns the same for one layer of leaves that are stacked along their leading dim."""

        def of_one(spec: P) -> P:
            split = [axis for axis in dim_axes(spec[0]) if axis in self.axes] if len(spec) else []
            if split:
                raise PlacementError(
                    f"Gather: {self.name or 'layers'} of {format_spec(spec)} are split over {split[0]!r} along their "
                    "stack. A device has some of the layers then, and cannot gather them one at a time.",
                    hint="write rules that split another dim of stacked layers, or use sync='once'.",
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
        return structure.unflatten(list(map(self._whole, paths, leaves, specs, dtypes)))

    def _whole(self, path: Any, leaf: Any, spec: P, dtype: Any) -> Any:
        back = {"grad_scatter_dtype": self.grad_scatter_dtype, "grad_sum_dtype": self.grad_sum_dtype}
        with leaf_scope(path, self.name):
            for axis in reversed(self.axes):  # the last axis of a spec splits a dim last, and is gathered first
                dim = dim_split_last_by(tuple(spec), axis, who=f"Gather: {format_spec(spec)}")
                if dim is not None:
                    leaf = gather_array(leaf, dim=dim, axis=axis, gather_dtype=dtype, **back)
            return leaf.astype(dtype)
