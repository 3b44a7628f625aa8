"""Losses that know nothing of a mesh, on meshes for which XLA needs help to compute the right gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import meshwright as mw
from meshwright import P

MESH = "dp:2,fsdp:2,tp:2"


def init(key):
    first, second, third = jax.random.split(key, 3)
    return {
        "embed": jax.random.normal(first, (16, 8)),
        "up": jax.random.normal(second, (8, 16)),
        "down": jax.random.normal(third, (16, 8)),
    }


def loss(params, batch, rng):
    h = jnp.tanh(params["embed"][batch["token"]] @ params["up"])
    return jnp.mean((h @ params["down"] - batch["y"]) ** 2), {}


@pytest.fixture(scope="module")
def batch():
    generator = np.random.default_rng(0)
    token = generator.integers(0, 16, 16).astype(np.int32)
    return {"token": token, "y": generator.standard_normal((16, 8)).astype(np.float32)}


def gradients(spec, mesh, batch, **options):
    job = mw.Job(init=init, rules=[("", spec)], loss=loss)
    layout = mw.state_layout(job, optax.sgd(1.0), mesh)
    state = mw.init_state(job, optax.sgd(1.0), layout, jax.random.key(0))
    step = mw.make_train_step(job, optax.sgd(1.0), layout, view="global", donate=False, **options)
    after, _ = step(state, batch)
    return jax.tree.map(lambda old, new: np.asarray(old) - np.asarray(new), state.params, after.params)


@pytest.mark.parametrize("options", [{}, {"num_minibatches": 2}, {"remat": "full"}], ids=str)
@pytest.mark.parametrize("spec", [P("fsdp", "tp"), P("tp", "fsdp")], ids=str)
def test_weights_split_over_both_axes(spec, options, batch):
    whole = gradients(P(), mw.create_mesh("dp:1", devices=1), batch)
    split = gradients(spec, mw.create_mesh(MESH), batch, **options)
    for name, grad in whole.items():
        # Sums of at most 64 terms of size 1; a wrong reduction changes gradients by a factor.
        np.testing.assert_allclose(split[name], grad, rtol=1e-5, atol=1e-5, err_msg=name)
