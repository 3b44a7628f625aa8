"""Gradients of a batch that is computed in minibatches: those of the whole batch, for any number of minibatches.

Minibatches are equal in rows, not in what counts: masks and padding make their losses averages over different numbers
of targets. So each is weighted by the denominator of its own loss. Sums are kept in float32 whatever the parameters
are, and random draws belong to rows (`meshwright.parallel.row_key`), so that dropout does not change with the number of
minibatches either.

`accumulate_gradients` and its two forms run on one device, or see one device's rows. `accumulate` runs in the local
view on any mesh, and decides how often devices exchange gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from meshwright.axes import vary
from meshwright.parallel.rows import Parts, row_key, split_rows
from meshwright.train.sync import Sync, make_sync_plan
from meshwright.train.weighted import (
    add,
    after,
    average,
    denominator,
    is_pair,
    over,
    times,
    weigh,
    wide,
    written_once,
    zeros_for,
)
from meshwright.types import Metrics, PRNGKeyArray, PyTree

# --- One device, or one device's rows ---


def accumulate_gradients(
    state: Any,
    batch: PyTree,
    rng: PRNGKeyArray | None,
    num_minibatches: int,
    loss_fn: Callable[..., Any],
    use_scan: bool = False,
    *,
    weight_key: str = "loss",
) -> tuple[PyTree, Metrics, PyTree]:
    """Returns gradients, metrics and mutable variables of a batch, computed in minibatches.

    Gradients are those of the whole batch, in float32 or wider. Metrics that are `(sum, count)` pairs are added up,
    others averaged. Mutable variables are stacked: their leading dim is the minibatches.

    Args:
        state: a train state; `params` and `apply_fn` are used.
        batch: arrays with a common leading dim, cut into minibatches, and scalars, which every minibatch gets.
        rng: a key; each minibatch gets a `row_key` of it. None is passed on.
        loss_fn: `loss_fn(params, apply_fn, minibatch, rng) -> (loss, (metrics, mutable_variables))`.
        use_scan: compiles one minibatch and loops over it, instead of writing them out one after the other.
        weight_key: the metric whose count is the denominator of the loss. If `metrics[weight_key]` is a `(sum, count)`
            pair, a minibatch weighs as much as its count, and nothing if that is zero; if not, all weigh the same.

    Example:
        >>> import meshwright as mw, numpy as np, optax
        >>> state = mw.TrainState.create(apply_fn=lambda w, x: w * x, params=jnp.float32(2.0), tx=optax.sgd(0.1))
        >>> def loss_fn(params, apply_fn, minibatch, rng):
        ...     valid = minibatch.targets >= 0
        ...     total = jnp.where(valid, apply_fn(params, minibatch.inputs), 0.0).sum()
        ...     return total / valid.sum(), ({"loss": (total, valid.sum())}, None)
        >>> batch = mw.Batch(inputs=jnp.arange(1.0, 5.0), targets=jnp.array([0, 0, 0, -1]))
        >>> grads, metrics, _ = accumulate_gradients(state, batch, jax.random.key(0), 2, loss_fn)
        >>> float(grads), [float(part) for part in metrics["loss"]]  # (1 + 2 + 3) / 3
        (2.0, [12.0, 3.0])
    """
    form = accumulate_gradients_scan if use_scan else accumulate_gradients_loop
    return form(state, batch, rng, num_minibatches, loss_fn, weight_key=weight_key)


def accumulate_gradients_loop(
    state: Any,
    batch: PyTree,
    rng: PRNGKeyArray | None,
    num_minibatches: int,
    loss_fn: Callable[..., Any],
    *,
    weight_key: str = "loss",
) -> tuple[PyTree, Metrics, PyTree]:
    """Does what `accumulate_gradients` does, with the minibatches written out one after the other."""
    parts, step = _minibatches(state, batch, rng, num_minibatches, loss_fn, weight_key)
    sums, mutable = step(0, [array[0] for array in parts.arrays])
    collected = [mutable]
    for index in range(1, num_minibatches):
        # The next minibatch waits for this sum: side by side, they would all hold their gradients at once.
        more, mutable = step(index, after(sums, [array[index] for array in parts.arrays]))
        sums = add(sums, more)
        collected.append(mutable)
    return _finish(sums, jax.tree.map(lambda *leaves: jnp.stack(leaves), *collected))


def accumulate_gradients_scan(
    state: Any,
    batch: PyTree,
    rng: PRNGKeyArray | None,
    num_minibatches: int,
    loss_fn: Callable[..., Any],
    *,
    weight_key: str = "loss",
) -> tuple[PyTree, Metrics, PyTree]:
    """Does what `accumulate_gradients` does, with one compiled minibatch in a loop."""
    parts, step = _minibatches(state, batch, rng, num_minibatches, loss_fn, weight_key)
    if num_minibatches == 1:
        sums, mutable = step(0, [array[0] for array in parts.arrays])
        return _finish(sums, jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], mutable))
    zeros = zeros_for(lambda: step(0, [array[0] for array in parts.arrays])[0])

    def body(sums: PyTree, x: Any) -> tuple[PyTree, PyTree]:
        more, mutable = step(*x)
        return add(sums, more), mutable

    sums, mutable = lax.scan(body, zeros, (jnp.arange(num_minibatches), parts.arrays))
    return _finish(sums, mutable)


def _minibatches(
    state: Any, batch: PyTree, rng: Any, num_minibatches: int, loss_fn: Callable[..., Any], weight_key: str
) -> tuple[Parts, Callable[[Any, Any], tuple[PyTree, PyTree]]]:
    parts = split_rows(batch, num_minibatches, who="accumulate_gradients", part="minibatch")

    def step(index: Any, slices: Any) -> tuple[PyTree, PyTree]:
        key = None if rng is None else row_key(rng, index * parts.num_rows)
        gradient = jax.grad(loss_fn, has_aux=True)
        grads, (metrics, mutable) = gradient(state.params, state.apply_fn, parts.join(slices), key)
        weight = lax.stop_gradient(denominator(metrics, weight_key))
        grads = jax.tree.map(lambda leaf: times(leaf, weight), grads)
        return (weight, grads, weigh(metrics, weight)), mutable

    return parts, step


def _finish(sums: PyTree, mutable: PyTree) -> tuple[PyTree, Metrics, PyTree]:
    total, grads, metrics = sums
    return jax.tree.map(lambda leaf: over(leaf, total), grads), average(metrics, total), mutable


# --- Any mesh ---


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
            return vary(jnp.asarray(total).astype(jnp.float32), plan.axes), (jnp.asarray(count), metrics)

        if with_gradients:
            # In the dtypes that the loss computes in, and widened after that: gradients of layers are put together and
            # written once, in half the bytes.
            (total, (count, metrics)), grads = jax.value_and_grad(local_sum, has_aux=True)(plan.narrow(whole))
            grads = written_once(grads)
            (grads,) = pull_inside(jax.tree.map(lambda grad, leaf: grad.astype(leaf.dtype), grads, whole))
            grads = jax.tree.map(wide, grads)
        else:
            (total, (count, metrics)), grads = local_sum(plan.narrow(whole)), None
        return vary((total, count, weigh(metrics, count)), plan.axes), grads

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
