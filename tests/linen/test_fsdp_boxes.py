"""Fully sharded data parallelism compared with one device: parameters, outputs and every gradient."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax.sharding import PartitionSpec as P

import meshwright as mw
from meshwright.errors import MeshError, MeshwrightWarning, PlacementError, RuleError, TreeError
from meshwright.linen import (
    gather_array_with_mean_grads,
    gather_params,
    shard_module_params,
    shard_params,
    sync_gradients,
)
from meshwright.parallel import local_map
from meshwright.parallel.fsdp import gather_array, gather_tree

MESHES = ("dp:2,fsdp:4", "dp:1,fsdp:8", "dp:4,fsdp:2", "dp:8,fsdp:1", "dp:1,fsdp:1")


def mesh_of(text):
    sizes = [int(part.split(":")[1]) for part in text.split(",")]
    return mw.create_mesh(text, devices=int(np.prod(sizes)))


def trace(f, *args, mesh="dp:2,fsdp:4"):
    """Traces a local function on an abstract mesh, for tests of shapes, names or errors.

    `check_vma` is off because the specs are not known; no gradient is computed.
    """
    run = local_map(f, mesh=mw.create_abstract_mesh(mesh), in_specs=P(), out_specs=P(), check_vma=False)
    return jax.eval_shape(run, *args)


class MLP(nn.Module):
    """Two layers, of which FSDP splits only the kernels."""

    dense: type = nn.Dense

    @nn.compact
    def __call__(self, x):
        h = nn.tanh(self.dense(16, bias_init=nn.initializers.normal(), name="first")(x))
        return self.dense(4, name="second")(h)


def loss_of(model, params, x, y):
    return jnp.mean((model.apply({"params": params}, x) - y) ** 2)


X, Y = jax.random.normal(jax.random.key(1), (16, 8)), jax.random.normal(jax.random.key(2), (16, 4))


@functools.cache
def reference():
    model = MLP()
    params = jax.jit(model.init)(jax.random.key(0), X)["params"]
    return params, *jax.jit(jax.value_and_grad(functools.partial(loss_of, model)))(params, X, Y)


def placed(params, mesh, min_weight_size):
    """Returns the reference's parameters in the sharded model's boxes, and the specs of these boxes."""
    boxes = trace(lambda params: shard_params(params, "fsdp", min_weight_size), params, mesh=mesh)

    def rewrap(box, value):
        return box.replace(value=value) if isinstance(box, nn.Partitioned) else value

    def is_box(node):
        return isinstance(node, nn.Partitioned)

    return jax.tree.map(rewrap, boxes, params, is_leaf=is_box), nn.get_partition_spec(boxes)


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("mode", ["checked", "checked, parameters varying", "unchecked"])
def test_gradients_are_those_of_the_global_mean_loss(mesh, mode):
    """Runs gather_params, the loss of each device, its gradient and sync_gradients on the same parameters."""
    params, loss, grads = reference()
    boxed, specs = placed(params, mesh, 100)
    model = MLP(dense=shard_module_params(nn.Dense, "fsdp", min_weight_size=100))

    def local(params, x, y):
        if "varying" in mode:
            params = mw.parallel.pcast_varying(params, ("dp", "fsdp"))
        results = jax.value_and_grad(functools.partial(loss_of, model))(params, x, y)
        return sync_gradients(results, ("dp", "fsdp"))

    batch = P(("dp", "fsdp"))
    run = local_map(
        local, mesh=mesh_of(mesh), in_specs=(specs, batch, batch), out_specs=(P(), specs), check_vma=mode != "unchecked"
    )
    got_loss, got = jax.jit(run)(boxed, X, Y)
    np.testing.assert_allclose(got_loss, loss, rtol=1e-5)
    assert jax.tree.structure(got) == jax.tree.structure(boxed)
    assert_close(nn.meta.unbox(got), grads)


def assert_close(got, expected, **tolerance):
    for (path, a), b in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(expected), strict=True):
        tolerance = {"rtol": 1e-5, "atol": 1e-6} | tolerance
        np.testing.assert_allclose(
            np.asarray(a, np.float32), np.asarray(b, np.float32), err_msg=jax.tree_util.keystr(path), **tolerance
        )


@pytest.mark.parametrize("mesh", ["dp:2,fsdp:4", "dp:8,fsdp:1"])
def test_a_sharded_model_starts_from_the_same_parameters_as_a_plain_one(mesh):
    params, _, _ = reference()
    model = MLP(dense=shard_module_params(nn.Dense, "fsdp", min_weight_size=100))
    _, specs = placed(params, mesh, 100)
    run = local_map(model.init, mesh=mesh_of(mesh), in_specs=(P(), P()), out_specs={"params": specs})
    got = jax.jit(run)(jax.random.key(0), X)["params"]
    if mesh == "dp:2,fsdp:4":
        assert got["first"]["kernel"].names == (None, "fsdp")
        assert got["first"]["kernel"].value.sharding.shard_shape((8, 16)) == (8, 4)
        assert not isinstance(got["first"]["bias"], nn.Partitioned)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(params), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


def make_dense(features, **kwargs):
    return nn.Dense(features, **kwargs)


@pytest.mark.parametrize(
    "target",
    [nn.Dense, functools.partial(nn.Dense, use_bias=True), make_dense, functools.partial(make_dense, use_bias=True)],
    ids=["class", "partial", "function", "partial of a function"],
)
def test_sharding_keeps_the_tree_and_the_outputs(target):
    layer = shard_module_params(target, "fsdp", min_weight_size=1)(8)
    plain = nn.Dense(8)
    params = plain.init(jax.random.key(0), X)["params"]
    boxed, specs = placed(params, "dp:1,fsdp:4", 1)
    made = trace(layer.init, jax.random.key(0), X, mesh="dp:1,fsdp:4")["params"]
    assert {name: box.names for name, box in made.items()} == {name: box.names for name, box in boxed.items()}
    run = local_map(
        lambda params, x: layer.apply({"params": params}, x),
        mesh=mesh_of("dp:1,fsdp:4"),
        in_specs=(specs, P("fsdp")),
        out_specs=P("fsdp"),
    )
    np.testing.assert_allclose(jax.jit(run)(boxed, X), plain.apply({"params": params}, X), rtol=1e-5, atol=1e-6)


def test_a_module_instance_is_refused():
    with pytest.raises(PlacementError, match=r"got the module Dense\(...\).\nhint: pass functools.partial\(Dense"):
        shard_module_params(nn.Dense(3), "fsdp")


@pytest.mark.parametrize(
    ("shape", "names", "expected"),
    [
        ((8, 16), (None, None), (None, "fsdp")),  # the largest
        ((16, 16), (None, None), (None, "fsdp")),  # the last of equals
        ((16, 16, 8), (None, None, None), (None, "fsdp", None)),
        ((6, 8), (None, None), (None, "fsdp")),
        ((8, 6), (None, None), ("fsdp", None)),  # the largest one that divides
        ((8, 6), (None, "dp"), ("fsdp", "dp")),
        ((4, 64), (None, "dp"), ("fsdp", "dp")),  # never a dim with a name
        ((8, 8), ("fsdp", None), ("fsdp", None)),  # already split
        ((8, 8), (("dp", "fsdp"), None), (("dp", "fsdp"), None)),
        ((3, 1), (None, None), None),  # fewer elements than min_weight_size
        ((4,), (None,), None),  # exactly min_weight_size elements
        ((8,), (None,), ("fsdp",)),
        ((), (), None),
    ],
)
def test_which_dim_is_split(shape, names, expected):
    leaf = nn.Partitioned(jnp.ones(shape), names) if any(names) else jnp.ones(shape)
    got = trace(lambda leaf: shard_params(leaf, "fsdp", 4), leaf)
    assert (got.names if isinstance(got, nn.Partitioned) else None) == expected
    if expected and "fsdp" not in names and ("dp", "fsdp") not in names:
        assert got.value.size == jnp.ones(shape).size // 4


def test_the_threshold_counts_global_elements():
    """A shard of 32 elements of an array that `dp` splits in two counts as 64 elements."""
    box = nn.Partitioned(jnp.ones((1, 4, 8)), ("dp", None, None))
    assert trace(lambda box: shard_params(box, "fsdp", 63), box).names == ("dp", None, "fsdp")
    assert trace(lambda box: shard_params(box, "fsdp", 64), box).names == ("dp", None, None)


def test_an_indivisible_parameter_causes_a_warning():
    with pytest.warns(MeshwrightWarning, match=r"`block/w`, with 105 elements, stays replicated .*free dims \(7, 15\)"):
        got = trace(lambda w: shard_params({"block": {"w": w}}, "fsdp", 100), jnp.ones((7, 15)))
    assert got["block"]["w"].shape == (7, 15)


@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("check", [True, False])
def test_gather_with_mean_grads(dim, check):
    x = jax.random.normal(jax.random.key(0), (8, 16))
    weights = jax.random.normal(jax.random.key(1), (8, 8, 16))  # one per device
    spec = P(*(["fsdp", None] if dim == 0 else [None, "fsdp"]))

    def local(x, weight):
        def loss(x):
            whole = gather_array_with_mean_grads(x, dim, "fsdp")
            return (whole * weight[0]).sum(), whole

        grad, whole = jax.grad(loss, has_aux=True)(x)
        return grad, whole[None]

    run = local_map(
        local, mesh=mesh_of("fsdp:8"), in_specs=(spec, P("fsdp")), out_specs=(spec, P("fsdp")), check_vma=check
    )
    grad, wholes = jax.jit(run)(x, weights)
    np.testing.assert_allclose(grad, weights.mean(0), rtol=1e-5, atol=1e-6)
    for whole in wholes:
        np.testing.assert_array_equal(whole, x)


@pytest.mark.parametrize("check", [True, False])
def test_bfloat16_beside_an_axis_of_one_device(check):
    """An automatic axis of size 1 makes XLA's CPU compiler abort on a psum of 16-bit floats."""
    x = jax.random.normal(jax.random.key(0), (16, 4), jnp.bfloat16)
    weights = jax.random.normal(jax.random.key(1), (8, 16, 4)).astype(jnp.bfloat16)  # one per device

    def local(x, weight):
        def loss(x):
            return (gather_array_with_mean_grads(x, 0, "fsdp") * weight[0]).astype(jnp.float32).sum()

        grads = jax.grad(loss)(x)
        return grads, sync_gradients(weight[0], "fsdp")

    run = local_map(
        local, mesh=mesh_of("dp:1,fsdp:8"), in_specs=(P("fsdp"), P("fsdp")), out_specs=(P("fsdp"), P()), check_vma=check
    )
    grad, mean = jax.jit(run)(x, weights)
    wanted = np.asarray(weights, np.float32).mean(0)
    assert grad.dtype == mean.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(grad, np.float32), wanted, atol=2e-2)
    np.testing.assert_allclose(np.asarray(mean, np.float32), wanted, atol=2e-2)


def test_arrays_are_sent_in_the_given_dtype():
    """Values are returned in the dtype in which the compiled program sends them; gradients in that of the slices."""
    x = jax.random.normal(jax.random.key(0), (16,))

    def local(x, weight, gather_dtype, grad_dtype):
        def loss(x):
            whole = gather_array_with_mean_grads(x, 0, "fsdp", gather_dtype, grad_dtype)
            assert whole.dtype == (jnp.bfloat16 if gather_dtype else jnp.float32)
            return (whole.astype(jnp.float32) * weight).sum(), whole

        return jax.grad(loss, has_aux=True)(x)

    def run(gather_dtype, grad_dtype):
        # Without check_vma, like code for the original; the test above has both.
        return local_map(
            functools.partial(local, gather_dtype=gather_dtype, grad_dtype=grad_dtype),
            mesh=mesh_of("fsdp:8"),
            in_specs=(P("fsdp"), P()),
            out_specs=(P("fsdp"), P()),
            check_vma=False,
        )

    weight = jnp.cos(x)
    grad, whole = jax.jit(run("bf16", None))(x, weight)
    np.testing.assert_array_equal(whole, x.astype(jnp.bfloat16))
    # The gradient of a bfloat16 array is rounded once, then summed and returned in float32.
    np.testing.assert_array_equal(grad, weight.astype(jnp.bfloat16).astype(jnp.float32))
    grad, whole = jax.jit(run(None, jnp.bfloat16))(x, weight)
    np.testing.assert_array_equal(whole, x)
    np.testing.assert_array_equal(grad, weight.astype(jnp.bfloat16).astype(jnp.float32))
    text = jax.jit(run("bfloat16", "bfloat16")).lower(x, weight).as_text()
    assert "(tensor<2xbf16>) -> tensor<16xbf16>" in text
    assert "(tensor<16xbf16>) -> tensor<2xbf16>" in text


def test_integers_and_small_leaves_pass_through_gather_params():
    tree = {"count": jnp.int32(3), "table": nn.Partitioned(jnp.arange(8), ("fsdp",)), "w": jnp.ones(3)}
    specs = {"count": P(), "table": P("fsdp"), "w": P()}
    run = local_map(
        lambda tree: jax.tree.map(lambda x: x[None], gather_params(tree, "fsdp", gather_dtype="bf16")),
        mesh=mesh_of("fsdp:4"),
        in_specs=(specs,),
        out_specs=P("fsdp"),
    )
    got = jax.jit(run)(tree)
    assert got["count"].tolist() == [3] * 4
    assert got["count"].dtype == jnp.int32
    assert got["table"].tolist() == [list(range(8))] * 4


def test_gather_params_gathers_the_last_axis_of_a_tuple_first():
    """A dim split over ("dp", "fsdp") must be gathered over `fsdp` first, or its parts would not be contiguous."""
    box = nn.Partitioned(jnp.arange(16.0), (("dp", "fsdp"),))

    def local(box):
        once = gather_params(box, "fsdp")
        assert once.names == ("dp",)
        assert once.value.shape == (8,)
        return gather_params(once, "dp")[None]

    run = local_map(local, mesh=mesh_of("dp:2,fsdp:4"), in_specs=(P(("dp", "fsdp")),), out_specs=P(("dp", "fsdp")))
    np.testing.assert_array_equal(jax.jit(run)(box), np.tile(np.arange(16.0), (8, 1)))
    with pytest.raises(
        PlacementError, match=r"split over \('dp', 'fsdp'\), and 'dp' is not the last.*\nhint: gather 'fsdp'"
    ):
        trace(lambda box: gather_params(box, "dp"), box)


@pytest.mark.parametrize("check", [True, False])
def test_sync_returns_the_mean_for_every_kind_of_leaf(check):
    """On dp2 x fsdp4: plain, split, split over a tuple, and unused leaves."""
    x = jnp.arange(8.0)

    def grads_of(params, x):
        return jax.grad(lambda p: sum(leaf.sum() for leaf in jax.tree.leaves(p)[:-1]) * x[0])(params)

    params = {
        "a_plain": jnp.ones(()),
        "b_split": nn.Partitioned(jnp.ones(4), ("fsdp",)),
        "c_both": nn.Partitioned(jnp.ones(8), (("dp", "fsdp"),)),
        "z_unused": jnp.ones(2),
    }
    specs = {"a_plain": P(), "b_split": P("fsdp"), "c_both": P(("dp", "fsdp")), "z_unused": P()}
    run = local_map(
        lambda params, x: sync_gradients(grads_of(params, x), ("dp", "fsdp")),
        mesh=mesh_of("dp:2,fsdp:4"),
        in_specs=(specs, P(("dp", "fsdp"))),
        out_specs=specs,
        check_vma=check,
    )
    got = jax.jit(run)(params, x)
    assert got["a_plain"] == 3.5
    assert got["b_split"].value.tolist() == [2, 3, 4, 5]  # the mean over dp of x[dp, fsdp]
    assert got["c_both"].value.tolist() == x.tolist()
    assert got["z_unused"].tolist() == [0, 0]


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("mesh", ["fsdp:8", "fsdp:2", "fsdp:1"])
def test_gather_tree_has_summed_gradients(check, mesh):
    params = {"w": jax.random.normal(jax.random.key(0), (8, 16)), "b": jnp.ones(16)}
    specs = {"w": P(None, "fsdp"), "b": P()}

    def local(params, x):
        def loss(params):
            whole = gather_tree(params, specs, axis="fsdp")
            return (nn.tanh(x @ whole["w"] + mw.parallel.pcast_varying(whole["b"], "fsdp")) ** 2).sum() / 16

        grads = jax.grad(loss)(params)
        if not check and mesh != "fsdp:1":
            grads["b"] = jax.lax.psum(grads["b"], "fsdp")
        return grads

    run = local_map(local, mesh=mesh_of(mesh), in_specs=(specs, P("fsdp")), out_specs=specs, check_vma=check)
    expected = jax.grad(lambda p: (nn.tanh(X @ p["w"] + p["b"]) ** 2).sum() / 16)(params)
    assert_close(jax.jit(run)(params, X), expected)


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_the_form_for_v5p_scatters_the_same_gradients(dim, monkeypatch):
    """This form scatters pieces along a separate dim."""
    spec = P(*("fsdp" if place == dim else None for place in range(dim + 1)))
    weights = jax.random.normal(jax.random.key(0), (8, 16, 24, 40))

    def local(x, weight):
        return jax.grad(lambda x: (gather_array(x, dim=dim, axis="fsdp") * weight[0]).sum())(x)

    def grads():
        run = local_map(local, mesh=mesh_of("fsdp:8"), in_specs=(spec, P("fsdp")), out_specs=spec)
        return run(jnp.ones((16, 24, 40)), weights)

    plain = grads()
    monkeypatch.setattr("meshwright.parallel.fsdp.chip_family", lambda mesh: "v5p")
    assert_close(grads(), plain)
    assert_close(plain, weights.sum(0))


def test_gradients_sent_in_bfloat16_can_be_summed_in_float32():
    """Equals the float64 sum of the sent values to float32 precision; a bfloat16 reduce-scatter would not."""
    weights = 1 + jax.random.uniform(jax.random.key(1), (8, 64))
    sent = np.asarray(weights.astype(jnp.bfloat16), np.float64).sum(0)

    def error(**dtypes):
        def local(x, weight):
            def loss(x):
                return (gather_array(x, dim=0, axis="fsdp", **dtypes) * weight[0]).sum()

            return jax.grad(loss)(x)

        run = jax.jit(local_map(local, mesh=mesh_of("fsdp:8"), in_specs=P("fsdp"), out_specs=P("fsdp")))
        return np.abs(np.asarray(run(jnp.ones(64), weights), np.float64) / sent - 1).max(), run

    wire, _ = error(grad_scatter_dtype="bfloat16")
    accurate, run = error(grad_scatter_dtype="bfloat16", grad_sum_dtype="float32")
    assert accurate < 1e-6 < 1e-4 < wire
    text = run.lower(jnp.ones(64), weights).as_text()
    assert "stablehlo.all_to_all" in text
    assert "(tensor<8x8xbf16>) -> tensor<8x8xbf16>" in text  # as many bytes as a bfloat16 reduce-scatter
    assert "reduce_scatter" not in text


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: gather_tree({"w": jnp.ones(2)}, {"v": P()}, axis="fsdp"), TreeError, "differ in structure"),
        (lambda: gather_tree({"w": jnp.ones(2)}, {"w": ("fsdp",)}, axis="fsdp"), RuleError, r"write P\('fsdp'\)"),
        (
            lambda: gather_tree({"w": jnp.ones(2)}, {"w": P(("fsdp", "dp"))}, axis="fsdp"),
            PlacementError,
            r"P\(\('fsdp', 'dp'\)\): dim 0 is split over .*\nhint: gather 'dp' first",
        ),
        (
            lambda: gather_array(jnp.ones(2), dim=0, axis="fsdp", gather_dtype="int8"),
            PlacementError,
            "cannot cast a float32 array to int8",
        ),
        (lambda: gather_array(jnp.ones(2), dim=0, axis="fsdp", gather_dtype="bf61"), PlacementError, "is not a dtype"),
    ],
)
def test_refusals(call, error, text):
    with pytest.raises(error, match=text):
        trace(call)


CALLS = {
    "shard_params": lambda axis: shard_params(jnp.ones(4), axis),
    "gather_params": lambda axis: gather_params(jnp.ones(4), axis),
    "sync_gradients": lambda axis: sync_gradients(jnp.ones(4), axis),
    "gather_tree": lambda axis: gather_tree(jnp.ones(4), P(), axis=axis),
    "gather_array": lambda axis: gather_array_with_mean_grads(jnp.ones(4), 0, axis),
}


@pytest.mark.parametrize("name", CALLS)
def test_an_unknown_axis_or_no_shard_map_is_refused(name):
    with pytest.raises(MeshError, match=rf"{name} names axis 'fdsp'.*\nhint: did you mean 'fsdp'"):
        trace(lambda: CALLS[name]("fdsp"))
    with pytest.raises(MeshError, match=rf"{name} was called outside of shard_map.*\nhint: call it inside"):
        CALLS[name]("fsdp")
