"""How often devices exchange gradients: what is done to parameters before the minibatches, and what within each.

Two things have to happen to a parameter before a loss can use it: it is marked as varying along the axes that it is
replicated over, and gathered along those it is split over. The transpose of the mark is a sum over devices, that of
the gather a sum that leaves each device its slice. Where the two are done decides how often that is:

    sync      before the minibatches   within each
    every     -                        mark, gather
    hybrid    mark                     gather
    once      mark, gather             -

The mark always comes first, so that gradients are scattered before the slices are summed: gathering first would make
the sum over the other axes one of whole gradients.

Parameters that a pipeline only stores along its axis (`gather_first`) are marked and gathered along it before the
minibatches in every mode: once per step, and outside the branches that only some stages take.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, get_args

import jax
from jax import lax
from jax.sharding import PartitionSpec as P
from jax.tree_util import SequenceKey

from meshwright.dtypes import as_dtype, is_float
from meshwright.errors import MeshwrightError, PlacementError, TreeError, did_you_mean
from meshwright.mesh.axes import axis_index, axis_size, is_manual, pcast_varying, summing_dtype, varying_axes
from meshwright.mesh.current import current_mesh, require_axes
from meshwright.parallel.fsdp import gather_array, leaf_scope
from meshwright.specs import canonical, check_spec_type, dim_axes, format_spec, spec_axes
from meshwright.tree import NamedLeaf, named_leaves, tree_path_to_string
from meshwright.types import PyTree

Sync = Literal["every", "hybrid", "once"]

WHO = "accumulate"


class LeafSync(NamedTuple):
    """The gathers, scatter and dtype of one parameter."""

    name: str  # used to name its collectives
    first: tuple[tuple[int, str], ...]  # dims and axes to gather it along before the minibatches, in any mode
    gathers: tuple[tuple[int, str], ...]  # dims and axes to gather it along after those, in this order
    scatter: tuple[int, str] | None  # dim and axis along which its gradient is scattered though the parameter is whole
    dtype: Any  # its dtype in the loss
    wire: Any  # its dtype in the first gathers
    is_sent: bool = True  # whether its gathers send anything, or the loss reads a copy in fp8 instead


@dataclass(frozen=True)
class SyncPlan:
    """How one call of `accumulate` prepares its parameters, and along which axes."""

    sync: Sync
    axes: tuple[str, ...]  # along these the loss is a partial sum
    row_axes: tuple[str, ...]  # these split the rows of the batch, the first one into the largest blocks
    leaves: tuple[LeafSync, ...]
    reduce_dtype: Any

    def only(self, wanted: Sequence[bool]) -> SyncPlan:
        """Returns the plan for some of the parameters, given as a list of leaves."""
        return replace(self, leaves=tuple(leaf for leaf, keep in zip(self.leaves, wanted, strict=True) if keep))

    def own(self, params: PyTree) -> PyTree:
        """Returns the part of each parameter whose gradient this device keeps: all of it, or a slice."""

        def cut(known: LeafSync, leaf: Any) -> Any:
            if known.scatter is None:
                return leaf
            dim, axis = known.scatter
            size = leaf.shape[dim] // axis_size(axis, who=WHO)
            return lax.dynamic_slice_in_dim(pcast_varying(leaf, axis), axis_index(axis, who=WHO) * size, size, axis=dim)

        return self._map(cut, params)

    def before(self, own: PyTree, params: PyTree) -> PyTree:
        """Prepares parameters for all minibatches; gradients flow to `own`, the result of `own()`."""
        whole = self._gather_first(self._mark(own, params, before=True))
        return self._gather(whole) if self.sync == "once" else whole

    def inside(self, prepared: PyTree, params: PyTree) -> PyTree:
        """Prepares the result of `before` for one minibatch."""
        return prepared if self.sync == "once" else self._gather(self._mark(prepared, params, before=False))

    def settled(self, prepared: PyTree) -> PyTree:
        """Casts the parameters that `before` has gathered for good to their dtypes in the loss, to hold fewer bytes."""

        def cast(known: LeafSync, leaf: Any) -> Any:
            done = self.sync == "once" or (known.first and not known.gathers)
            return leaf.astype(known.dtype) if done else leaf

        return self._map(cast, prepared)

    def _mark(self, own: PyTree, params: PyTree, *, before: bool) -> PyTree:
        def mark(known: LeafSync, own: Any, whole: Any) -> Any:
            if before != (self.sync != "every" or bool(known.first)):
                return own  # marked at the other place
            with leaf_scope(known.name):
                if known.scatter is None:
                    return _mark_for_sum(own, self.axes, self.reduce_dtype)
                dim, axis = known.scatter
                # In the backward pass the scatter comes first, so that only slices are summed over the other axes.
                own = _mark_for_sum(own, [other for other in self.axes if other != axis], self.reduce_dtype)
                return _mark_for_scatter(own, pcast_varying(whole, self.axes), dim, axis, self.reduce_dtype)

        return self._map(mark, own, params)

    def narrow(self, params: PyTree) -> PyTree:
        """Casts parameters to their dtypes in the loss."""
        return self._map(lambda known, leaf: leaf.astype(known.dtype), params)

    @property
    def num_row_devices(self) -> int:
        """Number of devices that the batch's rows are split over."""
        return math.prod(axis_size(axis, who=WHO) for axis in self.row_axes)

    def first_row(self, num_rows: int) -> Any:
        """Returns the index of this device's first row in the whole batch."""
        place = 0
        for axis in self.row_axes:
            place = place * axis_size(axis, who=WHO) + axis_index(axis, who=WHO)
        return place * num_rows

    def check_loss(self, loss: Any) -> None:
        """Raises if the loss varies along an axis that it is not summed over."""
        others = sorted(varying_axes(loss) - set(self.axes))
        if others:
            raise PlacementError(
                f"{WHO}: the loss varies along {', '.join(map(repr, others))}, but is summed only over "
                f"{', '.join(map(repr, self.axes)) or 'no axis'}.",
                hint=f"if each device holds a part of the loss, jax.lax.psum it in loss_fn or add {others[0]!r} to "
                "axes=; if parameters are gathered along that axis, split the batch over it too.",
            )

    def _gather_first(self, params: PyTree) -> PyTree:
        return self._map(lambda known, leaf: self._gathered(known, leaf, known.first, known.wire), params)

    def _gather(self, params: PyTree) -> PyTree:
        return self._map(lambda known, leaf: self._gathered(known, leaf, known.gathers, known.dtype), params)

    def _gathered(self, known: LeafSync, leaf: Any, steps: Sequence[tuple[int, str]], dtype: Any) -> Any:
        dtypes = {"gather_dtype": dtype, "grad_scatter_dtype": self.reduce_dtype}
        with leaf_scope(known.name):
            for dim, axis in steps:
                leaf = gather_array(leaf, dim=dim, axis=axis, sends=known.is_sent, **dtypes)
        return leaf

    def gather_casts(self, casts: PyTree) -> PyTree:
        """Gathers weights in fp8 (`CastWeight`) as their parameters are gathered; lists hold layers one by one."""
        steps = {leaf.name: leaf.gathers for leaf in self.leaves if leaf.gathers}

        def gather(path: Any, leaf: Any) -> Any:
            name = _name_of_cast(path)
            is_one = any(isinstance(key, SequenceKey) for key in path)  # without the layer dim
            with leaf_scope(name):
                for dim, axis in steps.get(name, ()):
                    leaf = gather_array(leaf, dim=dim - is_one, axis=axis)
            return leaf

        return jax.tree_util.tree_map_with_path(gather, casts)

    def _map(self, function: Callable[..., Any], *trees: PyTree) -> PyTree:
        structure: Any = jax.tree.structure(trees[0])
        rows = zip(self.leaves, *map(jax.tree.leaves, trees), strict=True)
        return structure.unflatten([function(*row) for row in rows])


def make_sync_plan(
    params: PyTree,
    batch: PyTree,
    specs: PyTree,
    *,
    sync: Sync,
    gather_axes: Sequence[str] | None,
    axes: Sequence[str] | None,
    row_axes: Sequence[str] | None,
    grad_specs: PyTree = None,
    dtypes: PyTree = None,
    reduce_dtype: Any = None,
    trainable: Sequence[bool] | None = None,
    gather_first: Sequence[tuple[str, Any] | None] | None = None,
    fp8_weights: PyTree = None,
) -> SyncPlan:
    """Checks the arguments of `accumulate` against the current mesh and fills in its defaults."""
    if sync not in get_args(Sync):
        hint = did_you_mean(sync, get_args(Sync)) or f"use one of: {', '.join(get_args(Sync))}"
        raise MeshwrightError(f"{WHO}: unknown sync mode {sync!r}.", hint=hint)
    mesh = current_mesh()
    manual = [] if mesh is None else [axis for axis in mesh.axis_names if is_manual(axis)]
    if manual and manual[0] not in varying_axes(lax.axis_index(manual[0])):
        raise PlacementError(
            f"{WHO} was called under check_vma=False, which hides the values that differ between devices and makes "
            "gradients wrong.",
            hint="leave check_vma=True, the default of local_map and jax.shard_map.",
        )
    for name, given in (("gather_axes", gather_axes), ("axes", axes), ("row_axes", row_axes)):
        if given is not None and mesh is not None:
            require_axes(mesh, given, where=f"{WHO}: {name}")
    split_by = frozenset().union(*map(varying_axes, jax.tree.leaves(batch)))
    summed = [axis for axis in manual if axis in split_by] if axes is None else [a for a in axes if a in manual]
    rows = [axis for axis in summed if axis in split_by] if row_axes is None else [a for a in row_axes if a in manual]
    gathered = ("fsdp",) if gather_axes is None else tuple(gather_axes)
    leaves = named_leaves(params)
    for leaf, learns in zip(leaves, trainable or [True] * len(leaves), strict=True):
        if learns and not is_float(leaf.value.dtype):
            raise PlacementError(
                f"{WHO}: parameter `{leaf.name}` is {leaf.value.dtype}, which has no gradient.",
                hint="freeze it, or remove it from params and close over it in loss_fn.",
            )
    own = _leaf_specs(params, specs)
    fine = own if grad_specs is None else _leaf_specs(params, grad_specs)
    wanted = [leaf.value.dtype for leaf in leaves] if dtypes is None else map(as_dtype, jax.tree.leaves(dtypes))
    unsent = {_name_of_cast(path) for path, _ in jax.tree.leaves_with_path(fp8_weights)}
    known = []
    for leaf, spec, finer, dtype, first in zip(
        leaves, own, fine, wanted, gather_first or [None] * len(leaves), strict=True
    ):
        axis, wire = first or (None, dtype)
        early = [] if axis is None else [*_gathers(leaf, spec, manual, (axis,))]
        # Of what the first gathers leave, the others are the axes to gather next.
        rest = _gathers(leaf, spec, manual, gathered if axis is None else (*gathered, axis))
        later = tuple(step for step in rest if step[1] != axis)
        scatter, is_sent = _scatter(leaf, spec, finer, manual, summed), leaf.name not in unsent
        known.append(LeafSync(leaf.name, tuple(early), later, scatter, dtype, wire, is_sent))
    return SyncPlan(sync, tuple(summed), tuple(rows), tuple(known), reduce_dtype)


def _name_of_cast(path: Sequence[Any]) -> str:
    """Returns the name of the parameter that a leaf of a `CastWeight` belongs to."""
    return str(tree_path_to_string([key for key in path[:-1] if not isinstance(key, SequenceKey)], sep="/"))


def _scatter(
    leaf: NamedLeaf, spec: P, finer: P, manual: Sequence[str], summed: Sequence[str]
) -> tuple[int, str] | None:
    extra = [axis for axis in spec_axes(finer) if axis in manual and axis not in spec_axes(spec)]
    if not extra:
        return None
    dim = next(dim for dim, entry in enumerate(finer) if extra[0] in dim_axes(entry))
    ways = axis_size(extra[0], who=WHO)
    coarse = P(*(tuple(a for a in dim_axes(entry) if a != extra[0]) or None for entry in finer))
    fits = len(extra) == 1 and dim_axes(finer[dim])[-1] == extra[0] and canonical(coarse) == canonical(spec)
    if not fits or extra[0] not in summed or leaf.value.shape[dim] % ways:
        raise PlacementError(
            f"{WHO}: the gradient of `{leaf.name}` cannot have spec {format_spec(finer)} if the parameter has "
            f"{format_spec(spec)} and shards of shape {leaf.value.shape}.",
            hint="add at most one axis in grad_specs: one that splits the batch and divides the dim, as its last axis.",
        )
    return dim, extra[0]


def _mark_for_sum(leaf: Any, axes: Sequence[str], dtype: Any) -> Any:
    """Marks a leaf as varying; its gradient is summed over the axes in `dtype`."""
    missing = [axis for axis in axes if axis not in varying_axes(leaf)]
    if dtype is None or dtype == leaf.dtype or not missing:
        return pcast_varying(leaf, missing)
    mark = jax.custom_vjp(lambda leaf: pcast_varying(leaf, missing))
    wire = summing_dtype(dtype)
    mark.defvjp(
        lambda leaf: (pcast_varying(leaf, missing), None),
        lambda _, grad: (lax.psum(grad.astype(wire), tuple(missing)).astype(grad.dtype),),
    )
    return mark(leaf)


def _mark_for_scatter(own: Any, whole: Any, dim: int, axis: str, dtype: Any) -> Any:
    """Returns `whole`; its gradient is reduce-scattered along `axis` to `own`."""
    wire = summing_dtype(dtype or whole.dtype)

    def scatter(_: None, grad: Any) -> tuple[Any]:
        total = lax.psum_scatter(grad.astype(wire), axis, scatter_dimension=dim, tiled=True)
        return (total.astype(grad.dtype),)

    mark = jax.custom_vjp(lambda own: whole)
    mark.defvjp(lambda own: (whole, None), scatter)
    return mark(own)


def _leaf_specs(params: PyTree, specs: PyTree) -> list[P]:
    structure: Any = jax.tree.structure(params)
    if specs is None:
        return [P()] * structure.num_leaves
    try:
        found = structure.flatten_up_to(specs)
    except (ValueError, TypeError) as error:
        raise TreeError(f"{WHO}: params and specs differ in structure: {error}") from None
    return [check_spec_type(spec, where=f"{WHO}: specs") for spec in found]


def _gathers(leaf: NamedLeaf, spec: P, manual: Sequence[str], gathered: Sequence[str]) -> tuple[tuple[int, str], ...]:
    varying = varying_axes(leaf.value)
    if {axis for axis in spec_axes(spec) if axis in manual} != varying:
        actual = ", ".join(map(repr, sorted(varying))) or "no axis"
        raise PlacementError(
            f"{WHO}: parameter `{leaf.name}` varies along {actual}, but its spec is {format_spec(spec)}.",
            hint="pass the specs that you passed to local_map for the parameters.",
        )
    steps = []
    for dim, entry in enumerate(spec):
        here = [axis for axis in dim_axes(entry) if axis in manual]
        while here and here[-1] in gathered:
            steps.append((dim, here.pop()))
        if any(axis in gathered for axis in here):
            raise PlacementError(
                f"{WHO}: dim {dim} of parameter `{leaf.name}` is split over {dim_axes(entry)}; a gather along only the "
                "first of these axes would not return a contiguous slice.",
                hint=f"put the gathered axes last in the spec: {(*[a for a in here if a not in gathered], *gathered)}.",
            )
    return tuple(steps)
