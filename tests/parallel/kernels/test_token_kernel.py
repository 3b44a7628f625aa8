"""The kernel that advances the memory of a recurrence by one token, interpreted."""

import runpy
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshwright as mw
from meshwright.hardware.flops import count_flops
from meshwright.models import MLSTMState, mlstm, mlstm_recurrent
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


def tokens(keys=128, length=5):
    made = jax.random.split(jax.random.key(1), 5)
    q, k = (jax.random.normal(key, (2, length, 2, keys)) for key in made[:2])
    v = jax.random.normal(made[2], (2, length, 2, 128))
    return q, k, v, *(3 * jax.random.normal(key, (2, length, 2)) for key in made[3:])


def recur(kernels, *, keys=128, state=None, segment_ids=None):
    return mlstm_recurrent(*tokens(keys), state=state, segment_ids=segment_ids, kernels=kernels)


@pytest.mark.parametrize("segment_ids", [None, jnp.array([[0, 0, 1, 1, 1], [1, 1, 1, 0, 2]])])
def test_a_recurrence_with_the_kernel_equals_one_without(segment_ids):
    start = recur(False)[1]
    start = MLSTMState(*start[:3], jnp.zeros(2, jnp.int32)) if segment_ids is not None else start
    found, expected = (recur(kernels, state=start, segment_ids=segment_ids) for kernels in (True, False))
    for got, true in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(got, true, rtol=0, atol=128 * 2.0**-23 * max(1.0, np.abs(true).max()))


def test_gradients_and_rows_apart_are_those_of_a_recurrence_without_the_kernel():
    """The rules of the kernel come from its plain form; the recurrence without it sums in another way."""
    given = tokens()

    def total(given, kernels):
        return (mlstm_recurrent(*given, kernels=kernels)[0] ** 2).sum()

    (value, grads), (value_2, grads_2) = (jax.value_and_grad(total)(given, kernels) for kernels in (True, False))
    # The bound of the test above; gradients sum over the tokens of a row as well.
    np.testing.assert_allclose(value, value_2, rtol=128 * 2.0**-23)
    for got, true in zip(grads, grads_2, strict=True):
        np.testing.assert_allclose(got, true, rtol=0, atol=5 * 128 * 2.0**-23 * np.abs(true).max())
    by_row = jax.vmap(lambda *one: mlstm_recurrent(*(x[None] for x in one), kernels=True)[0][0])(*given)
    h = mlstm_recurrent(*given, kernels=False)[0]
    np.testing.assert_allclose(by_row, h, rtol=0, atol=128 * 2.0**-23 * max(1.0, np.abs(h).max()))


def test_other_sizes_use_xla(monkeypatch):
    monkeypatch.setattr(token_kernel, "call_kernel", None)
    with pytest.warns(mw.MeshwrightWarning, match="XLA's form runs: heads have 64 features of keys and 128 of values"):
        recur(True, keys=64)


@pytest.mark.parametrize(
    ("rows", "keys", "values", "kernels", "uses"),
    [
        (64, 256, 512, None, True),  # 32 MiB
        (63, 256, 512, None, False),
        (64, 512, 256, None, False),
        (2, 128, 128, True, True),
        (64, 256, 512, False, False),
    ],
)
def test_large_states_use_the_kernel_by_default(rows, keys, values, kernels, uses, monkeypatch):
    used = []
    monkeypatch.setattr(mlstm, "uses_kernels", lambda wanted: wanted is not False)
    monkeypatch.setattr(mlstm, "advance_memory", lambda *args: used.append(1) or mlstm._advance(*args))
    q, v = (jax.ShapeDtypeStruct((rows, 1, 1, size), jnp.bfloat16) for size in (keys, values))
    gates = jax.ShapeDtypeStruct((rows, 1, 1), jnp.float32)
    jax.eval_shape(lambda *args: mlstm_recurrent(*args, kernels=kernels), q, q, v, gates, gates)
    assert bool(used) is uses


def test_the_cost_is_that_of_the_operations():
    given = inputs((2, 3, 128, 256))
    found = count_flops(advance_memory, *given)
    # Scale the memory, multiply and add the new products, multiply by the query and add; the normaliser likewise.
    assert found.total == pytest.approx(5 * 2 * 3 * 128 * 257, rel=0.02)
    assert not found.notes


# --- The programs that check it on a GPU ---

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture
def broken(monkeypatch):
    """Makes the kernel add to one element of the memory."""
    run = token_kernel._in_a_kernel

    def wrong(*given):
        memory, *others = run(*given)
        return memory.at[0, 0, 0, 0].add(0.5), *others

    def break_it():
        monkeypatch.setattr(token_kernel, "_in_a_kernel", wrong)

    return break_it


def test_kernel_values_finds_a_wrong_kernel(broken):
    values = runpy.run_path(str(BENCHMARKS / "kernel_values.py"))
    assert values["wrong_tokens"](1, 2, 128, 128) == 0
    broken()
    assert values["wrong_tokens"](1, 2, 128, 128) == 1


def test_mlstm_step_fails_for_a_wrong_kernel(broken, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setattr(sys, "argv", ["mlstm_step.py", "--tiny", "--rounds", "1", "--tokens", "2"])
    main = runpy.run_path(str(BENCHMARKS / "mlstm_step.py"))["main"]
    main()
    broken()
    with pytest.raises(SystemExit, match=r"error: forms differ in .*memories of \(2, 2, 128, 128\)"):
        main()
    assert "| 2, 2, 128, 128 | kernel" in capsys.readouterr().out  # the row is printed before the script fails
