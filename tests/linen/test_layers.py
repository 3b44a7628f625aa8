"""Tensor-parallel dense layers compared with one dense layer on one device: outputs and every gradient."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax.sharding import PartitionSpec as P

import meshwright as mw
from meshwright.errors import MeshError, PlacementError
from meshwright.linen import (
    DenseForm,
    TPAsyncDense,
    TPDense,
    from_global,
    scale_init,
    shard_module_params,
    sync_gradients,
    to_global,
)
from meshwright.parallel import local_map, pcast_varying

INPUTS, OUTPUTS, ROWS = 24, 48, 4  # divisible by 1, 2, 3, 4 and 8
X = jax.random.normal(jax.random.key(1), (ROWS, INPUTS))
WEIGHT = jax.random.normal(jax.random.key(2), (ROWS, OUTPUTS))  # weights of the outputs in the loss
GLOBAL = {
    "kernel": jax.random.normal(jax.random.key(3), (INPUTS, OUTPUTS)),
    "bias": jax.random.normal(jax.random.key(4), (OUTPUTS,)),
}


def make(layer, mode, size, *, axis="tp", outputs=OUTPUTS, dtype=None, bias_init=nn.initializers.zeros, **options):
    whole = mode == "none" or (layer is TPDense and mode == "scatter")
    dense = functools.partial(
        nn.Dense, features=outputs if whole else outputs // size, dtype=dtype, bias_init=bias_init
    )
    return layer(dense, axis, tp_mode=mode, **options)


def specs_of(params):
    return nn.get_partition_spec(params)


def loss_of(apply, params, x, weight):
    y = apply({"params": params}, x)
    return (y * weight).astype(jnp.float32).sum(), y


@functools.cache
def reference(dtype=None):
    apply = nn.Dense(OUTPUTS, dtype=dtype).apply
    return jax.jit(jax.value_and_grad(functools.partial(loss_of, apply), argnums=(0, 1), has_aux=True))(
        GLOBAL, X, WEIGHT
    )


def close(got, expected, tolerance=1e-5):
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for (path, a), b in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(expected), strict=True):
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        np.testing.assert_allclose(a, b, atol=tolerance * np.abs(b).max(), rtol=0, err_msg=jax.tree_util.keystr(path))


CASES = [
    *(
        (layer, mode, size, {}, True)
        for layer in (TPDense, TPAsyncDense)
        for mode in ("gather", "scatter")
        for size in (1, 2, 4, 8)
    ),
    *((layer, mode, 4, {}, False) for layer in (TPDense, TPAsyncDense) for mode in ("gather", "scatter")),
    *((layer, "none", 4, {}, check) for layer in (TPDense, TPAsyncDense) for check in (True, False)),
    *((TPAsyncDense, "gather", size, {"use_bidirectional_gather": False}, True) for size in (3, 4)),
    *((TPAsyncDense, "scatter", size, {"use_bidirectional_scatter": True}, True) for size in (2, 4, 8)),
    (TPAsyncDense, "scatter", 4, {"use_bidirectional_scatter": True}, False),
    (TPDense, "gather", 4, {"use_bias": False, "dense_name": "out"}, True),
    (TPDense, "scatter", 4, {"use_bias": False, "dense_name": "out"}, True),
    (TPDense, "scatter", 1, {"use_bias": False, "dense_name": "out"}, True),
    (TPAsyncDense, "gather", 2, {"use_bias": False}, True),
    *(
        (layer, mode, 4, {"dtype": jnp.bfloat16}, True)
        for layer in (TPDense, TPAsyncDense)
        for mode in ("gather", "scatter")
    ),
]


@pytest.mark.parametrize(
    ("layer", "mode", "size", "options", "check"),
    CASES,
    ids=lambda value: value.__name__ if isinstance(value, type) else str(value),
)
def test_the_layer_equals_one_dense_layer(layer, mode, size, options, check):
    """Outputs and gradients equal those of one device, with parameters and gradients in the global layout.

    Each device computes its part of the loss, without a sum over devices.
    """
    module = make(layer, mode, size, **options)
    with_bias = options.get("use_bias", True)
    whole = GLOBAL if with_bias else {"kernel": GLOBAL["kernel"]}
    form = DenseForm.of(module, axis_size=size)
    params = from_global(whole, form)
    specs = specs_of(params)
    # A plain layer takes the full inputs.
    io = P() if mode == "none" else P(None, "tp")

    def local(params, x, weight):
        return jax.value_and_grad(functools.partial(loss_of, module.apply), argnums=(0, 1), has_aux=True)(
            params, x, weight
        )

    run = local_map(
        lambda *args: (lambda out: (out[0][1], out[1]))(local(*args)),
        mesh=mw.create_mesh(f"tp:{size}", devices=size),
        in_specs=(specs, io, io),
        out_specs=(io, (specs, io)),
        check_vma=check,
    )
    y, (grads, x_grad) = jax.jit(run)(params, X, WEIGHT)
    dtype = options.get("dtype")
    (_, expected_y), (expected, expected_x) = reference(dtype)
    if not with_bias:
        expected_y, expected = expected_y - GLOBAL["bias"], {"kernel": expected["kernel"]}
    tolerance = 2e-2 if dtype else 1e-5
    close(y, expected_y, tolerance)
    close(x_grad, expected_x, tolerance)
    close(to_global(grads, form), expected, tolerance)
    if with_bias and (layer, mode) == (TPDense, "scatter") and size > 1:
        assert not np.asarray(grads["module"]["sharded"]["bias"].value)[1:].any()  # only one device has a bias


def init_on(module, size, *, seed=0):
    io = P(None, "tp")
    mesh = mw.create_mesh(f"tp:{size}", devices=size)
    # Without check_vma, because the specs are known only after init; nothing is computed here.
    boxes = jax.eval_shape(
        local_map(module.init, mesh=mesh, in_specs=(P(), io), out_specs=P(), check_vma=False), jax.random.key(seed), X
    )
    run = local_map(module.init_with_output, mesh=mesh, in_specs=(P(), io), out_specs=(io, specs_of(boxes)))
    y, variables = jax.jit(run)(jax.random.key(seed), X)
    return y, variables["params"]


@pytest.mark.parametrize("layer", [TPDense, TPAsyncDense])
@pytest.mark.parametrize("mode", ["gather", "scatter"])
def test_a_seed_gives_the_same_layer_for_every_axis_size(layer, mode):
    """Each kernel is a part of the full kernel, so its scale and values do not depend on the axis size."""
    kernels = {}
    for size in (1, 4):
        module = make(layer, mode, size)
        _, params = init_on(module, size)
        kernels[size] = to_global(params, DenseForm.of(module, axis_size=size))["kernel"]
    np.testing.assert_allclose(kernels[4], kernels[1], rtol=1e-5, atol=1e-7)
    assert np.std(kernels[1]) == pytest.approx(INPUTS**-0.5, rel=0.1)


INITIALIZERS = {
    "lecun": nn.initializers.lecun_normal(),
    "glorot": nn.initializers.glorot_uniform(),
    "normal": nn.initializers.normal(0.02),
    "orthogonal": nn.initializers.orthogonal(),
}


def test_every_initializer_sees_the_full_kernel():
    class Layers(nn.Module):
        @nn.compact
        def __call__(self, x):
            options = {"kernel_init_adjustment": 3.0}
            return [
                make(TPAsyncDense, "scatter", 2, kernel_init=init, name=name, **options)(x)
                for name, init in INITIALIZERS.items()
            ]

    _, params = init_on(Layers(), 2)
    forms = dict.fromkeys(INITIALIZERS, DenseForm(tp_mode="scatter", axis_size=2, pieces=True))
    for name, layer in to_global(params, forms).items():
        kernel, whole = (
            np.asarray(x) for x in (layer["kernel"], INITIALIZERS[name](jax.random.key(5), (INPUTS, OUTPUTS)))
        )
        assert kernel.std() == pytest.approx(3.0 * whole.std(), rel=0.1), name
        if name == "orthogonal":  # the full kernel is one orthogonal matrix
            np.testing.assert_allclose(kernel @ kernel.T, 9 * np.eye(INPUTS), atol=1e-4)


def test_adjustment_and_name_work_at_axis_size_1():
    kernels = {}
    for factor in (1.0, 2.0):
        module = make(TPDense, "gather", 1, kernel_init_adjustment=factor, dense_name="out")
        _, params = init_on(module, 1)
        kernels[factor] = params["out"]["kernel"]
    np.testing.assert_allclose(kernels[2.0], 2 * kernels[1.0], rtol=1e-6)
    assert list(init_on(make(TPDense, "gather", 1), 1)[1]) == ["Dense_0"]
    assert list(init_on(make(TPAsyncDense, "gather", 1), 1)[1]) == ["shard_0"]


def test_two_kernels_of_a_layer_differ():
    class Gated(nn.Module):
        kernel_init: object
        use_bias: bool

        @nn.compact
        def __call__(self, x):
            make = functools.partial(nn.Dense, 4, kernel_init=self.kernel_init, use_bias=self.use_bias)
            return make()(x) * make()(x)

    _, params = init_on(TPDense(Gated, "tp", tp_mode="gather", use_bias=False), 2)
    inner = params["module"]["sharded"]
    assert (np.asarray(inner["Dense_0"]["kernel"].value) != np.asarray(inner["Dense_1"]["kernel"].value)).all()


@pytest.mark.parametrize("layer", [TPDense, TPAsyncDense])
@pytest.mark.parametrize("mode", ["gather", "scatter"])
def test_a_new_bias_counts_once(layer, mode):
    """A bias of 1 on 4 devices adds 1, including in the output of init."""
    module = make(layer, mode, 4, bias_init=nn.initializers.ones, kernel_init=nn.initializers.zeros)
    y, params = init_on(module, 4)
    np.testing.assert_array_equal(y, jnp.ones((ROWS, OUTPUTS)))
    np.testing.assert_array_equal(apply_on(module, 4, params, X), jnp.ones((ROWS, OUTPUTS)))


def apply_on(module, size, params, x, out=P(None, "tp")):
    run = local_map(
        lambda params, x: module.apply({"params": params}, x),
        mesh=mw.create_mesh(f"tp:{size}", devices=size),
        in_specs=(specs_of(params), P(None, "tp")),
        out_specs=out,
    )
    return jax.jit(run)(params, x)


def test_biases_trained_on_every_device_are_summed_and_convert():
    """The original trained one bias per device and summed them; such parameters give the same outputs here."""
    module = make(TPDense, "scatter", 4)
    form = DenseForm.of(module, axis_size=4)
    params = from_global(GLOBAL, form)
    box = params["module"]["sharded"]["bias"]
    trained = jax.random.normal(jax.random.key(9), box.value.shape)
    params["module"]["sharded"]["bias"] = box.replace(value=trained)
    y = apply_on(module, 4, params, X)
    np.testing.assert_allclose(y, X @ GLOBAL["kernel"] + trained.sum(0), rtol=1e-4, atol=1e-4)
    whole = to_global(params, form)
    np.testing.assert_allclose(whole["bias"], trained.sum(0), rtol=1e-6)
    np.testing.assert_allclose(apply_on(module, 4, from_global(whole, form), X), y, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("size", [2, 4, 8])
def test_the_direction_of_the_ring_does_not_change_the_result(size):
    for mode, flag in (("gather", "use_bidirectional_gather"), ("scatter", "use_bidirectional_scatter")):
        layers = [make(TPAsyncDense, mode, size, **{flag: value}) for value in (True, False)]
        params = from_global(GLOBAL, DenseForm.of(layers[0], axis_size=size))
        one, other = (apply_on(layer, size, params, X) for layer in layers)
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("mode", "options", "num_hops", "num_directions"),
    [
        ("gather", {"use_bidirectional_gather": True}, 3, 2),
        ("gather", {"use_bidirectional_gather": False}, 3, 1),
        ("scatter", {"use_bidirectional_scatter": True}, 6, 2),
        ("scatter", {"use_bidirectional_scatter": False}, 3, 1),
    ],
)
def test_the_flags_choose_the_ring(mode, options, num_hops, num_directions):
    module = make(TPAsyncDense, mode, 4, **options)
    params = from_global(GLOBAL, DenseForm.of(module, axis_size=4))
    run = local_map(
        lambda params, x: module.apply({"params": params}, x),
        mesh=mw.create_mesh("tp:4", devices=4),
        in_specs=(specs_of(params), P(None, "tp")),
        out_specs=P(None, "tp"),
    )
    hops = re.findall(r"ppermute\[(.*?)\]", str(jax.make_jaxpr(run)(params, X)), re.DOTALL)
    assert len(hops) == num_hops
    assert len({re.sub(r"\s", "", hop) for hop in hops}) == num_directions


def test_skip_communication():
    """A gather then takes full inputs, and a scatter returns the terms of the sum."""
    whole = {"kernel": GLOBAL["kernel"], "bias": GLOBAL["bias"]}
    gather, scatter = (make(TPDense, mode, 4, skip_communication=True) for mode in ("gather", "scatter"))
    params = {
        mode: from_global(whole, DenseForm.of(layer, axis_size=4))
        for mode, layer in (("gather", gather), ("scatter", scatter))
    }

    def local(params, x_whole, x):
        terms = scatter.apply({"params": params["scatter"]}, x)
        assert terms.shape == (ROWS, OUTPUTS)
        return gather.apply({"params": params["gather"]}, x_whole), jax.lax.psum(terms, "tp")

    run = local_map(
        local,
        mesh=mw.create_mesh("tp:4", devices=4),
        in_specs=(specs_of(params), P(), P(None, "tp")),
        out_specs=(P(None, "tp"), P()),
    )
    for y in jax.jit(run)(params, X, X):
        np.testing.assert_allclose(y, X @ GLOBAL["kernel"] + GLOBAL["bias"], rtol=1e-4, atol=1e-5)


class Block(nn.Module):
    """A tensor-parallel block for `nn.scan`, with split features as inputs and outputs."""

    layer: type
    size: int

    @nn.compact
    def __call__(self, x, _=None):
        h = make(self.layer, "gather", self.size, name="up")(x)
        return x + make(self.layer, "scatter", self.size, outputs=INPUTS, name="down")(nn.tanh(h)), None


def stack_of(block):
    return nn.scan(
        nn.remat(block, prevent_cse=False),
        variable_axes={"params": 0},
        split_rngs={"params": True},
        length=2,
        metadata_params={nn.PARTITION_NAME: None},
    )


@pytest.mark.parametrize(
    ("layer", "fsdp", "check"),
    [
        (TPDense, True, True),
        (TPAsyncDense, False, False),
        (TPAsyncDense, True, True),
        (TPDense, False, True),
        (TPDense, True, False),
        (TPAsyncDense, True, False),
    ],
)
def test_blocks_in_scan_and_remat_on_data_and_tensor_axes(layer, fsdp, check):
    """Two blocks with remat on dp2 x tp4, with and without FSDP, compared with one device."""
    make_block = functools.partial(Block, layer, 4, name="block")
    module = stack_of(shard_module_params(make_block, "dp", min_weight_size=64) if fsdp else make_block)()
    mesh = mw.create_mesh("dp:2,tp:4")
    rows, io = X.shape[0], P("dp", "tp")
    weight = jax.random.normal(jax.random.key(5), X.shape)
    # Without check_vma, because the specs are known only after init.
    run = local_map(
        lambda key, x: module.init(key, pcast_varying(x, "dp"))["params"],
        mesh=mesh,
        in_specs=(P(), io),
        out_specs=P(),
        check_vma=False,
    )
    specs = specs_of(jax.eval_shape(run, jax.random.key(0), X))

    def init(key, x):
        return module.init(key, pcast_varying(x, "dp"))["params"]

    params = jax.jit(local_map(init, mesh=mesh, in_specs=(P(), io), out_specs=specs, check_vma=check))(
        jax.random.key(0), X
    )

    def local(params, x, weight):
        def loss(params, x):
            y, _ = module.apply({"params": params}, x)
            return (y * weight).sum() / (rows / 2), y  # this device's part of the mean

        (_, y), (grads, x_grad) = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(params, x)
        return y, sync_gradients(grads, "dp"), x_grad / 2

    step = local_map(local, mesh=mesh, in_specs=(specs, io, io), out_specs=(io, specs, io), check_vma=check)
    y, grads, x_grad = jax.jit(step)(params, X, weight)
    if fsdp:
        assert "dp" in mw.get_names_from_partition_spec(specs)
    forms = {
        name: DenseForm(tp_mode=mode, axis_size=4, pieces=layer is TPAsyncDense)
        for name, mode in (("up", "gather"), ("down", "scatter"))
    }
    whole, grads = (to_global(nn.meta.unbox(tree), forms) for tree in (params, grads))
    assert whole["up"]["kernel"].shape == (2, INPUTS, OUTPUTS)

    def reference_loss(params, x):
        for i in range(2):
            up, down = (jax.tree.map(lambda leaf: leaf[i], params[name]) for name in ("up", "down"))  # noqa: B023
            x = x + jnp.tanh(x @ up["kernel"] + up["bias"]) @ down["kernel"] + down["bias"]
        return (x * weight).sum() / rows, x

    run_reference = jax.jit(jax.value_and_grad(reference_loss, argnums=(0, 1), has_aux=True))
    (_, expected_y), expected = run_reference(whole, X)
    close(y, expected_y)
    close((grads, x_grad), expected)


def test_scale_init_keeps_boxes_and_dtype():
    boxed = nn.with_partitioning(nn.initializers.ones, (None, "tp"))
    got = scale_init(boxed, 0.5)(jax.random.key(0), (2, 2), jnp.bfloat16)
    assert got.names == (None, "tp")
    assert got.value.dtype == jnp.bfloat16
    assert got.value.tolist() == [[0.5, 0.5], [0.5, 0.5]]


def trace(module, x=X, axes="tp:4"):
    mesh = mw.create_abstract_mesh(axes)
    # Without check_vma, because the specs are not known; only names, shapes and errors are tested.
    return jax.eval_shape(
        local_map(module.init, mesh=mesh, in_specs=(P(), P()), out_specs=P(), check_vma=False), jax.random.key(0), x
    )


@pytest.mark.parametrize("layer", [TPDense, TPAsyncDense])
def test_bad_inputs_of_the_layers(layer):
    with pytest.raises(
        PlacementError, match=rf"{layer.__name__}: tp_mode='gahter' is unknown.\nhint: did you mean 'gather'"
    ):
        trace(make(layer, "gahter", 4))
    with pytest.raises(MeshError, match=rf"{layer.__name__} names axis 'model'; the mesh has axes: tp"):  # 21
        trace(make(layer, "gather", 4, axis="model"))
    with pytest.raises(MeshError, match=rf"{layer.__name__} was called outside of shard_map"):  # 22
        make(layer, "gather", 4).init(jax.random.key(0), X)


def test_bad_input_scatter_of_outputs_that_do_not_divide():
    with pytest.raises(PlacementError, match=r"cannot split 10 outputs over the 4 .*10 % 4 = 2.\nhint: .* 12 features"):
        trace(TPDense(functools.partial(nn.Dense, features=10), "tp", tp_mode="scatter"))


def test_a_split_ring_needs_two_features():
    with pytest.raises(
        PlacementError, match=r"async_scatter_split cannot halve the last dim of an array of shape \(4, 1\)"
    ):
        trace(make(TPAsyncDense, "scatter", 4, outputs=4, use_bidirectional_scatter=True))
