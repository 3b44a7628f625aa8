"""Loss and gradients of a job on a mesh, in the local or global view."""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from meshwright.errors import JobError, LayoutError, PlacementError
from meshwright.layout import Layout
from meshwright.layout.leaf import LeafLayout
from meshwright.mesh.current import AnyMesh
from meshwright.metrics import Mean, Sum, declare, is_pair
from meshwright.models.execution import Remat, remat_policy
from meshwright.parallel.fp8.weight import Amaxes
from meshwright.parallel.fsdp import Gather
from meshwright.parallel.local_map import local_map
from meshwright.parallel.pipeline.raw_slices import RawSlice, named_slices
from meshwright.parallel.rows import interleave_rows
from meshwright.specs import dim_axes, format_spec, keep_axes, spec_axes
from meshwright.train.accumulate import Accumulated, accumulate
from meshwright.train.axis_errors import axis_errors
from meshwright.train.fp8_scaling import Fp8, with_weights
from meshwright.train.fp8_weights import FP8_WEIGHTS, make_weight_casts
from meshwright.train.job import check_axes, execution_of, loss_axes, stored_along
from meshwright.train.optimizer.norms import leaf_square_sums
from meshwright.train.padding import (
    cut,
    fill,
    is_padded_along_others,
    part_leaves,
    stage_axes,
    view_of_layout,
)
from meshwright.train.precision import Precision
from meshwright.train.state import gradient_specs, only_trainable, params_layout, require_loss, trainable_leaves
from meshwright.train.sync import Sync
from meshwright.train.views import (
    GATHER_AXES,
    PIPELINE_AXES,
    View,
    ViewChoice,
    data_axes_of,
    sync_needs_local_view,
    view_errors,
)
from meshwright.tree import named_leaves
from meshwright.types import PyTree


@dataclass(frozen=True)
class Gradients:
    """`gradients(params, batch, rng, model_state=None, fp8=None) -> (Accumulated, squares)`, for use inside `jax.jit`.

    The metrics are declared metrics (`meshwright.metrics`) and include `loss` and, if the loss is a pair, `tokens`. The
    gradient of a frozen parameter is None. `squares` is an array with the sum of squares of each trained leaf's
    gradient. `trainable` says which leaves are trained. `row_axes` split the rows of a batch. With fp8, `fp8` is the
    scaling state (default: that of the first step), and `Accumulated.fp8` has the amaxes of this batch.
    """

    compute: Callable[[PyTree, PyTree, Any, PyTree, PyTree], tuple[Accumulated, Any]]
    row_axes: tuple[str, ...]
    trainable: tuple[bool, ...]
    view: ViewChoice
    fp8: Fp8 | None = None

    def __call__(
        self, params: PyTree, batch: PyTree, rng: Any, model_state: PyTree = None, fp8: PyTree = None
    ) -> tuple[Accumulated, Any]:
        return self.compute(params, batch, rng, model_state, fp8)


def make_gradients(
    job: Any,
    layout: Layout,
    *,
    view: View | None = None,
    num_minibatches: int = 1,
    sync: Sync | None = None,
    precision: Precision | str = "float32",
    remat: Remat = "none",
    data_axes: str | Sequence[str] | None = None,
    with_gradients: bool = True,
    evaluates: bool = False,
) -> Gradients:
    """Returns a function that computes a job's loss and gradients from global arrays, for use inside `jax.jit`.

    The arguments are those of `make_train_step`. With `with_gradients=False`, gradients are None; with `evaluates`, the
    loss is the job's `eval_loss`, if it has one.

    Example:
        >>> import meshwright as mw, optax
        >>> def loss(params, batch, rng):
        ...     return jnp.mean(batch["x"] @ params["w"]), {}
        >>> job = mw.Job(init=lambda key: {"w": jnp.zeros(8)}, rules=[("w", P("fsdp"))], loss=loss)
        >>> gradients = make_gradients(job, mw.train.state_layout(job, optax.sgd(0.1), mw.create_mesh("fsdp:8")))
        >>> result, squares = jax.jit(gradients)({"w": jnp.zeros(8)}, {"x": jnp.full((16, 8), 2.0)}, None)
        >>> result.grads["w"].tolist(), squares.tolist()
        ([2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0], [32.0])
    """
    require_loss(job, who="make_gradients")
    mesh, params = layout.mesh, params_layout(layout)
    row_axes = data_axes_of(mesh, data_axes)
    split_axes = [axis for leaf in layout.leaves for axis in spec_axes(leaf.spec)]
    check_axes(job, mesh.shape, data_axes=data_axes, split_axes=split_axes)
    choice, piped = view_of_layout(job, layout, view, data_axes=row_axes), stage_axes(job, view)
    view = choice.view
    if view == "global" and sync is not None:
        raise sync_needs_local_view(sync, choice)
    precision, all_specs = Precision.named(precision), gradient_specs(layout)
    gather_axes = tuple(axis for axis in GATHER_AXES if axis in mesh.axis_names and mesh.shape[axis] > 1)
    function = (getattr(job, "eval_loss", None) if evaluates else None) or job.loss
    takes = inspect.signature(function).parameters
    trainable = trainable_leaves(job, params.abstract)
    keeps_state = getattr(job, "model_state", None) is not None
    if keeps_state and view == "local":
        _require_whole_state(layout)
    specs = only_trainable(all_specs, trainable)
    # With sync="once", parameters are gathered before the minibatches, so layers have nothing to gather.
    by_layer = view == "local" and sync != "once" and bool(gather_axes) and "gather" in takes
    # Padding is cut between gathering parameters and the loss, so a loss cannot gather padded parameters itself.
    by_layer = by_layer and not any(is_padded_along_others(leaf, piped) for leaf in params.leaves)
    gather, dtypes = None, precision.compute_dtypes(params.abstract)
    compute_dtypes = dtypes
    stored_by = stored_along(job, params) if view == "local" else [None] * len(params.leaves)
    sent = zip(stored_by, jax.tree.leaves(dtypes), strict=True)
    gather_first = [None if axis is None else (axis, dtype) for axis, dtype in sent]
    if by_layer:
        pairs = zip(params.leaves, stored_by, strict=True)
        left = [keep_axes(leaf.spec, lambda axis, by=by: axis != by) for leaf, by in pairs]
        gather = Gather(params.structure.unflatten(left), gather_axes, dtypes, grad_scatter_dtype=precision.reduce)
        # The gather casts parameters, so that their gradients keep the dtype of the reduction.
        dtypes = params.structure.unflatten(
            [
                leaf.dtype if set(gather_axes) & set(spec_axes(leaf.spec)) else dtype
                for leaf, dtype in zip(params.leaves, jax.tree.leaves(dtypes), strict=True)
            ]
        )
    fp8 = precision.fp8
    if fp8 is not None and "fp8" not in takes:
        if function is job.loss:
            raise JobError(
                "precision fp8 needs a loss that takes fp8=, and the job's loss does not.",
                hint="use precision='mixed', or multiply by meshwright.parallel.Fp8Weight, as language_job does.",
            )
        fp8 = None  # an evaluation loss without it computes in `precision.compute`
    if fp8 is not None and view == "local" and execution_of(job) is None:
        _require_no_stages(mesh, [axis for axis in loss_axes(job) if axis in PIPELINE_AXES])
    weight_casts = make_weight_casts(
        job, params, fp8, compute_dtypes, takes=takes, num_minibatches=num_minibatches, by_layer=by_layer
    )
    explain = functools.partial(view_errors, choice)
    named = functools.partial(_raw_slices, params) if view == "local" and execution_of(job) is None else None
    loss_of_whole = _loss_function(
        function, takes, gather, remat, keeps_state=keeps_state, explain=explain, named=named
    )

    def loss(stored: PyTree, *arguments: Any, **passed: Any) -> Any:
        return loss_of_whole(cut(stored, params.leaves), *arguments, **passed)

    options: Any = {
        "num_minibatches": num_minibatches,
        "dtypes": dtypes,
        "with_gradients": with_gradients,
        "trainable": trainable,
        "model_state_reduce": getattr(job, "model_state_reduce", "mean"),
    }

    # Statistics of a minibatch depend on its rows, so with a model state minibatches are the same on every mesh:
    # contiguous rows, which then move between devices.
    moves_rows = keeps_state and num_minibatches > 1
    state_leaves = part_leaves(layout, "model_state")
    whole = None if execution_of(job) is not None else _gathered_shardings(params, row_axes)

    def gathered(params: PyTree, *arguments: Any, **passed: Any) -> Any:
        if whole is not None:
            params = jax.lax.with_sharding_constraint(params, whole)
            if weight_casts is not None:
                specs = {leaf.name: leaf.value.spec for leaf in named_leaves(whole)}
                passed[FP8_WEIGHTS] = weight_casts.constrained(passed[FP8_WEIGHTS], mesh, specs)
        return loss(params, *arguments, **passed)

    def spread(params: PyTree, model_state: PyTree, batch: PyTree, rng: Any, **passed: Any) -> Any:
        rows = jax.tree.map(lambda leaf: NamedSharding(mesh, P(row_axes) if np.ndim(leaf) else P()), batch)
        return gathered(params, model_state, jax.lax.with_sharding_constraint(batch, rows), rng, **passed)

    def cast_once(params: PyTree, amaxes: Amaxes | None) -> PyTree:
        return None if weight_casts is None or amaxes is None else weight_casts(params, amaxes)

    def in_global_view(
        params: PyTree, batch: PyTree, rng: Any, model_state: PyTree, amaxes: Amaxes | None
    ) -> tuple[Accumulated, Any]:
        own_rows = num_minibatches > 1 and not keeps_state
        ways = math.prod(mesh.shape[axis] for axis in row_axes) if own_rows else 1
        function = spread if moves_rows else gathered
        casts = cast_once(params, amaxes)
        result = accumulate(
            function,
            params,
            batch,
            rng,
            row_blocks=ways,
            model_state=cut(model_state, state_leaves),
            fp8=amaxes,
            fp8_weights=None if casts is None or weight_casts is None else weight_casts.constrained(casts, mesh),
            **options,
        )
        result = result._replace(model_state=fill(result.model_state, state_leaves))
        if not with_gradients:
            return result, None
        grads = jax.lax.with_sharding_constraint(result.grads, named_shardings(mesh, specs))
        return result._replace(grads=grads), leaf_square_sums(grads)

    def on_each_device(
        params_here: PyTree, batch: PyTree, rng: Any, model_state: PyTree, amaxes: Amaxes | None
    ) -> tuple[Accumulated, Any]:
        result = accumulate(
            loss,
            params_here,
            batch,
            rng,
            model_state=model_state,
            fp8=amaxes,
            fp8_weights=cast_once(params_here, amaxes),
            specs=params.specs,
            sync=sync or "hybrid",
            gather_axes=() if by_layer else gather_axes,
            axes=[axis for axis in mesh.axis_names if axis in (*row_axes, *PIPELINE_AXES)],
            row_axes=row_axes,
            grad_specs=all_specs,
            reduce_dtype=precision.reduce,
            gather_first=gather_first,
            interleaved=moves_rows,
            **options,
        )
        return result, leaf_square_sums(result.grads) if with_gradients else None

    def in_local_view(
        params_whole: PyTree, batch: PyTree, rng: Any, model_state: PyTree, amaxes: Amaxes | None
    ) -> tuple[Accumulated, Any]:
        rows = jax.tree.map(lambda leaf: P(row_axes) if np.ndim(leaf) else P(), batch)
        if moves_rows:
            ways = math.prod(mesh.shape[axis] for axis in row_axes)
            batch = interleave_rows(batch, num_minibatches, ways)
        replicated: Any = P()
        grads = specs if with_gradients else replicated
        out_specs = (Accumulated(replicated, grads, replicated, replicated, replicated), replicated)
        in_specs = (params.specs, rows, replicated, replicated, replicated)
        mapped = local_map(on_each_device, mesh=mesh, in_specs=in_specs, out_specs=out_specs)
        result: tuple[Accumulated, Any] = mapped(params_whole, batch, rng, model_state, amaxes)
        return result

    in_view = in_global_view if view == "global" else in_local_view

    def compute(
        stored: PyTree, batch: PyTree, rng: Any, model_state: PyTree, scaling: PyTree
    ) -> tuple[Accumulated, Any]:
        amaxes = None if fp8 is None else fp8.amaxes(cut(stored, params.leaves), scaling)
        result, squares = in_view(stored, batch, rng, model_state, amaxes)
        if amaxes is not None and result.fp8 is not None:
            result = result._replace(fp8=with_weights(result.fp8, amaxes))
        return result, squares

    return Gradients(compute, row_axes, tuple(trainable), choice, fp8)


def named_shardings(mesh: AnyMesh, specs: PyTree) -> PyTree:
    """Converts a tree of specs to shardings on a mesh."""
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda node: isinstance(node, P))


def _gathered_shardings(params: Layout, row_axes: Sequence[str]) -> PyTree | None:
    """Returns the shardings that parameters get in the global view before the loss uses them, or None.

    On a mesh such as dp=2, fsdp=2, tp=2, XLA's partitioner computes wrong gradients if two matmuls in a row have
    weights split over both `fsdp` and `tp` (jax 0.10.2 to 0.12, test_global_view.py). Gathering them along the axes
    of the rows first, as FSDP does, avoids this, and needs fewer collectives.
    """
    sizes = params.mesh.shape
    if sum(sizes[axis] > 1 for axis in row_axes) < 2:
        return None

    def gathered(leaf: LeafLayout) -> P:
        used = [axis for axis in spec_axes(leaf.spec) if sizes[axis] > 1]
        mixed = any(axis in row_axes for axis in used) and any(axis not in row_axes for axis in used)
        return keep_axes(leaf.spec, lambda axis: axis not in row_axes) if mixed else leaf.spec

    specs = [gathered(leaf) for leaf in params.leaves]
    if specs == [leaf.spec for leaf in params.leaves]:
        return None
    shardings: PyTree = params.structure.unflatten([NamedSharding(params.mesh, spec) for spec in specs])
    return shardings


def _loss_function(
    function: Callable[..., Any],
    takes: Container[str],
    gather: Gather | None,
    remat: Remat,
    *,
    keeps_state: bool,
    explain: Callable[[], contextlib.AbstractContextManager[None]],
    named: Callable[[PyTree], list[RawSlice]] | None,
) -> Callable[..., Any]:
    """Returns a job's loss with its options, its result checked and its metrics declared."""
    options: dict[str, Any] = {} if gather is None else {"gather": gather}
    policy = remat_policy(remat, by_name=False)
    if "remat" in takes:
        options["remat"] = remat

    def call(*arguments: Any, **passed: Any) -> Any:
        with axis_errors(), explain(), named_slices(named(arguments[0]) if named else ()):
            return function(*arguments, **options, **passed)

    # A loss without a `remat` argument is recomputed as a whole.
    run = call if policy is None or "remat" in takes else jax.checkpoint(call, policy=policy)

    def loss(*arguments: Any, **passed: Any) -> Any:
        value, metrics, *state = _checked(run(*arguments, **passed), keeps_state=keeps_state)
        metrics = {**declare(metrics), "loss": value if is_pair(value) else Mean(jnp.asarray(value))}
        if is_pair(value):
            metrics["tokens"] = Sum(value[1])
        return value, metrics, *state

    return loss


def _raw_slices(params: Layout, given: PyTree) -> list[RawSlice]:
    """Returns the parameters of a loss that are slices along the axis of a pipeline."""
    return [
        RawSlice(value, leaf.name, dim, axis)
        for leaf, value in zip(params.leaves, jax.tree.leaves(given), strict=True)
        for dim, entry in enumerate(leaf.spec)
        for axis in dim_axes(entry)
        if axis in PIPELINE_AXES and params.mesh.shape[axis] > 1
    ]


def _require_no_stages(mesh: AnyMesh, axes: Sequence[str]) -> None:
    """Raises if a custom loss in fp8 has pipeline stages, whose microbatches would add up their amaxes."""
    for axis in axes:
        if mesh.shape.get(axis, 1) > 1:
            raise PlacementError(
                f"a custom loss does not run in fp8 in a pipeline (axis {axis!r}): the amaxes of microbatches would be "
                "added up.",
                hint="use precision='mixed' (--precision mixed), or a mesh with fsdp and tp.",
            )


def _require_whole_state(layout: Layout) -> None:
    """Raises if a layout splits a leaf of the model state, which the local view passes whole."""
    for leaf in layout.leaves:
        if leaf.name.startswith("model_state/") and not leaf.is_replicated:
            raise LayoutError(
                f"`{leaf.name}` is split as {format_spec(leaf.spec)}, but the local view needs whole model states.",
                hint="use view='global', or a rule that replicates it.",
            )


def _checked(found: Any, *, keeps_state: bool) -> Any:
    """Returns the result of a job's loss; raises if it is not a loss, a dict of metrics and a model state, if any."""
    size = 3 if keeps_state else 2
    if not (isinstance(found, tuple) and len(found) == size and isinstance(found[1], Mapping)):
        kinds = ", ".join(type(part).__name__ for part in (found if isinstance(found, tuple) else (found,)))
        wanted = "(loss, metrics, model_state)" if keeps_state else "(loss, metrics)"
        hint = f"return {wanted.replace('metrics', '{}')} if there are no metrics."
        if not keeps_state and isinstance(found, tuple) and len(found) == 3:
            hint = "pass Job(..., model_state=...) if the loss updates a model state."
        raise JobError(
            f"{'with a model state, ' if keeps_state else ''}a loss must return {wanted}, with a dict of metrics; this "
            f"one returned {kinds}.",
            hint=hint,
        )
    value: Any = found[0]
    is_array = hasattr(value, "dtype")
    if not is_pair(value) and (not is_array or np.ndim(value)) and not isinstance(value, (int, float)):
        kind = f"an array of shape {np.shape(value)}" if is_array else f"a {type(value).__name__}"
        raise JobError(
            f"a loss must be a scalar or a (sum, count) pair; this one is {kind}.",
            hint="return loss.mean(), or (loss.sum(), count) if rows have different numbers of valid targets.",
        )
    return found
