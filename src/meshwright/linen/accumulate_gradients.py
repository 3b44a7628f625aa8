"""Gradient accumulation with the API of xlstm_jax, on one device or on the rows of one device.

`meshwright.train.accumulate` works on any mesh and controls how often devices exchange gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from meshwright.linen.minibatch_metrics import MetricsForm, count_of, finished, require_same_form, summands
from meshwright.mesh.axes import pcast_varying, varying_axes
from meshwright.mesh.current import current_mesh
from meshwright.metrics import over, times, wide
from meshwright.parallel.row_keys import row_key
from meshwright.parallel.rows import Parts, split_rows
from meshwright.train.accumulate import add, after, zeros_for
from meshwright.types import Metrics, PRNGKeyArray, PyTree

Result = tuple[PyTree, Metrics, PyTree]  # gradients, metrics, mutable variables


def accumulate_gradients(
    state: Any,
    batch: PyTree,
    rng: PRNGKeyArray | None,
    num_minibatches: int,
    loss_fn: Callable[..., Any],
    use_scan: bool = False,
    *,
    weight_key: str = "loss",
) -> Result:
    """Returns the gradients, metrics and mutable variables of a batch, computed in minibatches.

    The gradients equal those of the whole batch, in float32 or wider. Metrics that are pairs, `(v, c)` or
    `{"value": v, "count": c}`, are added up and keep their dtypes; other numbers are averaged. Leaves that are not
    numbers, such as `"log_modes": ["mean"]`, are returned unchanged. Mutable variables are stacked, with the
    minibatches as leading dim.

    Inside `shard_map`, these are the gradients and metrics of each device's own rows. `sync_gradients` then returns the
    mean of the gradients over devices, and `jax.lax.psum` the sums of the pairs. A minibatch without valid targets adds
    nothing, even if its loss is NaN; but if FSDP or another axis splits the parameters, the NaN reaches other devices,
    so divide by `jnp.maximum(count, 1)` there.

    Args:
        state: a train state, of which `params` and `apply_fn` are used.
        batch: arrays with a common leading dim, which is split into minibatches; scalars go to every minibatch.
        rng: a random key or None; each minibatch gets its own `row_key`.
        loss_fn: `loss_fn(params, apply_fn, minibatch, rng) -> (loss, (metrics, mutable_variables))`.
        use_scan: compile one minibatch and loop over it, instead of unrolling the loop.
        weight_key: the metric whose count is the denominator of the loss. If `metrics[weight_key]` is a pair,
            minibatches are weighted by their counts; otherwise they all have the same weight.

    Example:
        >>> import meshwright as mw, numpy as np, optax
        >>> state = mw.TrainState.create(apply_fn=lambda w, x: w * x, params=jnp.float32(2.0), tx=optax.sgd(0.1))
        >>> def loss_fn(params, apply_fn, minibatch, rng):
        ...     valid = minibatch.targets >= 0
        ...     total = jnp.where(valid, apply_fn(params, minibatch.inputs), 0.0).sum()
        ...     return total / valid.sum(), ({"loss": {"value": total, "count": valid.sum()}}, None)
        >>> batch = mw.Batch(inputs=jnp.arange(1.0, 5.0), targets=jnp.array([0, 0, 0, -1]))
        >>> grads, metrics, _ = accumulate_gradients(state, batch, jax.random.key(0), 2, loss_fn)
        >>> float(grads), float(metrics["loss"]["value"]), int(metrics["loss"]["count"])  # (1 + 2 + 3) / 3
        (2.0, 12.0, 3)
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
) -> Result:
    """Runs `accumulate_gradients` with an unrolled loop.

    Example:
        >>> import meshwright as mw, optax
        >>> state = mw.TrainState.create(apply_fn=None, params=jnp.float32(2.0), tx=optax.sgd(0.1))
        >>> loss_fn = lambda w, apply_fn, x, rng: ((w * x).mean(), ({}, None))
        >>> grads, _, _ = accumulate_gradients_loop(state, jnp.arange(4.0), None, 2, loss_fn)
        >>> float(grads)
        1.5
    """
    parts, step, finish = _minibatches(state, batch, rng, num_minibatches, loss_fn, weight_key, False)
    sums, mutable = step(0, [array[0] for array in parts.arrays])
    collected = [mutable]
    for index in range(1, num_minibatches):
        # Each minibatch waits for this sum, or the gradients of all minibatches would be in memory at once.
        more, mutable = step(index, after(sums, [array[index] for array in parts.arrays]))
        sums = add(sums, more)
        collected.append(mutable)
    return finish(sums, jax.tree.map(lambda *leaves: jnp.stack(leaves), *collected))


def accumulate_gradients_scan(
    state: Any,
    batch: PyTree,
    rng: PRNGKeyArray | None,
    num_minibatches: int,
    loss_fn: Callable[..., Any],
    *,
    weight_key: str = "loss",
) -> Result:
    """Runs `accumulate_gradients` with `jax.lax.scan`.

    Example:
        >>> import meshwright as mw, optax
        >>> state = mw.TrainState.create(apply_fn=None, params=jnp.float32(2.0), tx=optax.sgd(0.1))
        >>> loss_fn = lambda w, apply_fn, x, rng: ((w * x).mean(), ({}, None))
        >>> grads, _, _ = accumulate_gradients_scan(state, jnp.arange(4.0), None, 2, loss_fn)
        >>> float(grads)
        1.5
    """
    parts, step, finish = _minibatches(state, batch, rng, num_minibatches, loss_fn, weight_key, True)
    if num_minibatches == 1:
        sums, mutable = step(0, [array[0] for array in parts.arrays])
        return finish(sums, jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], mutable))
    zeros = zeros_for(lambda: step(0, [array[0] for array in parts.arrays])[0])

    def body(sums: PyTree, x: Any) -> tuple[PyTree, PyTree]:
        more, mutable = step(*x)
        return add(sums, more), mutable

    sums, mutable = lax.scan(body, zeros, (jnp.arange(num_minibatches), parts.arrays))
    return finish(sums, mutable)


def _minibatches(
    state: Any,
    batch: PyTree,
    rng: Any,
    num_minibatches: int,
    loss_fn: Callable[..., Any],
    weight_key: str,
    use_scan: bool,
) -> tuple[Parts, Callable[[Any, Any], tuple[PyTree, PyTree]], Callable[[PyTree, PyTree], Result]]:
    parts = split_rows(batch, num_minibatches, who="accumulate_gradients", part="minibatch")
    forms: list[MetricsForm] = []  # of each traced minibatch, because strings cannot leave a traced function

    def call(params: PyTree, index: Any, slices: Any) -> Any:
        key = None if rng is None else row_key(rng, index * parts.num_rows)
        return loss_fn(params, state.apply_fn, parts.join(slices), key)

    def count(index: Any, slices: Any) -> Any:
        return count_of(call(state.params, index, slices)[1][0], weight_key)

    total, axes = _known_total(count, parts, num_minibatches, use_scan)
    # Gradients of replicated parameters stay on their device until `sync_gradients`, like those of the original.
    params = pcast_varying(state.params, axes)

    def step(index: Any, slices: Any) -> tuple[PyTree, PyTree]:
        def loss_and_sums(params: PyTree) -> Any:
            loss, (metrics, mutable) = call(params, index, slices)
            weight = lax.stop_gradient(count_of(metrics, weight_key))
            numbers, form = summands(metrics, weight)
            forms.append(form)
            require_same_form(forms[0], form)
            share = 1 if total is None else over(weight, total).astype(jnp.result_type(loss))
            return loss * share, (weight, numbers, mutable)

        grads, (weight, numbers, mutable) = jax.grad(loss_and_sums, has_aux=True)(params)
        weighted = times if total is None else _without_empty
        return (weight, jax.tree.map(lambda leaf: weighted(leaf, weight), grads), numbers), mutable

    def finish(sums: PyTree, mutable: PyTree) -> Result:
        weight, grads, numbers = sums
        if total is None:
            grads = jax.tree.map(lambda leaf: over(leaf, weight), grads)
        return grads, finished(numbers, weight, forms[0]), mutable

    return parts, step, finish


def _known_total(
    count: Callable[[Any, Any], Any], parts: Parts, num_minibatches: int, use_scan: bool
) -> tuple[Any, tuple[str, ...]]:
    """Returns the count of all minibatches and the axes along which it varies; None if all devices have equal counts.

    Gradients that communicate (of FSDP, tensor parallelism, pipelines) mix the losses of several devices. So the share
    of a minibatch must multiply its loss, and the total must be known before. If the counts depend only on the batch,
    XLA removes the rest of the loss from this pass.
    """
    mesh = current_mesh()
    manual = [axis for axis in mesh.manual_axes if mesh.shape[axis] > 1] if mesh is not None else []
    if not manual:
        return None, ()
    first = [array[0] for array in parts.arrays]
    constant = []

    def shown(*args: Any) -> Any:
        made = count(*args)
        constant.append(not isinstance(made, jax.core.Tracer))
        return made

    axes = tuple(sorted(varying_axes(jax.eval_shape(shown, 0, first))))
    is_checked = manual[0] in varying_axes(lax.axis_index(manual[0]))
    if constant[0] or (is_checked and not axes):
        return None, ()
    if use_scan:
        xs = (jnp.arange(num_minibatches), parts.arrays)
        return lax.scan(lambda total, x: (total + count(*x), None), zeros_for(count, 0, first), xs)[0], axes
    return sum(count(index, [array[index] for array in parts.arrays]) for index in range(num_minibatches)), axes


def _without_empty(grad: Any, weight: Any) -> Any:
    """Returns a gradient in float32 or wider, without the NaN of a minibatch that has no targets."""
    grad = wide(grad)
    return jnp.where(jnp.isfinite(grad) | (weight != 0), grad, jnp.zeros_like(grad))
