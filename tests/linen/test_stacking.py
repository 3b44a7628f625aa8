"""Slices and stacks of arrays along a mesh axis: values, names, dtypes, gradients and errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax.sharding import PartitionSpec as P

import meshwright as mw
from meshwright.errors import MeshError, PlacementError
from meshwright.linen.stacking import split_array_over_mesh, stack_params, unstack_params
from meshwright.parallel import local_map

SIZES = (1, 2, 4, 8)


def mesh_of(size):
    return mw.create_mesh(f"tp:{size}", devices=size)


def trace(f, *args, size=4):
    """Traces a local function on an abstract mesh, for tests of shapes, names or errors."""
    mesh = mw.create_abstract_mesh(f"tp:{size}")
    return jax.eval_shape(local_map(f, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False), *args)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("check", [True, False])
def test_split_slices_every_dim_and_has_the_full_gradient(size, check):
    x = jnp.arange(2 * 8 * 16.0).reshape(2, 8, 16)
    weight = jnp.cos(x)
    specs = {1: P(None, "tp"), -1: P(None, None, "tp")}

    def local(x, weights):
        parts = {dim: split_array_over_mesh(x, "tp", dim) for dim in specs}
        grad = jax.grad(lambda x: sum((split_array_over_mesh(x, "tp", dim) * weights[dim]).sum() for dim in specs))(x)
        return parts, grad if check else jax.lax.psum(grad, "tp") if size > 1 else grad

    run = local_map(local, mesh=mesh_of(size), in_specs=(P(), specs), out_specs=(specs, P()), check_vma=check)
    parts, grad = jax.jit(run)(x, dict.fromkeys(specs, weight))
    for part in parts.values():
        np.testing.assert_array_equal(part, x)
    np.testing.assert_allclose(grad, 2 * weight, rtol=1e-6)


def test_split_accepts_values_that_already_vary():
    def local(x):
        return split_array_over_mesh(x + jax.lax.axis_index("tp") * 100, "tp", 0)

    run = local_map(local, mesh=mesh_of(4), in_specs=P(), out_specs=P("tp"))
    assert jax.jit(run)(jnp.arange(4)).tolist() == [0, 101, 202, 303]


def test_a_slice_varies_along_an_axis_of_one_device_too():
    """So that `psum` over the axis works with `check_vma`, as it does on more devices."""
    run = jax.shard_map(
        lambda x: jax.lax.psum(split_array_over_mesh(x, "tp", 0), "tp"), mesh=mesh_of(1), in_specs=P(), out_specs=P()
    )
    assert jax.jit(run)(jnp.arange(3)).tolist() == [0, 1, 2]


def test_split_refuses_a_remainder_instead_of_dropping_it():
    with pytest.raises(
        PlacementError, match=r"dim 0 of an array of shape \(10,\) has size 10.*10 % 4 = 2.\nhint: pad to 12"
    ):
        trace(lambda x: split_array_over_mesh(x, "tp", 0), jnp.ones(10))


@pytest.mark.parametrize("check", [True, False])
def test_split_of_fewer_rows_than_devices_is_empty_with_a_warning(check):
    """Models are initialized with one row, also if they split rows over a tensor axis."""

    def local(x):
        parts = split_array_over_mesh(x, "tp", 0), split_array_over_mesh(x, "tp", -1)
        assert [part.shape for part in parts] == [(0, 8), (1, 2)]
        return parts

    run = local_map(local, mesh=mesh_of(4), in_specs=P(), out_specs=(P("tp"), P(None, "tp")), check_vma=check)
    with pytest.warns(
        mw.MeshwrightWarning,
        match=r"dim 0 of an array of shape \(1, 8\) has size 1; axis 'tp' has 4 devices, so every slice is empty\.\n"
        r"hint: pad to 4",
    ) as seen:
        empty, rest = jax.jit(run)(jnp.arange(8.0)[None])
    assert len(seen) == 1
    assert seen[0].filename == __file__
    assert empty.shape == (0, 8)
    np.testing.assert_array_equal(rest, jnp.arange(8.0)[None])


@pytest.mark.parametrize(("rows", "warns", "fails"), [(0, False, False), (3, True, False), (5, False, True)])
def test_split_of_other_numbers_of_rows(rows, warns, fails):
    def split():
        return trace(lambda x: split_array_over_mesh(x, "tp", 0), jnp.ones((rows, 2)))

    if fails:
        with pytest.raises(PlacementError, match=r"has size 5; axis 'tp' has 4 devices: 5 % 4 = 1.\nhint: pad to 8"):
            split()
    elif warns:
        with pytest.warns(mw.MeshwrightWarning, match="has size 3; axis 'tp' has 4 devices, so every slice is empty"):
            assert split().shape == (0, 2)
    else:
        assert split().shape == (0, 2)


def test_a_model_that_splits_its_rows_initializes_with_one_row():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            h = nn.Dense(6)(split_array_over_mesh(x, "tp", 0))
            return nn.Dense(2)(jax.lax.all_gather(nn.tanh(h), "tp", tiled=True))

    one_row, rows = jnp.ones((1, 3)), jax.random.normal(jax.random.key(1), (8, 3))
    init = local_map(Model().init, mesh=mesh_of(4), in_specs=P(), out_specs=P())
    with pytest.warns(mw.MeshwrightWarning, match="every slice is empty"):
        params = jax.jit(init)(jax.random.key(0), one_row)
    apply = local_map(Model().apply, mesh=mesh_of(4), in_specs=P(), out_specs=P(), check_vma=False)
    first, second = (params["params"][f"Dense_{index}"]["kernel"] for index in range(2))
    np.testing.assert_allclose(jax.jit(apply)(params, rows), jnp.tanh(rows @ first) @ second, rtol=1e-5, atol=1e-6)


TREE = {
    "matrix": jnp.arange(6.0).reshape(2, 3),
    "half": jnp.ones((3,), jnp.bfloat16),
    "scalar": jnp.float32(3.0),
    "count": jnp.int32(7),
    "flags": jnp.array([True, False]),
    "boxed": nn.Partitioned(jnp.arange(4.0).reshape(2, 2), (("fsdp", "pp"), None)),
}


def assert_trees_equal(got, expected):
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b), strict=True)


@pytest.mark.parametrize("axis", [0, -1])
@pytest.mark.parametrize("size", [1, 4])
def test_stack_then_unstack_returns_the_same_tree(axis, size):
    run = local_map(
        lambda tree: unstack_params(stack_params(tree, "tp", axis=axis), "tp"),
        mesh=mesh_of(size),
        in_specs=P(),
        out_specs=P(),
        check_vma=False,
    )
    assert_trees_equal(jax.jit(run)(TREE), TREE)


@pytest.mark.parametrize(
    ("axis", "names"),
    [
        (0, {"matrix": ("tp", None, None), "scalar": ("tp",), "boxed": ("tp", ("fsdp", "pp"), None)}),
        (-1, {"matrix": (None, None, "tp"), "scalar": ("tp",), "boxed": (("fsdp", "pp"), None, "tp")}),
    ],
)
def test_tuple_names_and_scalars_stack(axis, names):
    stacked = trace(lambda tree: stack_params(tree, "tp", axis=axis), TREE)
    for leaf, expected in names.items():
        assert stacked[leaf].names == expected
    assert {name: box.value.dtype for name, box in stacked.items()} == {
        name: jax.tree.leaves(leaf)[0].dtype for name, leaf in TREE.items()
    }


def test_axis_one_goes_between_the_dims():
    assert trace(lambda x: stack_params(x, "tp", axis=1), jnp.ones((2, 3))).value.shape == (2, 1, 3)


def test_stacked_shards_are_one_global_array():
    run = local_map(
        lambda: stack_params({"w": jnp.full((2,), jax.lax.axis_index("tp"))}, "tp"),
        mesh=mesh_of(4),
        in_specs=(),
        out_specs={"w": P("tp")},
    )
    box = jax.jit(run)()["w"]
    assert box.names == ("tp", None)
    assert box.value.tolist() == [[0, 0], [1, 1], [2, 2], [3, 3]]


@pytest.mark.parametrize("keep", [2, -2, "traced"])
def test_mask_keeps_one_shard_and_its_dtype_and_masks_gradients(keep):
    tree = {"float": jnp.array([1.0, jnp.nan]), "half": jnp.ones((), jnp.bfloat16), "count": jnp.int32(7)}

    def local(tree, index):
        def stacked(tree):
            return stack_params(tree, "tp", mask_except=index if keep == "traced" else keep)

        def loss(half):
            return stacked(tree | {"half": half})["half"].value.sum() * 2

        # Cast to varying first, for the gradient of each device's copy instead of their sum.
        half = jax.lax.pcast(tree["half"], "tp", to="varying")
        return stacked(tree), jax.grad(loss)(half)[None]

    run = local_map(local, mesh=mesh_of(4), in_specs=(P(), P()), out_specs=(dict.fromkeys(tree, P("tp")), P("tp")))
    boxes, grads = jax.jit(run)(tree, jnp.int32(2))
    np.testing.assert_array_equal(boxes["float"].value, [[0, 0], [0, 0], [1, np.nan], [0, 0]])
    assert boxes["count"].value.tolist() == [0, 0, 7, 0]
    assert boxes["count"].value.dtype == jnp.int32
    assert boxes["half"].value.dtype == jnp.bfloat16
    assert grads.tolist() == [0, 0, 2, 0]


def test_unstack_does_not_change_other_leaves():
    other = {
        "plain": jnp.ones(2),
        "other": nn.Partitioned(jnp.ones((1, 2)), ("fsdp", None)),
        "inside": nn.Partitioned(jnp.ones((2, 2)), (("fsdp", "tp"), None)),
    }
    seen = trace(lambda tree: unstack_params(tree, "tp"), other)
    assert jax.tree.map(jnp.shape, seen) == jax.tree.map(jnp.shape, other)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda x: stack_params(stack_params(x, "tp"), "tp"), r"already split over axis 'tp'"),
        (lambda x: stack_params(nn.Partitioned(x, (("tp", "fsdp"), None)), "tp"), r"already split over axis 'tp'"),
        (lambda x: stack_params(x, "tp", axis=3), r"dim 3 is out of range for an array with 3 dims.\nhint: use 0 to 2"),
        (lambda x: stack_params(x, "tp", mask_except=4), r"shard 4 is out of range .* 4 shards .*\nhint: use 0 to 3"),
        (
            lambda x: unstack_params(nn.Partitioned(x, ("tp", None)), "tp"),
            r"named 'tp' and has size 2.*\nhint: call it inside",
        ),
        (lambda x: split_array_over_mesh(x, "tp", 2), r"dim 2 is out of range for an array with 2 dims"),
        (lambda x: split_array_over_mesh(x[0, 0], "tp", 0), r"with 0 dims.\nhint: pass an array with at least one dim"),
    ],
)
def test_refusals(call, text):
    with pytest.raises(PlacementError, match=text):
        trace(call, jnp.ones((2, 2)))


CALLS = {
    "split_array_over_mesh": lambda axis: split_array_over_mesh(jnp.ones(4), axis, 0),
    "stack_params": lambda axis: stack_params(jnp.ones(4), axis),
    "unstack_params": lambda axis: unstack_params(jnp.ones(4), axis),
}


@pytest.mark.parametrize("name", CALLS)
def test_an_unknown_axis_is_refused(name):
    with pytest.raises(MeshError, match=rf"{name} names axis 'tpp'; the mesh has axes: tp.\nhint: did you mean 'tp'"):
        trace(lambda: CALLS[name]("tpp"))


@pytest.mark.parametrize("name", CALLS)
def test_a_call_outside_of_shard_map_is_refused(name):
    with pytest.raises(MeshError, match=rf"{name} was called outside of shard_map.*\nhint: call it inside"):
        CALLS[name]("tp")
    with (
        pytest.raises(MeshError, match=rf"{name} was called outside of shard_map: axis 'tp' is automatic"),
        jax.set_mesh(mw.create_mesh("tp:8")),
    ):
        CALLS[name]("tp")
