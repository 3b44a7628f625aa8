import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshwright as mw
from meshwright import P

SEEDS = {
    "typed": lambda: jax.random.key(5),
    "old": lambda: jax.random.PRNGKey(5),
    "rbg": lambda: jax.random.key(5, impl="rbg"),
}


def bits(key, shape=()):
    return jax.random.bits(key, shape)


def expected(seed, count):
    return [int(bits(jax.random.fold_in(seed, n))) for n in range(count)]


# --- Keys per call ---


@pytest.mark.parametrize("seed", SEEDS.values(), ids=SEEDS)
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_call_n_gets_key_n(seed, wrap):
    draw = wrap(mw.wrap_function_with_rng(seed())(bits))
    values = [int(draw()) for _ in range(4)]
    assert values == expected(seed(), 4)
    assert len(set(values)) == 4


def test_numpy_keys_are_keys():
    draw = mw.wrap_function_with_rng(np.array([0, 5], np.uint32))(bits)
    assert int(draw()) == expected(jax.random.PRNGKey(5), 1)[0]


def test_eager_and_traced_calls_count_together():
    draw = mw.wrap_function_with_rng(jax.random.key(5))(bits)
    traced = jax.jit(draw)
    values = [int(draw()), int(traced()), int(draw()), int(traced())]
    assert values == expected(jax.random.key(5), 4)


def test_several_calls_in_one_program():
    draw = mw.wrap_function_with_rng(jax.random.key(5))(bits)
    traced = jax.jit(lambda: [draw(), draw(), draw()])
    with jax.checking_leaks():
        values = [int(value) for _ in range(2) for value in traced()]
    assert values == expected(jax.random.key(5), 6)


def test_inside_scan_every_step_draws_a_new_key():
    draw = mw.wrap_function_with_rng(jax.random.key(5))(bits)
    with jax.checking_leaks():
        run = jax.jit(lambda: jax.lax.scan(lambda carry, _: (carry, draw()), 0, None, length=3)[1])
        values = [int(value) for _ in range(2) for value in run()]
    assert values == expected(jax.random.key(5), 6)


def test_inside_grad():
    @mw.wrap_function_with_rng(jax.random.key(5))
    def noisy(key, x):
        return x * jax.random.normal(key)

    scales = [jax.random.normal(jax.random.fold_in(jax.random.key(5), n)) for n in range(2)]
    assert [float(jax.grad(noisy)(2.0)), float(jax.jit(jax.grad(noisy))(2.0))] == pytest.approx(
        [float(scale) for scale in scales]
    )


def test_a_key_made_while_tracing_stays_inside():
    @jax.jit
    def program(seed):
        draw = mw.wrap_function_with_rng(seed)(bits)
        return draw(), draw()

    with jax.checking_leaks():
        first = [int(value) for value in program(jax.random.key(5))]
        second = [int(value) for value in program(jax.random.key(5))]
    assert first == second == expected(jax.random.key(5), 2)


def test_arguments_and_names_pass_through():
    @mw.wrap_function_with_rng(jax.random.key(0))
    def named(key, a, *, b):
        """Draws a number."""
        return a, b

    assert named(1, b=2) == (1, 2)
    assert (named.__name__, named.__doc__) == ("named", "Draws a number.")


def test_inside_shard_map_it_is_an_error():
    draw = mw.wrap_function_with_rng(jax.random.key(0))(bits)
    mapped = jax.shard_map(lambda x: x + draw(), mesh=mw.create_mesh("dp:8"), in_specs=P("dp"), out_specs=P("dp"))
    with pytest.raises(mw.RngError, match=r"inside shard_map.*\nhint: pass the key .*fold_rng_over_axis"):
        jax.jit(mapped)(jnp.zeros(8, jnp.uint32))


# --- Keys per device ---


def fold(axes, mesh="dp:2,tp:4", manual=None, seed=0):
    """Returns the bits drawn on every device, as an array of the mesh's shape."""
    where = mw.create_mesh(mesh)
    names = tuple(where.axis_names)

    def draw(key):
        value = bits(mw.fold_rng_over_axis(key, axes))
        return jax.lax.pcast(value, tuple(a for a in names if a in varies), to="varying").reshape((1,) * len(names))

    varies = [name for name in names if name not in ((axes,) if isinstance(axes, str) else axes)]
    mapped = jax.shard_map(draw, mesh=where, in_specs=P(), out_specs=P(*names))
    return np.asarray(jax.jit(mapped)(jax.random.key(seed)))


def test_different_along_the_axis_equal_across_the_others():
    values = fold("tp")
    assert (values[0] == values[1]).all()
    assert len(set(values[0].tolist())) == 4


def test_two_axes_give_one_key_per_device():
    assert len(set(fold(("dp", "tp")).flatten().tolist())) == 8


def test_names_and_indices_all_differ():
    drawn = [*fold("dp")[:, 0].tolist(), *fold("tp")[0].tolist(), int(bits(jax.random.key(0)))]
    assert len(set(drawn)) == 2 + 4 + 1


def test_deterministic_and_independent_of_the_mesh():
    np.testing.assert_array_equal(fold("tp"), fold("tp"))
    np.testing.assert_array_equal(fold("tp")[0], fold("tp", "tp:4,dp:2")[:, 0])
    np.testing.assert_array_equal(fold("tp")[0, :2], fold("tp", "dp:4,tp:2")[0])
    assert (fold("tp") != fold("tp", seed=1)).all()


def test_axes_are_folded_in_order():
    key = jax.random.key(0)
    mapped = jax.shard_map(
        lambda key: bits(mw.fold_rng_over_axis(mw.fold_rng_over_axis(key, "dp"), "tp")).reshape(1, 1),
        mesh=mw.create_mesh("dp:2,tp:4"),
        in_specs=P(),
        out_specs=P("dp", "tp"),
    )
    np.testing.assert_array_equal(mapped(key), fold(["dp", "tp"]))


def test_an_axis_of_size_one_may_be_dropped():
    bound = fold(("dp", "tp"), "dp:8,tp:1")

    def draw(key):
        return bits(mw.fold_rng_over_axis(key, ("dp", "tp"))).reshape(1, 1)

    dropped = jax.shard_map(draw, mesh=mw.create_mesh("dp:8,tp:1"), in_specs=P(), out_specs=P("dp"), axis_names={"dp"})
    np.testing.assert_array_equal(jax.jit(dropped)(jax.random.key(0)), bound)


def test_outside_of_shard_map_is_an_error():
    with pytest.raises(mw.MeshwrightError, match=r"called outside of shard_map.*\nhint: call it inside"):
        mw.fold_rng_over_axis(jax.random.key(0), "dp")


def test_an_axis_that_is_not_manual_is_an_error():
    mapped = jax.shard_map(
        lambda key: bits(mw.fold_rng_over_axis(key, "tp")).reshape(1),
        mesh=mw.create_mesh("dp:2,tp:4"),
        in_specs=P(),
        out_specs=P("dp"),
        axis_names={"dp"},
    )
    with pytest.raises(mw.MeshwrightError, match=r"over other axes.*\nhint: .*'tp'.* axis_names"):
        jax.jit(mapped)(jax.random.key(0))
    with jax.set_mesh(mw.create_mesh("dp:2,tp:4")), pytest.raises(mw.MeshwrightError, match="axis 'tp' is"):
        mw.fold_rng_over_axis(jax.random.key(0), "tp")


def test_a_misspelled_axis_is_an_error():
    mapped = jax.shard_map(
        lambda key: bits(mw.fold_rng_over_axis(key, "ttp")), mesh=mw.create_mesh("tp:8"), in_specs=P(), out_specs=P()
    )
    with pytest.raises(mw.MeshError, match=r"names axis 'ttp'.*\nhint: did you mean 'tp'"):
        mapped(jax.random.key(0))


@pytest.mark.parametrize("seed", SEEDS.values(), ids=SEEDS)
def test_every_kind_of_key(seed):
    mapped = jax.shard_map(
        lambda key: bits(mw.fold_rng_over_axis(key, "tp"), (1,)),
        mesh=mw.create_mesh("tp:8"),
        in_specs=P(),
        out_specs=P("tp"),
    )
    assert len(set(jax.jit(mapped)(seed()).tolist())) == 8
