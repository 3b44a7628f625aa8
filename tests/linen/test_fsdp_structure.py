"""FSDP on boxes has one tree structure and one function on every mesh, also on an axis of one device."""

import functools

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax.sharding import PartitionSpec as P

import meshwright as mw
from meshwright.linen import (
    ModelParallelismWrapper,
    gather_array_with_mean_grads,
    gather_params,
    shard_module_params,
    shard_params,
    sync_gradients,
)
from meshwright.parallel import local_map

AXES = ("dp", "fsdp", "tp")
MESHES = ("dp:1,fsdp:8,tp:1", "dp:8,fsdp:1,tp:1", "dp:2,fsdp:2,tp:1", "dp:1,fsdp:1,tp:1")
X, Y = jax.random.normal(jax.random.key(1), (16, 8)), jax.random.normal(jax.random.key(2), (16, 8))
ENTER = {"local_map": local_map, "shard_map": jax.shard_map}


def mesh_of(text):
    return mw.create_mesh(text, devices=int(np.prod([int(part.split(":")[1]) for part in text.split(",")])))


class Model(nn.Module):
    """A small parameter, a large one in FSDP, and a large one in FSDP and tensor parallelism (of one device)."""

    dtype: jnp.dtype | None = None

    @nn.compact
    def __call__(self, x):
        dense = functools.partial(nn.Dense, 8, bias_init=nn.initializers.normal(), dtype=self.dtype)
        sharded = shard_module_params(dense, "fsdp", min_weight_size=8, gather_dtype=self.dtype)
        h = nn.tanh(sharded(name="first")(x))
        return ModelParallelismWrapper("tp", sharded, name="second")(h)


def step_on(mesh, enter, check, model=None, params=None):
    """Returns parameters, loss and gradients, as a loop for the original computes them."""
    model = model or Model()

    def init(key, x):
        return model.init(key, x)["params"]

    # Unchecked, because the specs are not known before; only shapes are computed.
    shapes = jax.eval_shape(
        enter(init, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False), jax.random.key(0), X[:1]
    )
    specs = nn.get_partition_spec(shapes)
    if params is None:
        params = jax.jit(enter(init, mesh=mesh, in_specs=P(), out_specs=specs, check_vma=check))(
            jax.random.key(0), X[:1]
        )

    def step(params, x, y):
        def loss(params):
            return jnp.mean((model.apply({"params": params}, x) - y) ** 2)

        value, grads = jax.value_and_grad(loss)(params)
        return sync_gradients(value, AXES), sync_gradients(grads, AXES)

    rows = P(("dp", "fsdp"))
    run = enter(step, mesh=mesh, in_specs=(specs, rows, rows), out_specs=(P(), specs), check_vma=check)
    return params, *jax.jit(run)(params, X, Y)


def plain(params):
    """Returns the parameters of the model's two layers without boxes."""
    arrays = nn.meta.unbox(params)
    second = jax.tree.map(lambda leaf: leaf[0], arrays["second"]["sharded"])
    return {"first": arrays["first"], "second": second}


@functools.cache
def reference():
    """Returns the parameters, the loss and the gradients of the whole batch in float64."""
    params, *_ = step_on(mesh_of(MESHES[-1]), local_map, True)
    with jax.enable_x64():
        wide = jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf, np.float64)), plain(params))
        x, y = (jnp.asarray(np.asarray(array, np.float64)) for array in (X, Y))

        def loss(p):
            h = jnp.tanh(x @ p["first"]["kernel"] + p["first"]["bias"])
            return jnp.mean((h @ p["second"]["kernel"] + p["second"]["bias"] - y) ** 2)

        return params, *jax.device_get(jax.value_and_grad(loss)(wide))


@pytest.mark.parametrize("enter", ENTER)
@pytest.mark.parametrize("check", [True, False], ids=["checked", "unchecked"])
@pytest.mark.parametrize("mesh", MESHES)
def test_structure_loss_and_gradients_are_the_same_on_every_mesh(mesh, check, enter):
    """With `shard_map`, an axis of one device is manual and values vary along it; `local_map` drops it."""
    one, loss, grads = reference()
    params, got_loss, got = step_on(mesh_of(mesh), ENTER[enter], check)
    assert jax.tree.structure(params) == jax.tree.structure(one)
    assert params["first"]["kernel"].names == (None, "fsdp")
    assert params["second"]["sharded"]["kernel"].names == ("tp", None, "fsdp")
    assert not isinstance(params["first"]["bias"], nn.Partitioned)
    for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(one), strict=True):
        np.testing.assert_allclose(a, b, atol=2**-23)  # drawn from uniform numbers in [-1, 1)
    # Sums of at most 16 * 8 float32 terms of size 1: the error is below 128 * 2**-24, about 8e-6.
    np.testing.assert_allclose(got_loss, loss, rtol=1e-5)
    for a, b in zip(jax.tree.leaves(plain(got)), jax.tree.leaves(grads), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_a_checkpoint_of_one_mesh_restores_on_another():
    many, *_ = step_on(mesh_of("dp:1,fsdp:8,tp:1"), local_map, True)
    one, *_ = step_on(mesh_of("dp:1,fsdp:1,tp:1"), local_map, True)
    zeros = jax.tree.map(jnp.zeros_like, one)
    restored = flax.serialization.from_bytes(zeros, flax.serialization.to_bytes(jax.device_get(many)))
    assert jax.tree.structure(restored) == jax.tree.structure(one)
    for a, b in zip(jax.tree.leaves(restored), jax.tree.leaves(many), strict=True):
        np.testing.assert_array_equal(a, b)
    _, loss, _ = step_on(mesh_of("dp:2,fsdp:2,tp:1"), local_map, True, params=restored)
    np.testing.assert_allclose(loss, reference()[1], rtol=1e-5)


def shard(size, leaf, min_weight_size):
    mesh = mw.create_abstract_mesh(f"fsdp:{size}")
    # Unchecked, because the specs depend on what is tested; only shapes are computed.
    run = local_map(
        lambda leaf: shard_params(leaf, "fsdp", min_weight_size),
        mesh=mesh,
        in_specs=P(),
        out_specs=P(),
        check_vma=False,
    )
    return jax.eval_shape(run, leaf)


@pytest.mark.parametrize("size", [1, 2, 8])
def test_the_threshold_and_the_dim_do_not_depend_on_the_axis_size(size):
    w = jnp.ones((8, 16, 16))
    assert shard(size, w, 8 * 16 * 16 - 1).names == (None, None, "fsdp")
    whole = shard(size, w, 8 * 16 * 16)
    assert not isinstance(whole, nn.Partitioned)
    assert whole.shape == w.shape
    assert shard(size, nn.Partitioned(w, (None, None, "tp")), 0).names == (None, "fsdp", "tp")


def test_a_scalar_on_one_device_has_no_box_and_no_warning():
    assert shard(1, jnp.ones(()), 0).shape == ()


@pytest.mark.parametrize("mesh", ["fsdp:8", "fsdp:1"])
@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("enter", ENTER)
def test_gather_dtype_is_the_dtype_of_the_result_on_any_number_of_devices(mesh, check, enter):
    x, weight = jax.random.normal(jax.random.key(0), (2, 16))
    tree = {"split": nn.Partitioned(x, ("fsdp",)), "ids": nn.Partitioned(jnp.arange(16), ("fsdp",)), "small": x[:3]}

    def local(tree, x, weight):
        gathered = gather_params(tree, "fsdp", gather_dtype=jnp.bfloat16)
        dtypes = {name: str(leaf.dtype) for name, leaf in gathered.items()}
        assert dtypes == {"split": "bfloat16", "ids": "int32", "small": "float32"}

        def loss(x):
            whole = gather_array_with_mean_grads(x, 0, "fsdp", "bfloat16")
            assert whole.dtype == jnp.bfloat16
            return (whole.astype(jnp.float32) * weight).sum()

        return gathered["split"][None], jax.grad(loss)(x)

    specs = {"split": P("fsdp"), "ids": P("fsdp"), "small": P()}
    run = ENTER[enter](
        local,
        mesh=mesh_of(mesh),
        in_specs=(specs, P("fsdp"), P()),
        out_specs=(P("fsdp"), P("fsdp")),
        check_vma=check,
    )
    wholes, grad = jax.jit(run)(tree, x, weight)
    assert wholes.dtype == jnp.bfloat16
    for whole in wholes:
        np.testing.assert_array_equal(whole, x.astype(jnp.bfloat16))
    assert grad.dtype == jnp.float32
    np.testing.assert_array_equal(grad, weight.astype(jnp.bfloat16).astype(jnp.float32))


def test_a_module_with_gather_dtype_computes_in_it():
    """The same bfloat16 program on eight devices and on one: bfloat16 outputs, float32 parameters and gradients."""
    (params, loss, grads), (_, one_loss, one_grads) = (
        step_on(mesh_of(mesh), local_map, False, model=Model(jnp.bfloat16)) for mesh in (MESHES[0], MESHES[-1])
    )
    assert {leaf.dtype for leaf in jax.tree.leaves((params, grads))} == {jnp.dtype(jnp.float32)}
    # Two layers of bfloat16, which rounds to 2**-9.
    np.testing.assert_allclose(loss, one_loss, rtol=2**-7)
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(one_grads), strict=True):
        np.testing.assert_allclose(a, b, atol=2**-6 * float(np.abs(b).max()))
