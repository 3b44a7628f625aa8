"""Gradient accumulation with the API of xlstm_jax, on one device or on the rows of one device.

`meshwright.train.accumulate` works on any mesh and controls how often devices exchange gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from meshwright.metrics import over, times
from meshwright.parallel.rows import Parts, row_key, split_rows
from meshwright.train.accumulate import add, after, average, denominator, weigh, zeros_for
from meshwright.types import Metrics, PRNGKeyArray, PyTree


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
    """Returns the gradients, metrics and mutable variables of a batch, computed in minibatches.

    The gradients equal those of the whole batch, in float32 or wider. Metrics that are `(sum, count)` pairs are summed;
    other metrics are averaged. Mutable variables are stacked, with the minibatches as leading dim.

    Args:
        state: a train state, of which `params` and `apply_fn` are used.
        batch: arrays with a common leading dim, which is split into minibatches; scalars go to every minibatch.
        rng: a random key or None; each minibatch gets its own `row_key`.
        loss_fn: `loss_fn(params, apply_fn, minibatch, rng) -> (loss, (metrics, mutable_variables))`.
        use_scan: compile one minibatch and loop over it, instead of unrolling the loop.
        weight_key: the metric whose count is the denominator of the loss. If `metrics[weight_key]` is a `(sum, count)`
            pair, minibatches are weighted by their counts; otherwise they all have the same weight.

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
    """Runs `accumulate_gradients` with an unrolled loop.

    Example:
        >>> import meshwright as mw, optax
        >>> state = mw.TrainState.create(apply_fn=None, params=jnp.float32(2.0), tx=optax.sgd(0.1))
        >>> loss_fn = lambda w, apply_fn, x, rng: ((w * x).mean(), ({}, None))
        >>> grads, _, _ = accumulate_gradients_loop(state, jnp.arange(4.0), None, 2, loss_fn)
        >>> float(grads)
        1.5
    """
    parts, step = _minibatches(state, batch, rng, num_minibatches, loss_fn, weight_key)
    sums, mutable = step(0, [array[0] for array in parts.arrays])
    collected = [mutable]
    for index in range(1, num_minibatches):
        # Each minibatch waits for this sum, or the gradients of all minibatches would be in memory at once.
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
    """Runs `accumulate_gradients` with `jax.lax.scan`.

    Example:
        >>> import meshwright as mw, optax
        >>> state = mw.TrainState.create(apply_fn=None, params=jnp.float32(2.0), tx=optax.sgd(0.1))
        >>> loss_fn = lambda w, apply_fn, x, rng: ((w * x).mean(), ({}, None))
        >>> grads, _, _ = accumulate_gradients_scan(state, jnp.arange(4.0), None, 2, loss_fn)
        >>> float(grads)
        1.5
    """
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
