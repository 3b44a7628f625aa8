import flax.linen as nn
import flax.training.train_state
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import meshwright as mw
from meshwright import types


def test_train_state_is_flax_s_with_two_more_fields():
    params = {"w": jnp.ones(3)}
    state = mw.TrainState.create(apply_fn=None, params=params, tx=optax.sgd(0.5), rng=jax.random.key(0))
    assert isinstance(state, flax.training.train_state.TrainState)
    assert state.mutable_variables is None
    after = state.apply_gradients(grads={"w": jnp.full(3, 2.0)}, mutable_variables={"stats": jnp.zeros(2)})
    np.testing.assert_array_equal(after.params["w"], np.zeros(3, np.float32))
    assert after.step == 1
    assert after.mutable_variables["stats"].shape == (2,)
    assert len(jax.tree.leaves(state)) == 3


@pytest.mark.parametrize(
    ("key", "rows"),
    [
        (slice(0, 2), [0, 1]),
        (slice(None, None, 2), [0, 2]),
        (np.array([2, 0]), [2, 0]),
        (np.array([True, False, True]), [0, 2]),
        (1, 1),
    ],
)
def test_batch_slices_every_array(key, rows):
    batch = mw.Batch(inputs={"x": np.arange(6).reshape(3, 2), "y": np.arange(3) * 10}, targets=jnp.arange(3))
    part = batch[key]
    np.testing.assert_array_equal(part.inputs["x"], batch.inputs["x"][rows])
    np.testing.assert_array_equal(part.inputs["y"], np.array(rows) * 10)
    np.testing.assert_array_equal(part.targets, rows)


def test_batch_is_a_pytree():
    batch = jax.jit(lambda batch: batch[:1])(mw.Batch(inputs=jnp.ones((2, 3)), targets=jnp.zeros(2)))
    assert (batch.inputs.shape, batch.targets.shape) == ((1, 3), (1,))
    assert [leaf.name for leaf in mw.tree.named_leaves(batch)] == ["inputs", "targets"]


def test_names_are_the_same_everywhere():
    for name in ("TrainState", "Batch", "Parameter", "PyTree", "PRNGKeyArray", "Metrics"):
        assert getattr(mw, name) is getattr(types, name)
        assert name in dir(types)
    assert mw.Parameter == jax.Array | nn.Partitioned[types.Any]


@pytest.mark.parametrize("module", [mw, types])
def test_unknown_names_are_attribute_errors(module):
    with pytest.raises(AttributeError, match=f"module '{module.__name__}' has no attribute 'nonsense'"):
        module.nonsense  # noqa: B018
