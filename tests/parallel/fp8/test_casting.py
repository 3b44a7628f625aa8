"""Casts to fp8: scales, saturation, and the kernel."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.errors import MeshwrightError
from meshwright.parallel.fp8.casting import (
    E4M3,
    E5M2,
    FIRST_AMAX,
    check_scaling,
    from_wire,
    quantize,
    scale_of,
    to_wire,
    widen,
)
from meshwright.parallel.kernels.cast_kernel import cast_both_ways

DTYPES = [E4M3, E5M2]


@pytest.mark.parametrize("dtype", DTYPES)
@given(amax=st.floats(2.0**-80, 2.0**80, width=32))
def test_a_scale_is_the_least_power_of_two_that_avoids_saturation(dtype, amax):
    scale, top = float(scale_of(jnp.float32(amax), dtype)), float(jnp.finfo(dtype).max)
    mantissa, _ = np.frexp(scale)
    assert mantissa == 0.5
    assert amax / scale <= top * (1 + 2**-23)
    assert amax / (scale / 2) >= top * (1 - 2**-23)


@pytest.mark.parametrize("unknown", [0.0, jnp.inf, jnp.nan])
def test_an_amax_that_is_not_known_gets_the_first_one(unknown):
    assert float(scale_of(jnp.float32(unknown), E4M3)) == float(scale_of(jnp.float32(FIRST_AMAX), E4M3))


@pytest.mark.parametrize("dtype", DTYPES)
def test_casting_rounds_as_the_dtype_and_saturates(dtype):
    x = np.random.default_rng(0).normal(size=(48, 32)).astype(np.float32)
    cast = jax.jit(lambda x: quantize(x, jnp.float32(1.0), dtype))(x)
    top, scale = float(jnp.finfo(dtype).max), float(cast.scale)
    name = {E4M3: ml_dtypes.float8_e4m3fn, E5M2: ml_dtypes.float8_e5m2}[dtype]
    wanted = np.clip(x.astype(np.float64) / scale, -top, top).astype(np.float32).astype(name)
    np.testing.assert_array_equal(np.asarray(cast.value).astype(np.float32), wanted.astype(np.float32))
    assert float(cast.amax) == np.abs(x).max() > 1.0
    assert np.abs(np.asarray(cast.value).astype(np.float32)).max() == top


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("wide", [jnp.bfloat16, jnp.float32])
def test_casting_twice_changes_nothing(dtype, wide):
    """Values that arrive as fp8 and a scale are cast to the same fp8 values again."""
    x, amax = jax.random.normal(jax.random.key(0), (32, 48)), jnp.float32(3.0)
    first = quantize(x, amax, dtype)
    again = quantize(widen(first.value, first.scale, wide), amax, dtype)
    assert bool((to_wire(first.value) == to_wire(again.value)).all())
    assert bool((from_wire(to_wire(first.value), dtype).astype(wide) == first.value.astype(wide)).all())


def test_current_scaling_uses_the_amax_of_the_tensor():
    x = jnp.full((16, 16), 100.0)
    cast = quantize(x, jnp.float32(1.0), E4M3, scaling="current")
    assert float(cast.scale) == float(scale_of(jnp.float32(100.0), E4M3))
    with pytest.raises(MeshwrightError, match="unknown scaling 'curent'"):
        check_scaling("curent")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(128, 128), (256, 128), (128, 384)])
def test_the_kernel_does_the_same(dtype, shape):
    x = 3 * jax.random.normal(jax.random.key(1), shape, jnp.bfloat16)
    plain, kernel = quantize(x, jnp.float32(2.0), dtype), quantize(x, jnp.float32(2.0), dtype, kernels=True)
    assert kernel.turned.shape == shape[::-1]
    assert bool((to_wire(plain.value) == to_wire(kernel.value)).all())
    assert bool((to_wire(kernel.turned) == to_wire(plain.value).T).all())
    assert float(plain.amax) == float(kernel.amax)
    assert cast_both_ways(x, jnp.float32(1), dtype)[2].shape == (shape[1] // 128, shape[0])
