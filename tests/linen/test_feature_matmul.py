"""Overlapped matmuls by features against one device: values and gradients, in the local view and as an island."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import meshwright as mw
from meshwright.errors import PlacementError
from meshwright.linen import gather_matmul_by_features, matmul_scatter_by_features
from meshwright.parallel import local_map

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
        PlacementError, match=r"4 slices of 2 features cannot multiply(.|\n)*hint: the weight must be \[8"
    ):
        gather(jnp.ones((3, 8)), jnp.ones((7, 4)))
    scatter = local_map(
        lambda x, w: matmul_scatter_by_features(x, w, axis="tp"), mesh=mesh, in_specs=(UP, DOWN), out_specs=UP
    )
    with pytest.raises(
        PlacementError, match=r"cannot scatter 6 columns over 4 devices(.|\n)*hint: pad the columns to 8"
    ):
        scatter(jnp.ones((3, 8)), jnp.ones((8, 6)))
