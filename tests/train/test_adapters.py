"""Jobs from models of three libraries: parameter names, dropout by rows, and the same step on any mesh."""

import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import meshwright as mw
from meshwright import P
from meshwright.train import equinox_job, linen_job, nnx_job
from meshwright.verify import verify

SHAPES = {"x": jax.ShapeDtypeStruct((16, 8), jnp.float32), "y": jax.ShapeDtypeStruct((16, 8), jnp.float32)}
RULES = mw.Rules([("kernel|weight", P("fsdp", "tp")), ("bias", P())], optional_axes=("fsdp", "tp"))


class Linen(linen.Module):
    @linen.compact
    def __call__(self, x, deterministic):
        x = linen.tanh(linen.Dense(16)(x))
        return linen.Dense(8)(linen.Dropout(0.5)(x, deterministic=deterministic))


class NNX(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(8, 16, rngs=rngs), nnx.Linear(16, 8, rngs=rngs)])
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.layers[1](self.dropout(nnx.tanh(self.layers[0](x))))


class Equinox(eqx.Module):
    layers: list
    dropout: eqx.nn.Dropout
    activation: object

    def __init__(self, key):
        first, second = jax.random.split(key)
        self.layers = [eqx.nn.Linear(8, 16, key=first), eqx.nn.Linear(16, 8, key=second)]
        self.dropout = eqx.nn.Dropout(0.5)
        self.activation = lambda x: jnp.tanh(x)  # a new function in every model, not a parameter

    def __call__(self, x, key):
        h = self.dropout(self.activation(jax.vmap(self.layers[0])(x)), key=key)
        return jax.vmap(self.layers[1])(h)


def error(y, batch):
    return jnp.mean((y - batch["y"]) ** 2)


JOBS = {
    "linen": lambda: linen_job(
        Linen(), lambda apply, batch, rng: error(apply(batch["x"], deterministic=rng is None), batch), SHAPES, RULES
    ),
    "nnx": lambda: nnx_job(NNX, lambda model, batch: error(model(batch["x"]), batch), SHAPES, RULES),
    "equinox": lambda: equinox_job(
        Equinox, lambda model, batch, key: error(model(batch["x"], key), batch), SHAPES, RULES
    ),
}
NAMES = {
    "linen": ["Dense_0/bias", "Dense_0/kernel", "Dense_1/bias", "Dense_1/kernel"],
    "nnx": ["layers/0/bias", "layers/0/kernel", "layers/1/bias", "layers/1/kernel"],
    "equinox": ["layers/0/bias", "layers/0/weight", "layers/1/bias", "layers/1/weight"],
}


@pytest.fixture
def batch():
    generator = np.random.default_rng(0)
    return {name: generator.standard_normal((16, 8)).astype(np.float32) for name in ("x", "y")}


@pytest.mark.parametrize("library", JOBS)
def test_names_follow_the_model(library):
    job = JOBS[library]()
    params = mw.abstract_init(job.init)
    assert list(mw.flatten_tree(params, sep="/")) == NAMES[library]
    assert all(type(node) is dict for node in (params, *params.values()))
    assert job.batch is SHAPES


@pytest.mark.parametrize("library", JOBS)
def test_the_loss_equals_the_model_s(library, batch):
    job, key = JOBS[library](), jax.random.key(0)
    params = job.init(key)
    loss, metrics = job.loss(params, batch, None)
    match library:
        case "linen":
            expected = Linen().apply({"params": params}, batch["x"], deterministic=True)
            same = Linen().init(key, batch["x"], True)["params"]
        case "nnx":
            model = NNX(nnx.Rngs(key))
            model.eval()
            expected, same = model(batch["x"]), nnx.to_pure_dict(nnx.state(model, nnx.Param))
        case "equinox":
            model = Equinox(key)
            expected = eqx.nn.inference_mode(model)(batch["x"], None)
            same = [layer.weight for layer in model.layers]
            params = [params["layers"][name]["weight"] for name in "01"]
    np.testing.assert_allclose(loss, error(expected, batch), rtol=1e-6)
    assert metrics == {}
    for mine, theirs in zip(jax.tree.leaves(params), jax.tree.leaves(same), strict=True):
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize("library", JOBS)
def test_dropout_is_drawn_by_rows(library, batch):
    job = JOBS[library]()
    params, key = job.init(jax.random.key(0)), jax.random.key(1)
    loss = jax.jit(lambda batch, rng: job.loss(params, batch, rng)[0])
    whole = loss(batch, mw.parallel.row_key(key))
    assert not np.isclose(whole, loss(batch, None))
    assert not np.isclose(whole, loss(batch, mw.parallel.row_key(jax.random.key(2))))
    halves = [
        loss(jax.tree.map(lambda leaf: leaf[start : start + 8], batch), mw.parallel.row_key(key, start))  # noqa: B023
        for start in (0, 8)
    ]
    np.testing.assert_allclose(whole, np.mean(halves), rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("library", JOBS)
def test_the_step_is_the_same_on_any_mesh(library):
    verify(JOBS[library](), meshes="fsdp:8", num_minibatches=2).require()
    verify(JOBS[library](), meshes="fsdp:2,tp:4", views="global").require()


def test_equinox_on_a_mesh():
    verify(JOBS["equinox"](), meshes="fsdp:8", views="local", num_steps=1).require()


def test_metrics_and_pairs_pass_through(batch):
    def loss(apply, batch, rng):
        return (jnp.sum(apply(batch["x"])), jnp.float32(16)), {"largest": jnp.max(batch["x"])}

    job = linen_job(linen.Dense(4), loss, SHAPES, RULES)
    value, metrics = job.loss(job.init(jax.random.key(0)), batch, None)
    assert isinstance(value, tuple)
    assert set(metrics) == {"largest"}


def test_arguments_that_initialize_linen_modules():
    def tied(apply, batch, rng):  # called twice with the same parameters
        return jnp.mean(apply(apply(batch["x"])))

    job = linen_job(linen.Dense(8), tied, SHAPES, RULES)
    assert list(mw.flatten_tree(mw.abstract_init(job.init), sep="/")) == ["bias", "kernel"]
    asked = linen_job(linen.Dense(8), tied, SHAPES, RULES, init_args=(jax.ShapeDtypeStruct((1, 5), jnp.float32),))
    assert mw.abstract_init(asked.init)["kernel"].shape == (5, 8)


def test_linen_boxes_are_unboxed():
    kernel_init = linen.with_partitioning(linen.initializers.ones, ("a", "b"))
    job = linen_job(linen.Dense(8, kernel_init=kernel_init), lambda apply, b, rng: apply(b["x"]).mean(), SHAPES, RULES)
    assert type(mw.abstract_init(job.init)["kernel"]) is jax.ShapeDtypeStruct


class Counter(eqx.Module):
    count: jax.Array

    def __init__(self, key):
        self.count = jnp.zeros(3, jnp.int32)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            lambda: mw.abstract_init(
                linen_job(
                    linen.BatchNorm(use_running_average=False),
                    lambda apply, b, rng: apply(b["x"]).mean(),
                    SHAPES,
                    RULES,
                ).init
            ),
            r"BatchNorm holds more than parameters: batch_stats\.\nhint: ",
        ),
        (
            lambda: nnx_job(lambda rngs: nnx.BatchNorm(8, rngs=rngs), None, SHAPES, RULES),
            r"BatchNorm holds more than parameters: BatchStat\.\nhint: ",
        ),
        (
            lambda: equinox_job(Counter, None, SHAPES, RULES),
            r"Counter holds more than parameters: int32\[3\]\.\nhint: ",
        ),
    ],
)
def test_state_besides_parameters_is_rejected(make, text):
    with pytest.raises(mw.JobError, match=text):
        make()


def test_equinox_is_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "equinox", None)
    with pytest.raises(mw.JobError, match=r"needs Equinox, which is not installed\.\nhint: pip install equinox"):
        equinox_job(Equinox, None, SHAPES, RULES)


@pytest.mark.parametrize("make_job", [linen_job, nnx_job, equinox_job])
def test_adapters_pass_make_batch_on(make_job):
    made = make_job(lambda key: None, lambda *args: 0.0, {}, [], make_batch=lambda seed: {"seed": seed})
    assert made.make_batch(3) == {"seed": 3}
