"""Casts to fp8 with one scale per tensor.

A scale maps the largest magnitude of a tensor (its amax) to the largest value of the fp8 dtype. Scales are powers of
two, so that multiplying and dividing by them is exact in every dtype: a cast costs the rounding to fp8 and nothing
else, and values that travel as fp8 and a scale arrive unchanged.

Forward operands are e4m3 (4 significant bits, up to 448), gradients e5m2 (3 significant bits, up to 57344).
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax import lax

from meshwright.errors import PlacementError, did_you_mean
from meshwright.hardware.chips import chip_family
from meshwright.mesh.axes import pcast_alike, varying_axes
from meshwright.mesh.current import current_mesh
from meshwright.parallel.kernels.cast_kernel import can_cast, cast_both_ways

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
Scaling = Literal["delayed", "current"]

INPUT, WEIGHT, GRADIENT = range(3)
"""Places in the amaxes of one matmul."""

FIRST_AMAX = 8.0
"""The amax of a tensor that no step has seen yet. Values above it saturate, once."""

_LEAST, _MOST = 2.0**-100, 2.0**100  # Bounds of scales, so that a scale and its inverse are normal float32 numbers.
_NEAR_ONE, _EXPONENT = 0x7FFFFF, 0x7F800000


class Cast(NamedTuple):
    """A tensor `[M, K]` in fp8.

    Args:
        value: the tensor divided by its scale.
        turned: its transpose `[K, M]`, or None if XLA transposes it.
        scale: float32 scalar.
        amax: the tensor's own amax, float32.
    """

    value: Any
    turned: Any
    scale: Any
    amax: Any


def check_scaling(scaling: str) -> None:
    """Raises if there is no such way to choose scales."""
    if scaling not in get_args(Scaling):
        hint = did_you_mean(str(scaling), get_args(Scaling)) or f"use one of: {', '.join(get_args(Scaling))}."
        raise PlacementError(f"fp8: unknown scaling {scaling!r}.", hint=hint)


def scale_of(amax: Any, dtype: Any) -> Any:
    """Returns the smallest power of two that is at least `amax / max(dtype)`, in float32.

    An amax of 0, infinity or NaN is not known, and counts as `FIRST_AMAX`.

    Example:
        >>> float(scale_of(jnp.float32(448.0), E4M3)), float(scale_of(jnp.float32(449.0), E4M3))
        (1.0, 2.0)
    """
    amax = jnp.asarray(amax, jnp.float32)
    known = jnp.where((amax > 0) & jnp.isfinite(amax), amax, FIRST_AMAX)
    wanted = jnp.clip(known / float(jnp.finfo(dtype).max), _LEAST, _MOST)
    bits = lax.bitcast_convert_type(wanted, jnp.int32)
    return lax.bitcast_convert_type((bits + _NEAR_ONE) & _EXPONENT, jnp.float32)


def amax_of(x: Any) -> Any:
    """Returns the largest magnitude of an array, in float32."""
    return jnp.max(jnp.abs(x)).astype(jnp.float32)


def quantize(
    x: Any, amax: Any, dtype: Any, *, scaling: Scaling = "delayed", stages: str | None = None, kernels: bool = False
) -> Cast:
    """Casts an array `[..., K]` to fp8.

    Args:
        amax: the amax that gives the scale; larger values saturate.
        scaling: "current" ignores `amax` and uses the amax of the array on all devices.
        stages: the axis of a pipeline, whose devices hold other arrays at the same time.
        kernels: whether a Pallas kernel casts, transposes and takes the amax in one pass, for arrays of two dims.

    Example:
        >>> cast = quantize(jnp.array([[1.0, 3.3], [-500.0, 100.0]]), jnp.float32(448.0), E4M3)
        >>> cast.value.tolist(), float(cast.scale), float(cast.amax)
        ([[1.0, 3.25], [-448.0, 96.0]], 1.0, 500.0)
    """
    own = None
    if scaling == "current":
        own = amax_of(x)
        axes = tuple(sorted(varying_axes(own) - {stages}))
        amax = lax.pmax(own, axes) if axes else own
    scale = scale_of(amax, dtype)
    if kernels and x.ndim == 2 and can_cast(x.shape):
        alike, inverse = pcast_alike(x, 1.0 / scale)
        value, turned, parts = cast_both_ways(alike, inverse, dtype)
        return Cast(value, turned, scale, jnp.max(parts) if own is None else own)
    top = float(jnp.finfo(dtype).max)
    # Casting a value beyond the range of e4m3 gives NaN, so clip first.
    value = jnp.clip(x.astype(jnp.float32) * (1.0 / scale), -top, top).astype(dtype)
    if chip_family(current_mesh()) != "gpu":
        # Without fp8 hardware, XLA would drop the casts to fp8 and back as excess precision.
        value = lax.optimization_barrier(value)
    return Cast(value, None, scale, amax_of(x) if own is None else own)


def widen(value: Any, scale: Any, dtype: Any) -> Any:
    """Returns the values of an fp8 array times their scale; exact, as the scale is a power of two."""
    return value.astype(dtype) * scale.astype(dtype)


def to_wire(value: Any) -> Any:
    """Returns fp8 values as bytes, which every backend can send."""
    return lax.bitcast_convert_type(value, jnp.uint8)


def from_wire(sent: Any, dtype: Any) -> Any:
    """Returns bytes from `to_wire` as fp8 values."""
    return lax.bitcast_convert_type(sent, dtype)


# --- Products of casts; the contracted dim is the last of both operands wherever a transpose is at hand ---

_INNER, _LAST, _ROWS = ((1,), (0,)), ((1,), (1,)), ((0,), (0,))


def multiply(x: Cast, w: Cast, dtype: Any) -> Any:
    """Returns `x @ w` for `[..., K]` and `[K, N]`."""
    if w.turned is not None:
        return _dot(x.value, x.scale, w.turned, w.scale, _LAST, dtype)
    return _dot(x.value, x.scale, w.value, w.scale, _INNER, dtype)


def multiply_turned(g: Cast, w: Cast, dtype: Any) -> Any:
    """Returns `g @ w.T` for `[..., N]` and `[K, N]`, the gradient of an input."""
    return _dot(g.value, g.scale, w.value, w.scale, _LAST, dtype)


def multiply_rows(x: Cast, g: Cast, dtype: Any) -> Any:
    """Returns `x.T @ g` for `[..., K]` and `[..., N]`, the gradient of a weight.

    It sums a product for every token, so it runs without cuBLASLt's fast accumulation, which keeps about 14 bits of a
    sum: with it, a 956M decoder ended 8% to 9% above bfloat16's loss (benchmarks/results/fp8_h200.md).
    """
    if x.turned is not None and g.turned is not None:
        return _dot(x.turned, x.scale, g.turned, g.scale, _LAST, dtype, lax.Precision.HIGHEST)
    return _dot(x.value, x.scale, g.value, g.scale, _ROWS, dtype, lax.Precision.HIGHEST)


def _dot(a: Any, a_scale: Any, b: Any, b_scale: Any, dims: Any, dtype: Any, precision: Any = None) -> Any:
    # XLA recognizes a dot of converted and scaled operands, and passes the fp8 values and scales to cuBLASLt.
    flat_a, flat_b = (v.reshape(-1, v.shape[-1]) for v in (a, b))
    product = lax.dot_general(
        widen(flat_a, a_scale, dtype),
        widen(flat_b, b_scale, dtype),
        (dims, ((), ())),
        preferred_element_type=dtype,
        precision=precision,
    )
    lead = a.shape[:-1] if dims != _ROWS else product.shape[:1]
    return jnp.reshape(product, (*lead, product.shape[-1]))


def as_cast(value: Any, scale: Any, *, turned: Any = None) -> Cast:
    """Returns a `Cast` whose amax is not needed."""
    return Cast(value, turned, scale, jnp.zeros((), jnp.float32))


def keep_max(leaf: Any, axes: tuple[str, ...]) -> Any:
    """Marks amaxes as varying along manual axes; their gradient, the amaxes of this step, is combined by maximum.

    The gradient of a plain `pcast` would be the sum.
    """
    missing = tuple(axis for axis in axes if axis not in varying_axes(leaf))
    if not missing:
        return leaf
    mark = jax.custom_vjp(lambda leaf: lax.pcast(leaf, missing, to="varying"))
    mark.defvjp(
        lambda leaf: (lax.pcast(leaf, missing, to="varying"), None),
        lambda _, found: (lax.pmax(found, missing),),
    )
    return mark(leaf)
