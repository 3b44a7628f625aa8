"""Heads split over a tensor axis, and key/value heads shared by neighboring devices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from meshwright.errors import PlacementError
from meshwright.parallel import local_map, split_heads

from .one_device import mesh_of

FEATURES = 16


def grouped_scores(q, k, num_heads, num_kv_heads, *, axis):
    """Combines each key head with its query heads, like attention."""
    q = split_heads(q, num_heads, axis=axis)
    k = split_heads(k, num_kv_heads, axis=axis, shared=True)
    k = jnp.repeat(k, q.shape[-2] // k.shape[-2], axis=-2)
    return jnp.sum(jnp.sin(q.astype("float32") * k.astype("float32")), axis=-1)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("ways", "kv_heads"), [(1, 2), (2, 1), (4, 1), (4, 2), (8, 1), (8, 2), (8, 4), (8, 8)])
def test_heads_and_all_gradients_equal_one_device(ways, kv_heads, dtype, check_vma):
    rng = np.random.default_rng(ways)
    heads, size = 8, FEATURES // kv_heads
    q, k, d = (
        jnp.asarray(rng.standard_normal(shape), dtype) for shape in ((3, heads * size), (3, FEATURES), (3, heads))
    )

    def loss(q, k, d, axis):
        total = jnp.sum(grouped_scores(q, k, heads, kv_heads, axis=axis) * d)
        return total if axis is None else lax.psum(total, axis)

    split = P(None, "tp")
    local = jax.shard_map(
        functools.partial(loss, axis="tp"),
        mesh=mesh_of(ways),
        in_specs=(split, split, split),
        out_specs=P(),
        check_vma=check_vma,
    )
    found = jax.jit(jax.value_and_grad(local, argnums=(0, 1)))(q, k, d)
    true = jax.value_and_grad(functools.partial(loss, axis=None), argnums=(0, 1))(q, k, d)
    tolerance = 1e-5 if dtype == "float32" else 2e-2
    for got, wanted in zip(jax.tree.leaves(found), jax.tree.leaves(true), strict=True):
        wanted = np.asarray(wanted, "float32")
        np.testing.assert_allclose(np.asarray(got, "float32"), wanted, atol=tolerance * np.abs(wanted).max())


@pytest.mark.parametrize(("ways", "kv_heads"), [(4, 2), (8, 2)])
def test_global_view_has_all_heads(ways, kv_heads):
    y = jnp.arange(2.0 * FEATURES).reshape(2, FEATURES)
    with jax.set_mesh(mesh_of(ways)):
        heads = jax.jit(lambda y: split_heads(y, kv_heads, axis="tp", shared=True))(y)
    np.testing.assert_array_equal(heads, y.reshape(2, kv_heads, -1))


def test_errors_suggest_head_counts():
    y = jnp.zeros((2, FEATURES))
    with jax.set_mesh(mesh_of(8)):
        with pytest.raises(
            PlacementError, match=r"4 heads are not divisible by the 8 devices.*\nhint: use 8 heads, or"
        ):
            split_heads(y, 4, axis="tp")
        text = r"3 kv heads are not .*: 3 % 8 = 3.\nhint: use 2 or 8 kv heads, or an axis of 1, 3, 6, 12 or so devices"
        with pytest.raises(PlacementError, match=text):
            split_heads(y, 3, axis="tp", shared=True, what="kv heads")
    assert split_heads(y, 2, axis=None).shape == (2, 2, 8)
    for count in (0, 3):
        with pytest.raises(PlacementError, match=f"16 features are not {count} heads of one size"):
            split_heads(y, count, axis=None)

    def whole(y):
        return split_heads(y, 2, axis="tp", shared=True)

    with pytest.raises(PlacementError, match=r"y of shape \(2, 16\) is the same on every device of axis 'tp'"):
        local_map(whole, mesh=mesh_of(8), in_specs=P(), out_specs=P(None, "tp", None))(y)


def test_explicit_axes_cannot_split_a_head():
    mesh = jax.make_mesh((8,), ("tp",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        y = jax.device_put(jnp.zeros((2, FEATURES)), jax.NamedSharding(mesh, P(None, "tp")))
        with pytest.raises(PlacementError, match=r"2 heads for 8 devices.*\nhint: use the local view, or a mesh"):
            split_heads(y, 2, axis="tp", shared=True)
