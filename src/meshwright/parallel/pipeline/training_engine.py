"""Runs a training schedule: loss and gradients of a pipeline in one loop over ticks, in the local view.

JAX can derive a backward pass only after the whole forward pass, when every microbatch is in memory. Here the loop
computes the gradients itself, next to the loss, for a cotangent of 1: `pipeline_loss` is a `custom_vjp` whose forward
pass is that loop, and whose backward pass multiplies the gradients by the cotangent of the loss. Without
differentiation, it is a plain forward pipeline.

At each tick a device runs the forward pass of a stage, its backward pass, or one half of it, and sends the result to a
neighbor. Sums over the pipeline's axis stay outside of these branches, in which they would deadlock.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero

from meshwright.errors import MeshwrightError, MeshwrightWarning, PlacementError
from meshwright.mesh.axes import axis_index, axis_size, pcast_varying, varying_axes
from meshwright.parallel.pipeline.engine import pipeline
from meshwright.parallel.pipeline.flow import Functions, in_mesh_order
from meshwright.parallel.pipeline.raw_slices import refuse_slices
from meshwright.parallel.pipeline.stage_moves import count_layers
from meshwright.parallel.pipeline.training_loop import TrainingLoop
from meshwright.parallel.pipeline.training_schedule import TrainingSchedule
from meshwright.parallel.rows import split_rows
from meshwright.tree import split_primals
from meshwright.types import PyTree


def pipeline_loss(
    stage_fn: Callable[..., PyTree],
    layers: PyTree,
    x: PyTree,
    *extras: PyTree,
    axis: str,
    schedule: TrainingSchedule,
    last: Callable[..., tuple[Any, PyTree]],
    last_params: PyTree = (),
    first: Callable[[PyTree, PyTree], PyTree] | None = None,
    first_params: PyTree = (),
    targets: PyTree = None,
    rng: PyTree = None,
    remat: bool = True,
    num_layers: int | None = None,
) -> tuple[Any, PyTree]:
    """Returns the loss of a batch, and other sums, computed with their gradients by a training schedule.

    The arguments are those of `pipeline`, with these differences. The result is on the last stage and zero on the
    others. Only parameters have gradients, and only the loss passes them on.

    Args:
        layers: this device's layers, contiguous and stacked along the leading dim of each leaf, for any schedule.
            `stage_fn` gets those of one virtual stage, in their order. Layers move to the devices of their stages and
            their gradients back, once per call, if the schedule needs it.
        schedule: from `make_schedule`, with the number of devices along `axis`.
        last: `last(last_params, h, targets)` returns the loss of a microbatch, a scalar, and any tree of arrays. Both
            are summed over microbatches. An array in both `first_params` and `last_params`, such as a tied embedding,
            has one gradient, the sum of both.
        remat: whether backward passes start from the inputs of their stages. If False, forward passes save what
            `jax.vjp` needs, except what depends on parameters alone.
        num_layers: as in `pipeline`; stages of other schedules may differ in length also if devices do not.

    Example:
        >>> import meshwright as mw
        >>> from jax.sharding import PartitionSpec as P
        >>> def stage(layers, h):
        ...     return jax.lax.scan(lambda h, w: (h * w, None), h, layers)[0]
        >>> def loss(layers, x):
        ...     schedule = mw.parallel.make_schedule("zb-v", 4, num_microbatches=8)
        ...     last = lambda _, h: (h.sum(), {})
        ...     return pipeline_loss(stage, layers, x, axis="pp", schedule=schedule, last=last)[0]
        >>> run = mw.parallel.local_map(
        ...     jax.value_and_grad(lambda layers, x: jax.lax.psum(loss(layers, x), "pp")),
        ...     mesh=mw.create_mesh("pp:4", devices=4),
        ...     in_specs=(P("pp"), P()),
        ...     out_specs=(P(), P("pp")),
        ... )
        >>> value, grads = jax.jit(run)(jnp.full(8, 2.0), jnp.ones((16, 1)))
        >>> float(value), grads.tolist()
        (4096.0, [2048.0, 2048.0, 2048.0, 2048.0, 2048.0, 2048.0, 2048.0, 2048.0])
    """
    num_stages = axis_size(axis, who="pipeline_loss")
    refuse_slices((first_params, last_params), axis=axis, who="pipeline_loss")
    if schedule.num_stages != num_stages:
        raise MeshwrightError(f"the schedule is for {schedule.num_stages} stages; the pipeline has {num_stages}.")
    if num_stages == 1:  # there is nothing to schedule
        loss, aux = pipeline(
            stage_fn, layers, x, *extras, axis=axis, num_microbatches=schedule.num_microbatches, first=first,
            first_params=first_params, last=last, last_params=last_params, targets=targets, rng=rng, combine="sum",
            num_layers=num_layers,
        )  # fmt: skip
        return loss, lax.stop_gradient(aux)
    if schedule.num_microbatches < num_stages:
        warnings.warn(
            f"pipeline_loss: {schedule.num_microbatches} microbatches on {num_stages} stages leave the devices idle "
            f"{schedule.bubble_fraction:.0%} of the time.\nhint: use at least {num_stages} microbatches.",
            MeshwrightWarning,
            stacklevel=2,
        )
    data = (x, extras, targets)
    shared = in_mesh_order(frozenset({axis}).union(*map(varying_axes, jax.tree.leaves(data))))
    ends, unpack, places = _joined_ends(first_params, last_params)
    # Mark everything here: inside a branch, the marks' gradients would deadlock.
    layers, ends, data = pcast_varying((layers, ends, data), shared)
    total = count_layers(
        stage_fn, layers, num_layers, num_stages=num_stages, num_rounds=schedule.num_rounds, who="pipeline_loss"
    )

    @jax.custom_vjp
    def run(layers: PyTree, ends: list[Any], data: PyTree, rng: PyTree) -> tuple[Any, PyTree]:
        x, extras, targets = data
        first_params, last_params = unpack(ends)
        result: tuple[Any, PyTree] = pipeline(
            stage_fn, layers, x, *extras, axis=axis, num_microbatches=schedule.num_microbatches, first=first,
            first_params=first_params, last=last, last_params=last_params, targets=targets, rng=rng, combine="sum",
            num_layers=total,
        )  # fmt: skip
        return result

    def start(layers: PyTree, ends: list[Any], data: PyTree, rng: PyTree) -> tuple[Any, Any]:
        (layers, learned), (ends, learned_ends), (data, differentiated), (rng, _) = map(
            split_primals, (layers, ends, data, rng)
        )
        if any(differentiated):
            raise PlacementError(
                f"pipeline_loss: the schedule {schedule.name!r} computes gradients of parameters only, but the batch "
                "is differentiated too.",
                hint='pass it through jax.lax.stop_gradient, or use pipeline(schedule="gpipe").',
            )
        parts = split_rows(data, schedule.num_microbatches, who="pipeline", part="microbatch")
        functions = Functions(stage_fn, first, last, parts, rng)
        loop = TrainingLoop(functions, schedule, axis, learned, learned_ends, unpack, places, remat, total)
        return loop.run(layers, ends)

    def backward(grads: tuple[PyTree, list[Any]], cotangents: tuple[Any, PyTree]) -> Any:
        cotangent = cotangents[0]
        if isinstance(cotangent, SymbolicZero):
            return None, None, None, None
        # The loss is on the last device, so its cotangent counts on all.
        is_last = axis_index(axis, who="pipeline_loss") == num_stages - 1
        factor = lax.psum(jnp.where(is_last, cotangent, jnp.zeros_like(cotangent)), axis)

        def scaled(leaf: Any) -> Any:
            return None if leaf is None else (leaf.astype(jnp.float32) * factor).astype(leaf.dtype)

        return *jax.tree.map(scaled, grads, is_leaf=lambda leaf: leaf is None), None, None

    run.defvjp(start, backward, symbolic_zeros=True)
    loss, aux = run(layers, ends, data, rng)
    return loss, lax.stop_gradient(aux)


def _joined_ends(
    first_params: PyTree, last_params: PyTree
) -> tuple[list[Any], Callable[..., Any], tuple[list[int], list[int]]]:
    """Returns the arrays of both trees, each once, a function that builds the trees from them, and their places."""
    ends: list[Any] = []
    places: list[list[int]] = []
    structures: list[Any] = []
    for tree in (first_params, last_params):
        leaves, structure = jax.tree.flatten(tree)
        structures.append(structure)
        places.append([])
        for leaf in leaves:
            same = [place for place, known in enumerate(ends) if known is leaf]
            places[-1].append(same[0] if same else len(ends))
            ends += [] if same else [leaf]

    def unpack(ends: Sequence[Any]) -> tuple[PyTree, PyTree]:
        first, last = (s.unflatten([ends[p] for p in own]) for s, own in zip(structures, places, strict=True))
        return first, last

    return ends, unpack, (places[0], places[1])
