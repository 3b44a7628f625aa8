"""Gradient kernels that read memory once: RMSNorm with a residual stream, and softmax cross-entropy.

For the gradient of an RMSNorm, XLA reads its operands twice: for the mean of each row and for the result. A kernel that
holds one row at a time reads them once, and adds the gradient of the residual stream in the same pass.

For the cross-entropy, XLA reads the logits three times: for the maximum, for the sum and for the gradient. A kernel
that handles one row at a time computes maximum and sum together, rereads the row from the cache, and overwrites the
logits with the gradient.

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

# --- RMSNorm with a residual stream ---

# Among the fastest of 8 to 128 rows per program and 1 to 16 warps, for 32768 rows of 2048 features on an H200.
_ROWS, _FEATURES_PER_WARP = 32, 512


@jax.named_scope("norm")
def residual_norm(
    h: jax.Array, scale: jax.Array, *, axis: str | None, eps: float = 1e-6, kernels: bool | None = None
) -> tuple[jax.Array, jax.Array]:
    """Returns `h` and `sequence_norm(h, scale)`; use both results.

    If later code uses the returned `h`, both gradients of `h` meet in one kernel, which adds them for free.

    Args:
        h: `[..., rows, D]`, split by rows over `axis`, or replicated.
        kernels: use a Pallas kernel for the gradient (default: if possible and faster).

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
    # Left to XLA, which fuses the residual addition that produces `h` into this pass.
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


def _norm_kernel(*refs: Any, rows: int, features: int, block: int) -> None:
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    h_ref, d_kept_ref, d_normed_ref, inverse_ref, scale_ref, d_h_ref, d_scale_ref = refs
    columns = jnp.arange(block)  # Triton array sizes are powers of two.
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


# --- Softmax cross-entropy ---

# A program reads a row in pieces of DEPTH x LANES logits, eight neighbors per thread and line. Each thread finds the
# maximum of DEPTH logits on its own and rescales its running sum once for all of them.
_DEPTH, _NUM_WARPS = 2, 8
_LANES = _NUM_WARPS * 32 * 8
_LOWEST = float(jnp.finfo(jnp.float32).min)
# exp2 is one instruction and exp is ten, and this kernel is bound by instructions.
_LOG2_E = math.log2(math.e)


class Softmax(NamedTuple):
    """Gradient of the cross-entropy for each logit, `[T, V]`, and statistics of each row, `[T]`."""

    d_logits: jax.Array
    log_sum: jax.Array
    """Log of the softmax denominator."""
    of_target: jax.Array
    """The target's logit, or 0 if the target is outside the vocabulary."""
    place: jax.Array
    """Index of the (first) largest logit."""


def softmax_gradient(logits: jax.Array, targets: jax.Array, factors: jax.Array, *, z_loss: float = 0.0) -> Softmax:
    """Returns the gradient of `sum(factors * (log_sum - of_target + z_loss * log_sum**2))`, in the logits' dtype.

    A Pallas kernel that computes in float32 and overwrites the logits. Check `uses_kernels` before you call it.

    Args:
        logits: `[T, V]`.
        targets: `[T]` integers.
        factors: `[T]`. NaN makes the gradient of its row NaN.

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


def _softmax_kernel(*refs: Any, size: int, z_loss: float) -> None:
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    logits_ref, targets_ref, factors_ref, d_logits_ref, log_sum_ref, of_target_ref, place_ref = refs
    row, piece = pl.program_id(0), _DEPTH * _LANES
    target, factor = targets_ref[row], factors_ref[row]
    offsets = lax.broadcasted_iota(jnp.int32, (_DEPTH, _LANES), 0) * _LANES
    offsets = offsets + lax.broadcasted_iota(jnp.int32, (_DEPTH, _LANES), 1)

    def load(index: Any) -> tuple[Any, Any, Any]:
        places = index * piece + offsets
        mask = places < size if size % piece else None
        values = triton.load(logits_ref.at[row, places], mask=mask, other=None if mask is None else _LOWEST)
        return places, mask, values.astype(jnp.float32)

    # Read it before the gradient overwrites it.
    of_target = logits_ref[row, jnp.clip(target, 0, size - 1)].astype(jnp.float32)

    def read(index: Any, carry: Any) -> Any:
        largest, total = carry
        _, _, values = load(index)
        new = jnp.maximum(largest, jnp.max(values, axis=0))
        # Subtract before multiplying, so that lanes without a logit give exactly 0.
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
