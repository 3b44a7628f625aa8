"""Gradients of a batch that is computed in minibatches: those of the whole batch, for any number of minibatches.

Minibatches are equal in rows, not in what counts: masks and padding make their losses averages over different numbers
of targets. So each is weighted by the denominator of its own loss. Sums are kept in float32 whatever the parameters
are, and random draws belong to rows (`meshwright.parallel.row_key`), so that dropout does not change with the number of
minibatches either.

A metric is a `(sum, count)` pair, whose two numbers are added up, or any other number or array, whose average is taken
with the weights of the parts. A part of no weight (nothing but masked targets) adds nothing, even if it holds NaN.
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
    """What `accumulate` returns: the mean loss, its gradients in float32, placed as the parameters, and metrics."""

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

    The result is that of one device with the whole batch: the sum of all losses over the number of valid targets on
    all devices. Outside of `shard_map` it is just that.

    Args:
        loss_fn: `loss_fn(params, minibatch, rng) -> (loss, metrics)`. The loss is a `(sum, count)` pair over the
            minibatch's valid targets; terms that belong to no target are multiplied by the count. A loss that is one
            number is taken for a mean, and all minibatches and devices weigh the same.
        params: this device's slices. `loss_fn` gets them whole along `gather_axes`.
        rng: a key that is the same on all devices; `loss_fn` gets a `row_key` of it.
        specs: a PartitionSpec for each parameter, as they were given to `local_map`; replicated where None.
        sync: how often gradients are exchanged, and parameters gathered. `"every"`: with each minibatch. `"hybrid"`:
            along the axes that parameters are split over with each minibatch, along the others once. `"once"`: once per
            batch; needs memory for whole parameters and whole float32 gradients.
        gather_axes: the axes that parameters are gathered along; `("fsdp",)` by default. With `()`, the loss gathers
            its parameters itself, layer by layer for instance, and `"once"` cannot spare it that.
        axes: the axes along which the loss is a partial sum; by default those that the batch is split over. Add the
            axis of a pipeline whose loss is on the last stage only; sum and count must both be zero elsewhere, since
            both are summed along these axes.
        row_axes: those of them that split the batch's rows, in the order of the batch's spec.
        grad_specs: finer specs for the gradients than for the parameters: with one more axis in a leaf's spec, its
            gradient is summed and scattered along that axis, for half the bytes of a sum (ZeRO-1).
        dtypes: the dtypes that `loss_fn` gets parameters in, leaf by leaf; their own by default. They are gathered in
            these.
        reduce_dtype: the dtype in which gradients travel between devices; float32 by default.
        row_blocks: in the global view, over how many devices rows are split. Minibatches then take a slice out of each
            device's rows.
        with_gradients: False computes the loss and metrics alone; gradients are None.

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

    # The reduction is the transpose of the preparation: what is marked or gathered before the loop is summed or
    # scattered once, after it. In float32, whatever the parameters are.
    masters = jax.tree.map(wide, params)
    prepared, pull = jax.vjp(lambda own: plan.before(own, masters), plan.own(masters))
    if sync == "once":
        prepared = plan.narrow(prepared)

    def step(index: Any, slices: Any) -> Any:
        key = None if rng is None else row_key(rng, first_row + index * block, **blocks)
        # Tied to the loop, or XLA would move the gather out of it and hold whole parameters throughout.
        held = prepared if sync == "once" or num_minibatches == 1 else after(index, prepared)

        whole, pull_inside = jax.vjp(lambda held: plan.inside(held, masters), held)

        def local_sum(params: PyTree) -> Any:
            loss, metrics = loss_fn(params, parts.join(slices), key)
            total, count = loss if is_pair(loss) else (loss, jnp.float32(1))
            plan.check_loss(total)
            # No sum over devices here, and no division: one scaling at the end serves all minibatches and devices. What
            # is summed there is what is differentiated, also where the loss is the same on all devices already.
            return pcast_varying(jnp.asarray(total).astype(jnp.float32), plan.axes), (jnp.asarray(count), metrics)

        if with_gradients:
            # In the dtypes that the loss computes in, and widened after that: gradients of layers are put together and
            # written once, in half the bytes.
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


# --- Sums over parts of a batch that become averages over the whole ---


def is_pair(node: Any) -> bool:
    """Returns whether this is a `(sum, count)` pair: a tuple of two scalars."""
    is_tuple = type(node) is tuple and len(node) == 2
    return is_tuple and all(isinstance(item, (int, float)) or getattr(item, "ndim", None) == 0 for item in node)


def denominator(metrics: Any, key: str) -> Any:
    """Returns the count of the pair `metrics[key]`; 1 where there is none, which makes all parts weigh the same."""
    pair: Any = metrics.get(key) if isinstance(metrics, Mapping) else None
    return jnp.asarray(pair[1]) if is_pair(pair) else jnp.float32(1)


def weigh(metrics: PyTree, weight: Any) -> PyTree:
    """Returns metrics in the form in which those of several parts are added: sums, of weighted values or of pairs."""

    def summand(node: Any) -> Any:
        if is_pair(node):
            total, count = (wide(item) for item in node)
            return (jnp.where(count > 0, total, jnp.zeros_like(total)), count)
        return times(node, weight)

    return jax.tree.map(summand, metrics, is_leaf=is_pair)


def times(value: Any, weight: Any) -> Any:
    """Returns `value * weight` in float32 or wider, and zero where the weight is zero, even of NaN."""
    value = jnp.asarray(value)
    product = value.astype(jnp.promote_types(value.dtype, jnp.float32)) * weight
    return jnp.where(weight > 0, product, jnp.zeros_like(product))


def over(value: Any, total: Any) -> Any:
    """Returns `value / total`, and zero where the total is zero."""
    return jnp.where(total > 0, value / jnp.where(total > 0, total, 1), jnp.zeros_like(value))


def average(sums: PyTree, total: Any) -> PyTree:
    """Returns what `weigh` made, added up, as metrics again: pairs stay pairs, the rest is divided by the total."""
    return jax.tree.map(lambda node: node if is_pair(node) else over(node, total), sums, is_leaf=is_pair)


def add(first: PyTree, second: PyTree) -> PyTree:
    """Returns the sum of two trees, leaf by leaf."""
    return jax.tree.map(jnp.add, first, second)


def after(done: PyTree, tree: PyTree) -> PyTree:
    """Returns a tree that cannot be used before `done` is computed; XLA keeps this order.

    Only those of `done` are waited for that vary no further than the leaf in question, whose type would change.
    """

    def wait(leaf: Any) -> Any:
        if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):  # random keys cannot be tied to anything
            return leaf
        known = [item for item in jax.tree.leaves(done) if varying_axes(item) <= varying_axes(leaf)]
        return lax.optimization_barrier((leaf, *known))[0]

    return jax.tree.map(wait, tree)


def written_once(tree: PyTree) -> PyTree:
    """Returns a tree whose leaves are in memory before anything uses them, where that pays: on GPUs.

    Layers' gradients are put together to stacked leaves. Fused into an optimizer's update, which then becomes one
    kernel for each of its results, that costs more than it saves (benchmarks/RESULTS.md).
    """
    # Leaf by leaf: what passes a barrier together varies along the same axes after it.
    return jax.tree.map(lax.optimization_barrier, tree) if chip_family(current_mesh()) == "gpu" else tree


def zeros_for(function: Callable[..., PyTree], *args: Any) -> PyTree:
    """Returns zeros of the shapes, dtypes and varying axes that `function(*args)` would have; runs nothing."""
    shapes = jax.eval_shape(function, *args)
    return jax.tree.map(
        lambda leaf: pcast_varying(jnp.zeros(leaf.shape, leaf.dtype), sorted(varying_axes(leaf))), shapes
    )


def wide(value: Any) -> Any:
    """Returns a value in the dtype it is summed in: float32 at least, integers as they are, booleans counted.

    A sum of ones in bfloat16 stops growing at 256.
    """
    value = jnp.asarray(value)
    if value.dtype == jnp.bool_:
        return value.astype(jnp.int32)
    return value.astype(jnp.promote_types(value.dtype, jnp.float32)) if is_float(value.dtype) else value
