"""All kernels lower for Hopper GPUs without one; warnings are errors, so that a deprecation in JAX fails here."""

import functools
import importlib
import pkgutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshwright.models import mlstm_chunkwise, mlstm_recurrent
from meshwright.models.mlstm_chunks import gated_mlstm
from meshwright.parallel import kernels
from meshwright.parallel.fp8.casting import E4M3, E5M2
from meshwright.parallel.kernels import dispatch
from meshwright.parallel.kernels.cast_kernel import cast_both_ways
from meshwright.parallel.kernels.copy_kernels import cut_columns, stack
from meshwright.parallel.kernels.gradient_kernels import residual_norm, softmax_gradient
from meshwright.parallel.kernels.head_norm_kernel import gated_head_norm
from meshwright.parallel.kernels.matmul_kernel import write_product
from meshwright.parallel.kernels.symmetric_kernel import symmetric_product

pytestmark = pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="Mosaic GPU kernels need jax 0.11")


@pytest.fixture(autouse=True)
def not_interpreted(monkeypatch):
    for found in pkgutil.iter_modules(kernels.__path__, f"{kernels.__name__}."):
        module = importlib.import_module(found.name)
        if hasattr(module, "is_interpreted"):
            monkeypatch.setattr(module, "is_interpreted", lambda: False)
    monkeypatch.setattr(dispatch, "is_hopper", lambda mesh: True)


def of(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


def norm_gradient(h, scale):
    return jax.vjp(lambda *given: residual_norm(*given, axis=None, kernels=True), h, scale)[1]((h, h))


def with_gradients(function, *given):
    out, pull = jax.vjp(functools.partial(function, kernels=True), *given)
    return out, pull(out)


def mlstm_gradient(*given):
    def total(*given):
        return mlstm_chunkwise(*given, kernels=True).sum().astype(jnp.float32)

    return jax.grad(total, argnums=range(5))(*given)


def gated(length, features):
    return [of(1, length, features), of(features, dtype=jnp.float32)]


GATES = [of(1, 256, 2, dtype=jnp.float32)] * 2
SMALL_GATES = [of(1, 128, 1, dtype=jnp.float32)] * 2
CELL = [of(1, 256, 2, 256), of(1, 256, 2, 256), of(1, 256, 2, 512), *GATES]
PADDED = (np.arange(256)[None] < 200).astype(np.int32)
TOKEN = [of(1, 1, 2, 256), of(1, 1, 2, 256), of(1, 1, 2, 512)] + [of(1, 1, 2, dtype=jnp.float32)] * 2
KERNELS = {
    "cast_e4m3": (functools.partial(cast_both_ways, dtype=E4M3), [of(256, 128), of(dtype=jnp.float32)], 1),
    "cast_e5m2": (functools.partial(cast_both_ways, dtype=E5M2), [of(128, 256), of(dtype=jnp.float32)], 1),
    "cut": (functools.partial(cut_columns, edges=[(0, 256), (256, 768)], kernels=True), [of(64, 768)], 1),
    "stack": (lambda *arrays: stack(arrays, kernels=True), [of(64, 128)] * 6, 1),
    "norm": (norm_gradient, [of(70, 256), of(256, dtype=jnp.float32)], 1),
    "head_norm": (functools.partial(with_gradients, gated_head_norm), [of(1, 70, 3, 96), *gated(70, 288)], 2),
    "softmax": (softmax_gradient, [of(5, 5120), of(5, dtype=jnp.int32), of(5, dtype=jnp.float32)], 1),
    "product": (
        lambda rows, w: write_product(None, rows, w, size=8, num_blocks=1, shard_rows=48, start=0),
        [of(128, 128), of(128, 256)],
        1,
    ),
    "symmetric": (symmetric_product, [of(2, 384, 128), of(2, 384, 128)], 1),
    "mlstm": (mlstm_gradient, CELL, 6),
    "gated_mlstm": (
        functools.partial(with_gradients, functools.partial(gated_mlstm, eps=1e-6, segment_ids=PADDED)),
        [*CELL, *gated(256, 1024)],
        8,
    ),
    "mlstm_slices": (mlstm_gradient, [of(1, 128, 1, 384), of(1, 128, 1, 384), of(1, 128, 1, 768), *SMALL_GATES], 6),
    "token": (functools.partial(mlstm_recurrent, kernels=True), TOKEN, 1),
}


@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_lowers_for_a_gpu(name):
    function, given, count = KERNELS[name]
    lowered = jax.jit(lambda *given: function(*given)).trace(*given).lower(lowering_platforms=("cuda",))
    calls = [line for line in lowered.as_text().splitlines() if "custom_call" in line and "mosaic_gpu" in line]
    assert len(calls) == count
