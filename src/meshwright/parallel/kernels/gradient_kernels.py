"""Gradients in one pass over memory: of a norm beside a residual stream, and of a softmax's cross-entropy.

For the gradient of an RMSNorm XLA reads its operands twice: for the mean of each row, and for the result. A kernel that
holds a row at a time reads them once, and adds the gradient that arrives along the residual stream on the way.

XLA passes over logits three times, for their largest, for their sum, and for the gradient, and each time reads them
from memory. A kernel that has one row at a time finds largest and sum together, finds the row in the cache when it
comes back to it, and writes the gradient over the logits.

Shapes: T rows or tokens, D features, V vocabulary.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from meshwright.hardware.flops import register_cost
from meshwright.mesh.axes import pcast_alike
from meshwright.parallel.kernels.dispatch import call_kernel, uses_kernels
from meshwright.parallel.tensor import sequence_norm
from meshwright.specs import ceil_div

# --- A norm beside a residual stream ---

# On an H200, 32768 rows of 2048: of 8 to 128 rows for each program, and 1 to 16 warps, these are among the best.
_ROWS, _FEATURES_PER_WARP = 32, 512


@jax.named_scope("norm")
def residual_norm(
    h: jax.Array, scale: jax.Array, *, axis: str | None, eps: float = 1e-6, kernels: bool | None = None
) -> tuple[jax.Array, jax.Array]:
    """Returns `h` as it is and `sequence_norm(h, scale)`; what comes after must use both.

    Used on, the first makes the gradients of the two uses meet here, where their sum costs nothing.

    Args:
        h: `[..., rows, D]`, split by rows over `axis`, or not.
        kernels: whether the gradient is a kernel of ours; by default where that is possible and faster.

    Example:
        >>> h, x = residual_norm(jnp.array([[3.0, -3.0]]), jnp.array([1.0, 2.0]), axis=None, eps=0.0)
        >>> h.tolist(), x.tolist()
        ([[3.0, -3.0]], [[1.0, -2.0]])
    """
    if not uses_kernels(kernels):
        return h, sequence_norm(h, scale, axis=axis, eps=eps)
    found: tuple[jax.Array, jax.Array] = _residual_norm(eps, *pcast_alike(h, scale.astype(jnp.float32)))
    return found


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _residual_norm(eps: float, h: Any, scale: Any) -> tuple[Any, Any]:
    return _norm_forward(eps, h, scale)[0]


def _norm_forward(eps: float, h: Any, scale: Any) -> tuple[tuple[Any, Any], Any]:
    # By XLA, which adds up `h` in the same pass that finds the mean.
    wide = h.astype(jnp.float32)
    inverse = lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (h, (wide * inverse * scale).astype(h.dtype)), (h, inverse, scale)


def _norm_backward(eps: float, kept: Any, grads: Any) -> tuple[Any, Any]:
    h, inverse, scale = kept
    d_kept, d_normed = grads
    features = h.shape[-1]
    rows = h.size // features
    programs = ceil_div(rows, _ROWS)
    block = max(16, 1 << (features - 1).bit_length())
    d_h, partial = call_kernel(
        functools.partial(_norm_kernel, rows=rows, features=features, block=block),
        *(x.reshape(rows, features) for x in (h, d_kept, d_normed)),
        inverse.reshape(rows),
        scale,
        grid=(programs,),
        outs=[((rows, features), h.dtype), ((programs, features), jnp.float32)],
        num_warps=min(16, max(1, block // _FEATURES_PER_WARP)),
        name="residual_norm_gradient",
    )
    return d_h.reshape(h.shape), partial.sum(axis=0)


_residual_norm.defvjp(_norm_forward, _norm_backward)
register_cost("residual_norm_gradient", linear_in=range(1, 3))


def _norm_kernel(
    h_ref: Any,
    d_kept_ref: Any,
    d_normed_ref: Any,
    inverse_ref: Any,
    scale_ref: Any,
    d_h_ref: Any,
    d_scale_ref: Any,
    *,
    rows: int,
    features: int,
    block: int,
) -> None:
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    columns = jnp.arange(block)  # Triton's arrays have powers of two as sizes
    mask = columns < features if block > features else None

    def load(ref: Any) -> Any:
        return triton.load(ref, mask=mask, other=None if mask is None else 0).astype(jnp.float32)

    program = pl.program_id(0)
    scale = load(scale_ref.at[columns])

    def one_row(index: Any, d_scale: Any) -> Any:
        row = program * _ROWS + index
        inverse = inverse_ref[row]
        unit = load(h_ref.at[row, columns]) * inverse
        d_normed = load(d_normed_ref.at[row, columns])
        d_unit = d_normed * scale
        along = jnp.sum(d_unit * unit) / features
        d_h = (d_unit - unit * along) * inverse + load(d_kept_ref.at[row, columns])
        triton.store(d_h_ref.at[row, columns], d_h.astype(d_h_ref.dtype), mask=mask)
        return d_scale + d_normed * unit

    count = jnp.minimum(_ROWS, rows - program * _ROWS)
    d_scale = lax.fori_loop(0, count, one_row, jnp.zeros(block, jnp.float32))
    triton.store(d_scale_ref.at[program, columns], d_scale, mask=mask)


# --- The gradient of a softmax's cross-entropy ---

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
        functools.partial(_softmax_kernel, size=size, z_loss=z_loss),
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


def _softmax_kernel(
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
