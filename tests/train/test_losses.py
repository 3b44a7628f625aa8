"""Losses, data axes and layouts of a train step, and errors for invalid ones."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import meshwright as mw
from meshwright import P
from meshwright.errors import JobError, LayoutError, MeshError
from meshwright.models import Decoder
from meshwright.train import init_state, language_job, make_train_step, state_layout

X = np.arange(32, dtype=np.float32).reshape(16, 2)


def errors(params, batch):
    return (batch["x"] @ params["w"] - 1) ** 2


def make(loss, mesh="dp:8", rules=(("w", P()),), **options):
    job = mw.Job(init=lambda key: {"w": jnp.array([0.5, -0.25])}, rules=list(rules), loss=loss)
    layout = state_layout(job, optax.sgd(0.1), mw.create_mesh(mesh))
    step = make_train_step(job, optax.sgd(0.1), layout, donate=False, **options)
    return step, init_state(job, optax.sgd(0.1), layout, jax.random.key(0))


@pytest.mark.parametrize(
    ("loss", "text"),
    [
        (
            lambda p, b, r: errors(p, b).mean(),
            r"must return \(loss, metrics\), with a dict of metrics; this one returned \w*Tracer",
        ),
        (lambda p, b, r: (errors(p, b).mean(), None), r"this one returned \w*Tracer, NoneType"),
        (lambda p, b, r: (errors(p, b).sum(), 16.0), r"this one returned \w*Tracer, float"),
        (lambda p, b, r: (errors(p, b), {}), r"this one is an array of shape \(\d+,\)"),
        (lambda p, b, r: ([errors(p, b).sum(), 16.0], {}), "this one is a list"),
        (lambda p, b, r: ((errors(p, b), errors(p, b)), {}), "this one is a tuple"),
    ],
)
def test_invalid_results_of_a_loss(loss, text):
    step, state = make(loss)
    with pytest.raises(JobError, match=text):
        step(state, {"x": X})


@pytest.mark.parametrize("metric", ["number", "pair"])
def test_a_job_may_have_a_metric_named_tokens(metric):
    def loss(params, batch, rng):
        rows = batch["x"].shape[0]
        return errors(params, batch).mean(), {"tokens": jnp.float32(7) if metric == "number" else (7.0 * rows, rows)}

    step, state = make(loss)
    assert float(step(state, {"x": X})[1]["tokens"]) == 7


def test_tokens_of_a_pair_are_counted():
    step, state = make(lambda p, b, r: ((errors(p, b).sum(), b["x"].shape[0]), {"mine": jnp.float32(2)}))
    metrics = step(state, {"x": X})[1]
    assert (float(metrics["tokens"]), float(metrics["mine"])) == (16, 2)
    assert not [name for name in metrics if " " in name]


def test_data_axes():
    loss = lambda p, b, r: (errors(p, b).mean(), {})  # noqa: E731
    for mesh, axes in (("rows:8", "rows"), ("rows:8", ["rows"]), ("rows:4,tp:2", ("rows", "tp"))):
        step, state = make(loss, mesh, data_axes=axes)
        assert float(step(state, {"x": X})[1]["loss"]) == pytest.approx(float(errors(state.params, {"x": X}).mean()))
    with pytest.raises(MeshError, match=r"data_axes names axis 'row'; [\s\S]*did you mean 'rows'"):
        make(loss, "rows:4,tp:2", data_axes="row")


@pytest.mark.parametrize(
    ("mesh", "rules", "text"),
    [
        ("dp:4,pp:2", [(".*", P())], r"has 4 layers, but the parameters hold 2 x 4"),
        ("dp:4,fsdp:2", [("layers/", P("fsdp")), (".*", P())], r"has 4 layers, but the parameters hold 1 x 2"),
    ],
)
def test_layers_split_over_a_wrong_axis_are_rejected(mesh, rules, text):
    """Each device would run the layers it holds: all of them on every stage, or only some."""
    model = Decoder(vocab_size=32, num_layers=4, d_model=16, num_heads=2, d_ff=16)
    job = language_job(model, batch_size=16, num_tokens=8)
    job = dataclasses.replace(job, rules=rules)
    layout = state_layout(job, optax.sgd(0.1), mw.create_mesh(mesh))
    step = make_train_step(job, optax.sgd(0.1), layout)
    with pytest.raises(LayoutError, match=text):
        step.lower({name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for name, leaf in job.batch.items()})
