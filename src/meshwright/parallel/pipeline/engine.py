"""Pipeline parallelism: layers split over a mesh axis, with microbatches flowing through them.

Every device runs the same loop over the ticks of a schedule: look up its stage and microbatch, run it or idle, send the
result to the next device. Three details keep the gradients correct and cheap:

* Idle ticks run nothing (`cond`), because a stage that runs on zeros can turn zero gradients into NaN.
* All differentiated inputs are marked as varying before the loop. The gradient of that mark is a sum over devices,
  which would deadlock inside a branch that only some devices take.
* Each tick is checkpointed as a whole, including the choice of weights, so only its activations are kept.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from meshwright.errors import MeshwrightError, MeshwrightWarning, PlacementError, did_you_mean
from meshwright.mesh.axes import axis_index, axis_size, pcast_varying, summing_dtype, varying_axes
from meshwright.parallel.pipeline.flow import Functions, flow, in_mesh_order, mark, zeros
from meshwright.parallel.pipeline.raw_slices import refuse_slices
from meshwright.parallel.pipeline.schedule import (
    IDLE,
    STAGES_SCOPE,
    Schedule,
    circular_schedule,
    count_rounds,
    gpipe_schedule,
)
from meshwright.parallel.pipeline.stage_moves import count_layers, make_moves
from meshwright.parallel.rows import split_rows
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
    num_layers: int | None = None,
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
        num_layers: for `stage_params` that are stacked layers, the number of them on all devices, if the last devices
            hold padding (default: what they hold). If stages then differ in length, layers that leave a device without
            any move to it, and `stage_fn` is also passed `num_layers=`, an array. It must ignore its layers after so
            many, for example by `jnp.where`.

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
    refuse_slices((first_params, last_params), axis=axis, who="pipeline")
    table = _table(schedule, stage_params, num_stages=num_stages, num_microbatches=num_microbatches)
    by_round = schedule == "circular" or table.num_rounds > 1
    if num_layers is not None:
        if by_round:
            raise PlacementError(
                "pipeline takes num_layers only if each device has one stage, and not with the circular schedule.",
                hint="use pipeline_loss, whose schedules take any number of layers.",
            )
        num_layers = count_layers(
            stage_fn, stage_params, num_layers, num_stages=num_stages, num_rounds=1, who="pipeline"
        )
    if num_microbatches < num_stages:
        warnings.warn(
            f"pipeline: {num_microbatches} microbatches on {num_stages} stages leave the devices idle "
            f"{table.bubble_fraction:.0%} of the time.\nhint: use at least {num_stages} microbatches.",
            MeshwrightWarning,
            stacklevel=2,
        )
    # Mark everything here: inside a branch, the marks' gradients would deadlock.
    shared = in_mesh_order(frozenset({axis}).union(*map(varying_axes, jax.tree.leaves((x, extras, targets)))))
    params = pcast_varying((stage_params, first_params, last_params), shared)
    parts = split_rows(pcast_varying((x, extras, targets), shared), num_microbatches, who="pipeline", part="microbatch")
    if num_layers is not None and num_layers % num_stages:
        moves = make_moves(range(num_stages), num_stages, num_layers)
        params = (jax.tree.map(lambda leaf: moves.to_stages(leaf, axis)[0], params[0]), *params[1:])
        stage_fn = functools.partial(stage_fn, num_layers=pcast_varying(moves.counts_on(axis)[0], shared))
    functions = Functions(stage_fn, first, last, parts, rng)

    def of_stage(stage: Any) -> PyTree:
        turn = stage // num_stages
        take = lambda leaf: lax.dynamic_index_in_dim(leaf, turn, keepdims=False)  # noqa: E731
        return jax.tree.map(take, params[0]) if by_round else params[0]

    h_type, out_type = flow(functions, (of_stage(pcast_varying(jnp.int32(0), axis)), *params[1:]), axis)
    place, end = axis_index(axis, who="pipeline"), table.num_virtual_stages - 1

    def tick(h: PyTree, row: Any) -> tuple[PyTree, PyTree]:
        stage, microbatch = (column[place] for column in row)

        def enter(h: PyTree) -> PyTree:
            return mark(functions.enter(params[1], microbatch), h_type)

        def leave(h: PyTree) -> PyTree:
            return mark(functions.leave(params[2], h, microbatch), out_type)

        def work(h: PyTree) -> tuple[PyTree, PyTree]:
            h = enter(h) if end == 0 else lax.cond(stage == 0, enter, lambda h: h, h)
            h = mark(functions.run(of_stage(stage), h, microbatch), h_type)
            return h, leave(h) if end == 0 else lax.cond(stage == end, leave, lambda h: zeros(out_type), h)

        if (table.stages != IDLE).all():
            return work(h)
        done: tuple[PyTree, PyTree] = lax.cond(stage != IDLE, work, lambda h: (h, zeros(out_type)), h)
        return done

    if remat:
        # Checkpoint the whole tick; inside the branch, the chosen weights would be saved as residuals.
        tick = jax.checkpoint(tick, prevent_cse=False)

    senders = range(num_stages if table.num_rounds > 1 else num_stages - 1)
    pairs = [(stage, (stage + 1) % num_stages) for stage in senders]

    def step(h: PyTree, row: Any) -> tuple[PyTree, PyTree]:
        h, out = tick(h, row)
        if num_stages == 1:
            return h, out
        with jax.named_scope(STAGES_SCOPE):
            return jax.tree.map(lambda leaf: lax.ppermute(leaf, axis, pairs), h), out

    _, outs = lax.scan(step, zeros(h_type), (jnp.asarray(table.stages), jnp.asarray(table.microbatches)))
    result = _combine(outs, table, combine)
    if not everywhere or num_stages == 1:
        return result
    return jax.tree.map(lambda leaf: lax.psum(leaf.astype(summing_dtype(leaf.dtype)), axis).astype(leaf.dtype), result)


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
