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
MESH = mw.create_abstract_mesh("fsdp:2,tp:2")
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


def test_equinox_is_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "equinox", None)
    with pytest.raises(mw.JobError, match=r"needs Equinox, which is not installed\.\nhint: pip install equinox"):
        equinox_job(Equinox, None, SHAPES, RULES)


@pytest.mark.parametrize("library", JOBS)
def test_adapters_pass_fields_of_a_job_on(library):
    def make(**fields):
        match library:
            case "linen":
                return linen_job(linen.Dense(8), lambda apply, b, rng: apply(b["x"]).mean(), SHAPES, RULES, **fields)
            case "nnx":
                return nnx_job(NNX, lambda model, b: model(b["x"]).mean(), SHAPES, RULES, **fields)
        return equinox_job(Equinox, lambda model, b, key: model(b["x"], key).mean(), SHAPES, RULES, **fields)

    assert make(make_batch=lambda seed: {"seed": seed}).make_batch(3) == {"seed": 3}
    assert make(mesh="dp:8").mesh == "dp:8"
    with pytest.raises(mw.JobError, match=rf"{library}_job has no argument 'mash'\.\nhint: did you mean 'mesh'\?"):
        make(mash="dp:8")


class Noisy(linen.Module):
    @linen.compact
    def __call__(self, x, train):
        if train:
            x = (
                x
                + jax.random.normal(self.make_rng("noise"), x.shape)
                + jax.random.normal(self.make_rng("more"), x.shape)
            )
        return linen.Dropout(0.5, deterministic=not train)(linen.Dense(8)(x))


def test_every_random_stream_of_a_linen_module_has_its_own_key(batch):
    job = linen_job(Noisy(), lambda apply, b, rng: jnp.sum(apply(b["x"], rng is not None)), SHAPES, RULES)
    params, key = job.init(jax.random.key(0)), mw.parallel.row_key(jax.random.key(1))
    drawn = []
    noise, normal = jax.random.normal, jax.random.key_data

    def draw(key, *args):
        drawn.append(tuple(np.asarray(normal(key)).tolist()))
        return noise(key, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax.random, "normal", draw)
        job.loss(params, batch, key)
    assert drawn[-1] != drawn[-2]
    assert np.isfinite(job.loss(params, batch, None)[0])
    assert job.loss(params, batch, key)[0] == job.loss(params, batch, key)[0]


def test_annotations_replace_rules(batch):
    def logical(init, *names):
        return linen.with_logical_partitioning(init, names)

    module = linen.Dense(8, kernel_init=logical(linen.initializers.lecun_normal(), "in", "out"))
    table = {"in": "fsdp", "out": "tp"}

    def loss(apply, b, rng):
        return apply(b["x"]).mean()

    job = linen_job(module, loss, SHAPES, table, unannotated=[("bias", P())])
    assert list(job.rules) == [("^kernel$", P("fsdp", "tp")), ("bias", P())]
    with pytest.raises(mw.LayoutError, match=r"no rule matches 1 leaf:\n  `bias`"):
        mw.make_layout(linen_job(module, loss, SHAPES, table).rules, mw.abstract_init(job.init), MESH)
    with pytest.raises(mw.JobError, match=r"unannotated= adds rules to those of the model's annotations"):
        linen_job(module, loss, SHAPES, RULES, unannotated=[("bias", P())])


def test_annotations_of_linen_modules_ignore_the_current_mesh():
    init = linen.with_partitioning(linen.initializers.lecun_normal(), ("fsdp", "other"))
    module = linen.Dense(8, kernel_init=init, use_bias=False)
    job = linen_job(module, lambda apply, b, rng: apply(b["x"]).mean(), SHAPES)
    assert list(job.rules) == [("^kernel$", P("fsdp", "other"))]
    expected = job.init(jax.random.key(0))["kernel"]
    with jax.set_mesh(mw.create_mesh("dp:8")):
        np.testing.assert_array_equal(job.init(jax.random.key(0))["kernel"], expected)
        np.testing.assert_array_equal(jax.jit(job.init)(jax.random.key(0))["kernel"], expected)


def test_annotations_of_nnx_need_no_mesh():
    def make(rngs):
        kernel_init = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("fsdp", "tp"))
        return nnx.Linear(8, 8, kernel_init=kernel_init, use_bias=False, rngs=rngs)

    job = nnx_job(make, lambda model, b: model(b["x"]).mean(), SHAPES)
    assert list(job.rules) == [("^kernel$", P("fsdp", "tp"))]
    layout = mw.make_layout(job.rules, mw.abstract_init(job.init), mw.create_abstract_mesh("dp:2,fsdp:4"))
    assert layout["kernel"].spec == P("fsdp", None)
    assert "annotation of kernel: ('fsdp', 'tp')" in str(layout)
    with jax.set_mesh(mw.create_mesh("dp:8")):  # which has none of the axes
        assert jax.jit(job.init)(jax.random.key(0))["kernel"].shape == (8, 8)
