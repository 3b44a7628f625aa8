"""`accumulate_gradients` of the xlstm_jax API: loop and scan return the gradients of the whole batch."""

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from jax import lax
from jax.sharding import PartitionSpec as P

import meshwright as mw
from meshwright.linen import accumulate_gradients, accumulate_gradients_loop, accumulate_gradients_scan
from meshwright.parallel.local_map import local_map
from meshwright.parallel.row_keys import row_key

WIDTH = 16


def assert_close(got, expected, tolerance=1e-5):
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for (path, a), (_, b) in zip(jax.tree.leaves_with_path(got), jax.tree.leaves_with_path(expected), strict=True):
        scale = max(float(np.abs(b).max()), 1e-30)
        assert np.abs(np.asarray(a) - np.asarray(b)).max() / scale < tolerance, jax.tree_util.keystr(path)


def make_params():
    keys = jax.random.split(jax.random.key(0), 2)
    return {name: jax.random.normal(key, (WIDTH, WIDTH)) / 4 for name, key in zip(("up", "down"), keys, strict=True)}


def make_batch(rows):
    """Returns three tokens per row, with some masked: all of every fifth row and of a quarter of the rows."""
    x = jax.random.normal(jax.random.key(1), (rows, 3, WIDTH))
    mask = jax.random.bernoulli(jax.random.key(2), 0.6, (rows, 3)) & (jnp.arange(rows) % 5 > 0)[:, None]
    return {"x": x, "y": jnp.roll(x, 1, 0), "mask": mask & (jnp.arange(rows) >= rows // 4)[:, None]}


def loss_fn(params, apply_fn, batch, rng):
    """Squared error over valid tokens, which is NaN if there are none."""
    h = jnp.tanh(batch["x"] @ params["up"])
    if rng is not None:
        h = jnp.where(jax.random.bernoulli(rng, 0.7, h.shape), h / 0.7, 0)
    errors = ((h @ params["down"] - batch["y"]) ** 2).sum(-1)
    total, count = (errors * batch["mask"]).sum(), batch["mask"].sum()
    rows = (batch["mask"].any(-1).sum(), batch["mask"].shape[0])
    mutable = {"seen": batch["x"].shape[0] + 0 * total, "where": batch["x"][0, 0, 0]}
    return total / count, ({"loss": (total, count), "rows": rows, "error": total / count}, mutable)


def make_state(params, apply_fn=None):
    return mw.TrainState.create(apply_fn=apply_fn, params=params, tx=optax.sgd(0.1))


@pytest.mark.parametrize(("num_minibatches", "with_rng"), [(1, False), (4, True), (8, False)])
def test_loop_scan_and_full_batch_agree(num_minibatches, with_rng):
    """The batch has masked tokens, masked rows, and a fully masked minibatch, whose loss and gradients are NaN."""
    state, batch = make_state(make_params()), make_batch(16)
    rng = jax.random.key(4) if with_rng else None
    whole = jax.jit(jax.grad(loss_fn, has_aux=True), static_argnums=1)
    expected, (expected_metrics, _) = whole(state.params, None, batch, row_key(rng) if with_rng else None)
    step = functools.partial(accumulate_gradients, num_minibatches=num_minibatches, loss_fn=loss_fn)
    results = [jax.jit(functools.partial(step, use_scan=use_scan))(state, batch, rng) for use_scan in (False, True)]
    for grads, metrics, mutable in results:
        assert_close((grads, metrics), (expected, expected_metrics))
        assert mutable["seen"].shape == (num_minibatches,)
        np.testing.assert_array_equal(mutable["where"], batch["x"][:: 16 // num_minibatches, 0, 0])
    assert_close(*results, tolerance=1e-6)


def test_the_accumulator_is_float32_for_any_parameter_dtype():
    batch = {"x": jnp.where(jnp.arange(512) == 0, 256.0, 1.0)}
    state = make_state(jnp.ones((), jnp.bfloat16))

    def loss_fn(params, apply_fn, batch, rng):
        return (params * batch["x"].astype(jnp.bfloat16)).sum(), ({"total": (params, 1)}, None)

    for form in (accumulate_gradients_loop, accumulate_gradients_scan):
        state_step = functools.partial(form, num_minibatches=512, loss_fn=loss_fn)
        if form is accumulate_gradients_loop:  # unrolled 512 times, it would take minutes to compile
            state_step = functools.partial(form, num_minibatches=64, loss_fn=loss_fn)
            small = {"x": jnp.where(jnp.arange(64) == 0, 256.0, 1.0)}
            grads, metrics, _ = jax.jit(state_step)(state, small, None)
            assert float(grads) * 64 == 256 + 63
        else:
            grads, metrics, _ = jax.jit(state_step)(state, batch, None)
            assert float(grads) * 512 == 256 + 511
            assert [float(part) for part in metrics["total"]] == [512, 512]
        assert grads.dtype == jnp.float32


def test_metrics_are_averaged_not_summed_and_weighted_by_the_loss():
    def loss_fn(params, apply_fn, batch, rng):
        count = batch["mask"].sum()
        return params * 1.0, ({"loss": (count * 3.0, count), "plain": batch["x"].mean(), "nested": {"a": (2, 1)}}, None)

    batch = {"x": jnp.array([1.0, 1.0, 5.0, 5.0]), "mask": jnp.array([1.0, 1.0, 1.0, 0.0])}
    for form in (accumulate_gradients_loop, accumulate_gradients_scan):
        grads, metrics, mutable = form(make_state(jnp.float32(2.0)), batch, None, 2, loss_fn)
        assert float(grads) == 1.0
        assert float(metrics["plain"]) == pytest.approx((2 * 1 + 1 * 5) / 3)
        assert [float(part) for part in metrics["loss"]] == [9.0, 3.0]
        assert [int(part) for part in metrics["nested"]["a"]] == [4, 2]
        assert mutable is None


def test_without_a_count_minibatches_have_equal_weights_unless_weight_key_names_one():
    def loss_fn(params, apply_fn, batch, rng):
        return (params * batch["x"]).mean(), ({"loss": params, "tokens": (0.0, batch["x"].sum())}, None)

    batch = {"x": jnp.array([1.0, 3.0])}
    state = make_state(jnp.float32(2.0))
    assert float(accumulate_gradients(state, batch, None, 2, loss_fn)[0]) == 2.0
    weighted = accumulate_gradients(state, batch, None, 2, loss_fn, weight_key="tokens")[0]
    assert float(weighted) == (1 * 1 + 3 * 3) / 4


class Dropping(nn.Module):
    @nn.compact
    def __call__(self, x):
        h = nn.Dropout(0.5, deterministic=False)(nn.Dense(8)(x))
        return nn.Dropout(0.3, deterministic=False)(nn.Dense(4)(h))


def test_flax_dropout_does_not_depend_on_the_number_of_minibatches():
    module, x = Dropping(), jax.random.normal(jax.random.key(0), (8, 5))
    params = jax.jit(module.init)({"params": jax.random.key(1), "dropout": jax.random.key(2)}, x)

    def loss_fn(params, apply_fn, batch, rng):
        out = apply_fn(params, batch.inputs, rngs={"dropout": rng})
        return ((out - batch.targets) ** 2).mean(), ({"kept": (out != 0).mean()}, None)

    state = make_state(params, module.apply)
    batch = mw.Batch(inputs=x, targets=jnp.ones((8, 4)))

    @functools.partial(jax.jit, static_argnums=1)
    def step(rng, num_minibatches):
        return accumulate_gradients(state, batch, rng, num_minibatches, loss_fn, use_scan=num_minibatches > 2)[:2]

    whole = step(jax.random.key(3), 1)
    for rng, num_minibatches in ((jax.random.key(3), 2), (jax.random.key(3), 8), (jax.random.PRNGKey(3), 1)):
        assert_close(step(rng, num_minibatches), whole)
    assert not np.allclose(jax.tree.leaves(step(jax.random.key(4), 1)[0])[0], jax.tree.leaves(whole[0])[0])


LARGE = 256  # so that the weights dominate the memory


@pytest.mark.parametrize("form", [accumulate_gradients_loop, accumulate_gradients_scan])
def test_memory_is_one_float32_accumulator(form):
    def loss_fn(params, apply_fn, batch, rng):
        return (jnp.tanh(batch @ params[0]) @ params[1]).sum(), ({}, None)

    def temp(num_minibatches):
        def step(params, batch):
            return form(SimpleNamespace(params=params, apply_fn=None), batch, None, num_minibatches, loss_fn)[0]

        params = [jax.ShapeDtypeStruct((LARGE, LARGE), jnp.float32)] * 2
        batch = jax.ShapeDtypeStruct((8, LARGE), jnp.float32)
        return jax.jit(step).lower(params, batch).compile().memory_analysis().temp_size_in_bytes

    accumulator = 2 * LARGE * LARGE * 4
    assert temp(8) - temp(1) <= accumulator * 1.05


@pytest.mark.parametrize("use_scan", [False, True])
def test_it_works_in_the_local_view(use_scan):
    batch = make_batch(64)

    def loss_fn(params, apply_fn, batch, rng):
        return ((batch["x"] @ params) ** 2).mean(), ({"loss": (params.sum(), 1)}, None)

    def local(params, batch):
        mine = lax.pcast(params, ("dp",), to="varying")
        grads, metrics, _ = accumulate_gradients(make_state(mine), batch, None, 2, loss_fn, use_scan=use_scan)
        return lax.pmean(grads, "dp"), jax.tree.map(lambda part: lax.psum(part, "dp"), metrics)

    run = local_map(local, mesh=mw.create_mesh("dp:8"), in_specs=(P(), P("dp")), out_specs=P())
    params = jnp.ones(WIDTH)
    grads, metrics = jax.jit(run)(params, batch)
    assert_close(grads, jax.grad(lambda params: loss_fn(params, None, batch, None)[0])(params))
    assert [float(part) for part in metrics["loss"]] == [16.0 * WIDTH, 16.0]


@pytest.mark.parametrize(
    ("batch", "num_minibatches", "message"),
    [
        (
            {"x": np.ones((10, 2))}, 4,
            r"a batch of 10 rows into 4 minibatches: 10 % 4 = 2\.\nhint: use a batch of 8 or 12 rows, or 2 or 5 minib",
        ),
        ({"x": np.ones((3, 2))}, 4, r"cannot make 4 minibatches of a batch of 3 rows(.|\n)*4 rows, or 3 minibatches"),
        ({"x": np.ones((4, 2)), "y": np.ones(3)}, 2, "leading dim: `x` has 4 rows, `y` has 3"),
        ({"x": 1.0}, 2, "no array has rows"),
        ({"x": np.ones((4, 2))}, 0, "num_minibatches=0"),
        ({"x": np.ones((4, 2))}, 2.0, "not an integer"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("use_scan", [False, True])
def test_batches_that_cannot_be_split(batch, num_minibatches, message, use_scan):
    with pytest.raises(mw.PlacementError, match=message):
        accumulate_gradients(None, batch, None, num_minibatches, lambda *_: None, use_scan=use_scan)
