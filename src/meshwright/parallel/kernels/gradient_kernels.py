"""Gradient kernels that read memory once: RMSNorm with a residual stream, and softmax cross-entropy.

For the gradient of an RMSNorm, XLA reads its operands twice: for the mean of each row and for the result. A kernel that
holds one row at a time reads them once, and adds the gradient of the residual stream in the same pass.

For the cross-entropy, XLA reads the logits three times: for the maximum, for the sum and for the gradient. A kernel
that handles one row at a time computes maximum and sum together, and rereads the row from the cache.

Shapes: T rows or tokens, D features, V vocabulary.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from meshwright.hardware.flops import register_cost
from meshwright.mesh.axes import pcast_alike, pcast_varying, varying_axes
from meshwright.parallel.kernels.dispatch import block_index, call_kernel, fill_row, fits_row, load_row, uses_kernels
from meshwright.parallel.tensor import sequence_norm
from meshwright.specs import ceil_div

# --- RMSNorm with a residual stream ---

_ROWS = 32  # Rows per block.
_MOST_FEATURES = 4096  # More do not fit in a warpgroup's registers.


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
    if not (fits_row(h.shape[-1]) and h.shape[-1] <= _MOST_FEATURES and uses_kernels(kernels)):
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
    found: tuple[Any, Any] = _norm_gradient(h, *grads, inverse, scale)
    return found


@jax.jit  # so that the kernel is lowered once for all layers
def _norm_gradient(h: Any, d_kept: Any, d_normed: Any, inverse: Any, scale: Any) -> tuple[Any, Any]:
    features = h.shape[-1]
    rows = h.size // features
    blocks = ceil_div(rows, _ROWS)
    d_h, partial = call_kernel(
        functools.partial(_norm_kernel, rows=rows, features=features),
        *(x.reshape(rows, features) for x in (h, d_kept, d_normed)),
        inverse.reshape(rows),
        scale,
        grid=(blocks,),
        outs=[((rows, features), h.dtype), ((blocks, features), jnp.float32)],
        name="residual_norm_gradient",
    )
    return d_h.reshape(h.shape), partial.sum(axis=0)


_residual_norm.defvjp(_norm_forward, _norm_backward)
register_cost("residual_norm_gradient", linear_in=range(1, 3))


def _norm_kernel(*refs: Any, rows: int, features: int) -> None:
    h_ref, d_kept_ref, d_normed_ref, inverse_ref, scale_ref, d_h_ref, d_scale_ref = refs
    block = block_index(0)
    scale = load_row(scale_ref)

    def one_row(index: Any, d_scale: Any) -> Any:
        row = block * _ROWS + index
        inverse = inverse_ref[row]
        unit = load_row(h_ref.at[row]).astype(jnp.float32) * inverse
        d_normed = load_row(d_normed_ref.at[row]).astype(jnp.float32)
        d_kept = load_row(d_kept_ref.at[row]).astype(jnp.float32)
        d_unit = d_normed * scale
        along = jnp.sum(d_unit * unit) / features
        d_h = (d_unit - unit * along) * inverse + d_kept
        d_h_ref.at[row][...] = d_h.astype(d_h_ref.dtype)
        return d_scale + d_normed * unit

    count = jnp.minimum(_ROWS, rows - block * _ROWS)
    d_scale_ref.at[block][...] = lax.fori_loop(0, count, one_row, fill_row(features, 0, jnp.float32))


# --- Softmax cross-entropy ---

# A block reads DEPTH pieces of LANES logits at a time. Each lane finds the maximum of DEPTH logits on its own and
# rescales its running sum once for all of them.
_DEPTH, _LANES = 4, 1024
_ALIGNMENT = 8  # Rows start at multiples of 16 bytes.
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


def fits_softmax(size: int) -> bool:
    """Returns whether `softmax_gradient` supports this many logits per row."""
    return size >= _LANES and size % _ALIGNMENT == 0


def softmax_gradient(logits: jax.Array, targets: jax.Array, factors: jax.Array, *, z_loss: float = 0.0) -> Softmax:
    """Returns the gradient of `sum(factors * (log_sum - of_target + z_loss * log_sum**2))`, in the logits' dtype.

    A Pallas kernel that computes in float32. Check `uses_kernels` and `fits_softmax` before you call it.

    Args:
        logits: `[T, V]`.
        targets: `[T]` integers.
        factors: `[T]`. NaN makes the gradient of its row NaN.

    Example:
        >>> found = softmax_gradient(jnp.zeros((1, 1024)), jnp.array([1]), jnp.array([1.0]))
        >>> found.d_logits[0, :2].tolist(), float(found.log_sum[0]), int(found.place[0])
        ([0.0009765625, -0.9990234375], 6.931471824645996, 0)
    """
    rows, size = logits.shape
    found = call_kernel(
        functools.partial(_softmax_kernel, size=size, z_loss=z_loss),
        logits,
        targets.astype(jnp.int32),
        factors.astype(jnp.float32),
        pcast_varying(jnp.arange(_LANES, dtype=jnp.int32), sorted(varying_axes(logits))),
        grid=(rows,),
        outs=[((rows, size), logits.dtype), ((rows,), jnp.float32), ((rows,), jnp.float32), ((rows,), jnp.int32)],
        name="softmax_gradient",
    )
    return Softmax(*found)


register_cost("softmax_gradient", linear_in=range(2, 3))


def _softmax_kernel(*refs: Any, size: int, z_loss: float) -> None:
    from jax.experimental import pallas as pl

    logits_ref, targets_ref, factors_ref, lanes_ref, d_logits_ref, log_sum_ref, of_target_ref, place_ref = refs
    row, step = block_index(0), _DEPTH * _LANES
    target, factor = targets_ref[row], factors_ref[row]
    lanes = load_row(lanes_ref)
    num_steps, num_pieces = size // step, size // _LANES
    pieces = [piece * _LANES for piece in range(num_steps * _DEPTH, num_pieces)]  # after the steps
    # The last piece ends with the row, and begins within the piece before it.
    last = size - _LANES if size % _LANES else None

    def load(start: Any) -> Any:
        return load_row(logits_ref.at[row, pl.ds(start, _LANES)]).astype(jnp.float32)

    def join(carry: Any, some: Sequence[Any]) -> Any:
        largest, total = carry
        new = functools.reduce(jnp.maximum, some, largest)
        total = total * jnp.exp2((largest - new) * _LOG2_E)
        # Subtract before multiplying, so that lanes without a logit give exactly 0.
        return new, functools.reduce(jnp.add, [jnp.exp2((values - new) * _LOG2_E) for values in some], total)

    def read(index: Any, carry: Any) -> Any:
        return join(carry, [load(index * step + depth * _LANES) for depth in range(_DEPTH)])

    start = fill_row(_LANES, _LOWEST, jnp.float32), fill_row(_LANES, 0, jnp.float32)
    carry = lax.fori_loop(0, num_steps, read, start)
    rest = [load(piece) for piece in pieces]
    if last is not None:
        rest.append(jnp.where(lanes + last >= num_pieces * _LANES, load(last), _LOWEST))
    by_lane, total = join(carry, rest) if rest else carry
    largest = jnp.max(by_lane)
    log_sum = largest + jnp.log(jnp.sum(total * jnp.exp2((by_lane - largest) * _LOG2_E)))
    of_softmax = factor * (1 + 2 * z_loss * log_sum) if z_loss else factor

    def write(start: Any, first: Any) -> Any:
        values, places = load(start), lanes + start
        d_logits = of_softmax * jnp.exp2((values - log_sum) * _LOG2_E) - jnp.where(places == target, factor, 0.0)
        d_logits_ref.at[row, pl.ds(start, _LANES)][...] = d_logits.astype(d_logits_ref.dtype)
        return jnp.minimum(first, jnp.where(values == largest, places, size))

    def write_step(index: Any, first: Any) -> Any:
        for depth in range(_DEPTH):
            first = write(index * step + depth * _LANES, first)
        return first

    first = lax.fori_loop(0, num_steps, write_step, fill_row(_LANES, size, jnp.int32))
    for piece in (*pieces, *(() if last is None else (last,))):
        first = write(piece, first)
    of_target = logits_ref[row, jnp.clip(target, 0, size - 1)].astype(jnp.float32)
    log_sum_ref[row] = log_sum
    of_target_ref[row] = jnp.where((target >= 0) & (target < size), of_target, 0.0)
    place_ref[row] = jnp.min(first)
