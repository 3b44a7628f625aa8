"""Ring collectives compared with all_gather and psum_scatter: values, order and gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.sharding import PartitionSpec as P

import meshwright as mw
from meshwright.errors import MeshError, PlacementError
from meshwright.linen import (
    async_gather,
    async_gather_bidirectional,
    async_gather_split,
    async_scatter,
    async_scatter_split,
    gather_matmul_by_features,
    matmul_scatter_by_features,
)
from meshwright.parallel import local_map

SIZES = (1, 2, 3, 4, 5, 7, 8)


@functools.cache
def mesh_of(size):
    return mw.create_mesh(f"tp:{size}", devices=size)


def on_ring(f, size, *, out=P(None, "tp"), check_vma=True):
    """Runs `f` on each device's slice of an array with `size` shards."""
    return jax.jit(local_map(f, mesh=mesh_of(size), in_specs=P("tp"), out_specs=out, check_vma=check_vma))


def shards(size, width=6, rows=2):
    return np.arange(size * rows * width, dtype=np.float32).reshape(size * rows, width)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("up", [True, False])
@pytest.mark.parametrize("gather", [async_gather, async_gather_bidirectional])
@pytest.mark.parametrize("size", SIZES)
def test_entry_k_is_the_shard_of_the_device_k_positions_below(size, gather, up, check_vma):
    x = shards(size)
    entries = on_ring(lambda s: jnp.stack(gather(s, "tp", shift_up=up)), size, check_vma=check_vma)(x)
    by_device = np.split(x, size)
    for k in range(size):
        expected = np.concatenate([by_device[(i - k if up else i + k) % size] for i in range(size)])
        np.testing.assert_array_equal(entries[k], expected)


@pytest.mark.parametrize("width", [2, 5, 6])
@pytest.mark.parametrize("size", SIZES)
def test_split_gather_returns_both_halves_of_every_shard(size, width):
    x = {"a": shards(size, width), "b": shards(size, width + 1)}

    def run(tree):
        return [jax.tree.map(lambda leaf: leaf[None], entry) for entry in async_gather_split(tree, "tp")]

    entries = on_ring(run, size, out=P(None, "tp"))(x)
    assert len(entries) == 2 * size
    for name in x:
        cut = -(-x[name].shape[1] // 2)
        by_device = np.split(x[name], size)
        for k in range(size):
            left = np.concatenate([by_device[(i - k) % size][:, :cut] for i in range(size)])
            right = np.concatenate([by_device[(i + k) % size][:, cut:] for i in range(size)])
            np.testing.assert_array_equal(entries[k][name][0], left)
            np.testing.assert_array_equal(entries[size + k][name][0], right)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("size", SIZES)
def test_scatter_sums_the_entries_for_each_device(size, check_vma):
    rng = np.random.default_rng(size)
    x = rng.integers(-9, 9, size=(size, size, 5)).astype(np.float32)  # device, entry, width

    def run(scatter, **kwargs):
        f = lambda s: scatter([s[0, k] for k in range(size)], "tp", **kwargs)  # noqa: E731
        return on_ring(f, size, out=P("tp"), check_vma=check_vma)(x).reshape(size, 5)

    up = np.stack([sum(x[(d - (size - 1 - k)) % size, k] for k in range(size)) for d in range(size)])
    down = np.stack([sum(x[(d + (size - 1 - k)) % size, k] for k in range(size)) for d in range(size)])
    np.testing.assert_array_equal(run(async_scatter), up)
    np.testing.assert_array_equal(run(async_scatter, shift_up=False), down)
    np.testing.assert_array_equal(run(async_scatter_split), up)  # defect 5: the direction does not change the sum


@settings(max_examples=12)
@given(st.sampled_from([2, 3, 4, 8]), st.integers(2, 5), st.booleans(), st.integers(0, 2**31))
def test_rings_agree_with_all_gather_and_psum_scatter(size, width, up, seed):
    x = np.random.default_rng(seed).standard_normal((size, width)).astype(np.float32)

    def both(s):
        place = lax.axis_index("tp")
        entries = jnp.stack(async_gather_bidirectional(s, "tp", shift_up=up))
        order = (place - jnp.arange(size) if up else place + jnp.arange(size)) % size
        gathered = jnp.zeros_like(entries).at[order].set(entries)
        whole = lax.all_gather(s, "tp")
        # Entry k goes to place + size - 1 - k.
        destined = (place + size - 1 - jnp.arange(size)) % size
        summed = async_scatter(list(whole[destined] * (place + 1.0)), "tp")
        reference = lax.psum_scatter(whole * (place + 1.0), "tp", scatter_dimension=0)
        return gathered - whole, summed - reference

    gather_error, scatter_error = on_ring(both, size, out=(P("tp"), P("tp")))(x)
    assert float(jnp.abs(gather_error).max()) == 0.0
    assert float(jnp.abs(scatter_error).max()) < 1e-5


@pytest.mark.parametrize("size", [1, 2, 3, 8])
@pytest.mark.parametrize("gather", [async_gather, async_gather_bidirectional, async_gather_split])
def test_the_gradient_of_a_gather_is_a_scatter(size, gather):
    x = np.random.default_rng(0).standard_normal((size * 2, 4)).astype(np.float32)

    def loss(s):
        # Different weights per entry and device reveal a wrong destination.
        place = lax.axis_index("tp") if size > 1 else 0
        entries = gather(s, "tp")
        total = sum(jnp.sum(jnp.sin(e * (k + 1.0)) * (place + 2.0)) for k, e in enumerate(entries))
        return lax.psum(total, "tp") if size > 1 else total

    def reference(x):
        by_device, total = jnp.split(x, size), 0.0
        for i in range(size):
            if gather is async_gather_split:
                entries = [by_device[(i - k) % size][:, :2] for k in range(size)]
                entries += [by_device[(i + k) % size][:, 2:] for k in range(size)]
            else:
                entries = [by_device[(i - k) % size] for k in range(size)]
            total += sum(jnp.sum(jnp.sin(e * (k + 1.0)) * (i + 2.0)) for k, e in enumerate(entries))
        return total

    ours = jax.jit(jax.grad(local_map(loss, mesh=mesh_of(size), in_specs=P("tp"), out_specs=P())))(x)
    np.testing.assert_allclose(ours, jax.grad(reference)(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("scatter", [async_scatter, async_scatter_split])
@pytest.mark.parametrize("size", [1, 3, 8])
def test_the_gradient_of_a_scatter_is_a_gather(size, scatter):
    x = np.random.default_rng(1).standard_normal((size, size, 4)).astype(np.float32)

    def loss(s):
        place = lax.axis_index("tp") if size > 1 else 0
        total = jnp.sum(jnp.sin(scatter([s[0, k] for k in range(size)], "tp")) * (place + 1.0))
        return lax.psum(total, "tp") if size > 1 else total

    def reference(x):
        sums = [sum(x[(d - (size - 1 - k)) % size, k] for k in range(size)) for d in range(size)]
        return sum(jnp.sum(jnp.sin(s) * (d + 1.0)) for d, s in enumerate(sums))

    ours = jax.jit(jax.grad(local_map(loss, mesh=mesh_of(size), in_specs=P("tp"), out_specs=P())))(x)
    np.testing.assert_allclose(ours, jax.grad(reference)(x), rtol=1e-5, atol=1e-5)


def test_a_replicated_input_gets_the_sum_of_its_gradients():
    def loss(w):
        return lax.psum(sum(jnp.sum(e * (k + 1.0)) for k, e in enumerate(async_gather(w, "tp"))), "tp")

    grad = jax.grad(local_map(loss, mesh=mesh_of(4), in_specs=P(), out_specs=P()))(jnp.ones(3))
    np.testing.assert_allclose(grad, np.full(3, 4 * (1 + 2 + 3 + 4.0)))


def test_bidirectional_gather_takes_half_as_many_hops():
    text = on_ring(lambda s: jnp.stack(async_gather_bidirectional(s, "tp")), 8).lower(shards(8)).compile().as_text()
    assert mw_count(text) == 7


def mw_count(text):
    from meshwright.plan.compiled.collectives import read_schedule

    return read_schedule(text).count("collective-permute")


# Bad inputs 21 to 24.


def test_unknown_axis_inside_shard_map():
    with pytest.raises(MeshError, match=r"async_gather names axis 'tpp'.*\n?.*did you mean 'tp'"):
        on_ring(lambda s: async_gather(s, "tpp")[0], 4)(shards(4))


def test_called_outside_shard_map():
    with pytest.raises(MeshError, match=r"async_gather was called outside of shard_map(.|\n)*hint:"):
        async_gather(jnp.ones(4), "tp")
    with jax.set_mesh(mesh_of(4)), pytest.raises(MeshError, match="axis 'tp' is automatic here"):
        async_gather(jnp.ones(4), "tp")


@pytest.mark.parametrize("scatter", [async_scatter, async_scatter_split])
def test_wrong_number_of_entries(scatter):
    with pytest.raises(
        PlacementError, match=r"got 3 entries for axis 'tp' of 4 devices(.|\n)*hint: pass one entry per"
    ):
        on_ring(lambda s: scatter([s] * 3, "tp"), 4, out=P("tp"))(shards(4))


@pytest.mark.parametrize("shape", [(4, 1), (4,)])
def test_nothing_to_halve(shape):
    x = np.ones(shape, np.float32)
    f = (lambda s: async_gather_split(s, "tp")[0]) if len(shape) == 2 else (lambda s: async_gather_split(s[0], "tp")[0])
    with pytest.raises(PlacementError, match=r"cannot halve the last dim of an array of shape"):
        on_ring(f, 4, out=P("tp"))(x)


# --- Matmuls by features compared with one device: values and gradients, inside and outside of shard_map ---

FEATURES, UP, DOWN = P(None, None, "tp"), P(None, "tp"), P("tp", None)


@pytest.mark.parametrize("view", ["local", "island", "plain"])
@pytest.mark.parametrize("both_ways", [False, True])
@pytest.mark.parametrize("ways", [1, 2, 3, 8])
def test_equals_one_device(ways, both_ways, view):
    mesh = mw.create_mesh(f"tp:{ways}", devices=ways)
    rng = np.random.default_rng(ways)
    dim, hidden = ways * 3, ways * 2
    x, up, down = (rng.standard_normal(s).astype(np.float32) for s in ((2, 5, dim), (dim, hidden), (hidden, dim)))
    weight = rng.standard_normal(x.shape).astype(np.float32)

    def block(x, up, down):
        h = jnp.tanh(gather_matmul_by_features(x, up, axis="tp", both_ways=both_ways))
        return matmul_scatter_by_features(h, down, axis="tp", both_ways=both_ways)

    mapped = local_map(block, mesh=mesh, in_specs=(FEATURES, UP, DOWN), out_specs=FEATURES)
    run = mapped if view == "local" else block
    both = jax.jit(jax.value_and_grad(lambda *args: jnp.sum(run(*args) * weight), argnums=(0, 1, 2)))
    if view == "plain":
        loss, grads = both(x, up, down)
    else:
        with jax.set_mesh(mesh):
            loss, grads = both(x, up, down)
    reference = jax.value_and_grad(lambda x, up, down: jnp.sum(jnp.tanh(x @ up) @ down * weight), argnums=(0, 1, 2))
    true_loss, true_grads = reference(x, up, down)
    np.testing.assert_allclose(loss, true_loss, rtol=1e-5)
    for ours, true in zip(grads, true_grads, strict=True):
        assert np.abs(ours - true).max() <= 2e-6 * np.abs(true).max()


def test_bad_shapes():
    mesh = mw.create_mesh("tp:4", devices=4)
    gather = local_map(
        lambda x, w: gather_matmul_by_features(x, w, axis="tp"), mesh=mesh, in_specs=(UP, UP), out_specs=UP
    )
    with pytest.raises(
        PlacementError, match=r"4 slices of 2 features do not fit(.|\n)*hint: pass a weight of shape \[8"
    ):
        gather(jnp.ones((3, 8)), jnp.ones((7, 4)))
    scatter = local_map(
        lambda x, w: matmul_scatter_by_features(x, w, axis="tp"), mesh=mesh, in_specs=(UP, DOWN), out_specs=UP
    )
    with pytest.raises(PlacementError, match=r"6 columns cannot be split over 4 devices(.|\n)*hint: pad to 8"):
        scatter(jnp.ones((3, 8)), jnp.ones((8, 6)))
