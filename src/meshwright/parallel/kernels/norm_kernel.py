"""A norm beside a residual stream, whose gradient is one pass over memory.

For the gradient of an RMSNorm XLA reads its operands twice: for the mean of each row, and for the result. A kernel that
holds a row at a time reads them once, and adds the gradient that arrives along the residual stream on the way.

Shapes: T rows, D features.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from meshwright.hardware.flops import register_cost
from meshwright.mesh.axes import vary_alike
from meshwright.parallel.kernels.dispatch import call_kernel, uses_kernels
from meshwright.parallel.tensor import sequence_norm
from meshwright.specs import ceil_div

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
    found: tuple[jax.Array, jax.Array] = _residual_norm(eps, *vary_alike(h, scale.astype(jnp.float32)))
    return found


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _residual_norm(eps: float, h: Any, scale: Any) -> tuple[Any, Any]:
    return _forward(eps, h, scale)[0]


def _forward(eps: float, h: Any, scale: Any) -> tuple[tuple[Any, Any], Any]:
    # By XLA, which adds up `h` in the same pass that finds the mean.
    wide = h.astype(jnp.float32)
    inverse = lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (h, (wide * inverse * scale).astype(h.dtype)), (h, inverse, scale)


def _backward(eps: float, kept: Any, grads: Any) -> tuple[Any, Any]:
    h, inverse, scale = kept
    d_kept, d_normed = grads
    features = h.shape[-1]
    rows = h.size // features
    programs = ceil_div(rows, _ROWS)
    block = max(16, 1 << (features - 1).bit_length())
    d_h, partial = call_kernel(
        functools.partial(_kernel, rows=rows, features=features, block=block),
        *(x.reshape(rows, features) for x in (h, d_kept, d_normed)),
        inverse.reshape(rows),
        scale,
        grid=(programs,),
        outs=[((rows, features), h.dtype), ((programs, features), jnp.float32)],
        num_warps=min(16, max(1, block // _FEATURES_PER_WARP)),
        name="residual_norm_gradient",
    )
    return d_h.reshape(h.shape), partial.sum(axis=0)


_residual_norm.defvjp(_forward, _backward)
register_cost("residual_norm_gradient", linear_in=range(1, 3))


def _kernel(
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
