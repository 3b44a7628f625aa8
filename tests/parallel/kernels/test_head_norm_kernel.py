"""The kernels of a head norm with a gate, interpreted, or with plain JAX in place of them on several devices."""

import functools
import runpy
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from meshwright.hardware.flops import count_flops
from meshwright.parallel import local_map
from meshwright.parallel.kernels import head_norm_kernel
from meshwright.parallel.kernels.head_norm_kernel import (
    fits_heads,
    gated_head_norm,
    head_norm_forward,
    head_norm_gradient,
)

from ..one_device import close, mesh_of
from .plain_head_norm import in_plain_jax

EPS = 0.1  # as large as some means of squares, so that it counts
# Rows that do and do not fill steps and blocks; 1, 2, 4 and 8 elements per load, and several rows per warp.
SHAPES = [(1, 4, 1, 512), (3, 35, 2, 96), (2, 37, 3, 64), (1, 70, 2, 128), (1, 9, 1, 768), (5, 5, 1, 1024)]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Makes blocks of two steps; traces with other blocks or stand-ins are not reused."""
    monkeypatch.setattr(head_norm_kernel, "_STEPS", 2)
    for function in (head_norm_forward, head_norm_gradient):
        function.clear_cache()
    yield
    for function in (head_norm_forward, head_norm_gradient):
        function.clear_cache()


def inputs(shape, dtype=jnp.float32):
    rows, length, heads, features = shape
    keys = jax.random.split(jax.random.key(0), 5)
    sizes = jnp.exp2(jax.random.randint(keys[4], (*shape[:3], 1), -4, 3))  # heads of very different sizes
    h = (sizes * jax.random.normal(keys[0], shape)).astype(dtype)
    gate, d_y = (jax.random.normal(key, (rows, length, heads * features)).astype(dtype) for key in keys[1:3])
    return h, 3 * gate, 1 + jax.random.normal(keys[3], (heads * features,)), d_y


def in_float64(h, gate, scale, d_y, keep=None):
    """Returns the norm, its three gradients, and the dot products of heads with their gradients."""
    flat = gate.shape
    h, gate, scale, d_y = (np.asarray(x, np.float64) for x in (h, gate, scale, d_y))
    gate, d_y, scale = gate.reshape(h.shape), d_y.reshape(h.shape), scale.reshape(h.shape[2:])
    inverse = 1 / np.sqrt((h * h).mean(-1, keepdims=True) + EPS)
    unit, opening = h * inverse, 1 / (1 + np.exp(-gate))
    if keep is not None:
        opening = opening * np.asarray(keep)[..., None, None]
    d_unit = d_y * opening * scale
    d_h = (d_unit - unit * (d_unit * unit).mean(-1, keepdims=True)) * inverse
    d_gate, d_scale = d_unit * unit / (1 + np.exp(gate)), (d_y * opening * unit).sum((0, 1))
    y = unit * scale * opening
    return y.reshape(flat), d_h, d_gate.reshape(flat), d_scale.reshape(-1), (d_h * h).sum(-1)


def with_kernels(h, gate, scale, d_y, keep=None):
    return head_norm_forward(EPS, h, gate, scale, keep), *head_norm_gradient(EPS, h, gate, scale, d_y, keep)


NAMES = ("y", "h", "gate", "scale", "dots")


def assert_close(found, exact, dtype):
    for got, true, name in zip(found, exact, NAMES, strict=True):
        wide = np.asarray(got, np.float64)
        assert got.dtype == (jnp.float32 if name in ("scale", "dots") else dtype), name
        # A result rounds once to its dtype, and about 32 times to float32 on the way.
        once = np.abs(true) * (float(jnp.finfo(got.dtype).eps) / 2 if got.dtype != jnp.float32 else 0)
        assert (np.abs(wide - true) <= once + 32 * 2.0**-24 * np.abs(true).max()).all(), name


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_kernels_equal_float64(shape, dtype):
    given = inputs(shape, dtype)
    assert fits_heads(*given[:2])
    assert_close(with_kernels(*given), in_float64(*given), dtype)


def test_rows_that_do_not_count_are_zero_whatever_is_in_them():
    h, gate, scale, d_y = inputs((2, 37, 2, 64))
    keep = (jnp.arange(37) % 5 != 3).astype(jnp.float32)[None].repeat(2, axis=0)
    bad = jnp.where(keep[..., None, None] == 0, jnp.nan, h)
    found, exact = with_kernels(bad, gate, scale, d_y, keep), in_float64(h, gate, scale, d_y, keep)
    assert_close(found, exact, jnp.float32)
    assert not found[1][keep == 0].any()


def values_and_gradients(given, kernels):
    *inputs, d_y = given
    norm = jax.jit(functools.partial(gated_head_norm, eps=EPS, kernels=kernels))
    y, pull = jax.vjp(norm, *inputs)
    return y, *pull(d_y)


@pytest.mark.parametrize("heads_dtype", [jnp.float32, jnp.bfloat16])
def test_gradients_equal_those_of_the_plain_form(heads_dtype):
    """`h`, gate and scale may have different dtypes, which their gradients have too."""
    given = inputs((2, 37, 3, 64), jnp.bfloat16)
    given = given[0].astype(heads_dtype), given[1], given[2].astype(jnp.bfloat16), given[3]
    found, exact = values_and_gradients(given, True), values_and_gradients(given, False)
    for got, true, name in zip(found, exact, NAMES, strict=False):
        assert got.dtype == true.dtype
        close(got, np.asarray(true, np.float32), 2**-8, name)  # both round


def test_only_gradients_use_kernels(monkeypatch):
    given = inputs((2, 40, 2, 64))
    monkeypatch.setattr(head_norm_kernel, "call_kernel", None)
    assert (gated_head_norm(*given[:3], kernels=True) == gated_head_norm(*given[:3], kernels=False)).all()
    with pytest.raises(TypeError, match="not callable"):
        values_and_gradients(given, True)


@pytest.mark.parametrize("shape", [(2, 40, 2, 100), (1, 8, 1, 2048), (1, 3, 2, 512), (1, 31, 2, 32)])
def test_other_shapes_use_xla(shape, monkeypatch):
    monkeypatch.setattr(head_norm_kernel, "call_kernel", None)
    values_and_gradients(inputs(shape), True)


def test_float64_uses_xla(monkeypatch):
    monkeypatch.setattr(head_norm_kernel, "call_kernel", None)
    with jax.enable_x64(True):
        given = [jnp.asarray(x, jnp.float64) for x in inputs((2, 40, 2, 64))]
        values_and_gradients(given, True)


@pytest.mark.parametrize("split", [True, False])
def test_gradients_are_summed_over_devices_once(split, monkeypatch):
    """JAX cannot interpret kernels on several devices."""
    monkeypatch.setattr(head_norm_kernel, "uses_kernels", lambda wanted: wanted is not False)
    used = []
    monkeypatch.setattr(
        head_norm_kernel,
        "call_kernel",
        lambda *args, name, **kw: used.append(name) or in_plain_jax(*args, name=name, **kw),
    )
    h, gate, scale, weights = inputs((4, 40, 4, 32))
    features = "tp" if split else None

    def loss(h, gate, scale, weights, *, kernels):
        return (gated_head_norm(h, gate, scale, eps=EPS, kernels=kernels) * weights).sum()

    def on_devices(*given):
        return jax.lax.psum(loss(*given, kernels=None), ("dp", "tp") if split else "dp")

    flat = P("dp", None, features)
    specs = (P("dp", None, features), flat, P(features), flat)
    mapped = local_map(on_devices, mesh=mesh_of(4), in_specs=specs, out_specs=P())
    found = jax.jit(jax.grad(mapped, argnums=(0, 1, 2)))(h, gate, scale, weights)
    exact = jax.grad(functools.partial(loss, kernels=False), argnums=(0, 1, 2))(h, gate, scale, weights)
    for got, true, what in zip(found, exact, NAMES[1:], strict=False):
        close(got, np.asarray(true), 2e-6, what)
    assert used == ["gated_head_norm", "gated_head_norm_gradient"]


def test_the_cost_is_counted():
    found = count_flops(with_kernels, *inputs((2, 40, 2, 64)))
    assert found.total > 0
    assert not found.notes


def test_kernel_values_finds_a_wrong_kernel(monkeypatch):
    values = runpy.run_path(str(Path(__file__).parents[3] / "benchmarks" / "kernel_values.py"))
    allowed = 8e-3
    assert max(values["head_norm_differences"](70, 2, 64, "bfloat16").values()) <= allowed
    tiles = head_norm_kernel._Tiles
    plain = tiles.for_all_rows

    def forgets_the_last(self, refs, body, carry):
        return plain(self._replace(num_rows=self.num_rows - self.at_once), refs, body, carry)

    monkeypatch.setattr(tiles, "for_all_rows", forgets_the_last)
    for function in (head_norm_forward, head_norm_gradient):
        function.clear_cache()
    assert not max(values["head_norm_differences"](70, 2, 64, "bfloat16").values()) <= allowed
