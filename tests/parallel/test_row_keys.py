"""Random draws depend on rows of the whole batch, not on parts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from meshwright.parallel.row_keys import row_key

KEY = jax.random.key(7)
DRAWS = {
    "normal": lambda key, rows: jax.random.normal(key, (rows, 5)),
    "bernoulli": lambda key, rows: jax.random.bernoulli(key, 0.3, (rows, 2, 3)),
    "bfloat16": lambda key, rows: jax.random.uniform(key, (rows,), jnp.bfloat16),
    "uint8": lambda key, rows: jax.random.bits(key, (rows, 4), jnp.uint8),
    "randint": lambda key, rows: jax.random.randint(key, (rows, 2), 0, 1000),
    "categorical": lambda key, rows: jax.random.categorical(key, jnp.zeros((rows, 7))),
    "folded and split": lambda key, rows: jax.random.normal(
        jax.random.split(jax.random.fold_in(key, 3), 4)[2], (rows, 2)
    ),
    "flax": lambda key, rows: nn.Dropout(0.5, deterministic=False).apply(
        {}, jnp.ones((rows, 6)), rngs={"dropout": key}
    ),
}


@pytest.mark.parametrize("name", DRAWS)
def test_parts_draw_the_values_of_the_whole(name):
    cuts = [(0, 12), (0, 4), (4, 8), (11, 1)]
    draw_all = jax.jit(lambda: [DRAWS[name](row_key(KEY, first), rows) for first, rows in cuts])
    whole, *parts = (np.asarray(values, np.float32) for values in draw_all())
    for (first, rows), part in zip(cuts[1:], parts, strict=True):
        np.testing.assert_allclose(part, whole[first : first + rows], rtol=1e-6)  # erf_inv may differ in its last bit
    assert len(np.unique(whole.reshape(12, -1), axis=0)) > 2


def test_row_keys_add_up_and_legacy_keys_work():
    draw = DRAWS["normal"]
    np.testing.assert_array_equal(draw(row_key(row_key(KEY, 3), 4), 2), draw(row_key(KEY, 7), 2))
    np.testing.assert_array_equal(draw(row_key(jax.random.PRNGKey(7), 1), 2), draw(row_key(KEY, 1), 2))
    assert not np.array_equal(draw(row_key(jax.random.key(8)), 2), draw(row_key(KEY), 2))
    assert draw(row_key(jax.random.key(0, impl="rbg")), 2).shape == (2, 5)


def test_row_keys_pass_through_transformations():
    keys = jax.vmap(lambda first: row_key(KEY, first))(jnp.arange(3))
    one_by_one = [DRAWS["normal"](row_key(KEY, first), 1) for first in range(3)]
    np.testing.assert_array_equal(jax.vmap(lambda key: DRAWS["normal"](key, 1))(keys), jnp.stack(one_by_one))
    scanned = jax.lax.scan(lambda _, key: (None, DRAWS["normal"](key, 1)), None, keys)[1]
    np.testing.assert_array_equal(scanned, jnp.stack(one_by_one))
    remade = jax.jit(jax.checkpoint(lambda key: DRAWS["normal"](key, 4)))(row_key(KEY))
    np.testing.assert_allclose(remade, DRAWS["normal"](row_key(KEY), 4), rtol=1e-6)
