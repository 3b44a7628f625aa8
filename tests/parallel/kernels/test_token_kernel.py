"""The kernel that advances the memory of a recurrence by one token, interpreted."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshwright.hardware.flops import count_flops
from meshwright.models import MLSTMState, mlstm_recurrent
from meshwright.parallel.kernels import token_kernel
from meshwright.parallel.kernels.token_kernel import advance_memory, fits_token

# Blocks of 16 and of 64 keys; values of several sizes, also one that no power of two of rows fills.
SHAPES = [(1, 2, 128, 128), (2, 3, 256, 384), (70, 4, 128, 128), (1, 1, 128, 4096)]


def inputs(shape, dtype=jnp.float32):
    rows, heads, keys, values = shape
    made = jax.random.split(jax.random.key(0), 7)
    memory, normaliser = jax.random.normal(made[0], shape), jax.random.normal(made[1], (rows, heads, keys))
    q, k = (jax.random.normal(key, (rows, heads, keys)).astype(dtype) for key in made[2:4])
    v = jax.random.normal(made[4], (rows, heads, values)).astype(dtype)
    return memory, normaliser, q, k, v, *(jax.random.uniform(key, (rows, heads)) for key in made[5:])


def in_float64(memory, normaliser, q, k, v, keep, gain):
    memory, normaliser, q, k, v, keep, gain = (
        np.asarray(x, np.float64) for x in (memory, normaliser, q, k, v, keep, gain)
    )
    memory = keep[..., None, None] * memory + gain[..., None, None] * k[..., None] * v[..., None, :]
    normaliser = keep[..., None] * normaliser + gain[..., None] * k
    read, size = np.einsum("bhk,bhkv->bhv", q, memory), (q * normaliser).sum(-1)
    # The most that rounding can change: each sum has K products, and each of them three roundings.
    absolute = np.einsum("bhk,bhkv->bhv", np.abs(q), np.abs(memory)), np.abs(q * normaliser).sum(-1)
    return (memory, normaliser, read, size), (np.abs(memory), np.abs(normaliser), *absolute)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_kernel_equals_float64(shape, dtype):
    given = inputs(shape, dtype)
    expected, bounds = in_float64(*given)
    steps = (4, 4, shape[2], shape[2])  # roundings of an element of the state, and of a sum
    found = jax.jit(advance_memory)(*given)
    for got, true, bound, count in zip(found, expected, bounds, steps, strict=True):
        assert got.dtype == jnp.float32
        largest = np.maximum(bound, np.abs(true)) + 4.0  # terms that cancel are not larger than this
        assert (np.abs(np.asarray(got) - true) <= count * 2.0**-24 * largest).all()


def test_sizes_that_fit():
    assert all(fits_token(*sizes) for sizes in ((128, 256), (256, 4096)))
    assert not any(fits_token(*sizes) for sizes in ((64, 128), (128, 192), (128, 8192)))


def recur(kernels, *, keys=128, state=None, segment_ids=None, length=5):
    made = jax.random.split(jax.random.key(1), 5)
    q, k = (jax.random.normal(key, (2, length, 2, keys)) for key in made[:2])
    v = jax.random.normal(made[2], (2, length, 2, 128))
    i, f = (3 * jax.random.normal(key, (2, length, 2)) for key in made[3:])
    return mlstm_recurrent(q, k, v, i, f, state=state, segment_ids=segment_ids, kernels=kernels)


@pytest.mark.parametrize("segment_ids", [None, jnp.array([[0, 0, 1, 1, 1], [1, 1, 1, 0, 2]])])
def test_a_recurrence_with_the_kernel_equals_one_without(segment_ids):
    start = recur(False)[1]
    start = MLSTMState(*start[:3], jnp.zeros(2, jnp.int32)) if segment_ids is not None else start
    found, expected = (recur(kernels, state=start, segment_ids=segment_ids) for kernels in (True, False))
    for got, true in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(got, true, rtol=0, atol=128 * 2.0**-23 * max(1.0, np.abs(true).max()))


def test_gradients_and_rows_apart_are_those_without_the_kernel():
    given = inputs((2, 2, 128, 128))

    def total(memory, kernel):
        found = (advance_memory if kernel else token_kernel._plain)(memory, *given[1:])
        return sum((x**2).sum() for x in found)

    found, expected = (jax.grad(total)(given[0], kernel) for kernel in (True, False))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())
    by_row = jax.vmap(lambda *one: advance_memory(*(x[None] for x in one)))(*given)
    for got, true in zip(by_row, token_kernel._plain(*given), strict=True):
        np.testing.assert_allclose(got[:, 0], true, rtol=1e-5, atol=1e-4)


def test_other_sizes_use_xla(monkeypatch):
    monkeypatch.setattr(token_kernel, "call_kernel", None)
    recur(True, keys=64)


def test_the_cost_is_that_of_the_operations():
    given = inputs((2, 3, 128, 256))
    found = count_flops(advance_memory, *given)
    # Scale the memory, multiply and add the new products, multiply by the query and add; the normaliser likewise.
    assert found.total == pytest.approx(5 * 2 * 3 * 128 * 257, rel=0.02)
    assert not found.notes
