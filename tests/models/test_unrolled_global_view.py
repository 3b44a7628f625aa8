"""The global view with tp, another axis and unrolled layers, which is the default on GPUs, equals one device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import meshwright as mw
from meshwright.models import XLSTM, Decoder, Execution
from meshwright.parallel import vocab_embed
from meshwright.train import init_state, language_job, make_train_step, state_layout

MODELS = {
    "decoder": Decoder(vocab_size=32, d_model=16, num_layers=2, num_heads=4, d_ff=32),
    "xlstm": XLSTM(vocab_size=32, d_model=16, num_layers=2, num_heads=4, d_ff=32),
}


@functools.cache
def trained(name, mesh):
    """Returns the loss of an SGD step with learning rate 1 and the gradients, on the host."""
    job = language_job(MODELS[name], batch_size=8, num_tokens=8, run=Execution(layers="unroll"), packed=True)
    layout = state_layout(job, optax.sgd(1.0), mw.create_mesh(mesh, devices=1 if mesh == "dp:1" else None))
    state = init_state(job, optax.sgd(1.0), layout, jax.random.key(0))
    step = make_train_step(job, optax.sgd(1.0), layout, view="global", donate=False)
    after, metrics = step(state, job.make_batch(0))
    before, after = jax.device_get((state.params, after.params))
    return float(metrics["loss"]), jax.tree.map(lambda old, new: old - new, before, after)


@pytest.mark.slow  # a compiled step per mesh
@pytest.mark.parametrize(
    ("name", "mesh"),
    [("decoder", "dp:2,tp:4"), ("decoder", "fsdp:4,tp:2"), ("decoder", "dp:2,fsdp:2,tp:2"), ("xlstm", "fsdp:2,tp:4")],
)
def test_unrolled_layers_in_the_global_view_equal_one_device(name, mesh):
    loss, grads = trained(name, "dp:1")
    got, found = trained(name, mesh)
    np.testing.assert_allclose(got, loss, rtol=1e-5)
    largest = max(float(np.abs(leaf).max()) for leaf in jax.tree.leaves(grads))
    # A gradient is the difference of two parameters of order 1, each rounded to float32.
    for leaf, expected in zip(jax.tree.leaves(found), jax.tree.leaves(grads), strict=True):
        np.testing.assert_allclose(leaf, expected, rtol=1e-4, atol=1e-5 * max(1.0, largest))


def test_the_embedding_in_the_global_view_asks_no_device_for_its_number():
    """XLA may refuse `partition_id` outside of programs that are manual along all axes."""
    ids, table = jnp.zeros((8, 8), jnp.int32), jnp.ones((32, 16))
    with jax.set_mesh(mw.create_mesh("dp:2,tp:4")):
        lowered = jax.jit(lambda ids, table: vocab_embed(ids, table, axis="tp")).lower(ids, table)
    assert "partition_id" not in lowered.as_text()
