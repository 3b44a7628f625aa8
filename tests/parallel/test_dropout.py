"""Dropout masks depend on positions in the global array, not on devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import meshwright as mw
from meshwright.parallel.dropout import dropout
from meshwright.parallel.local_map import local_map

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
