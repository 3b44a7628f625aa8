"""The mLSTM's kernels for Hopper GPUs: the same function as the other forms, with plain JAX in place of the kernels."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import meshwright as mw
from meshwright.models import mlstm_chunks, mlstm_chunkwise, mlstm_hopper, mlstm_parallel
from meshwright.models.mlstm_chunks import gated_mlstm
from meshwright.models.mlstm_hopper import can_fuse
from meshwright.parallel import local_map
from meshwright.parallel.kernels import head_norm_kernel
from meshwright.parallel.kernels.head_norm_kernel import gated_head_norm

from ..parallel.kernels.plain_head_norm import in_plain_jax
from ..parallel.kernels.recurrence import plain_pairs, plain_sums

B, S, H, K, V = 2, 256, 2, 16, 24
NAMES = ("h", "q", "k", "v", "i", "f")


fused = functools.partial(mlstm_chunkwise, kernels=True)


@pytest.fixture
def stand_ins(monkeypatch):
    """Records the kernels' names, and computes them in plain JAX, in float32."""
    used = []
    monkeypatch.setattr(mlstm_hopper, "running_sums", lambda *a, **kw: used.append("sums") or plain_sums(*a, **kw))
    monkeypatch.setattr(
        mlstm_hopper, "gated_pairs", lambda pairs, *a, **kw: used.append(pairs.name) or plain_pairs(pairs, *a, **kw)
    )
    monkeypatch.setattr(mlstm_hopper, "_CHUNK_SIZES", (64,))
    monkeypatch.setattr(mlstm_chunks, "uses_hopper_kernels", lambda wanted: wanted is not False)
    monkeypatch.setattr(mlstm_chunks, "why_not_fused", lambda q, v: None)
    return used


def tokens(seed=0, *, forget=1.0):
    rng = np.random.default_rng(seed)
    q, k, v = (rng.standard_normal((B, S, H, size)).astype(np.float32) for size in (K, K, V))
    i, f = (2 * rng.standard_normal((B, S, H)).astype(np.float32) for _ in range(2))
    return q, k, v, i, f + forget


def packed(seed=1):
    """Documents of random lengths, some of them within a chunk, and padding at the end."""
    rng = np.random.default_rng(seed)
    ids = 1 + np.cumsum(rng.random((B, S)) < 8 / S, axis=1)
    ids[:, -9:] = 0
    return ids.astype(np.int32)


def values_and_gradients(cell, args, weights):
    def run(*args):
        h, pull = jax.vjp(cell, *args)
        return h, *pull(weights)

    return jax.jit(run)(*args)


@pytest.mark.parametrize("forget", [4.0, 0.0, -4.0])
@pytest.mark.parametrize("segments", ["one document", "packed"])
def test_outputs_and_gradients_equal_the_parallel_form(forget, segments, stand_ins):
    args, segment_ids = tokens(forget=forget), packed() if segments == "packed" else None
    weights = np.random.default_rng(5).standard_normal((B, S, H, V)).astype(np.float32)
    found = values_and_gradients(lambda *a: fused(*a, segment_ids=segment_ids), args, weights)
    assert stand_ins == [
        "sums", "mlstm_outputs", "sums", "mlstm_value_gradients", "mlstm_key_gradients", "mlstm_query_gradients"
    ]  # fmt: skip
    exact = values_and_gradients(lambda *a: mlstm_parallel(*a, segment_ids=segment_ids), args, weights)
    for name, got, true in zip(NAMES, found, exact, strict=True):
        # One float32 sum of up to 64 log forget gates of at most 12 has an error of 2^-24 * 64 * 12 = 5e-5; gradients
        # of forget gates are differences of larger sums.
        error = np.linalg.norm(got - true) / np.linalg.norm(true)
        assert error < (2e-3 if name == "f" else 2e-4), name


def gated_tokens(eps):
    """Inputs of a cell and of the norm of its outputs, which are about as large as the root of `eps`."""
    q, k, _, i, f = tokens(forget=4.0)
    rng, size = np.random.default_rng(3), 32
    v = eps**0.5 * rng.standard_normal((B, S, H, size)).astype(np.float32)
    gate, weights = rng.standard_normal((2, B, S, H * size)).astype(np.float32)
    return (q, k, v, i, f, gate, 1 + rng.standard_normal(H * size).astype(np.float32)), weights


@pytest.fixture
def norms(monkeypatch):
    """Computes the norm's kernels in plain JAX, also where one device would interpret them, and records their names."""
    used = []

    def call(*args, name, **options):
        used.append(name)
        return in_plain_jax(*args, name=name, **options)

    monkeypatch.setattr(head_norm_kernel, "call_kernel", call)
    for function in (head_norm_kernel.head_norm_forward, head_norm_kernel.head_norm_gradient):
        function.clear_cache()
    yield used
    for function in (head_norm_kernel.head_norm_forward, head_norm_kernel.head_norm_gradient):
        function.clear_cache()


@pytest.mark.parametrize("segments", ["one document", "packed"])
def test_with_the_norm_gradients_equal_the_parallel_form(segments, stand_ins, norms):
    eps = 1e-4
    args, weights = gated_tokens(eps)
    segment_ids = packed() if segments == "packed" else None
    found = values_and_gradients(
        lambda *a: gated_mlstm(*a, eps=eps, segment_ids=segment_ids, kernels=True), args, weights
    )
    assert norms == ["gated_head_norm", "gated_head_norm_gradient"]
    assert len(stand_ins) == 6

    def exactly(*args):
        return gated_head_norm(mlstm_parallel(*args[:5], segment_ids=segment_ids), *args[5:], eps=eps, kernels=False)

    exact = values_and_gradients(exactly, args, weights)
    for name, got, true in zip(("y", *NAMES[1:], "gate", "scale"), found, exact, strict=True):
        error = np.linalg.norm(got - true) / np.linalg.norm(true)
        assert error < (2e-3 if name == "f" else 2e-4), name  # the bounds above


def test_gates_of_any_size_stay_finite(stand_ins):
    q, k, v, i, f = tokens()
    i = i.copy()
    i[:, 3], i[:, 100], i[:, 101] = 90.0, -90.0, -np.inf
    found = values_and_gradients(fused, (q, k, v, i, f), np.ones((B, S, H, V), np.float32))
    exact = values_and_gradients(mlstm_parallel, (q, k, v, i, f), np.ones((B, S, H, V), np.float32))
    for name, got, true in zip(NAMES, found, exact, strict=True):
        assert np.isfinite(got).all(), name
        np.testing.assert_allclose(got, true, atol=2e-3 * np.abs(true).max(), err_msg=name)


def test_split_rows_and_heads_equal_one_device(stand_ins):
    args = tokens()
    weights = np.random.default_rng(5).standard_normal((B, S, H, V)).astype(np.float32)

    def loss(q, k, v, i, f, weights):
        return jnp.sum(fused(q, k, v, i, f) * weights)

    specs = P("dp", None, "tp")
    split = local_map(
        lambda *a: jax.lax.psum(loss(*a), ("dp", "tp")),
        mesh=mw.create_mesh("dp:2,tp:2", devices=4),
        in_specs=(specs,) * 6,
        out_specs=P(),
    )
    found = jax.jit(jax.value_and_grad(split, argnums=range(5)))(*args, weights)
    exact = jax.jit(jax.value_and_grad(loss, argnums=range(5)))(*args, weights)
    for got, true in zip(jax.tree.leaves(found), jax.tree.leaves(exact), strict=True):
        np.testing.assert_allclose(got, true, rtol=1e-4, atol=1e-4 * np.abs(true).max())


def test_with_the_norm_split_rows_and_heads_equal_one_device(stand_ins, norms):
    args, weights = gated_tokens(1e-4)

    def loss(*args):
        return jnp.sum(gated_mlstm(*args[:-1], eps=1e-4, kernels=True) * args[-1])

    heads, features = P("dp", None, "tp"), P("tp")
    split = local_map(
        lambda *a: jax.lax.psum(loss(*a), ("dp", "tp")),
        mesh=mw.create_mesh("dp:2,tp:2", devices=4),
        in_specs=(*(heads,) * 6, features, heads),
        out_specs=P(),
    )
    found = jax.jit(jax.value_and_grad(split, argnums=range(7)))(*args, weights)
    exact = jax.jit(jax.value_and_grad(loss, argnums=range(7)))(*args, weights)
    for got, true in zip(jax.tree.leaves(found), jax.tree.leaves(exact), strict=True):
        np.testing.assert_allclose(got, true, rtol=1e-4, atol=1e-4 * np.abs(true).max())


needs_mosaic = pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="Mosaic GPU kernels need jax 0.11")


@needs_mosaic
@pytest.mark.slow  # interprets six kernels
@pytest.mark.parametrize(
    ("length", "keys", "values"),
    [(128, 64, 64), (384, 64, 64), (128, 320, 640)],
    ids=["one chunk", "three chunks", "shared columns and slices"],
)
def test_interpreted_kernels_equal_the_parallel_form(length, keys, values):
    rng = np.random.default_rng(0)
    q, k, v, weights = (
        jnp.asarray(rng.standard_normal((1, length, 1, size)), jnp.bfloat16) for size in (keys, keys, values, values)
    )
    i, f = (jnp.asarray(rng.standard_normal((1, length, 1)), jnp.float32) for _ in range(2))
    segment_ids = jnp.asarray(1 + (np.arange(length)[None] >= 50), jnp.int32)
    args = q, k, v, i - 1, f + 3
    found = values_and_gradients(lambda *a: mlstm_chunkwise(*a, segment_ids=segment_ids, kernels=True), args, weights)

    def exactly(*args):
        return mlstm_parallel(*(x.astype(jnp.float32) for x in args), segment_ids=segment_ids)

    exact = values_and_gradients(exactly, args, weights.astype(jnp.float32))
    for name, got, true in zip(NAMES, found, exact, strict=True):
        got, true = np.asarray(got, np.float64), np.asarray(true, np.float64)
        assert np.linalg.norm(got - true) < 2e-2 * np.linalg.norm(true), name


@needs_mosaic
def test_kernels_trace_on_several_devices(monkeypatch):
    """Their results and gradients have the types that shard_map expects."""
    monkeypatch.setattr(mlstm_chunks, "uses_hopper_kernels", lambda wanted: True)
    shapes = [jax.ShapeDtypeStruct((2, 256, 2, size), jnp.bfloat16) for size in (64, 64, 128)]
    gates = [jax.ShapeDtypeStruct((2, 256, 2), jnp.float32)] * 2
    ids = jax.ShapeDtypeStruct((2, 256), jnp.int32)

    def local(q, k, v, i, f, segment_ids):
        h = fused(q, k, v, i, f, segment_ids=segment_ids)
        return jax.lax.psum(jnp.sum(h.astype(jnp.float32)), "dp")

    split = local_map(local, mesh=mw.create_mesh("dp:2", devices=2), in_specs=(P("dp"),) * 6, out_specs=P())
    found = jax.eval_shape(jax.grad(split, argnums=range(5)), *shapes, *gates, ids)
    assert [(x.shape, x.dtype) for x in found] == [(x.shape, x.dtype) for x in (*shapes, *gates)]
    assert str(jax.make_jaxpr(jax.grad(split))(*shapes, *gates, ids)).count("mlstm_query_gradients") > 0


@pytest.mark.parametrize(
    ("keys", "values", "length", "dtype", "fits"),
    [
        (256, 512, 8192, "bfloat16", True),
        (128, 256, 384, "float16", True),
        (192, 384, 256, "bfloat16", True),
        (64, 64, 128, "bfloat16", True),
        (256, 512, 8192, "float32", False),
        (256, 512, 8200, "bfloat16", False),
        (32, 64, 8192, "bfloat16", False),
        (256, 96, 8192, "bfloat16", False),
        (512, 1088, 8192, "bfloat16", True),
        (576, 64, 8192, "bfloat16", False),
    ],
)
def test_supported_shapes_and_dtypes(keys, values, length, dtype, fits):
    q, v = (jax.ShapeDtypeStruct((1, length, 2, size), dtype) for size in (keys, values))
    assert can_fuse(q, v) is fits


@pytest.mark.parametrize(
    ("keys", "length", "dtype", "why"),
    [
        (64, 128, "float32", "inputs are float32"),
        (64, 100, "bfloat16", "rows have 100 tokens, which is not a multiple of 128"),
        (32, 128, "bfloat16", "heads have 32 features of keys and 64 of values, which should be multiples of 64"),
    ],
)
def test_a_fallback_that_was_not_asked_for_warns(keys, length, dtype, why):
    q, v = (jnp.zeros((1, length, 1, size), dtype) for size in (keys, 64))
    gates = jnp.zeros((1, length, 1))
    with pytest.warns(mw.MeshwrightWarning, match=f"kernels=True, but XLA's form runs: {why}"):
        mlstm_chunkwise(q, q, v, gates, gates, kernels=True)
    mlstm_chunkwise(q, q, v, gates, gates)


def test_states_and_chunk_sizes_use_xla(stand_ins):
    args = tokens()
    with pytest.warns(mw.MeshwrightWarning, match="kernels=True, but XLA's form runs: chunk_size is 64"):
        fused(*args, chunk_size=64)
    with pytest.warns(mw.MeshwrightWarning, match="they neither take nor return a state"):
        _, state = fused(*args, return_state=True)
    with pytest.warns(mw.MeshwrightWarning, match="they neither take nor return a state"):
        fused(*args, state=state)
    fused(*args, kernels=False)
    assert not stand_ins
    mlstm_chunkwise(*args)  # the kernels are on by default where they are supported
    assert stand_ins
