import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import meshwright as mw
from meshwright import PlacementError
from meshwright.hardware.flops import count_flops
from meshwright.models.attention import attention
from meshwright.models.splash import _takes, splash_attention
from meshwright.parallel.local_map import local_map
from meshwright.plan.compiled.topology import can_compile_for, mesh_on_target

ROWS, LENGTH, HEADS, KV_HEADS, DIM = 2, 256, 4, 2, 32


def arrays(dtype=jnp.float32, kind=jnp.asarray):
    shapes = [(ROWS, LENGTH, n, DIM) for n in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    draw = np.random.default_rng(0).normal
    return [kind(draw(size=shape), dtype) for shape in shapes]


def documents():
    """One row with documents of 100, 1 and 155 tokens; one row that is a single document."""
    return jnp.stack(
        [jnp.repeat(jnp.arange(3), jnp.array([100, 1, 155]), total_repeat_length=LENGTH), jnp.zeros(LENGTH)]
    )


@pytest.mark.parametrize(
    ("packed", "options"),
    [(True, {"window": 70, "scale": 0.3}), (False, {"soft_cap": 2.0})],
    ids=["packed-window", "soft-cap"],
)
def test_values_and_gradients_on_two_devices(packed, options):
    """Interpreted on CPU devices inside `shard_map`, which checks along which axes results vary."""
    ids = documents().astype(jnp.int32)
    fused = functools.partial(splash_attention, interpret=True, **options)

    def weighted(attend, q, k, v, weight, ids):
        return (attend(q, k, v, ids) * weight).sum()

    def gradients(attend):
        return jax.value_and_grad(functools.partial(weighted, attend), argnums=(0, 1, 2))

    def local(*args):
        loss, grads = gradients(lambda q, k, v, ids: fused(q, k, v, pieces=ids if packed else None))(*args)
        return jax.lax.psum(loss, "dp"), grads

    mesh = mw.create_mesh("dp:2", devices=jax.devices()[:2])
    split = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P("dp"), out_specs=(P(), P("dp"))))
    found = split(*arrays(), ids)
    with jax.enable_x64(True):
        segments = ids + 1 if packed else None
        plain = gradients(lambda q, k, v, _: attention(q, k, v, segment_ids=segments, implementation="xla", **options))
        expected = jax.jit(plain)(*arrays(jnp.float64), ids)
    for one, exact in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        # A float32 dot of at most 256 terms, three of them in a row, is off by at most sqrt(256) roundings each.
        size = np.abs(exact).max()
        np.testing.assert_allclose(one, exact, rtol=0, atol=size * 3 * 16 * np.finfo(np.float32).eps)


def test_flops_are_those_that_the_mask_leaves():
    one = 2 * ROWS * HEADS * LENGTH * LENGTH * DIM // 2
    shapes = arrays(jnp.bfloat16, lambda x, dtype: jax.ShapeDtypeStruct(x.shape, dtype))

    def loss(q, k, v):
        return splash_attention(q, k, v).astype(jnp.float32).sum()

    forward = count_flops(loss, *shapes[:3])
    assert (forward.attention, forward.matmul, forward.notes) == (2 * one, 2 * one, ())
    both = count_flops(jax.grad(loss, argnums=(0, 1, 2)), *shapes[:3])
    rows = 2 * ROWS * HEADS * LENGTH * DIM  # products of outputs and their gradients
    assert (both.attention, both.recomputed, both.model) == (9 * one, 3 * one, 6 * one + rows)
    # Without a remat policy, the backward pass of a block repeats the forward kernel.
    again = count_flops(jax.grad(jax.checkpoint(loss), argnums=(0, 1, 2)), *shapes[:3])
    assert (again.attention, again.recomputed) == (9 * one, 5 * one)


def test_errors_name_what_is_missing():
    with pytest.raises(PlacementError, match=r"splash attention cannot run here.*\n.*multiple of 128"):
        attention(*arrays()[:3], implementation="splash")


@pytest.fixture
def no_cache():
    """JAX cannot load programs for absent TPUs from its cache."""
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    yield
    jax.config.update("jax_enable_compilation_cache", True)
    compilation_cache.reset_cache()


@pytest.mark.skipif(not can_compile_for("v5p:2x2x1"), reason="libtpu is not installed")
@pytest.mark.parametrize(("target", "dim", "packed"), [("v5p:2x2x1", 128, True), ("v5e:2x2", 64, False)])
def test_a_tpu_compiles_three_kernels_and_keeps_no_logits(no_cache, target, dim, packed):
    mesh = mesh_on_target(target, "dp:2,tp:2")
    length, split = 1024, NamedSharding(mesh, P("dp", None, "tp"))
    shapes = [jax.ShapeDtypeStruct((2, length, n, dim), jnp.bfloat16, sharding=split) for n in (8, 4, 4)]
    ids = jax.ShapeDtypeStruct((2, length), jnp.int32, sharding=NamedSharding(mesh, P("dp")))

    def gradients(q, k, v, ids):
        def loss(q, k, v):
            return attention(q, k, v, segment_ids=ids if packed else None).astype(jnp.float32).sum()

        return jax.grad(loss, argnums=(0, 1, 2))(q, k, v)

    specs = (split.spec, split.spec, split.spec, P("dp"))
    with jax.set_mesh(mesh):
        mapped = jax.shard_map(gradients, in_specs=specs, out_specs=(split.spec,) * 3)
        compiled = jax.jit(mapped).lower(*shapes, ids).compile()
    assert compiled.as_text().count('custom_call_target="tpu_custom_call"') == 3
    # Logits would take 4 heads x 1024 x 1024 floats.
    assert compiled.memory_analysis().temp_size_in_bytes < 4 * length * length * 4 / 2


@pytest.mark.skipif(not can_compile_for("v5p:2x2x1"), reason="libtpu is not installed")
def test_the_global_view_keeps_xla():
    """XLA cannot split a kernel, so a TPU program in the global view has none."""
    mesh = mesh_on_target("v5p:2x2x1", "dp:4").abstract_mesh
    shapes = arrays(jnp.bfloat16, lambda x, dtype: jax.ShapeDtypeStruct(x.shape, dtype))[:3]
    with jax.sharding.use_abstract_mesh(mesh):
        assert "pallas" not in str(jax.make_jaxpr(attention)(*shapes))


@pytest.mark.skipif(not can_compile_for("v5p:2x2x1"), reason="libtpu is not installed")
def test_an_axis_of_size_1_keeps_xla():
    """`local_map` leaves such an axis to the compiler, and the compiler of TPUs then refuses kernels."""
    shapes = arrays(jnp.bfloat16, lambda x, dtype: jax.ShapeDtypeStruct((4, *x.shape[1:]), dtype))[:3]
    for mesh, has_kernels in (("dp:4", True), ("dp:4,tp:1", False)):
        mapped = local_map(attention, mesh=mesh_on_target("v5p:2x2x1", mesh), in_specs=P("dp"), out_specs=P("dp"))
        assert ("pallas" in str(jax.make_jaxpr(mapped)(*shapes))) == has_kernels


@pytest.mark.parametrize(
    ("precision", "taken"), [(None, (True, True)), ("highest", (False, True)), ("tensorfloat32", (False, False))]
)
def test_dtypes_that_the_kernels_take_by_precision(precision, taken):
    with jax.default_matmul_precision(precision):
        assert (_takes(jnp.dtype(jnp.bfloat16)), _takes(jnp.dtype(jnp.float32))) == taken
