import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from meshwright.parallel import local_map
from meshwright.parallel.kernels import dispatch as kernels
from meshwright.parallel.kernels import norm_kernel
from meshwright.parallel.kernels.norm_kernel import residual_norm
from meshwright.parallel.tensor import sequence_norm

from ..one_device import close, mesh_of

# Rows that fill programs and that do not, features that are powers of two and that are not.
SHAPES = [(2, 37, 64), (1, 32, 16), (3, 5, 24)]


def normal(seed, *shape, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(seed), shape).astype(dtype)


def values_and_grads(norm, h, scale, cotangents):
    out, pull = jax.vjp(norm, h, scale)
    return *out, *pull(cotangents)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(jnp.float32, 2e-6), (jnp.bfloat16, 8e-3)])
def test_the_kernel_is_the_norm_and_the_sum_of_both_gradients(shape, dtype, tolerance):
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


def test_without_kernels_it_is_the_plain_norm():
    h, scale = normal(0, 2, 3, 8), normal(1, 8)
    same, normed = residual_norm(h, scale, axis=None, kernels=False)
    assert same is h
    assert (normed == sequence_norm(h, scale, axis=None)).all()


def in_plain_jax(kernel, h, d_kept, d_normed, inverse, scale, *, outs, **_):
    """What the kernel computes, row by row of its partial sums: JAX cannot interpret kernels on several devices."""
    wide, d_normed = (x.astype(jnp.float32) for x in (h, d_normed))
    unit, d_unit = wide * inverse[:, None], d_normed * scale
    d_h = (d_unit - unit * (d_unit * unit).mean(axis=1, keepdims=True)) * inverse[:, None] + d_kept
    parts = jnp.zeros_like((d_normed * unit)[:1]).repeat(outs[1][0][0], axis=0)
    return [d_h.astype(h.dtype), parts.at[0].set((d_normed * unit).sum(axis=0))]


@pytest.mark.parametrize("split", [True, False])
def test_the_scale_gets_its_gradient_from_all_devices_once(split, monkeypatch):
    monkeypatch.setattr(kernels, "chip_family", lambda mesh: "gpu")
    monkeypatch.setattr(norm_kernel, "call_kernel", in_plain_jax)
    h, scale, weights = normal(0, 4, 8, 16), 1 + normal(1, 16), normal(2, 2, 4, 8, 16)
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
