import functools
import inspect

import jax
import jax._src.cudnn.fused_attention_stablehlo as cudnn
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import meshwright as mw
from meshwright import PlacementError
from meshwright.errors import MeshwrightWarning
from meshwright.models.attention import _warn_of_padding, attention

# Documents of 3, 1 and 2 tokens with padding at the end; padding in front; one document that fills the row.
SEGMENTS = np.array([[1, 1, 1, 2, 3, 3, 0, 0], [0, 1, 1, 2, 2, 2, 2, 2], [4, 4, 4, 4, 4, 4, 4, 4]])


def inputs(heads=4, kv_heads=2, rows=3, length=8, dim=8, dtype=jnp.float32):
    shapes = [(rows, length, n, dim) for n in (heads, kv_heads, kv_heads, heads)]
    keys = jax.random.split(jax.random.key(0), 4)
    made = [np.asarray(jax.random.normal(key, shape)) for key, shape in zip(keys, shapes, strict=True)]
    return [jnp.asarray(array.astype(dtype)) for array in made]  # NumPy casts; XLA needs F16C for float16


def in_float64(q, k, v, segment_ids=None, soft_cap=None, window=None, scale=None):
    """Attention computed one number at a time."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    out, group = np.zeros(q.shape), q.shape[2] // k.shape[2]
    for b, t, h in np.ndindex(q.shape[:3]):
        ids = np.zeros(q.shape[1]) if segment_ids is None else segment_ids[b]
        seen = [s for s in range(0 if window is None else max(0, t + 1 - window), t + 1) if ids[s] == ids[t]]
        logits = np.array([q[b, t, h] @ k[b, s, h // group] for s in seen]) * (scale or q.shape[-1] ** -0.5)
        if soft_cap is not None:
            logits = soft_cap * np.tanh(logits / soft_cap)
        weights = np.exp(logits - logits.max())
        out[b, t, h] = weights @ v[b, seen, h // group] / weights.sum()
    return out


def relative_error(actual, expected):
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    return np.linalg.norm(actual - expected) / np.linalg.norm(expected)


@pytest.mark.parametrize("soft_cap", [None, 1.5])
@pytest.mark.parametrize("segments", [None, SEGMENTS], ids=["whole", "segments"])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (3, 1)])
def test_values(heads, kv_heads, segments, soft_cap):
    q, k, v, _ = inputs(heads, kv_heads)
    out = jax.jit(lambda q, k, v: attention(q, k, v, segment_ids=segments, soft_cap=soft_cap))(q, k, v)
    assert relative_error(out, in_float64(q, k, v, segments, soft_cap)) < 1e-6


@pytest.mark.parametrize("window", [1, 3, 8])
@pytest.mark.parametrize("soft_cap", [None, 1.5])
def test_a_window_and_a_scale(window, soft_cap):
    q, k, v, _ = inputs()

    @jax.jit
    def call(q, k, v, is_windowed):
        return attention(
            q, k, v, segment_ids=SEGMENTS, soft_cap=soft_cap, scale=0.2, window=window, is_windowed=is_windowed
        )

    for is_windowed, seen in ((True, window), (False, None)):
        expected = in_float64(q, k, v, SEGMENTS, soft_cap, window=seen, scale=0.2)
        assert relative_error(call(q, k, v, is_windowed), expected) < 1e-6


@pytest.mark.parametrize("soft_cap", [None, 1.5])
def test_each_document_equals_the_document_alone(soft_cap):
    def together(q, k, v):
        return attention(q, k, v, segment_ids=jnp.asarray(SEGMENTS), soft_cap=soft_cap)

    def alone(q, k, v):
        out = jnp.zeros(q.shape)
        for row, ids in enumerate(SEGMENTS):
            for document in np.unique(ids):
                where = np.flatnonzero(ids == document)
                piece = attention(*(x[row : row + 1, where] for x in (q, k, v)), soft_cap=soft_cap)
                out = out.at[row, where].set(piece[0])
        return out

    *qkv, d_out = inputs()

    @jax.jit
    def compare(d_out, *qkv):
        return [(out, pull(d_out)) for out, pull in (jax.vjp(call, *qkv) for call in (together, alone))]

    actual, expected = compare(d_out, *qkv)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), actual, expected)


@pytest.mark.parametrize("soft_cap", [None, 1.5])
def test_bfloat16_is_within_its_rounding_error(soft_cap):
    q, k, v, d_out = inputs(dtype=jnp.bfloat16)

    def grads(q, k, v, d_out):
        call = lambda *qkv: attention(*qkv, segment_ids=jnp.asarray(SEGMENTS), soft_cap=soft_cap)  # noqa: E731
        out, pull = jax.vjp(call, q, k, v)
        return out, *pull(d_out)

    wide = grads(*(x.astype(jnp.float32) for x in (q, k, v, d_out)))
    for actual, expected in zip(grads(q, k, v, d_out), wide, strict=True):
        assert actual.dtype == jnp.bfloat16
        assert relative_error(actual, expected) < 1e-2


def test_only_rows_with_too_many_pieces_are_nan():
    q, k, v, _ = inputs()
    out = attention(q, k, v, segment_ids=jnp.asarray(SEGMENTS), max_segments=3)
    assert np.isnan(out[0]).all()  # four pieces, the padding included
    expected = attention(q, k, v, segment_ids=jnp.asarray(SEGMENTS))
    np.testing.assert_array_equal(out[1:], expected[1:])
    np.testing.assert_array_equal(
        attention(q, k, v, segment_ids=jnp.asarray(SEGMENTS), max_segments=4), attention(q, k, v, segment_ids=SEGMENTS)
    )


# --- Arguments passed to cuDNN; its results were compared on a GPU (benchmarks/results/packed_attention.md) ---


@pytest.fixture
def asked(monkeypatch):
    """Replaces cuDNN: records its arguments and computes attention in a loop over the pieces."""
    calls = []
    signature = inspect.signature(cudnn.dot_product_attention)

    def replaced(*args, **named):
        signature.bind(*args, **named)  # raises if JAX has renamed an argument
        return answer(*args, **named)

    def answer(
        q, k, v, *, q_seqlen, kv_seqlen, q_offsets, kv_offsets, scale, mask_type, qkv_layout, sliding_window_length
    ):
        calls.append({"lengths": q_seqlen, "offsets": q_offsets, "k": k, "window": sliding_window_length})
        assert (mask_type, qkv_layout) == (cudnn.MaskType.PADDING_CAUSAL, "BTNH")
        assert scale == q.shape[-1] ** -0.5
        np.testing.assert_array_equal(q_seqlen, kv_seqlen)
        np.testing.assert_array_equal(q_offsets, kv_offsets)
        out = np.zeros(q.shape, np.float32)
        for row in range(q.shape[0]):
            for offset, length in zip(q_offsets[row], q_seqlen[row], strict=False):
                where = np.arange(offset, offset + length)
                if length > 0:
                    piece = [x[row : row + 1, where] for x in (q, k, v)]
                    near = where[:, None] - where < (sliding_window_length or length)
                    out[row, where] = jax.nn.dot_product_attention(*piece, is_causal=True, mask=near[None, None])[0]
        return jnp.asarray(out)

    monkeypatch.setattr(cudnn, "dot_product_attention", replaced)
    monkeypatch.setattr(cudnn, "check_compute_capability", lambda wanted: True)
    return calls


@pytest.mark.parametrize("max_segments", [4, 6])
def test_cudnn_gets_pieces_by_offset_and_length(asked, max_segments):
    q, k, v, _ = inputs()
    options = {"segment_ids": jnp.asarray(SEGMENTS), "max_segments": max_segments}
    out = attention(q, k, v, **options, implementation="cudnn")
    np.testing.assert_allclose(out, attention(q, k, v, **options, implementation="xla"), atol=1e-5)
    (call,) = asked
    assert call["lengths"].dtype == call["offsets"].dtype == jnp.int32
    none = [-1] * (max_segments - 4)
    np.testing.assert_array_equal(call["lengths"], [[3, 1, 2, 2, *none], [1, 2, 5, -1, *none], [8, -1, -1, -1, *none]])
    np.testing.assert_array_equal(
        call["offsets"], [[0, 3, 4, 6, -1, *none], [0, 1, 3, -1, -1, *none], [0, -1, -1, -1, -1, *none]]
    )


def test_cudnn_gets_the_window(asked):
    q, k, v, _ = inputs()
    options = {"segment_ids": jnp.asarray(SEGMENTS), "max_segments": 4, "implementation": "cudnn"}
    for window, given in ((3, 3), (8, None)):  # a window as long as the row cuts nothing off
        out = attention(q, k, v, **options, window=window)
        np.testing.assert_allclose(out, in_float64(q, k, v, SEGMENTS, window=window), atol=1e-5)
        assert asked[-1]["window"] == given


def test_before_jax_0_11_cudnn_gets_one_key_head_per_query_head(asked, monkeypatch):
    q, k, v, _ = inputs(heads=4, kv_heads=2)
    options = {"segment_ids": jnp.asarray(SEGMENTS), "max_segments": 4, "implementation": "cudnn"}
    for version, heads in (((0, 10, 2), 4), ((0, 11, 2), 2)):
        monkeypatch.setattr(jax, "__version_info__", version)
        np.testing.assert_allclose(attention(q, k, v, **options), in_float64(q, k, v, SEGMENTS), atol=1e-5)
        assert asked[-1]["k"].shape[2] == heads


@pytest.mark.parametrize(
    ("dtype", "dim", "length", "options", "expected"),
    [
        (jnp.bfloat16, 8, 8, {}, "cudnn"),
        (jnp.float16, 128, 8, {}, "cudnn"),
        (jnp.float32, 8, 8, {}, "xla"),
        (jnp.bfloat16, 12, 8, {}, "xla"),
        (jnp.bfloat16, 256, 8, {}, "xla"),
        (jnp.float32, 8, 7, {}, "xla"),
        (jnp.bfloat16, 8, 8, {"segment_ids": jnp.ones((3, 8), int)}, "cudnn"),
        (jnp.bfloat16, 8, 8, {"implementation": "xla"}, "xla"),
    ],
)
def test_which_implementation_a_gpu_uses(monkeypatch, dtype, dim, length, options, expected):
    chosen = []
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(cudnn, "check_cudnn_version", lambda: 91200)
    monkeypatch.setattr(jax.nn, "dot_product_attention", lambda q, *_, **named: chosen.append(named) or q)
    q, k, v, _ = inputs(length=length, dim=dim, dtype=dtype)
    attention(q, k, v, **options)
    assert chosen[0]["implementation"] == expected
    assert chosen[0]["is_causal"]
    assert (chosen[0]["mask"] is None) == ("segment_ids" not in options)


@pytest.mark.parametrize("packed", [False, True])
def test_an_odd_length_is_padded_for_cudnn_with_one_warning(monkeypatch, packed):
    """JAX rejects the gradient of cuDNN attention at odd lengths, with and without a mask."""
    lengths, real = [], jax.nn.dot_product_attention

    def answer(q, k, v, *, implementation, **options):
        lengths.append((implementation, q.shape[1]))
        return real(q, k, v, implementation="xla", **options)

    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(cudnn, "check_cudnn_version", lambda: 91200)
    monkeypatch.setattr(jax.nn, "dot_product_attention", answer)
    _warn_of_padding.cache_clear()
    segments = jnp.asarray(SEGMENTS)[:, :7] if packed else None
    *qkv, d_out = inputs(length=7, dtype=jnp.bfloat16)

    def grads(implementation, q, k, v):
        call = functools.partial(attention, segment_ids=segments, implementation=implementation)
        out, pull = jax.vjp(call, q, k, v)
        return out, *pull(d_out)

    with pytest.warns(MeshwrightWarning, match=r"pads 7 positions to 8.*\nhint: use an even number"):
        padded = grads(None, *qkv)
    grads(None, *qkv)  # a second warning would be an error here
    plain = grads("xla", *qkv)
    assert lengths == [("cudnn", 8), ("cudnn", 8), ("xla", 7)]
    for actual, expected in zip(padded, plain, strict=True):
        assert relative_error(actual, expected) < 1e-2
        assert actual.shape == expected.shape


@pytest.mark.parametrize("length", [7, 5])
def test_an_odd_length_is_padded_inside_its_last_piece(asked, length):
    segments = jnp.asarray(SEGMENTS)[:, :length]
    q, k, v, _ = inputs(length=length)
    _warn_of_padding.cache_clear()
    with pytest.warns(MeshwrightWarning, match=f"pads {length} positions"):
        out = attention(q, k, v, segment_ids=segments, max_segments=4, implementation="cudnn")
    np.testing.assert_allclose(out, in_float64(q, k, v, np.asarray(segments)), atol=1e-5)
    assert (np.where(asked[0]["lengths"] > 0, asked[0]["lengths"], 0).sum(axis=1) == length + 1).all()


def test_the_current_mesh_overrides_the_default_backend(monkeypatch):
    chosen = []
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(cudnn, "check_cudnn_version", lambda: 91200)
    monkeypatch.setattr(jax.nn, "dot_product_attention", lambda q, *_, **named: chosen.append(named) or q)
    with jax.set_mesh(mw.create_mesh("dp:8")):
        attention(*inputs(dtype=jnp.bfloat16)[:3])
    assert chosen[0]["implementation"] == "xla"


def test_without_cudnn_a_gpu_program_uses_xla(monkeypatch):
    def missing():
        raise RuntimeError("cuDNN is not detected.")

    chosen = []
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(cudnn, "check_cudnn_version", missing)
    monkeypatch.setattr(jax.nn, "dot_product_attention", lambda q, *_, **named: chosen.append(named) or q)
    attention(*inputs(dtype=jnp.bfloat16)[:3])
    assert chosen[0]["implementation"] == "xla"


# --- Inside shard_map ---


@pytest.mark.parametrize("soft_cap", [None, 1.5])
def test_rows_and_heads_on_different_devices(soft_cap):
    q, k, v, _ = inputs(rows=4)
    ids = jnp.asarray(SEGMENTS)[jnp.array([0, 1, 2, 0])]

    def call(q, k, v, ids):
        return attention(q, k, v, segment_ids=ids, soft_cap=soft_cap, max_segments=4)

    heads, rows = P("dp", None, "tp"), P("dp")
    sharded = jax.shard_map(
        call, mesh=mw.create_mesh("dp:4,tp:2"), in_specs=(heads, heads, heads, rows), out_specs=heads
    )

    def grads(f):
        loss = jax.value_and_grad(lambda *qkv: jnp.square(f(*qkv, ids)).sum(), argnums=(0, 1, 2))
        return jax.jit(loss)(q, k, v)

    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), grads(sharded), grads(call))


# --- Errors ---


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"q": jnp.zeros((3, 8, 4))}, r"pass q as \[B, S, H, K\]"),
        ({"k": jnp.zeros((3, 7, 2, 8))}, r"k and v as \[B, S, G, K\]"),
        ({"q": jnp.zeros((3, 8, 5, 8))}, "5 query heads for 2 key heads"),
        ({"segment_ids": jnp.zeros((3, 7), int)}, r"integers of shape \(3, 8\)"),
        ({"segment_ids": jnp.zeros((3, 8))}, r"integers of shape \(3, 8\)"),
        ({"window": 0}, "window must be at least 1; got 0"),
        ({"max_segments": 0}, "max_segments must be at least 1; got 0"),
        ({"implementation": "triton"}, "no implementation 'triton'"),
        ({"implementation": "cudnn", "soft_cap": 3.0}, "no soft cap"),
        (
            {"implementation": "cudnn"},
            r"cannot run here on float32 queries of shape \(3, 8, 4, 8\).*\nhint: it needs a GPU",
        ),
    ],
)
def test_bad_inputs(change, text):
    q, k, v, _ = inputs()
    with pytest.raises(PlacementError, match=text):
        attention(**{"q": q, "k": k, "v": v, **change})
