"""Models, optimizers and schedules by name."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from meshwright.checkpoint.manifest import model_fact
from meshwright.errors import ConfigError
from meshwright.loop.resume import what_must_match
from meshwright.loop.settings.choices import make_model, model_names
from meshwright.loop.settings.optimizers import decayed, make_learning_rate, make_optimizer
from meshwright.loop.settings.options import OptimizerOptions


def test_options_change_fields_by_their_kind():
    model = make_model("decoder-tiny", ("num_layers=3", "tied_embeddings=true", "dropout=0.5", "num_kv_heads=2"))
    assert (model.num_layers, model.tied_embeddings, model.dropout, model.num_kv_heads) == (3, True, 0.5, 2)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("decoder-tinny", (), "did you mean 'decoder-tiny'"),
        ("decoder-tiny", ("layers=3",), "no option 'layers=3'"),
        ("decoder-tiny", ("num_layers",), "has no value.\\nhint: write num_layers=VALUE"),
        ("decoder-tiny", ("num_layers=three",), "'num_layers=three' is not a whole number"),
        ("decoder-tiny", ("num_layers=2.5",), "hint: use a whole number, e.g. 4"),
        ("decoder-tiny", ("num_kv_heads=2.5",), "hint: use a whole number, e.g. 4"),
        ("decoder-tiny", ("tied_embeddings=yes",), "neither true nor false"),
    ],
)
def test_unknown_models_and_invalid_options_are_errors(name, options, message):
    with pytest.raises(ConfigError, match=message):
        make_model(name, options)


def test_the_vocabulary_grows_to_fit_the_tokenizer():
    assert make_model("decoder-tiny", vocab_size=256).vocab_size == 256
    assert make_model("decoder-tiny", vocab_size=300).vocab_size == 384
    with pytest.raises(ConfigError, match="the tokenizer has 300 tokens, but the model's vocab_size is 256"):
        make_model("decoder-tiny", ("vocab_size=256",), vocab_size=300)


def test_every_model_has_rules_for_every_parameter():
    for name in model_names():
        model = make_model(name)
        shapes = jax.eval_shape(model.init, jax.eval_shape(lambda: jax.random.key(0)))
        assert set(jax.tree.leaves(decayed(shapes))) == {True, False}


def test_the_chunk_size_of_an_xlstm_may_change():
    now, before = make_model("xlstm-125m"), make_model("xlstm-125m", ("chunk_size=64",))
    assert "chunk_size=None" in repr(now)  # older checkpoints hold 64, the former default
    assert what_must_match(repr(before), now) == what_must_match(model_fact(now), now)
    other = make_model("xlstm-125m", ("num_heads=8",))
    assert what_must_match(repr(before), other) != what_must_match(model_fact(other), other)


def test_norms_do_not_decay():
    mask = decayed(jax.eval_shape(make_model("xlstm-tiny").init, jax.eval_shape(lambda: jax.random.key(0))))
    flat = {jax.tree_util.keystr(path): value for path, value in jax.tree.leaves_with_path(mask)}
    assert all(not value for name, value in flat.items() if "norm" in name or "bias" in name)
    assert flat["['embed']['table']"]


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
def test_schedules_rise_and_end_where_they_should(schedule):
    rate = make_learning_rate(OptimizerOptions(learning_rate=2.0, schedule=schedule, warmup=10), 100)
    rates = np.asarray(jax.vmap(rate)(jnp.arange(101)))
    assert 0 < rates[0] < rates[5] < rates[10] == rates.max() == 2.0
    np.testing.assert_allclose(rates[100], 2.0 if schedule == "constant" else 0.2, rtol=1e-6)


@pytest.mark.parametrize("name", ["adamw", "muon", "adafactor", "lion", "sgd"])
def test_every_optimizer_descends(name):
    rate = {"sgd": 1.0, "muon": 0.5}.get(name, 0.05)
    optimizer = make_optimizer(OptimizerOptions(optimizer=name, learning_rate=rate, warmup=0, weight_decay=0.0), 60)
    params = {"w": jnp.ones((4, 4)) * 2.0}
    state = optimizer.init(params)

    @jax.jit
    def step(params, state):
        loss, grads = jax.value_and_grad(lambda params: jnp.mean((params["w"] - 1.0) ** 2))(params)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    losses = []
    for _ in range(60):
        params, state, loss = step(params, state)
        losses.append(float(loss))
    assert losses[-1] < 0.3 * losses[0]
