"""Gradient accumulation over minibatches; the result is the gradient of the whole batch.

Minibatches have equal numbers of rows but, with masks and padding, different numbers of valid targets. So each one is
weighted by the count of its loss. Sums are in float32 for any parameter dtype, and random numbers belong to rows
(`meshwright.parallel.row_key`), so dropout does not depend on the number of minibatches.

A metric is a `(sum, count)` pair, whose entries are summed, or any other number or array, which is averaged with the
weights of the minibatches. A minibatch with weight 0 (all targets masked) adds nothing, even if it contains NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from meshwright.dtypes import is_float
from meshwright.hardware.chips import chip_family
from meshwright.mesh.axes import pcast_varying, varying_axes
from meshwright.mesh.build import current_mesh
from meshwright.parallel.rows import row_key, split_rows
from meshwright.train.sync import Sync, make_sync_plan
from meshwright.types import Metrics, PRNGKeyArray, PyTree


class Accumulated(NamedTuple):
    """The result of `accumulate`: the mean loss, float32 gradients sharded like the parameters, and metrics."""

    loss: Any
    grads: PyTree
    metrics: Metrics


def accumulate(
    loss_fn: Callable[..., Any],
    params: PyTree,
    batch: PyTree,
    rng: PRNGKeyArray | None = None,
    *,
    num_minibatches: int,
    specs: PyTree = None,
    sync: Sync = "hybrid",
    gather_axes: Sequence[str] | None = None,
    axes: Sequence[str] | None = None,
    row_axes: Sequence[str] | None = None,
    grad_specs: PyTree = None,
    dtypes: PyTree = None,
    reduce_dtype: Any = None,
    row_blocks: int = 1,
    with_gradients: bool = True,
) -> Accumulated:
    """Returns loss and gradients of a batch whose rows are split over devices and minibatches, in the local view.

    The result is the same as on one device with the whole batch: the sum of all losses divided by the number of valid
    targets on all devices. Also works outside `shard_map`, on one device.

    Args:
        loss_fn: `loss_fn(params, minibatch, rng) -> (loss, metrics)`. The loss is a `(sum, count)` pair over the
            minibatch's valid targets; multiply terms that are not per target by the count. A scalar loss is treated as
            a mean, with equal weights for all minibatches and devices.
        params: this device's shards. `loss_fn` gets them gathered along `gather_axes`.
        batch: this device's rows.
        rng: a key that is the same on all devices; `loss_fn` gets a `row_key` of it.
        num_minibatches: number of minibatches, computed one after the other.
        specs: the PartitionSpec of each parameter, as passed to `local_map` (default: replicated).
        sync: how often devices reduce gradients and gather parameters. `"every"`: for each minibatch. `"hybrid"`: for
            each minibatch along the axes that split parameters, once along the others. `"once"`: once per batch, which
            needs memory for whole parameters and whole float32 gradients.
        gather_axes: the axes to gather parameters along (default: `("fsdp",)`). With `()`, the loss gathers its
            parameters (layer by layer, for instance), even with `sync="once"`.
        axes: the axes along which the loss is a partial sum (default: those that split the batch). Add the pipeline
            axis if only the last stage computes the loss; its sum and count must be zero on the other stages.
        row_axes: the axes that split the batch's rows, in the order of the batch's spec.
        grad_specs: specs of the gradients (default: `specs`). A leaf's spec may have one more axis; its gradient is
            then reduce-scattered along that axis, which sends half the bytes of an all-reduce (ZeRO-1).
        dtypes: the dtype of each parameter in `loss_fn` and in its all-gather (default: its own).
        reduce_dtype: the dtype in which devices exchange gradients (default: float32).
        row_blocks: number of devices that rows are split over in the global view. Each minibatch then takes a slice of
            each device's rows.
        with_gradients: whether to compute gradients; if False, they are None.

    Example:
        >>> import meshwright as mw
        >>> from jax.sharding import PartitionSpec as P
        >>> specs, rows = {"w": P("fsdp")}, P(("dp", "fsdp"))
        >>> def loss_fn(params, minibatch, rng):
        ...     errors = (minibatch["x"] @ params["w"] - minibatch["y"]) ** 2
        ...     return ((errors * minibatch["mask"]).sum(), minibatch["mask"].sum()), {}
        >>> step = mw.parallel.local_map(
        ...     lambda params, batch: accumulate(loss_fn, params, batch, num_minibatches=2, specs=specs),
        ...     mesh=mw.create_mesh("dp:2,fsdp:4"),
        ...     in_specs=(specs, rows),
        ...     out_specs=Accumulated(loss=P(), grads=specs, metrics=P()),
        ... )
        >>> batch = {"x": jnp.eye(16, 4), "y": jnp.ones(16), "mask": jnp.arange(16) < 5}
        >>> result = step({"w": jnp.zeros(4)}, batch)
        >>> float(result.loss), result.grads["w"].tolist()
        (1.0, [-0.4000000059604645, -0.4000000059604645, -0.4000000059604645, -0.4000000059604645])
    """
    plan = make_sync_plan(
        params,
        batch,
        specs,
        sync=sync,
        gather_axes=gather_axes,
        axes=axes,
        row_axes=row_axes,
        grad_specs=grad_specs,
        dtypes=dtypes,
        reduce_dtype=reduce_dtype,
    )
    parts = split_rows(batch, num_minibatches, who="accumulate", part="minibatch", num_blocks=row_blocks)
    first_row = plan.first_row(parts.num_rows * num_minibatches)
    block = parts.num_rows // row_blocks
    blocks = {"block": block, "stride": block * num_minibatches} if row_blocks > 1 else {}

    # Gradients are reduced by the transpose of this preparation: marks and gathers before the loop become one sum or
    # scatter after it, in float32.
    masters = jax.tree.map(wide, params)
    prepared, pull = jax.vjp(lambda own: plan.before(own, masters), plan.own(masters))
    if sync == "once":
        prepared = plan.narrow(prepared)

    def step(index: Any, slices: Any) -> Any:
        key = None if rng is None else row_key(rng, first_row + index * block, **blocks)
        # Without this dependency, XLA would hoist the gather out of the loop and keep whole parameters in memory.
        held = prepared if sync == "once" or num_minibatches == 1 else after(index, prepared)

        whole, pull_inside = jax.vjp(lambda held: plan.inside(held, masters), held)

        def local_sum(params: PyTree) -> Any:
            loss, metrics = loss_fn(params, parts.join(slices), key)
            total, count = loss if is_pair(loss) else (loss, jnp.float32(1))
            plan.check_loss(total)
            # The sum over devices and the division come once, after the loop; pcast_varying makes gradients match that
            # sum even if the loss is already equal on all devices.
            return pcast_varying(jnp.asarray(total).astype(jnp.float32), plan.axes), (jnp.asarray(count), metrics)

        if with_gradients:
            # Widening after the gradients are stacked writes them once, in half the bytes.
            (total, (count, metrics)), grads = jax.value_and_grad(local_sum, has_aux=True)(plan.narrow(whole))
            grads = written_once(grads)
            (grads,) = pull_inside(jax.tree.map(lambda grad, leaf: grad.astype(leaf.dtype), grads, whole))
            grads = jax.tree.map(wide, grads)
        else:
            (total, (count, metrics)), grads = local_sum(plan.narrow(whole)), None
        return pcast_varying((total, count, weigh(metrics, count)), plan.axes), grads

    if num_minibatches == 1:
        sums, grads = step(0, [array[0] for array in parts.arrays])
    else:
        zeros = zeros_for(lambda: step(0, [array[0] for array in parts.arrays]))
        xs = (jnp.arange(num_minibatches), parts.arrays)
        (sums, grads), _ = lax.scan(lambda sums, x: (add(sums, step(*x)), None), zeros, xs)

    total, count, metrics = lax.psum(sums, plan.axes) if plan.axes else sums
    if with_gradients:
        (grads,) = pull(grads)
        grads = jax.tree.map(lambda leaf: over(leaf, count), grads)
    return Accumulated(over(total, count), grads, average(metrics, count))


# --- Weighted sums over minibatches and devices ---


def is_pair(node: Any) -> bool:
    """Whether this is a `(sum, count)` pair: a tuple of two scalars."""
    is_tuple = type(node) is tuple and len(node) == 2
    return is_tuple and all(isinstance(item, (int, float)) or getattr(item, "ndim", None) == 0 for item in node)


def denominator(metrics: Any, key: str) -> Any:
    """Returns the count of the pair `metrics[key]`, or 1 (equal weights) if there is no such pair."""
    pair: Any = metrics.get(key) if isinstance(metrics, Mapping) else None
    return jnp.asarray(pair[1]) if is_pair(pair) else jnp.float32(1)


def weigh(metrics: PyTree, weight: Any) -> PyTree:
    """Returns metrics as summands: weighted values, and pairs without the NaN of empty ones."""

    def summand(node: Any) -> Any:
        if is_pair(node):
            total, count = (wide(item) for item in node)
            return (jnp.where(count > 0, total, jnp.zeros_like(total)), count)
        return times(node, weight)

    return jax.tree.map(summand, metrics, is_leaf=is_pair)


def times(value: Any, weight: Any) -> Any:
    """Returns `value * weight` in float32 or wider, and zero if the weight is zero, even for NaN."""
    value = jnp.asarray(value)
    product = value.astype(jnp.promote_types(value.dtype, jnp.float32)) * weight
    return jnp.where(weight > 0, product, jnp.zeros_like(product))


def over(value: Any, total: Any) -> Any:
    """Returns `value / total`, or zero if the total is zero."""
    return jnp.where(total > 0, value / jnp.where(total > 0, total, 1), jnp.zeros_like(value))


def average(sums: PyTree, total: Any) -> PyTree:
    """Turns sums of `weigh` results into metrics: pairs stay pairs, other values are divided by the total weight."""
    return jax.tree.map(lambda node: node if is_pair(node) else over(node, total), sums, is_leaf=is_pair)


def add(first: PyTree, second: PyTree) -> PyTree:
    """Returns the sum of two trees, leaf by leaf."""
    return jax.tree.map(jnp.add, first, second)


def after(done: PyTree, tree: PyTree) -> PyTree:
    """Returns `tree` with a dependency on `done`, so that XLA computes `done` first.

    A leaf waits only for entries of `done` that vary along no more axes than the leaf, because its type would change.
    """

    def wait(leaf: Any) -> Any:
        if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):  # optimization_barrier does not take random keys
            return leaf
        known = [item for item in jax.tree.leaves(done) if varying_axes(item) <= varying_axes(leaf)]
        return lax.optimization_barrier((leaf, *known))[0]

    return jax.tree.map(wait, tree)


def written_once(tree: PyTree) -> PyTree:
    """Returns a tree whose leaves are written to memory before use, on GPUs.

    Otherwise XLA fuses the stacking of layer gradients into the optimizer update, which is slower
    (benchmarks/results/decoder_h200.md).
    """
    # One barrier per leaf, because the outputs of one barrier vary along the same axes.
    return jax.tree.map(lax.optimization_barrier, tree) if chip_family(current_mesh()) == "gpu" else tree


def zeros_for(function: Callable[..., PyTree], *args: Any) -> PyTree:
    """Returns zeros with the shapes, dtypes and varying axes of `function(*args)`, without running it."""
    shapes = jax.eval_shape(function, *args)
    return jax.tree.map(
        lambda leaf: pcast_varying(jnp.zeros(leaf.shape, leaf.dtype), sorted(varying_axes(leaf))), shapes
    )


def wide(value: Any) -> Any:
    """Returns a value in the dtype of its sum: at least float32 for floats, int32 for booleans.

    A sum of ones in bfloat16 stops growing at 256.
    """
    value = jnp.asarray(value)
    if value.dtype == jnp.bool_:
        return value.astype(jnp.int32)
    return value.astype(jnp.promote_types(value.dtype, jnp.float32)) if is_float(value.dtype) else value
