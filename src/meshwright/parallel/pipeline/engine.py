"""Pipeline parallelism: layers split over a mesh axis, with microbatches flowing through them.

Every device runs the same loop over the ticks of a schedule: look up its stage and microbatch, run it or idle, send the
result to the next device. Three details keep the gradients correct and cheap:

* Idle ticks run nothing (`cond`), because a stage that runs on zeros can turn zero gradients into NaN.
* All differentiated inputs are marked as varying before the loop. The gradient of that mark is a sum over devices,
  which would deadlock inside a branch that only some devices take.
* Each tick is checkpointed as a whole, including the choice of weights, so only its activations are kept.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from meshwright.dtypes import is_float
from meshwright.errors import MeshwrightError, MeshwrightWarning, PlacementError, did_you_mean
from meshwright.mesh.axes import axis_index, axis_size, pcast_varying, summing_dtype, varying_axes
from meshwright.mesh.build import current_mesh
from meshwright.parallel.overlap.forms import branch
from meshwright.parallel.pipeline.schedule import IDLE, Schedule, circular_schedule, count_rounds, gpipe_schedule
from meshwright.parallel.rows import Parts, row_key, split_rows
from meshwright.types import PyTree

Combine = Literal["concatenate", "stack", "sum"]


def pipeline(
    stage_fn: Callable[..., PyTree],
    stage_params: PyTree,
    x: PyTree,
    *extras: PyTree,
    axis: str,
    num_microbatches: int,
    schedule: Literal["gpipe", "circular"] | Schedule = "gpipe",
    first: Callable[[PyTree, PyTree], PyTree] | None = None,
    first_params: PyTree = (),
    last: Callable[..., PyTree] | None = None,
    last_params: PyTree = (),
    targets: PyTree = None,
    rng: PyTree = None,
    combine: Combine = "concatenate",
    everywhere: bool = False,
    remat: bool = True,
) -> PyTree:
    """Runs a batch through pipeline stages along a mesh axis, in the local view.

    The result is on the last stage and zero on the others, unless `everywhere=True`.

    Args:
        stage_fn: `stage_fn(params, h, *extras)` returns the next stage's `h`; with `rng`, it is also passed `rng=`. It
            may communicate along other axes but not along `axis`. On simulated CPU devices, custom `ppermute` rings
            hang inside it, and the overlapped matmuls use their unsplit form.
        stage_params: this device's slice of the output of `stage_layers`, split over `axis`. With a circular schedule,
            the leading dim is the rounds, and `stage_fn` gets one round at a time.
        x: the batch that enters the first stage, or the input of `first`.
        extras: more arrays to cut into microbatches, e.g. masks or positions. Close over values that all rows share.
        schedule: "gpipe", "circular" or a `Schedule`.
        first: `first(first_params, x)`, run only on the first stage, e.g. an embedding.
        last: `last(last_params, h)`, or `last(last_params, h, targets)` with `targets`, run only on the last stage,
            e.g. a head and the loss.
        rng: a key or a tree of keys. Each microbatch gets its rows' keys (`row_key`), so the values drawn do not depend
            on `num_microbatches`. All stages get the same key; fold in the layer index.
        combine: concatenate the microbatches' results along rows, stack them, or sum them (e.g. losses).
        everywhere: send the result to all stages.
        remat: recompute each tick in the backward pass. If False, residuals are kept, including a copy of the stage's
            weights for every tick.

    Example:
        >>> import meshwright as mw
        >>> from jax.sharding import PartitionSpec as P
        >>> layers = jnp.full((8, 1, 1), 2.0)  # Each of eight layers doubles its input.
        >>> def stage(params, h):
        ...     return jax.lax.scan(lambda h, w: (h @ w, None), h, params)[0]
        >>> run = mw.parallel.local_map(
        ...     lambda params, x: pipeline(stage, params, x, axis="pp", num_microbatches=4, everywhere=True),
        ...     mesh=mw.create_mesh("pp:4", devices=4),
        ...     in_specs=(P("pp"), P()),
        ...     out_specs=P(),
        ... )
        >>> run(layers, jnp.ones((4, 1))).ravel().tolist()
        [256.0, 256.0, 256.0, 256.0]
    """
    if combine not in get_args(Combine):
        hint = did_you_mean(str(combine), get_args(Combine)) or f"use one of: {', '.join(get_args(Combine))}."
        raise PlacementError(f"pipeline: unknown combine={combine!r}.", hint=hint)
    num_stages = axis_size(axis, who="pipeline")
    table = _table(schedule, stage_params, num_stages=num_stages, num_microbatches=num_microbatches)
    if num_microbatches < num_stages:
        warnings.warn(
            f"pipeline: {num_microbatches} microbatches on {num_stages} stages leave the devices idle "
            f"{table.bubble_fraction:.0%} of the time.\nhint: use at least {num_stages} microbatches.",
            MeshwrightWarning,
            stacklevel=2,
        )
    # Mark everything here: inside a branch, the marks' gradients would deadlock.
    shared = _in_mesh_order(frozenset({axis}).union(*map(varying_axes, jax.tree.leaves((x, extras, targets)))))
    functions = _Functions(
        stage_fn=stage_fn,
        first=first,
        last=last,
        params=pcast_varying((stage_params, first_params, last_params), shared),
        parts=split_rows(
            pcast_varying((x, extras, targets), shared), num_microbatches, who="pipeline", part="microbatch"
        ),
        rng=rng,
        table=table,
        by_round=schedule == "circular" or table.num_rounds > 1,
    )
    h_type, out_type = _flow(functions, axis)
    place, end = axis_index(axis, who="pipeline"), table.num_virtual_stages - 1

    def tick(h: PyTree, row: Any) -> tuple[PyTree, PyTree]:
        stage, microbatch = (column[place] for column in row)

        def enter(h: PyTree) -> PyTree:
            return _mark(functions.enter(microbatch), h_type)

        def leave(h: PyTree) -> PyTree:
            return _mark(functions.leave(h, microbatch), out_type)

        def work(h: PyTree) -> tuple[PyTree, PyTree]:
            h = enter(h) if end == 0 else lax.cond(stage == 0, enter, lambda h: h, h)
            h = _mark(functions.run(h, stage, microbatch), h_type)
            return h, leave(h) if end == 0 else lax.cond(stage == end, leave, lambda h: _zeros(out_type), h)

        if (table.stages != IDLE).all():
            return work(h)
        done: tuple[PyTree, PyTree] = lax.cond(stage != IDLE, work, lambda h: (h, _zeros(out_type)), h)
        return done

    if remat:
        # Checkpoint the whole tick; inside the branch, the chosen weights would be saved as residuals.
        tick = jax.checkpoint(tick, prevent_cse=False)

    senders = range(num_stages if table.num_rounds > 1 else num_stages - 1)
    pairs = [(stage, (stage + 1) % num_stages) for stage in senders]

    def step(h: PyTree, row: Any) -> tuple[PyTree, PyTree]:
        h, out = tick(h, row)
        return h if num_stages == 1 else jax.tree.map(lambda leaf: lax.ppermute(leaf, axis, pairs), h), out

    _, outs = lax.scan(step, _zeros(h_type), (jnp.asarray(table.stages), jnp.asarray(table.microbatches)))
    result = _combine(outs, table, combine)
    if not everywhere or num_stages == 1:
        return result
    return jax.tree.map(lambda leaf: lax.psum(leaf.astype(summing_dtype(leaf.dtype)), axis).astype(leaf.dtype), result)


# --- One tick ---


@dataclass(frozen=True)
class _Functions:
    """The user's functions and their arguments."""

    stage_fn: Callable[..., PyTree]
    first: Callable[..., PyTree] | None
    last: Callable[..., PyTree] | None
    params: tuple[PyTree, PyTree, PyTree]
    parts: Parts
    rng: PyTree
    table: Schedule
    by_round: bool

    def _rows(self, microbatch: Any) -> Any:
        take = [lax.dynamic_index_in_dim(array, microbatch, keepdims=False) for array in self.parts.arrays]
        return self.parts.join(take)

    def enter(self, microbatch: Any) -> PyTree:
        x = self._rows(microbatch)[0]
        with branch():
            return x if self.first is None else self.first(self.params[1], x)

    def run(self, h: PyTree, stage: Any, microbatch: Any) -> PyTree:
        params, extras = self.params[0], self._rows(microbatch)[1]
        if self.by_round:
            turn = stage // self.table.num_stages
            params = jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, turn, keepdims=False), params)
        keys = {}
        if self.rng is not None:
            first_row = microbatch * self.parts.num_rows
            keys["rng"] = jax.tree.map(lambda key: row_key(key, first_row), self.rng)
        with branch():
            return self.stage_fn(params, h, *extras, **keys)

    def leave(self, h: PyTree, microbatch: Any) -> PyTree:
        if self.last is None:
            return h
        targets = self._rows(microbatch)[2]
        with branch():
            return self.last(self.params[2], h) if targets is None else self.last(self.params[2], h, targets)


def _combine(outs: PyTree, table: Schedule, combine: Combine) -> PyTree:
    ticks = table.finished_at()
    in_a_row = (np.diff(ticks) == 1).all()

    def merge(leaf: Any) -> Any:
        results = leaf[int(ticks[0]) : int(ticks[-1]) + 1] if in_a_row else leaf[ticks]
        if combine == "sum":
            return results.sum(axis=0)
        if combine == "stack":
            return results
        if results.ndim < 2:
            raise PlacementError(
                "pipeline cannot concatenate the microbatches' results along rows: they are scalars.",
                hint='use combine="sum" or combine="stack".',
            )
        return results.reshape(-1, *results.shape[2:])

    return jax.tree.map(merge, outs)


# --- Types of the arrays between stages ---


@dataclass(frozen=True)
class _Type:
    """Shape, dtype and varying axes of one array."""

    shape: tuple[int, ...]
    dtype: Any
    axes: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


def _flow(f: _Functions, axis: str) -> tuple[PyTree, PyTree]:
    """Returns the types of `h` and of the result, and checks the user's functions."""
    zero = pcast_varying(jnp.int32(0), axis)
    h_type = _trace(lambda: f.enter(zero), axis, name="first")
    while True:
        made = _trace(lambda: f.run(_zeros(h_type), zero, zero), axis, name="stage_fn")  # noqa: B023, called at once
        wider = _join_types(h_type, made)
        if wider == h_type:
            break
        h_type = wider  # A stage may return an `h` that varies along more axes; then its input must vary as well.
    return h_type, _trace(lambda: f.leave(_zeros(h_type), zero), axis, name="last")


def _trace(call: Callable[[], PyTree], axis: str, *, name: str) -> PyTree:
    jaxpr, shapes = jax.make_jaxpr(call, return_shape=True)()
    # False if check_vma is off or the axis has size 1.
    checked = axis in varying_axes(pcast_varying(jnp.int32(0), axis))
    for value in jaxpr.consts:
        outside = isinstance(value, jax.core.Tracer) and is_float(value.dtype)
        if checked and outside and axis not in varying_axes(value):
            raise PlacementError(
                f"pipeline: {name} closes over a {value.dtype} array of shape {value.shape} that is replicated over "
                f"{axis!r}. Its gradient would be a sum over {axis!r} inside one stage's branch, which deadlocks.",
                hint=f"pass it through {name}'s parameters, or close over "
                f"meshwright.parallel.pcast_varying(array, {axis!r}).",
            )
    return jax.tree.map(
        lambda leaf: _Type(tuple(leaf.shape), leaf.dtype, _in_mesh_order(varying_axes(leaf) | {axis})), shapes
    )


def _join_types(taken: PyTree, made: PyTree) -> PyTree:
    structures: list[Any] = [jax.tree.structure(taken), jax.tree.structure(made)]
    same = structures[0] == structures[1] and all(
        (a.shape, a.dtype) == (b.shape, b.dtype)
        for a, b in zip(jax.tree.leaves(taken), jax.tree.leaves(made), strict=True)
    )
    if not same:
        raise PlacementError(
            f"pipeline: a stage takes {jax.tree.map(str, taken)} but returns {jax.tree.map(str, made)}; input and "
            "output must have the same shapes and dtypes.",
            hint="move layers that change shapes into first= (an embedding) or last= (a head).",
        )
    return jax.tree.map(
        lambda a, b: _Type(a.shape, a.dtype, _in_mesh_order(frozenset(a.axes) | frozenset(b.axes))), taken, made
    )


def _zeros(types: PyTree) -> PyTree:
    return jax.tree.map(lambda t: pcast_varying(jnp.zeros(t.shape, t.dtype), t.axes), types)


def _mark(tree: PyTree, types: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf, t: pcast_varying(jnp.asarray(leaf, t.dtype), t.axes), tree, types)


def _in_mesh_order(axes: frozenset[str]) -> tuple[str, ...]:
    mesh = current_mesh()
    return tuple(axis for axis in mesh.axis_names if axis in axes) if mesh is not None else ()


# --- Checks ---


def _table(schedule: str | Schedule, stage_params: PyTree, *, num_stages: int, num_microbatches: int) -> Schedule:
    if isinstance(schedule, Schedule):
        for name, ours, theirs in (
            ("stages", num_stages, schedule.num_stages),
            ("microbatches", num_microbatches, schedule.num_microbatches),
        ):
            if ours != theirs:
                raise MeshwrightError(f"the schedule is for {theirs} {name}; the pipeline has {ours}.")
        if schedule.num_rounds > 1:
            count_rounds(stage_params, schedule.num_rounds)
        return schedule
    if num_microbatches < 1:
        raise PlacementError(f"pipeline got num_microbatches={num_microbatches}.", hint="use 1 or more.")
    if schedule == "gpipe":
        return gpipe_schedule(num_stages, num_microbatches)
    if schedule == "circular":
        return circular_schedule(num_stages, count_rounds(stage_params), num_microbatches)
    hint = did_you_mean(schedule, ("gpipe", "circular")) or "use 'gpipe', 'circular' or a Schedule."
    raise MeshwrightError(f"pipeline: unknown schedule {schedule!r}.", hint=hint)
