"""Norms count each leaf once, and clipping uses the norm of all gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import meshwright as mw
from meshwright.train import global_norm


@pytest.mark.parametrize("mesh", ["dp:2,fsdp:2,tp:2", "fsdp:8", "pp:2,tp:2,dp:2"])
def test_clipping_uses_the_global_norm(lab, mesh):
    first, wanted, metrics = lab.reference(1, clip=0.1)
    change = jax.tree.map(lambda a, b: (a - b) / 0.5, first, wanted)
    assert float(metrics["grad_norm"]) > 0.2
    np.testing.assert_allclose(global_norm(change), 0.1, rtol=1e-4)
    lab.assert_same_change(lab.train(lab.decoder_job(), mesh, 1, clip=0.1), (first, wanted, metrics))


def test_norms_in_the_local_view_count_whole_leaves_once():
    tree = {"split": jnp.arange(8.0), "both": jnp.arange(16.0).reshape(8, 2), "whole": jnp.arange(3.0)}
    specs = {"split": P("fsdp"), "both": P("fsdp", "tp"), "whole": P()}
    norm = mw.parallel.local_map(global_norm, mesh=mw.create_mesh("fsdp:4,tp:2"), in_specs=(specs,), out_specs=P())(
        tree
    )
    wanted = np.sqrt(sum(float((leaf**2).sum()) for leaf in jax.tree.leaves(tree)))
    np.testing.assert_allclose(norm, wanted, rtol=1e-6)
