"""Slices that are taken before a loop give the same results, and the loop no longer carries the whole arrays."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from meshwright.models.ops import unstack
from meshwright.parallel.loop_slices import slices_first

KEYS = jax.random.split(jax.random.key(0), 2)
STACKED, TABLE = jax.random.normal(KEYS[0], (3, 4, 4)), jax.random.normal(KEYS[1], (3, 4))


def loss(stacked, table, x):
    for layer, bias in zip(unstack(stacked, 3), table, strict=True):
        x = jnp.tanh(x @ layer + bias)
    return (x**2).sum() + table.sum()


def gradients(x):
    """Of a matrix that is only sliced, and of one that is also used as a whole."""
    return jax.value_and_grad(loss, argnums=(0, 1))(STACKED, TABLE, x)


def constants(function, x):
    return sorted(np.shape(value) for value in jax.make_jaxpr(function)(x).consts)


def test_results_are_the_same_and_only_slices_are_left():
    x = jnp.linspace(-1.0, 1.0, 8).reshape(2, 4)
    cut = slices_first(gradients, x)
    jax.tree.map(np.testing.assert_array_equal, cut(x), gradients(x))
    assert constants(gradients, x) == [(3, 4), (3, 4, 4)]
    assert constants(cut, x) == [(3, 4), (4, 4), (4, 4), (4, 4)]


def test_slices_of_arguments_stay_inside():
    cut = slices_first(lambda x: (lax.index_in_dim(x, 1, keepdims=False), STACKED.sum()), TABLE)
    np.testing.assert_array_equal(cut(2 * TABLE)[0], 2 * TABLE[1])
    assert constants(cut, TABLE) == [(3, 4, 4)]
