import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import meshwright as mw
from meshwright.dtypes import as_dtype, cast_target, dtype_bits, is_dtype_like

KEY = jax.eval_shape(lambda: jax.random.key(0)).dtype


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("bfloat16", "bfloat16"),
        ("bf16", "bfloat16"),
        ("fp32", "float32"),
        ("float8_e4m3fn", "float8_e4m3fn"),
        (np.float16, "float16"),
        (np.dtype("float32"), "float32"),
        (jnp.bfloat16, "bfloat16"),
        (jnp.dtype("bfloat16"), "bfloat16"),
        (ml_dtypes.float8_e5m2, "float8_e5m2"),
        (jax.ShapeDtypeStruct((3,), jnp.bfloat16), "bfloat16"),
        (np.ones(2, np.float16), "float16"),
    ],
)
def test_every_way_to_write_a_dtype(given, name):
    assert as_dtype(given) == jnp.dtype(name)


def test_unknown_dtype_is_explained():
    with pytest.raises(mw.PlacementError, match=r"'bfloat61' is not a dtype\.\nhint: did you mean 'bfloat16'\?"):
        as_dtype("bfloat61")
    with pytest.raises(mw.PlacementError, match=r"is not a dtype\.\nhint: "):
        as_dtype(object())


@pytest.mark.parametrize(
    ("given", "one"),
    [("bf16", True), (np.float32, True), (jnp.bfloat16, True), (np.dtype("int8"), True), ({"a": "bf16"}, False),
     (["bf16"], False), (jax.ShapeDtypeStruct((), "float32"), True)],
)  # fmt: skip
def test_one_dtype_or_a_tree(given, one):
    assert is_dtype_like(given) is one


@pytest.mark.parametrize(
    ("dtype", "wanted", "result"),
    [
        ("float32", "bfloat16", "bfloat16"),
        ("bfloat16", "float32", "float32"),
        ("float32", None, "float32"),
        ("int32", "bfloat16", "int32"),
        ("bool", "bfloat16", "bool"),
        ("int32", "int8", "int32"),
        ("float8_e5m2", "float32", "float32"),
    ],
)
def test_only_floats_are_cast(dtype, wanted, result):
    target = cast_target(jnp.dtype(dtype), None if wanted is None else jnp.dtype(wanted))
    assert target == jnp.dtype(result)


def test_keys_are_not_cast():
    assert cast_target(KEY, jnp.dtype("bfloat16")) == KEY


def test_floats_do_not_become_integers():
    with pytest.raises(mw.PlacementError, match=r"cannot cast a float32 array to int8.*\nhint: pass a float dtype"):
        cast_target(jnp.dtype("float32"), jnp.dtype("int8"))


@pytest.mark.parametrize(
    ("dtype", "bits"),
    [("float32", 32), ("bfloat16", 16), ("float8_e4m3fn", 8), ("int8", 8), ("bool", 8), ("int4", 4), ("uint4", 4),
     ("int2", 2), ("float4_e2m1fn", 4), ("complex64", 64)],
)  # fmt: skip
def test_bits(dtype, bits):
    assert dtype_bits(jnp.dtype(dtype)) == bits


def test_bits_of_a_key():
    assert dtype_bits(KEY) == 64
