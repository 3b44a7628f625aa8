import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import meshwright as mw
from meshwright import PlacementError
from meshwright.models.ops import rotary_tables, rotate, swiglu, unstack


def normal(seed, *shape, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(seed), shape).astype(dtype)


def assert_close(actual, expected, tolerance):
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    error = np.linalg.norm(actual - expected) / np.linalg.norm(expected)
    assert error < tolerance, error


TOLERANCE = {jnp.float32: 1e-6, jnp.bfloat16: 4e-3}


# --- rotate ---


def turned_in_float64(x, positions, theta, sign=1.0):
    x, dim = np.asarray(x, np.float64), x.shape[-1]
    angles = np.asarray(positions, np.float64)[..., None] / theta ** (np.arange(0, dim, 2) / dim)
    pairs = x[..., : dim // 2] + 1j * x[..., dim // 2 :]
    pairs = pairs * np.exp(sign * 1j * angles)[..., :, None, :]
    return np.concatenate([pairs.real, pairs.imag], axis=-1)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("per_row", [False, True])
def test_rotate_and_its_gradient(dtype, per_row):
    x, d_turned = normal(0, 2, 7, 3, 8, dtype=dtype), normal(1, 2, 7, 3, 8, dtype=dtype)
    positions = jnp.array([[0, 1, 2, 0, 1, 0, 1], [5, 6, 7, 8, 9, 10, 11]]) if per_row else jnp.arange(7)
    cos, sin = rotary_tables(positions, 8, theta=100.0)
    assert cos.dtype == sin.dtype == jnp.float32
    turned, pull = jax.vjp(lambda x: rotate(x, cos, sin), x)
    (d_x,) = pull(d_turned)
    assert turned.dtype == d_x.dtype == dtype
    assert_close(turned, turned_in_float64(x, positions, 100.0), TOLERANCE[dtype])
    assert_close(d_x, turned_in_float64(d_turned, positions, 100.0, sign=-1.0), TOLERANCE[dtype])


def test_dot_products_depend_only_on_relative_positions():
    q, k = normal(0, 1, 5, 1, 16), normal(1, 1, 5, 1, 16)

    def products(shift):
        tables = rotary_tables(shift + jnp.arange(5), 16)
        return jnp.einsum("bshk,bthk->st", rotate(q, *tables), rotate(k, *tables))

    np.testing.assert_allclose(products(0), products(31), atol=1e-4)


def test_large_positions_keep_precision():
    positions = jnp.array([131071])
    cos, _ = rotary_tables(positions, 4, theta=5e5)
    assert_close(cos[0, 0, 0], np.cos(131071.0 / 5e5 ** np.array([0.0, 0.5])), 1e-3)


@pytest.mark.parametrize(
    ("positions", "head_dim", "x"),
    [((3, 2, 1), 4, ()), ((3,), 5, ()), ((3,), 4, (1, 4, 2, 4)), ((2, 3), 4, (3, 3, 2, 4)), ((3,), 4, (3, 2, 4))],
)
def test_bad_shapes_of_a_rotation(positions, head_dim, x):
    with pytest.raises(PlacementError, match=r"pass positions as|cos and sin from rotary_tables, \[1 or B"):
        rotate(jnp.zeros(x), *rotary_tables(jnp.zeros(positions), head_dim))


# --- swiglu ---


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_swiglu_and_its_gradients(dtype):
    gate, up, d_out = (3 * normal(seed, 4, 33, dtype=dtype) for seed in range(3))
    out, pull = jax.vjp(swiglu, gate, up)
    d_gate, d_up = pull(d_out)
    g, u, d = (np.asarray(x, np.float64) for x in (gate, up, d_out))
    sigmoid = 1 / (1 + np.exp(-g))
    assert out.dtype == d_gate.dtype == d_up.dtype == dtype
    assert_close(out, g * sigmoid * u, TOLERANCE[dtype])
    assert_close(d_gate, d * u * sigmoid * (1 + g * (1 - sigmoid)), TOLERANCE[dtype])
    assert_close(d_up, d * g * sigmoid, TOLERANCE[dtype])


def test_swiglu_stays_finite():
    gate = jnp.array([-1e30, -200.0, 0.0, 200.0, 1e30])
    grads = jax.grad(lambda gate, up: swiglu(gate, up).sum(), argnums=(0, 1))(gate, jnp.ones(5))
    assert np.isfinite(swiglu(gate, jnp.ones(5))).all()
    assert np.isfinite(grads).all()


def test_swiglu_keeps_only_its_inputs():
    gate, up = normal(0, 4, 8, dtype=jnp.bfloat16), normal(1, 4, 8, dtype=jnp.bfloat16)
    kept = jax.tree.leaves(jax.vjp(swiglu, gate, up)[1])
    assert [(x.shape, x.dtype) for x in kept] == [((4, 8), jnp.bfloat16)] * 2


def test_swiglu_of_different_shapes():
    with pytest.raises(PlacementError, match="the same shape and dtype"):
        swiglu(jnp.ones((2, 3)), jnp.ones((2, 4)))
    with pytest.raises(PlacementError, match="the same shape and dtype"):
        swiglu(jnp.ones(3), jnp.ones(3, jnp.bfloat16))


# --- unstack ---


def test_unstack_is_indexing():
    tree = {"w": normal(0, 3, 4, 2), "n": [normal(1, 3, 2, dtype=jnp.bfloat16)]}

    def loss(layers):
        x = jnp.ones((1, 4))
        return sum(jnp.sin(x @ layer["w"] * layer["n"][0]).sum() * (i + 1) for i, layer in enumerate(layers))

    value, grads = jax.value_and_grad(lambda tree: loss(unstack(tree, 3)))(tree)
    plain = jax.value_and_grad(lambda tree: loss([jax.tree.map(lambda x: x[i], tree) for i in range(3)]))  # noqa: B023
    expected, expected_grads = plain(tree)
    assert value == expected
    jax.tree.map(np.testing.assert_array_equal, grads, expected_grads)


def test_the_gradient_of_unstack_is_one_stack():
    def loss(w):
        return sum(jnp.sin(x).sum() for x in unstack(w, 4))

    text = jax.jit(jax.grad(loss)).lower(jnp.ones((4, 3))).as_text()
    assert text.count("stablehlo.concatenate") == 1
    assert "stablehlo.pad" not in text
    assert "scatter" not in text


def test_unstack_with_a_wrong_number_of_layers():
    with pytest.raises(PlacementError, match=r"unstack of 3 layers got a leaf of shape \(2,\)"):
        unstack({"a": jnp.ones((3, 1)), "b": jnp.ones(2)}, 3)


# --- Inside shard_map ---


def test_gradients_inside_shard_map_equal_those_on_one_device():
    x, gates, ups = normal(0, 4, 6, 8, 16), normal(1, 2, 16, 16), normal(2, 2, 16)

    def loss(x, gates, ups):
        tables = rotary_tables(jnp.arange(x.shape[1]), x.shape[-1])
        for gate, up in zip(unstack(gates, 2), unstack(ups, 2), strict=True):
            # One varies along both axes, the other along neither.
            x = rotate(x, *tables) + swiglu(x @ gate, jnp.broadcast_to(up, x.shape))
        return jnp.square(x).mean()

    def local(x, gates, ups):
        return jax.lax.pmean(loss(x, gates, ups), ("dp", "tp"))

    mesh = mw.create_mesh("dp:4,tp:2")
    sharded = jax.shard_map(local, mesh=mesh, in_specs=(P("dp", None, "tp"), P(), P()), out_specs=P())
    expected = jax.value_and_grad(loss, argnums=(0, 1, 2))(x, gates, ups)
    actual = jax.jit(jax.value_and_grad(sharded, argnums=(0, 1, 2)))(x, gates, ups)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), actual, expected)

    inside = jax.shard_map(
        jax.grad(local, argnums=(0, 1, 2)),
        mesh=mesh,
        in_specs=(P("dp", None, "tp"), P(), P()),
        out_specs=(P("dp", None, "tp"), P(), P()),
    )
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), jax.jit(inside)(x, gates, ups), expected[1]
    )
