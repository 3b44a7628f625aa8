"""`ModelParallelismWrapper`: variables, random streams, masks, and nesting in other lifted transforms."""

import contextlib
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax.core import FrozenDict
from jax import lax
from jax.sharding import PartitionSpec as P

import meshwright as mw
from meshwright.errors import MeshError, PlacementError
from meshwright.linen import ModelParallelismWrapper, shard_module_params, sync_gradients
from meshwright.parallel import local_map, pcast_varying

WIDTH, LAYERS = 8, 2
X = jax.random.normal(jax.random.key(1), (4, WIDTH))


def mesh_of(text):
    return mw.create_mesh(text, devices=int(np.prod([int(part.split(":")[1]) for part in text.split(",")])))


def abstract_init(module, mesh, *args):
    """Returns the boxed variables, which have the specs; `check_vma` is off because specs are not known yet."""
    run = local_map(module.init, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    return nn.get_partition_spec(jax.eval_shape(run, jax.random.key(0), *args))


def init(module, mesh, *args, check=True):
    specs = abstract_init(module, mesh, *args)

    def local(key, *args):
        return module.init(key, *pcast_varying(args, mesh.axis_names))  # the initial carry must vary like the result

    run = local_map(local, mesh=mesh, in_specs=P(), out_specs=specs, check_vma=check)
    return jax.jit(run)(jax.random.key(0), *args), specs


class Layer(nn.Module):
    """One layer with a non-zero bias, for `nn.scan`."""

    @nn.compact
    def __call__(self, x, _=None):
        return nn.tanh(nn.Dense(WIDTH, bias_init=nn.initializers.normal())(x)), None


LIFTS = {
    "wrap": lambda make: functools.partial(ModelParallelismWrapper, "tp", make),
    "fsdp": lambda make: shard_module_params(make, "fsdp", min_weight_size=WIDTH - 1),
    "remat": nn.remat,
    "scan": lambda make: nn.scan(
        make,
        variable_axes={"params": 0},
        split_rngs={"params": True},
        length=LAYERS,
        metadata_params={nn.PARTITION_NAME: None},
    ),
}


def devices_first(params):
    """Returns kernel and bias as [devices, layers, ...], and the names of their dims."""
    arrays = {}
    for path, box in jax.tree.leaves_with_path(params, is_leaf=lambda node: isinstance(node, nn.Partitioned)):
        name = [key.key for key in path if hasattr(key, "key")][-1]
        arrays[name] = jnp.moveaxis(box.value, box.names.index("tp"), 0)
        if "scan" not in str(path) and arrays[name].ndim == {"kernel": 3, "bias": 2}[name]:
            arrays[name] = arrays[name][:, None]
    return arrays


def reference(params, x, weight):
    """Runs the same layers on one device, as [devices, rows, width]."""
    outputs = []
    for device in range(params["kernel"].shape[0]):
        y = x
        for layer in range(params["kernel"].shape[1]):
            y = jnp.tanh(y @ params["kernel"][device, layer] + params["bias"][device, layer])
        outputs.append(y)
    outputs = jnp.stack(outputs)
    return (outputs * weight).sum() / 2, outputs  # the mean over two data shards of their sums


def check_nesting(order, *, check=True, set_mesh=False, mesh_text="fsdp:2,tp:4"):
    make = Layer
    for lift in reversed(order):
        make = LIFTS[lift](make)
    module, mesh = make(), mesh_of(mesh_text)
    variables, specs = init(module, mesh, X, check=check)
    tp = dict(mesh.shape)["tp"]
    weight = jax.random.normal(jax.random.key(2), (tp, *X.shape))

    def local(variables, x, weight):
        def loss(params):
            y, _ = module.apply({"params": params}, pcast_varying(x, ("fsdp", "tp")))
            return (y * weight[0]).sum(), y[None]

        (_, y), grads = jax.value_and_grad(loss, has_aux=True)(variables["params"])
        return y, sync_gradients(grads, "fsdp")

    run = local_map(
        local,
        mesh=mesh,
        in_specs=(specs, P("fsdp"), P("tp", "fsdp")),
        out_specs=(P("tp", "fsdp"), specs["params"]),
        check_vma=check,
    )
    with jax.set_mesh(mesh) if set_mesh else contextlib.nullcontext():
        y, grads = jax.jit(run)(variables, X, weight)
    params = devices_first(variables["params"])
    assert params["kernel"].shape == (tp, LAYERS if "scan" in order else 1, WIDTH, WIDTH)
    (_, expected_y), expected = jax.jit(jax.value_and_grad(reference, has_aux=True))(params, X, weight)
    np.testing.assert_allclose(y, expected_y, atol=1e-5)
    got = devices_first(grads)
    for name, value in expected.items():
        np.testing.assert_allclose(got[name], value, atol=1e-5, err_msg=name)
    kernels = np.asarray(params["kernel"]).reshape(-1, WIDTH * WIDTH)
    assert len(np.unique(kernels, axis=0)) == len(kernels)  # every device and layer has its own
    return variables


@pytest.mark.parametrize(
    ("order", "options"),
    [
        (("wrap",), {"check": True}),
        (("wrap",), {"check": False}),
        (("wrap",), {"set_mesh": True}),
        (("wrap",), {"mesh_text": "fsdp:2,tp:1"}),
        (("fsdp", "wrap"), {"check": True}),
        (("fsdp", "wrap"), {"check": False, "set_mesh": True}),
        (("wrap", "fsdp"), {"check": True, "set_mesh": True}),
        (("wrap", "fsdp"), {"check": False}),
        (("scan", "remat", "fsdp", "wrap"), {}),
        (("wrap", "fsdp", "scan", "remat"), {"set_mesh": True}),
    ],
    ids=str,
)
def test_nesting(order, options):
    check_nesting(order, **options)


@pytest.mark.parametrize("order", list(itertools.permutations(LIFTS)), ids="-".join)
def test_nesting_in_every_order(order):
    check_nesting(order)


def test_fsdp_of_a_wrapped_module_splits_its_shards():
    variables, _ = init(LIFTS["fsdp"](LIFTS["wrap"](Layer))(), mesh_of("fsdp:2,tp:4"), X)
    kernel = variables["params"]["sharded"]["Dense_0"]["kernel"]
    assert kernel.names == ("tp", None, "fsdp")
    assert kernel.value.sharding.shard_shape(kernel.value.shape) == (1, WIDTH, WIDTH // 2)


class Noisy(nn.Module):
    """A module with dropout, a counter, a running mean, a sown value and an integer parameter."""

    @nn.compact
    def __call__(self, x):
        calls = self.variable("counts", "calls", lambda: jnp.int32(0))
        mean = self.variable("batch_stats", "mean", lambda: jnp.zeros(WIDTH))
        offset = self.param("offset", lambda key: jax.random.randint(key, (), 1, 1000))
        y = nn.Dense(WIDTH, use_bias=False)(x)
        if not self.is_initializing():
            calls.value += 1
            mean.value = 0.5 * mean.value + y.mean(0)
        self.sow("intermediates", "y", y)
        return nn.Dropout(0.5, deterministic=False)(jnp.ones_like(x)), offset


@pytest.mark.parametrize("split_rngs", [True, False])
def test_dropout_differs_per_device_and_all_collections_are_kept_per_device(split_rngs):
    module, mesh = ModelParallelismWrapper("tp", Noisy, split_rngs=split_rngs), mesh_of("tp:4")

    def local(keys, x):
        variables = module.init(keys, x)
        (kept, offset), updates = module.apply(
            variables, x, rngs={"dropout": keys["dropout"]}, mutable=["counts", "batch_stats", "intermediates"]
        )
        (again, _), updates = module.apply(
            variables | updates, x, rngs={"dropout": keys["dropout"]}, mutable=["counts", "batch_stats"]
        )
        return variables, updates, kept[None], again[None], offset[None]

    keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    # Without split keys the results do not vary, and JAX would refuse to stack them.
    run = local_map(local, mesh=mesh, in_specs=P(), out_specs=P("tp"), check_vma=split_rngs)
    variables, updates, kept, again, offset = jax.jit(run)(keys, X)
    distinct = 4 if split_rngs else 1
    assert len(np.unique(np.asarray(kept).reshape(4, -1), axis=0)) == distinct
    np.testing.assert_array_equal(kept, again)
    assert len(set(offset.tolist())) == distinct
    kernel = variables["params"]["sharded"]["Dense_0"]["kernel"].value
    assert len(np.unique(np.asarray(kernel).reshape(4, -1), axis=0)) == distinct
    assert updates["counts"]["sharded"]["calls"].names == ("tp",)
    assert updates["counts"]["sharded"]["calls"].value.tolist() == [2] * 4
    stats = updates["batch_stats"]["sharded"]["mean"]
    assert stats.names == ("tp", None)
    np.testing.assert_allclose(stats.value, 1.5 * (X @ kernel).mean(1), rtol=1e-5, atol=1e-6)


def test_two_calls_of_one_wrapper_draw_different_masks():
    class Twice(nn.Module):
        @nn.compact
        def __call__(self, x):
            wrapped = ModelParallelismWrapper("tp", functools.partial(nn.Dropout, 0.5, deterministic=False))
            return wrapped(x), wrapped(x)

    run = local_map(
        lambda key, x: Twice().apply({}, x, rngs={"dropout": key}),
        mesh=mesh_of("tp:4"),
        in_specs=P(),
        out_specs=P("tp"),
    )
    a, b = jax.jit(run)(jax.random.key(0), jnp.ones((8, 8)))
    assert (a != b).any()


class Mixed(nn.Module):
    @nn.compact
    def __call__(self, x):
        shift = self.param("shift", lambda key: jnp.int32(3))
        return nn.Dense(2, bias_init=nn.initializers.ones)(x) + shift


@pytest.mark.parametrize("check", [True, False])
def test_the_mask_applies_at_init_in_use_and_to_gradients(check):
    module, mesh = ModelParallelismWrapper("tp", Mixed, mask_except_model_idx=1), mesh_of("tp:4")
    variables, specs = init(module, mesh, X, check=check)
    inner = variables["params"]["sharded"]
    assert inner["shift"].value.tolist() == [0, 3, 0, 0]
    assert inner["shift"].value.dtype == jnp.int32
    assert inner["Dense_0"]["bias"].value.tolist() == [[0, 0], [1, 1], [0, 0], [0, 0]]
    assert np.asarray(inner["Dense_0"]["kernel"].value).any((1, 2)).tolist() == [False, True, False, False]

    def local(params, x):
        def loss(params):
            y = module.apply({"params": params}, x)
            return y.sum(), y[None]

        (_, y), grads = jax.value_and_grad(loss, has_aux=True, allow_int=True)(params)
        dense = grads["sharded"]["Dense_0"]
        return y, dense, module.init_with_output(jax.random.key(0), x)[0][None]

    dense = {"kernel": P("tp"), "bias": P("tp")}
    run = local_map(
        local, mesh=mesh, in_specs=(specs["params"], P()), out_specs=(P("tp"), dense, P("tp")), check_vma=check
    )
    # Masked shards have no effect even if an optimizer made them non-zero.
    ones = jax.tree.map(jnp.ones_like, variables["params"])
    y, grads, y_at_init = jax.jit(run)(ones, X)
    expected = X.sum(-1, keepdims=True) + jnp.ones(2) + 1
    np.testing.assert_allclose(y, jnp.stack([expected * (device == 1) for device in range(4)]), rtol=1e-5, atol=1e-6)
    assert grads["bias"].value.tolist() == [[0, 0], [4, 4], [0, 0], [0, 0]]
    np.testing.assert_allclose(grads["kernel"].value[1], jnp.broadcast_to(X.sum(0)[:, None], (WIDTH, 2)), rtol=1e-5)
    assert not np.asarray(grads["kernel"].value)[[0, 2, 3]].any()
    assert np.asarray(y_at_init).any((1, 2)).tolist() == [False, True, False, False]


def test_module_kwargs_reach_the_inner_module():
    module = ModelParallelismWrapper("tp", nn.Dense, module_kwargs=FrozenDict(features=3, use_bias=False))
    variables, specs = init(module, mesh_of("tp:2"), X)
    assert variables["params"]["sharded"]["kernel"].value.shape == (2, WIDTH, 3)
    assert specs["params"]["sharded"] == {"kernel": P("tp", None, None)}


@pytest.mark.parametrize("bound", [True, False], ids=["manual axis of size 1", "dropped"])
def test_an_axis_of_one_device(bound):
    module, mesh = ModelParallelismWrapper("tp", nn.Dense, module_kwargs=FrozenDict(features=3)), mesh_of("dp:2,tp:1")
    enter = jax.shard_map if bound else local_map
    specs = {"params": {"sharded": {"kernel": P("tp"), "bias": P("tp")}}}
    variables = jax.jit(enter(module.init, mesh=mesh, in_specs=P(), out_specs=specs))(jax.random.key(0), X)
    kernel = variables["params"]["sharded"]["kernel"]
    assert kernel.names == ("tp", None, None)
    y = jax.jit(enter(module.apply, mesh=mesh, in_specs=(specs, P("dp")), out_specs=P("dp", "tp")))(variables, X)
    np.testing.assert_allclose(y, X @ kernel.value[0], rtol=1e-5, atol=1e-6)


def test_calls_outside_shard_map_unknown_axes_and_masks_out_of_range_are_refused():
    module = ModelParallelismWrapper("tp", nn.Dense, module_kwargs=FrozenDict(features=3))
    with pytest.raises(MeshError, match=r"ModelParallelismWrapper was called outside of shard_map"):
        module.init(jax.random.key(0), X)
    with pytest.raises(MeshError, match=r"ModelParallelismWrapper names axis 'tp'; the mesh has axes: model"):
        abstract_init(module, mesh_of("model:4"), X)
    with pytest.raises(PlacementError, match=r"shard 4 is out of range for the 4 shards along axis 'tp'"):
        abstract_init(module.clone(mask_except_model_idx=4), mesh_of("tp:4"), X)


def test_gradients_of_equal_biases_stay_on_their_shard():
    """In one shard_map with init, zero biases are equal on all devices, but each has its own gradient."""
    module = ModelParallelismWrapper(model_axis_name="tp", module_fn=functools.partial(nn.Dense, features=3))

    def grads(key, x):
        params = module.init(key, x)

        def loss(params):
            return lax.psum(jnp.sum(module.apply(params, x)) * (lax.axis_index("tp") + 1.0), "tp")

        return jax.tree.map(
            lambda box: box.value, jax.grad(loss)(params), is_leaf=lambda n: isinstance(n, nn.Partitioned)
        )

    run = local_map(grads, mesh=mw.create_mesh("tp:4", devices=4), in_specs=(P(), P()), out_specs=P("tp"))
    bias = run(jax.random.key(0), jnp.ones((2, 5)))["params"]["sharded"]["bias"]
    np.testing.assert_allclose(bias, np.repeat([[2.0], [4.0], [6.0], [8.0]], 3, axis=1))
