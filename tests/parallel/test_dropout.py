"""Random draws depend on positions in the global array, not on devices or parts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax.sharding import PartitionSpec as P

import meshwright as mw
from meshwright.parallel.dropout import dropout
from meshwright.parallel.local_map import local_map
from meshwright.parallel.rows import row_key

KEY = jax.random.key(7)
SHAPE = (8, 6, 16)


@pytest.mark.parametrize(
    ("mesh", "spec"),
    [
        ("dp:8", P("dp")),
        ("tp:8", P(None, None, "tp")),
        ("sp:2,tp:4", P(None, "sp", "tp")),
        ("dp:2,fsdp:2,tp:2", P(("dp", "fsdp"), None, "tp")),
        ("dp:2,fsdp:2,tp:2", P(("fsdp", "dp"), "tp")),
        ("dp:8,tp:1", P("dp", None, "tp")),
    ],
)
def test_split_arrays_get_the_mask_of_the_whole(mesh, spec):
    x = jnp.arange(1.0, 1 + np.prod(SHAPE)).reshape(SHAPE)
    local = local_map(
        lambda x, key: dropout(x, 0.4, key, spec=spec), mesh=mw.create_mesh(mesh), in_specs=(spec, P()), out_specs=spec
    )
    np.testing.assert_array_equal(jax.jit(local)(x, KEY), dropout(x, 0.4, KEY))


def test_global_view_equals_one_device():
    x = jnp.ones(SHAPE)
    sharding = jax.NamedSharding(mw.create_mesh("dp:4,tp:2"), P("dp", None, "tp"))
    got = jax.jit(lambda x: dropout(x, 0.4, KEY), in_shardings=sharding, out_shardings=sharding)(x)
    np.testing.assert_array_equal(got, dropout(x, 0.4, KEY))


@pytest.mark.parametrize("rate", [0.0, 0.1, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_rate_scale_and_gradient(rate, dtype):
    x = jnp.full((64, 256), 2.0, dtype)
    out, grad = jax.value_and_grad(lambda x: dropout(x, rate, KEY).astype(jnp.float32).sum())(x)
    kept = np.asarray(dropout(x, rate, KEY) != 0)
    assert kept.mean() == pytest.approx(1 - rate, abs=0.01)
    assert float(out) == pytest.approx(2.0 * x.size, rel=0.03) or rate == 1
    np.testing.assert_array_equal(np.asarray(grad != 0), kept)
    assert grad.dtype == dtype


def test_rows_and_columns_and_keys_are_independent():
    """No two rows or columns share a mask, and neighbors agree on half of their elements."""
    mask = np.asarray(dropout(jnp.ones((128, 128)), 0.5, KEY) != 0)
    for view in (mask, mask.T):
        assert len(np.unique(view, axis=0)) == 128
        assert (view[1:] == view[:-1]).mean() == pytest.approx(0.5, abs=0.02)
    other = np.asarray(dropout(jnp.ones((128, 128)), 0.5, jax.random.fold_in(KEY, 1)) != 0)
    assert (mask == other).mean() == pytest.approx(0.5, abs=0.02)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: dropout(x, 1.5, KEY), "rate=1.5"),
        (lambda x: dropout(x, 0.5, KEY, spec=P(None, None, None, "dp")), "at most 3 entries"),
        (lambda x: dropout(x, 0.5, KEY, spec=P("dpp")), "did you mean 'dp'"),
    ],
)
def test_bad_inputs(call, message):
    with pytest.raises(mw.MeshwrightError, match=message):
        local_map(call, mesh=mw.create_mesh("dp:8"), in_specs=P("dp"), out_specs=P("dp"))(jnp.ones(SHAPE))


# --- Keys by row ---

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
