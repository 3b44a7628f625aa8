"""Parsing of dtypes, and the casting policy: only floats are cast, and only to floats."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshwright.errors import PlacementError, did_you_mean

_SHORT_NAMES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64", "f32": "float32"}
_KNOWN_NAMES = ["float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int32", "int8", "bool"]


def as_dtype(spec: Any) -> Any:
    """Returns the dtype for a name, a numpy or jnp dtype, a scalar type, or an object with a dtype.

    Example:
        >>> as_dtype("bf16"), as_dtype(jnp.float32), as_dtype(jax.ShapeDtypeStruct((2,), "float8_e5m2"))
        (dtype(bfloat16), dtype('float32'), dtype(float8_e5m2))
    """
    if isinstance(spec, str):
        spec = _SHORT_NAMES.get(spec, spec)
    elif not isinstance(spec, (type, np.dtype)) and hasattr(spec, "dtype"):
        return spec.dtype
    try:
        return jnp.dtype(spec)
    except TypeError:
        hint = did_you_mean(str(spec), [*_KNOWN_NAMES, *_SHORT_NAMES]) or "use a name such as 'bfloat16'."
        raise PlacementError(f"{spec!r} is not a dtype.", hint=hint) from None


def is_dtype_like(spec: Any) -> bool:
    """Returns whether `spec` is one dtype rather than a tree of dtypes."""
    return isinstance(spec, (str, type, np.dtype, jax.ShapeDtypeStruct))


def is_float(dtype: Any) -> bool:
    """Returns whether a precision setting may cast this dtype, which it does for real and complex floats."""
    return bool(jnp.issubdtype(dtype, jnp.inexact))


def cast_target(dtype: Any, wanted: Any | None) -> Any:
    """Returns the dtype of a leaf after casting its tree to `wanted`.

    Integers, booleans and random keys keep their dtype. Casting a float to an integer raises an error.
    """
    if wanted is None or not is_float(dtype):
        return dtype
    if not is_float(wanted):
        raise PlacementError(
            f"cannot cast a {dtype} array to {wanted}, because that would drop its fractional part.",
            hint="pass a float dtype, or None to keep the dtype.",
        )
    return wanted


@functools.cache
def dtype_bits(dtype: Any) -> int:
    """Returns the bits per element, e.g. 4 for int4 and the size of the key for a random key."""
    name = getattr(dtype, "name", str(dtype))
    for narrow, bits in (("int4", 4), ("int2", 2), ("int1", 1), ("float4_e2m1fn", 4)):
        if name in (narrow, f"u{narrow}"):
            return bits
    return int(dtype.itemsize) * 8
