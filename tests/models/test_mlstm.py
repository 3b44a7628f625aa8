"""The three forms of the mLSTM, compared with each other and with a float64 loop written from the equations."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import meshwright as mw
from meshwright.errors import PlacementError
from meshwright.models import (
    MLSTMState,
    init_mlstm_state,
    mlstm,
    mlstm_chunkwise,
)
from meshwright.parallel import local_map

from .mlstm_forms import (
    FORMS,
    NAMES,
    PACKED,
    SEGMENTS,
    STATE_NAMES,
    WITH_STATE,
    B,
    H,
    K,
    S,
    V,
    assert_close,
    by_equations,
    in_units_of_one,
    slope,
    some_state,
    state_gradients,
    tokens,
    value_and_gradients,
    weights,
)


@pytest.mark.parametrize("segments", SEGMENTS)
@pytest.mark.parametrize("form", FORMS)
def test_outputs_and_gradients_follow_the_equations(form, segments):
    args, segment_ids = tokens(), SEGMENTS[segments]
    gradients, h = value_and_gradients(form)(*args, segment_ids)
    assert_close([h], [by_equations(*args, segment_ids=segment_ids)])
    for which, gradient in enumerate(gradients):
        towards, expected = slope(args, which, segment_ids=segment_ids)
        np.testing.assert_allclose(np.sum(gradient * towards), expected, rtol=1e-4, err_msg=NAMES[which])


@pytest.mark.parametrize("segments", SEGMENTS)
@pytest.mark.parametrize("form", [name for name in FORMS if name != "parallel"])
def test_every_gradient_equals_that_of_the_parallel_form(form, segments):
    args = (*tokens(1), SEGMENTS[segments])
    ours, h = value_and_gradients(form)(*args)
    expected, reference = value_and_gradients("parallel")(*args)
    assert_close([h], [reference])
    assert_close(ours, expected)


def test_gpus_read_the_memory_in_parts():
    rng = np.random.default_rng(3)
    q, c = rng.standard_normal((2, 2, 96)), rng.standard_normal((2, 2, 96, 8))
    (read, pull), given = jax.vjp(mlstm._sums, *(x.astype(np.float32) for x in (q, c))), weights((2, 2, 8))
    assert "reduce_sum" in str(jax.make_jaxpr(mlstm._sums)(q, c)).split("optimization_barrier")[1]  # three parts
    expected = (
        np.einsum("bhk,bhkv->bhv", q, c),
        np.einsum("bhv,bhkv->bhk", given, c),
        q[..., None] * given[:, :, None],
    )
    assert_close((read, *pull(given)), expected, names=("read", "q", "memory"))


def test_without_segments_all_tokens_are_one_document():
    forms = {name: (FORMS[name], FORMS[name]) for name in ("parallel", "recurrent", "chunk longer than the sequence")}
    forms |= {f"chunks of {size}": (functools.partial(mlstm_chunkwise, chunk_size=size),) for size in (1, 4, S)}
    args = tokens(2)

    @jax.jit
    def run(*args):
        ids = (None, jnp.full((B, S), 5))
        return {n: [form(*args, segment_ids=x) for form, x in zip(f, ids, strict=False)] for n, f in forms.items()}

    for name, outputs in run(*args).items():
        assert_close(outputs, [by_equations(*args)] * 2, names=[name] * 2)


# --- Documents ---


def test_each_document_alone_gives_the_same():
    args = tokens(3)
    together, h = jax.tree.map(np.asarray, value_and_gradients("ragged chunks of 5")(*args, PACKED))
    for row, document in [(0, 1), (0, 2), (0, 3), (1, 4), (1, 1), (1, 7)]:
        here = np.flatnonzero(PACKED[row] == document)
        expected = by_equations(*(x[row : row + 1, here] for x in args))
        assert_close([h[row, here]], [expected[0]])
        # The gradient from a row with only this document.
        w, *alone = (np.roll(x[row : row + 1], -here[0], axis=1).repeat(B, axis=0) for x in (weights(h.shape), *args))
        only = np.broadcast_to(np.arange(S) < len(here), (B, S)).astype(np.int32)
        expected, _ = value_and_gradients("parallel")(*alone, only, w)
        assert_close([x[row, here] for x in together], [np.asarray(x)[0, : len(here)] for x in expected])
    padding = PACKED == 0
    assert not any(np.any(x[padding]) for x in (h, *together))


@settings(max_examples=30)
@given(st.lists(st.integers(0, 3), min_size=B * S, max_size=B * S), st.integers(0, 2**31))
def test_any_documents_in_any_order(ids, seed):
    args, segment_ids = tokens(seed), np.array(ids, np.int32).reshape(B, S)
    expected = by_equations(*args, segment_ids=segment_ids)
    for form in ("parallel", "recurrent", "ragged chunks of 5"):
        gradients, h = value_and_gradients(form)(*args, segment_ids)
        assert_close([h], [expected], tolerance=1e-3)
        assert all(np.all(np.isfinite(x)) for x in gradients)


# --- Numbers ---


@pytest.mark.parametrize("form", ["parallel", "ragged chunks of 5"])
def test_bfloat16_is_within_its_rounding_error(form):
    args = [jnp.asarray(x, jnp.bfloat16) for x in tokens(8)]
    gradients, h = value_and_gradients(form)(*args, PACKED)
    assert {x.dtype for x in (h, *gradients)} == {jnp.dtype("bfloat16")}
    wide = [np.asarray(x, np.float32) for x in args]
    expected, reference = value_and_gradients("parallel")(*wide, PACKED)
    for mine, theirs in zip((h, *gradients), (reference, *expected), strict=True):
        error = np.linalg.norm(np.asarray(mine, np.float32) - theirs) / np.linalg.norm(theirs)
        assert error < 0.02


def test_gates_and_states_are_float32_for_any_input_dtype():
    args = [jnp.asarray(x, jnp.bfloat16) for x in tokens()]
    for form in WITH_STATE.values():
        h, state = jax.eval_shape(form, *args)
        assert h.dtype == jnp.bfloat16
        assert [x.dtype for x in state] == [jnp.float32] * 3 + [jnp.int32]


EXTREMES = {
    "write all": (80.0, 0.0),
    "write nothing": (-80.0, 0.0),
    "keep all": (0.0, 80.0),
    "forget all": (0.0, -80.0),
    "write and keep all": (80.0, 80.0),
    "write all, forget all": (80.0, -80.0),
    "write nothing, keep all": (-80.0, 80.0),
    "write nothing, forget all": (-80.0, -80.0),
    "write more than float32 holds": (200.0, 2.0),
    "now and then": ((-80.0, 0.0, 80.0), (-80.0, 0.0, 80.0)),
    "now and then more than float32 holds": ((-200.0, 0.0, 200.0), (-200.0, 2.0, 200.0)),
}


@pytest.mark.parametrize("case", EXTREMES)
@pytest.mark.parametrize("form", ["parallel", "recurrent", "ragged chunks of 5"])
def test_extreme_gates(form, case):
    q, k, v, i, f = tokens(10)
    # Rounding errors are unbounded for queries nearly orthogonal to the memory. Positive keys, and queries whose
    # features all have the same sign, avoid that.
    q, k = np.sign(q[..., :1]) * np.abs(q), np.abs(k)
    rng = np.random.default_rng(11)
    i, f = (0.1 * i + rng.choice(np.atleast_1d(levels), i.shape) for levels in EXTREMES[case])
    args = (q, k, v, i.astype(np.float32), f.astype(np.float32))
    gradients, h = value_and_gradients(form)(*args, PACKED)
    assert_close([h], [by_equations(*args, segment_ids=PACKED)], tolerance=5e-5, floor=1e-33)
    for which, gradient in enumerate(gradients):
        assert np.all(np.isfinite(gradient))
        towards, expected = slope(args, which, step=1e-5, segment_ids=PACKED)
        # If h hardly depends on an input, large terms cancel; the second tolerance allows for their rounding.
        tolerance = 1e-4 * np.abs(gradient * towards).sum() + 1e-6 * np.abs(h).sum() + 1e-36
        assert abs(np.sum(gradient * towards) - expected) < tolerance, NAMES[which]


def test_strong_forgetting_keeps_precision():
    # In one running sum of these gates, neighbors would differ by less than its last bit.
    args = list(tokens(12, length=256))
    args[3], args[4] = 0.1 * args[3], np.where(np.arange(256)[:, None] % 4, 3.0, -80.0) + 0 * args[4]
    ours = jax.jit(functools.partial(mlstm_chunkwise, chunk_size=256))(*args)
    error = np.abs(ours - by_equations(*args))
    assert np.quantile(error, 0.99) < 1e-5


@pytest.mark.parametrize("form", FORMS)
def test_a_query_of_zeros_reads_zero(form):
    q, k, v, i, f = tokens()
    gradients, h = value_and_gradients(form)(0 * q, k, v, 0 * i + 100.0, f, PACKED)
    assert not np.any(h)
    assert all(np.all(np.isfinite(x)) for x in gradients)


# --- In programs ---


def split(loss, num_split):
    """Sums `loss` over devices that split its first arguments by rows and heads, with the rest replicated."""
    by_rows_and_heads, mesh = P("dp", None, "tp"), mw.create_mesh("dp:2,tp:4")

    def everywhere(*args):
        specs = tuple(by_rows_and_heads if n < num_split else P() for n in range(len(args)))
        added = lambda *args: jax.lax.psum(loss(*args), ("dp", "tp"))  # noqa: E731
        return local_map(added, mesh=mesh, in_specs=specs, out_specs=P())(*args)

    return everywhere


@pytest.mark.parametrize(
    ("form", "dtype"),
    [
        ("parallel", "float32"),
        ("recurrent", "float32"),
        ("ragged chunks of 5", "float32"),
        ("ragged chunks of 5", "bfloat16"),
    ],
)
def test_split_over_rows_and_heads_equals_one_device(form, dtype):
    args = [jnp.asarray(x, dtype) for x in tokens(13)]

    def loss(q, k, v, i, f, w, segment_ids):
        run = jax.checkpoint(lambda *args: FORMS[form](*args[:5], segment_ids=args[5]))  # must not change the result
        return jnp.sum(run(q, k, v, i, f, segment_ids[jax.lax.axis_index("dp")[None]]) * w)

    gradients = jax.jit(jax.grad(split(loss, 6), argnums=range(5)))(*args, weights(args[2].shape), PACKED)
    expected, _ = value_and_gradients(form)(*args, PACKED)
    assert_close(gradients, expected, tolerance=2e-5 if dtype == "float32" else 1e-2)


@pytest.mark.parametrize("form", WITH_STATE)
def test_a_state_and_gates_that_are_the_same_on_all_devices(form):
    q, k, v, i, f = tokens(14)
    i, f, memory, normaliser, stabiliser = shared = (i[:1, :, :1], f[:1, :, :1], *(x[:1, :1] for x in some_state()[:3]))

    def loss(q, k, v, i, f, *state):
        h, after = WITH_STATE[form](q, k, v, i, f, state=MLSTMState(*state, jnp.full(1, -1)))
        return sum(jnp.sum(jnp.sin(x)) for x in (h, *in_units_of_one(after)))

    value, gradients = jax.jit(jax.value_and_grad(split(loss, 3), argnums=range(8)))(q, k, v, *shared)
    gates = (np.broadcast_to(x, (B, S, H)) for x in (i, f))
    state = (np.broadcast_to(x, (B, H, *x.shape[2:])) for x in (memory, normaliser, stabiliser))
    reference, expected = state_gradients(form)(*state, q, k, v, *gates)
    expected = [np.asarray(x) for x in (*expected[3:], *expected[:3])]
    for n, heads in ((3, 2), (4, 2), (5, 1), (6, 1), (7, 1)):  # replicated inputs get the sum over rows and heads
        expected[n] = expected[n].sum(axis=(0, heads), keepdims=True)
    np.testing.assert_allclose(value, reference, rtol=1e-5)
    assert_close(gradients, expected, names=(*NAMES, *STATE_NAMES[:3]))


def test_memory_grows_linearly_with_the_length():
    def temporary(form, length):
        shapes = [jax.ShapeDtypeStruct((B, length, *x.shape[2:]), x.dtype) for x in tokens()]
        gradient = jax.jit(jax.grad(lambda *args: jnp.sum(jnp.sin(form(*args))), argnums=range(5)))
        return gradient.lower(*shapes).compile().memory_analysis().temp_size_in_bytes

    chunkwise = functools.partial(mlstm_chunkwise, chunk_size=16)
    short, long = temporary(chunkwise, 256), temporary(chunkwise, 512)
    one_array_of_all_pairs = B * H * 512 * 512 * 4
    assert long < 2.5 * short
    assert long < one_array_of_all_pairs / 2


@pytest.mark.parametrize(
    ("backend", "key_size", "length"), [("cpu", 256, 64), ("gpu", 4, 128), ("gpu", 128, 256), ("gpu", 256, 512)]
)
def test_the_default_chunk_size_suits_the_chip(monkeypatch, backend, key_size, length):
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    q, _, v, i, f = tokens(length=600)
    keys = jax.ShapeDtypeStruct((*q.shape[:-1], key_size), q.dtype)

    def program(**options):
        text = str(jax.make_jaxpr(functools.partial(mlstm_chunkwise, **options))(keys, keys, v, i, f))
        return re.sub("0x[0-9a-f]+", "", text)  # addresses of functions

    assert program() == program(chunk_size=None) == program(chunk_size=length) != program(chunk_size=32)


# --- Bad inputs ---


def changed(**new):
    return [new.get(name, x) for name, x in zip(NAMES, tokens(), strict=True)]


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        (changed(k=np.ones((B, S, H, K + 1))), {}, r"got q of shape \(2, 13, 4, 4\), k of \(2, 13, 4, 5\)"),
        (changed(v=np.ones((B, S, H))), {}, r"hint: pass q and k as \[B, S, H, K\]"),
        ([x[:, :0] for x in tokens()], {}, r"got q of shape \(2, 0, 4, 4\)"),
        (changed(f=np.ones((B, S, 1))), {}, r"pass both with shape \(2, 13, 4\)"),
        (changed(k=np.ones((B, S, H, K), np.float16)), {}, "with the same float dtype"),
        (changed(i=np.ones((B, S, H), int)), {}, "gates of int32 and float32"),
        (tokens(), {"segment_ids": np.ones((B, S + 1), int)}, r"integers of shape \(2, 13\)"),
        (tokens(), {"segment_ids": np.ones((B, S))}, r"segment_ids of shape \(2, 13\) and dtype float32"),
        (
            tokens(),
            {"state": init_mlstm_state(B, H, key_dim=V, value_dim=K)},
            r"hint: use init_mlstm_state\(2, 4, key_dim=4",
        ),
        (tokens(), {"chunk_size": 0}, "chunk_size must be a positive integer; got 0"),
        (tokens(), {"chunk_size": 2.5}, "chunk_size must be a positive integer; got 2.5"),
    ],
)
def test_bad_inputs(args, kwargs, message):
    with pytest.raises(PlacementError, match=rf"mlstm_chunkwise(.|\n)*{message}(.|\n)*"):
        mlstm_chunkwise(*args, **kwargs)
