"""The stand-in for cuDNN attention has the same results, which is all that can be tested without a GPU."""

import jax
import jax.numpy as jnp
import pytest
from jax._src import xla_bridge
from jax._src.cudnn import fused_attention_stablehlo as cudnn

from meshwright.hardware.flops import count_flops
from meshwright.models import Decoder
from meshwright.plan.compiled.topology import _backward, _forward, assumed_cudnn
from meshwright.plan.plan import make_plan
from meshwright.plan.step_setup import Setup
from meshwright.train.jobs.language_job import language_job

B, T, N, H = 2, 8, 4, 16


def traced(*, by_heads=False, documents=1):
    """Returns the jaxpr equations of attention and its gradient on GPUs."""
    shape = (B, N, T, H) if by_heads else (B, T, N, H)
    x = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    options = {"qkv_layout": "BNTH" if by_heads else "BTNH", "mask_type": cudnn.MaskType.CAUSAL}
    lengths = offsets = None
    if documents > 1:
        lengths = jnp.full((B, documents), T // documents, jnp.int32)
        offsets = jnp.broadcast_to(jnp.arange(documents + 1, dtype=jnp.int32) * (T // documents), (B, documents + 1))
        options["mask_type"] = cudnn.MaskType.PADDING_CAUSAL

    def loss(q, k, v):
        packed = {"q_seqlen": lengths, "kv_seqlen": lengths, "q_offsets": offsets, "kv_offsets": offsets}
        return jnp.sum(cudnn.dot_product_attention(q, k, v, scale=1.0, **packed, **options) ** 2)

    with assumed_cudnn():
        jaxpr = jax.make_jaxpr(jax.grad(loss, (0, 1, 2)))(x, x, x)
    found = {}

    def walk(jaxpr):
        for equation in jaxpr.eqns:
            if equation.primitive.name.startswith("dot_product_attention"):
                found[equation.primitive.name] = equation
            for value in equation.params.values():
                inner = getattr(value, "jaxpr", None)
                if inner is not None:
                    walk(inner)

    walk(jaxpr.jaxpr)
    return found


@pytest.mark.parametrize(("by_heads", "documents"), [(False, 1), (True, 1), (False, 4)])
def test_the_stand_in_has_the_same_results(by_heads, documents):
    found = traced(by_heads=by_heads, documents=documents)
    for name, stand_in in (("fwd", _forward), ("bwd", _backward)):
        equation = found[f"dot_product_attention_{name}_wrapper"]
        values = [jax.ShapeDtypeStruct(value.aval.shape, value.aval.dtype) for value in equation.invars]
        results = jax.eval_shape(lambda *args, f=stand_in, e=equation: f(*args, **e.params), *values)
        assert [(r.shape, r.dtype) for r in results] == [(v.aval.shape, v.aval.dtype) for v in equation.outvars]
        # Every large operand is used, so that none is freed early.
        jaxpr = jax.make_jaxpr(lambda *args, f=stand_in, e=equation: f(*args, **e.params))(*values)
        used = {id(value) for inner in jaxpr.jaxpr.eqns for value in inner.invars}
        large = [var for var in jaxpr.jaxpr.invars if var.aval.size >= B * T * N]
        assert all(id(var) in used for var in large)


def test_the_stand_in_has_no_matmuls():
    x = jax.ShapeDtypeStruct((B, T, N, H), jnp.bfloat16)
    forward = lambda q: _forward(q, q, q, *(jnp.zeros(0),) * 7, layout=0, is_training=True)  # noqa: E731
    assert count_flops(forward, x).matmul == 0


def test_the_cudnn_version_check_is_restored():
    before = cudnn.check_cudnn_version
    with assumed_cudnn():
        assert cudnn.check_cudnn_version() > 90000
    assert cudnn.check_cudnn_version is before


@pytest.mark.parametrize("target", ["h200:1x4", "v5p:2x2x1", "cpu:4"])
def test_a_plan_by_arithmetic_starts_no_backend(target, monkeypatch):
    """JAX's backends include libtpu where it is installed, which can take 20 seconds to find no TPU."""
    monkeypatch.setattr(xla_bridge, "get_backend", lambda *_, **__: pytest.fail("asked for a backend"))
    job = language_job(Decoder.named("tiny", d_model=48, num_heads=3), batch_size=4, num_tokens=24)  # traced here first
    assert make_plan(job, target, Setup(mesh="fsdp:4")).memory.total > 0
