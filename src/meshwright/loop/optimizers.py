"""Optimizers by name, with their schedule of learning rates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optax

from meshwright.loop.config import OptimizerOptions
from meshwright.tree import named_tree_map
from meshwright.types import PyTree


def make_schedule(options: OptimizerOptions, num_steps: int) -> Callable[[Any], Any]:
    """Returns the learning rate as a function of how many steps were taken before.

    Example:
        >>> rate = make_schedule(OptimizerOptions(learning_rate=1.0, warmup=10), 100)
        >>> [round(float(rate(n)), 2) for n in (0, 5, 10, 100)]
        [0.09, 0.55, 1.0, 0.1]
    """
    peak, warmup = options.learning_rate, min(options.warmup, num_steps)
    last, rest = peak * options.final_learning_rate, max(1, num_steps - warmup)
    after: Callable[[Any], Any] = {
        "cosine": lambda: optax.cosine_decay_schedule(peak, rest, options.final_learning_rate),
        "linear": lambda: optax.linear_schedule(peak, last, rest),
        "constant": lambda: optax.constant_schedule(peak),
    }[options.schedule]()
    if not warmup:
        return after
    # The first step is not at 0: it would be computed for nothing.
    rising = optax.linear_schedule(peak / (warmup + 1), peak, warmup)
    joined: Callable[[Any], Any] = optax.join_schedules([rising, after], [warmup])
    return joined


def make_optimizer(options: OptimizerOptions, num_steps: int) -> Any:
    """Returns an optax optimizer; clipping by the norm is the step's."""
    rate = make_schedule(options, num_steps)
    decay = options.weight_decay
    if options.optimizer == "adamw":
        return optax.adamw(rate, b1=options.beta1, b2=options.beta2, weight_decay=decay, mask=decayed)
    if options.optimizer == "lion":
        return optax.lion(rate, b1=options.beta1, b2=options.beta2, weight_decay=decay, mask=decayed)
    if options.optimizer == "adafactor":
        return optax.adafactor(rate, weight_decay_rate=decay or None, weight_decay_mask=decayed)
    return optax.chain(optax.add_decayed_weights(decay, mask=decayed), optax.sgd(rate, momentum=options.beta1 or None))


def decayed(params: PyTree) -> PyTree:
    """Returns which parameters decay: matrices, not norms and biases (whose stacks over layers have two dims).

    Example:
        >>> import jax.numpy as jnp
        >>> decayed({"mlp": {"up": jnp.ones((2, 4, 8))}, "mlp_norm": {"scale": jnp.ones((2, 4))}})
        {'mlp': {'up': True}, 'mlp_norm': {'scale': False}}
    """

    def decays(name: str, leaf: Any) -> bool:
        return leaf.ndim > 1 and not any(word in name for word in ("norm", "bias", "scale"))

    return named_tree_map(decays, params, sep="/")
