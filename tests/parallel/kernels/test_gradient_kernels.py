"""Gradient kernels: RMSNorm with a residual stream, and softmax cross-entropy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from meshwright.parallel import local_map, logit_chunks
from meshwright.parallel.cross_entropy import linear_cross_entropy
from meshwright.parallel.kernels import gradient_kernels
from meshwright.parallel.kernels.gradient_kernels import residual_norm, softmax_gradient
from meshwright.parallel.tensor import sequence_norm

from ..losses import naive, values
from ..one_device import close, mesh_of

# Rows that do and do not fill blocks; features that are and are not powers of two.
SHAPES = [(2, 37, 128), (1, 32, 256), (3, 5, 384)]


def normal(seed, *shape, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(seed), shape).astype(dtype)


def values_and_grads(norm, h, scale, cotangents):
    out, pull = jax.vjp(norm, h, scale)
    return *out, *pull(cotangents)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(jnp.float32, 2e-6), (jnp.bfloat16, 8e-3)])
def test_norm_kernel_sums_both_gradients(shape, dtype, tolerance):
    h, scale = normal(0, *shape, dtype=dtype), 1 + normal(1, shape[-1])
    cotangents = normal(2, *shape, dtype=dtype), normal(3, *shape, dtype=dtype)

    def plain(h, scale):  # in float32
        return h, sequence_norm(h, scale, axis=None)

    exact = values_and_grads(plain, h.astype(jnp.float32), scale, tuple(c.astype(jnp.float32) for c in cotangents))
    norm = jax.jit(lambda h, scale: residual_norm(h, scale, axis=None, kernels=True))
    found = values_and_grads(norm, h, scale, cotangents)
    assert [x.dtype for x in found] == [dtype, dtype, dtype, jnp.float32]
    for got, true, what in zip(found, exact, ("h", "normed", "d_h", "d_scale"), strict=True):
        close(got, np.asarray(true), tolerance, what)


@pytest.mark.parametrize("features", [100, 8192])
def test_unsupported_features_use_xla(features, monkeypatch):
    monkeypatch.setattr(gradient_kernels, "call_kernel", None)
    h, scale = normal(0, 2, features), normal(1, features)
    jax.grad(lambda h: residual_norm(h, scale, axis=None, kernels=True)[1].sum())(h)


def test_without_kernels_the_norm_is_plain():
    h, scale = normal(0, 2, 3, 8), normal(1, 8)
    same, normed = residual_norm(h, scale, axis=None, kernels=False)
    assert same is h
    assert (normed == sequence_norm(h, scale, axis=None)).all()


def in_plain_jax(kernel, h, d_kept, d_normed, inverse, scale, *, outs, **_):
    """The same as the kernel in plain JAX, which cannot interpret kernels on several devices."""
    wide, d_normed = (x.astype(jnp.float32) for x in (h, d_normed))
    unit, d_unit = wide * inverse[:, None], d_normed * scale
    d_h = (d_unit - unit * (d_unit * unit).mean(axis=1, keepdims=True)) * inverse[:, None] + d_kept
    parts = jnp.zeros_like((d_normed * unit)[:1]).repeat(outs[1][0][0], axis=0)
    return [d_h.astype(h.dtype), parts.at[0].set((d_normed * unit).sum(axis=0))]


@pytest.mark.parametrize("split", [True, False])
def test_scale_gradient_is_summed_over_devices_once(split, monkeypatch):
    monkeypatch.setattr(gradient_kernels, "uses_kernels", lambda wanted: wanted is not False)
    monkeypatch.setattr(gradient_kernels, "call_kernel", in_plain_jax)
    h, scale, weights = normal(0, 4, 8, 128), 1 + normal(1, 128), normal(2, 2, 4, 8, 128)
    rows = P("dp", "tp") if split else P("dp")

    def loss(h, scale, weights, *, kernels):
        pair = residual_norm(h, scale, axis="tp", kernels=kernels)
        return sum((x * w).sum() for x, w in zip(pair, weights, strict=True))

    def on_devices(h, scale, weights):
        total = loss(h, scale, weights, kernels=None)
        return jax.lax.psum(total, ("dp", "tp") if split else "dp")

    mapped = local_map(on_devices, mesh=mesh_of(4), in_specs=(rows, P(), P(None, *rows)), out_specs=P())
    found = jax.jit(jax.grad(mapped, argnums=(0, 1)))(h, scale, weights)
    exact = jax.grad(lambda *args: loss(*args, kernels=False), argnums=(0, 1))(h, scale, weights)
    for got, true, what in zip(found, exact, ("h", "scale"), strict=True):
        close(got, np.asarray(true), 2e-6, what)


# --- Softmax ---


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    """Makes rows of many pieces, but small enough to interpret; traces with stand-ins are not reused."""
    monkeypatch.setattr(gradient_kernels, "_LANES", 16)
    gradient_kernels._norm_gradient.clear_cache()
    yield
    gradient_kernels._norm_gradient.clear_cache()


def logits_of(rows, size, dtype):
    return (4 * jax.random.normal(jax.random.key(0), (rows, size))).astype(dtype)


# One piece and several, whole steps and not, with and without a last piece that overlaps another.
@pytest.mark.parametrize("size", [16, 24, 64, 176, 200])
@pytest.mark.parametrize(("dtype", "tolerance"), [(jnp.float32, 2e-6), (jnp.bfloat16, 8e-3)])
def test_gradient_and_statistics_equal_a_softmax(size, dtype, tolerance):
    logits = logits_of(6, size, dtype)
    wide = np.asarray(logits, np.float64)
    targets = jnp.array([0, size - 1, size // 2, int(wide[3].argmax()), 3, 1])
    factors, z_loss = jnp.array([1.0, 0.5, 2.0, 1.0, 0.0, 0.25]), 1e-2
    found = jax.jit(lambda logits: softmax_gradient(logits, targets, factors, z_loss=z_loss))(logits)
    log_sum = np.log(np.exp(wide).sum(axis=1))
    d_logits = np.exp(wide - log_sum[:, None]) * (1 + 2 * z_loss * log_sum)[:, None]
    d_logits[np.arange(6), np.asarray(targets)] -= 1
    assert found.d_logits.dtype == dtype
    close(found.d_logits, d_logits * np.asarray(factors)[:, None], tolerance, "d_logits")
    close(found.log_sum, log_sum, 1e-6, "log_sum")
    assert (np.asarray(found.of_target) == wide[np.arange(6), np.asarray(targets)]).all()
    assert (np.asarray(found.place) == wide.argmax(axis=1)).all()


def test_ties_go_to_the_first_logit():
    logits = jnp.zeros((2, 104)).at[0, jnp.array([40, 41, 103])].set(5.0).at[1, 103].set(5.0)
    assert softmax_gradient(logits, jnp.zeros(2, int), jnp.ones(2)).place.tolist() == [40, 103]


def test_large_and_infinite_logits_stay_in_range():
    logits = jnp.array([[3e4, -3e4, 2.9e4] * 8, [-jnp.inf, 0.0, -jnp.inf] * 8])
    logits = logits.at[:, 3:].set(jnp.array([[-3e4], [-jnp.inf]]))
    found = softmax_gradient(logits, jnp.array([0, 1]), jnp.ones(2))
    assert not found.d_logits.any()
    assert found.log_sum.tolist() == [3e4, 0.0]


def test_targets_outside_the_vocabulary_are_not_read():
    found = softmax_gradient(jnp.zeros((2, 40)), jnp.array([-1, 40]), jnp.array([1.0, jnp.nan]))
    assert found.of_target.tolist() == [0.0, 0.0]
    np.testing.assert_allclose(found.d_logits[0], 0.025, rtol=1e-6)
    assert bool(jnp.isnan(found.d_logits[1]).all())


def with_gradients(kernels, a, **options):
    def total(x, head):
        sums = linear_cross_entropy(x, head, a["targets"], weights=a["weights"], kernels=kernels, **options)
        return sums.total, sums

    (_, sums), grads = jax.jit(jax.value_and_grad(total, argnums=(0, 1), has_aux=True))(a["x"], a["head"])
    return sums, grads


@pytest.mark.parametrize("z_loss", [0.0, 1e-2])
def test_loss_with_the_kernel_equals_the_loss(z_loss, monkeypatch):
    used, kernel = [], logit_chunks.softmax_gradient
    monkeypatch.setattr(logit_chunks, "softmax_gradient", lambda *a, **kw: used.append(1) or kernel(*a, **kw))
    a = values()
    sums, grads = with_gradients(True, a, z_loss=z_loss, chunk_rows=8)
    assert used
    for got, true, what in zip(sums, naive(a, z_loss=z_loss), sums._fields, strict=True):
        close(got, np.asarray(true), 2e-6, what)
    for got, true in zip(grads, with_gradients(False, a, z_loss=z_loss, chunk_rows=8)[1], strict=True):
        close(got, np.asarray(true), 2e-6, "gradient")


def test_zero_weights_ignore_bad_values_and_bad_targets_are_nan():
    a = dict(values())
    weights = np.ones_like(a["weights"])
    weights[0, 3] = 0.0
    x, targets = a["x"].copy(), a["targets"].copy()
    x[0, 3], targets[0, 3] = np.nan, -7
    sums, grads = with_gradients(True, a | {"x": x, "targets": targets, "weights": weights}, chunk_rows=8)
    assert all(bool(jnp.isfinite(part).all()) for part in (*sums, *grads))
    targets[1, 2] = 10_000
    sums, grads = with_gradients(True, a | {"x": x, "targets": targets, "weights": weights}, chunk_rows=8)
    assert bool(jnp.isnan(sums.total))
    assert bool(jnp.isnan(grads[0][1, 2]).all())
    assert bool(jnp.isfinite(grads[0][0]).all())


def test_unsupported_sizes_use_xla(monkeypatch):
    monkeypatch.setattr(logit_chunks, "softmax_gradient", None)
    a = dict(values())
    with_gradients(True, a | {"head": a["head"][:, :-1]})


@pytest.mark.parametrize("options", [{"label_smoothing": 0.1}, {"soft_cap": 5.0}, {"vocab_size": 33}])
def test_unsupported_options_use_xla(options, monkeypatch):
    monkeypatch.setattr(logit_chunks, "softmax_gradient", None)
    sums, _ = with_gradients(True, values(), **options)
    close(sums.total, np.asarray(naive(values(), **options).total), 2e-6, "total")
