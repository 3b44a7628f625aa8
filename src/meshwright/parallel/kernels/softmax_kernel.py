"""The gradient of a softmax's cross-entropy, written over its logits.

XLA passes over the logits three times, for their largest, for their sum, and for the gradient, and each time reads them
from memory. A kernel that has one row at a time finds largest and sum together, and finds the row in the cache when it
comes back to it.

Shapes: T tokens, V vocabulary.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from meshwright.hardware.flops import register_cost
from meshwright.parallel.kernels.dispatch import call_kernel
from meshwright.specs import ceil_div

# A program reads a row in pieces of DEPTH x LANES logits, eight neighbours of each line for every thread. So a thread
# finds the largest of DEPTH logits alone, and makes what it has summed relative to a new one once for all of them.
_DEPTH, _NUM_WARPS = 2, 8
_LANES = _NUM_WARPS * 32 * 8
_LOWEST = float(jnp.finfo(jnp.float32).min)
# Powers of two are one instruction, those of e ten, and instructions are what there is too much of here.
_LOG2_E = math.log2(math.e)


class Softmax(NamedTuple):
    """The gradient of the cross-entropy with respect to each logit, `[T, V]`, and facts about each row, `[T]`."""

    d_logits: jax.Array
    log_sum: jax.Array
    """The logarithm of the softmax's denominator."""
    of_target: jax.Array
    """The target's logit; 0 where the target lies outside of the vocabulary."""
    place: jax.Array
    """Where the largest logit is; the first of several."""


def softmax_gradient(logits: jax.Array, targets: jax.Array, factors: jax.Array, *, z_loss: float = 0.0) -> Softmax:
    """Returns the gradient of `sum(factors * (log_sum - of_target + z_loss * log_sum**2))`, in the logits' dtype.

    Computes in float32, and reuses the memory of the logits. A kernel of ours: see `uses_kernels`.

    Args:
        logits: `[T, V]`.
        targets: `[T]` of integers.
        factors: `[T]`; where NaN, so is the gradient.

    Example:
        >>> found = softmax_gradient(jnp.zeros((1, 2)), jnp.array([1]), jnp.array([1.0]))
        >>> found.d_logits.tolist(), float(found.log_sum[0]), int(found.place[0])
        ([[0.5, -0.5]], 0.6931471824645996, 0)
    """
    rows, size = logits.shape
    found = call_kernel(
        functools.partial(_kernel, size=size, z_loss=z_loss),
        logits,
        targets.astype(jnp.int32),
        factors.astype(jnp.float32),
        grid=(rows,),
        outs=[((rows, size), logits.dtype), ((rows,), jnp.float32), ((rows,), jnp.float32), ((rows,), jnp.int32)],
        aliases={0: 0},
        num_warps=_NUM_WARPS,
        name="softmax_gradient",
    )
    return Softmax(*found)


register_cost("softmax_gradient", linear_in=range(2, 3))


def _kernel(
    logits_ref: Any,
    targets_ref: Any,
    factors_ref: Any,
    d_logits_ref: Any,
    log_sum_ref: Any,
    of_target_ref: Any,
    place_ref: Any,
    *,
    size: int,
    z_loss: float,
) -> None:
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    row, piece = pl.program_id(0), _DEPTH * _LANES
    target, factor = targets_ref[row], factors_ref[row]
    offsets = lax.broadcasted_iota(jnp.int32, (_DEPTH, _LANES), 0) * _LANES
    offsets = offsets + lax.broadcasted_iota(jnp.int32, (_DEPTH, _LANES), 1)

    def load(index: Any) -> tuple[Any, Any, Any]:
        places = index * piece + offsets
        mask = places < size if size % piece else None
        values = triton.load(logits_ref.at[row, places], mask=mask, other=None if mask is None else _LOWEST)
        return places, mask, values.astype(jnp.float32)

    # Before the gradient is written over it.
    of_target = logits_ref[row, jnp.clip(target, 0, size - 1)].astype(jnp.float32)

    def read(index: Any, carry: Any) -> Any:
        largest, total = carry
        _, _, values = load(index)
        new = jnp.maximum(largest, jnp.max(values, axis=0))
        # Subtracted before they are multiplied: lanes without a logit must come to exactly 0 here.
        exponentials = jnp.exp2((values - new[None]) * _LOG2_E)
        return new, total * jnp.exp2((largest - new) * _LOG2_E) + jnp.sum(exponentials, axis=0)

    pieces = ceil_div(size, piece)
    start = jnp.full(_LANES, _LOWEST, jnp.float32), jnp.zeros(_LANES, jnp.float32)
    by_lane, total = lax.fori_loop(0, pieces, read, start)
    largest = jnp.max(by_lane)
    log_sum = largest + jnp.log(jnp.sum(total * jnp.exp(by_lane - largest)))
    of_softmax = factor * (1 + 2 * z_loss * log_sum) if z_loss else factor

    def write(index: Any, first: Any) -> Any:
        places, mask, values = load(index)
        d_logits = of_softmax * jnp.exp2((values - log_sum) * _LOG2_E) - jnp.where(places == target, factor, 0.0)
        triton.store(d_logits_ref.at[row, places], d_logits.astype(d_logits_ref.dtype), mask=mask)
        return jnp.minimum(first, jnp.min(jnp.where(values == largest, places, size), axis=0))

    first = jnp.min(lax.fori_loop(0, pieces, write, jnp.full(_LANES, size, jnp.int32)))
    log_sum_ref[row] = log_sum
    of_target_ref[row] = jnp.where((target >= 0) & (target < size), of_target, 0.0)
    place_ref[row] = first
