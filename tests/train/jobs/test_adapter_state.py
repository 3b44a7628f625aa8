"""Models with batch statistics, buffers and dropout: their state is that of the library, equal on any mesh."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import meshwright as mw
from meshwright import P
from meshwright.parallel import row_keys
from meshwright.train import equinox_job, linen_job, nnx_job
from meshwright.verify import verify

SHAPES = {name: jax.ShapeDtypeStruct((16, 8), jnp.float32) for name in ("x", "y")}
RULES = mw.Rules([("kernel|(first|second).weight", P("fsdp", "tp")), (".*", P())], optional_axes=("fsdp", "tp"))


class Linen(linen.Module):
    @linen.compact
    def __call__(self, x, train):
        seen = self.variable("counters", "seen", lambda: jnp.zeros((), jnp.int32))
        if train:
            seen.value += 1
        x = linen.BatchNorm(use_running_average=not train)(linen.Dense(16)(x))
        return linen.Dense(8)(linen.Dropout(0.5, deterministic=not train)(linen.tanh(x)))


class NNX(nnx.Module):
    def __init__(self, rngs):
        self.first, self.norm = nnx.Linear(8, 16, rngs=rngs), nnx.BatchNorm(16, rngs=rngs)
        self.dropout, self.second = nnx.Dropout(0.5, rngs=rngs), nnx.Linear(16, 8, rngs=rngs)

    def __call__(self, x):
        h = self.dropout(nnx.tanh(self.norm(self.first(x))))
        self.hidden = nnx.Intermediate(h)  # a variable that the initial model does not have
        return self.second(h)


class Equinox(eqx.Module):
    first: eqx.nn.Linear
    norm: eqx.nn.BatchNorm
    dropout: eqx.nn.Dropout
    second: eqx.nn.Linear
    order: jax.Array

    def __init__(self, key):
        k_first, k_second, k_order = jax.random.split(key, 3)
        self.first, self.second = eqx.nn.Linear(8, 16, key=k_first), eqx.nn.Linear(16, 8, key=k_second)
        self.norm = eqx.nn.BatchNorm(16, axis_name="rows", mode="ema")
        self.dropout = eqx.nn.Dropout(0.5)
        self.order = jax.random.permutation(k_order, 8)  # a buffer

    def __call__(self, x, state, key):
        h, state = self.norm(self.first(x[self.order]), state)
        return self.second(self.dropout(jnp.tanh(h), key=key)), state


def error(y, batch):
    return jnp.mean((y - batch["y"]) ** 2)


def equinox_loss(model, state, batch, key):
    keys = None if key is None else row_keys(key, len(batch["x"]))
    axes = (0, None, None if key is None else 0)
    y, state = jax.vmap(model, in_axes=axes, out_axes=(0, None), axis_name="rows")(batch["x"], state, keys)
    return error(y, batch), state


JOBS = {
    "linen": lambda: linen_job(
        Linen(),
        lambda apply, batch, rng: error(apply(batch["x"], rng is not None), batch),
        SHAPES,
        RULES,
        predict=lambda apply, batch: apply(batch["x"], False),
    ),
    "nnx": lambda: nnx_job(
        NNX,
        lambda model, batch: error(model(batch["x"]), batch),
        SHAPES,
        RULES,
        predict=lambda model, batch: model(batch["x"]),
    ),
    "equinox": lambda: equinox_job(
        Equinox,
        equinox_loss,
        SHAPES,
        RULES,
        predict=lambda model, state, batch: jax.vmap(lambda x: model(x, state, None)[0])(batch["x"]),
    ),
}
NAMES = {
    "linen": ["batch_stats/BatchNorm_0/mean", "batch_stats/BatchNorm_0/var", "counters/seen"],
    "nnx": ["norm/mean", "norm/var"],
    "equinox": [
        "buffers/order",
        "state/norm/ema_first_time_index",
        "state/norm/ema_state_index/0",
        "state/norm/ema_state_index/1",
    ],
}
# The running mean after one step from zero: momentum 0.99 in Flax; Equinox starts with the first batch's mean.
MEAN = {
    "linen": (("batch_stats", "BatchNorm_0", "mean"), ("Dense_0", "kernel"), 0.01),
    "nnx": (("norm", "mean"), ("first", "kernel"), 0.01),
    "equinox": (("state", "norm", "ema_state_index", "0"), ("first", "weight"), 1.0),
}


@pytest.fixture
def batch():
    generator = np.random.default_rng(0)
    return {name: generator.standard_normal((16, 8)).astype(np.float32) for name in ("x", "y")}


def at(tree, path):
    for key in path:
        tree = tree[key]
    return np.asarray(tree)


@pytest.mark.parametrize("library", JOBS)
def test_training_updates_the_state_and_evaluation_does_not(library, batch):
    job, key = JOBS[library](), jax.random.key(0)
    params, state = job.init(key), job.model_state(key)
    assert list(mw.flatten_tree(state, sep="/")) == NAMES[library]
    _, metrics, same = job.loss(params, state, batch, None)
    assert metrics == {}
    jax.tree.map(np.testing.assert_array_equal, same, state)
    _, _, new = job.loss(params, state, batch, mw.parallel.row_key(key))
    place, weight, share = MEAN[library]
    x = batch["x"]
    if library == "equinox":
        x = x[:, np.asarray(state["buffers"]["order"])] @ at(params, weight).T + at(params, ("first", "bias"))
        assert not new["state"]["norm"]["ema_first_time_index"]
    else:
        x = x @ at(params, weight)  # biases start at zero
    np.testing.assert_allclose(at(new, place), share * x.mean(axis=0), rtol=1e-5, atol=1e-6)
    if library == "linen":
        assert new["counters"]["seen"] == 1


@pytest.mark.parametrize("library", JOBS)
def test_predictions_use_the_running_statistics(library, batch):
    job, key = JOBS[library](), jax.random.key(0)
    params, state = job.init(key), job.model_state(key)
    _, _, state = job.loss(params, state, batch, mw.parallel.row_key(key))
    predicted = job.predict(params, state, batch)
    assert predicted.shape == (16, 8)
    np.testing.assert_allclose(job.loss(params, state, batch, None)[0], error(predicted, batch), rtol=1e-6)


@pytest.mark.slow  # compiles six steps: three libraries, on a mesh and on one device
@pytest.mark.parametrize("library", JOBS)
def test_the_step_is_the_same_on_any_mesh(library):
    verify(JOBS[library](), meshes=["dp:8", "dp:2,fsdp:2,tp:2"], views="global", num_steps=2).require()


def test_a_linen_loss_may_ask_for_other_collections(batch):
    class Sowing(linen.Module):
        @linen.compact
        def __call__(self, x, train):
            self.sow("intermediates", "input", x)
            return linen.BatchNorm(use_running_average=not train)(x)

    def loss(apply, b, rng):
        y, sown = apply(b["x"], rng is not None, mutable="intermediates")
        assert list(sown) == ["intermediates"]
        return jnp.mean(y + sown["intermediates"]["input"][0])

    job = linen_job(Sowing(), loss, SHAPES, RULES)
    assert mw.abstract_init(linen_job(Sowing(), loss, SHAPES, RULES, init_args=(SHAPES["x"], False)).init)
    params, state = job.init(jax.random.key(0)), job.model_state(jax.random.key(0))
    assert list(state) == ["batch_stats"]
    _, _, new = job.loss(params, state, batch, jax.random.key(0))
    assert not np.allclose(new["batch_stats"]["BatchNorm_0"]["mean"], 0)


def test_two_calls_of_a_linen_module_update_the_state_twice(batch):
    def loss(apply, b, rng):
        apply(b["x"], rng is not None)
        return jnp.mean(apply(b["y"], rng is not None))

    job = linen_job(Linen(), loss, SHAPES, RULES)
    params, state = job.init(jax.random.key(0)), job.model_state(jax.random.key(0))
    assert job.loss(params, state, batch, jax.random.key(0))[2]["counters"]["seen"] == 2


def test_the_loss_of_a_stateful_equinox_model_returns_the_state(batch):
    job = equinox_job(Equinox, lambda model, state, b, key: jnp.float32(0), SHAPES, RULES)
    key = jax.random.key(0)
    with pytest.raises(mw.JobError, match=r"does not end in the state\.\nhint: return \(loss, state\)"):
        job.loss(job.init(key), job.model_state(key), batch, None)
