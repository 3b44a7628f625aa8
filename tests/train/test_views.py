"""The view of a step: chosen by one rule, the same for steps and plans, and checked if forced."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import meshwright as mw
from meshwright import P
from meshwright.models import Decoder, Execution
from meshwright.train import choose_view, init_state, language_job, make_eval_step, make_train_step, state_layout
from meshwright.train.views import unknown_axes

DECODER = Decoder(vocab_size=16, d_model=8, num_layers=1, num_heads=2, d_ff=16)


def mlp_job(**changes):
    """A job whose loss works on whole parameters and knows nothing of meshes."""

    def init(key):
        k_up, k_down = jax.random.split(key)
        return {"up": jax.random.normal(k_up, (8, 16)) / 3, "down": jax.random.normal(k_down, (16, 8)) / 4}

    def loss(params, batch, rng):
        errors = (jnp.tanh(batch["x"] @ params["up"]) @ params["down"] - batch["y"]) ** 2
        return (errors.sum(), jnp.float32(errors.size)), {}

    rules = mw.Rules([("up", P("fsdp", "tp")), ("down", P("tp", "fsdp"))], optional_axes=("fsdp", "tp"))
    batch = {"x": jax.ShapeDtypeStruct((16, 8), "float32"), "y": jax.ShapeDtypeStruct((16, 8), "float32")}
    return mw.Job(**{"init": init, "rules": rules, "loss": loss, "batch": batch} | changes)


def summed_over_tp(params, batch, rng):
    """A loss that expects slices along tp."""
    out = lax.psum(jnp.tanh(batch["x"] @ params["up"]) @ params["down"], "tp")
    return (((out - batch["y"]) ** 2).sum(), jnp.float32(out.size)), {}


def some_batch():
    generator = np.random.default_rng(0)
    return {"x": generator.standard_normal((16, 8), np.float32), "y": generator.standard_normal((16, 8), np.float32)}


def train(job, mesh, **options):
    devices = jax.devices()[:1] if mesh == "dp:1" else None
    layout = state_layout(job, optax.sgd(0.5), mw.create_mesh(mesh, devices=devices))
    step = make_train_step(job, optax.sgd(0.5), layout, **options)
    state = init_state(job, optax.sgd(0.5), layout, jax.random.key(0))
    state, metrics = step(state, some_batch())
    return step, jax.device_get(state.params), float(metrics["loss"]), state


CHOICES = {
    "data": (mlp_job(), {"dp": 4, "fsdp": 2}, None, "local", "dp, fsdp"),
    "one device": (mlp_job(), {"tp": 1}, None, "local", "one device"),
    "unknown axis": (mlp_job(), {"dp": 4, "tp": 2}, None, "global", "does not communicate over tp"),
    "two unknown axes": (mlp_job(), {"sp": 4, "tp": 2}, None, "global", "does not communicate over sp and tp"),
    "declared": (mlp_job(local_axes=("tp",)), {"dp": 4, "tp": 2}, None, "local", "dp, tp"),
    "declared as a string": (mlp_job(local_axes="tp"), {"tp": 2}, None, "local", "tp"),
    "other data axes": (mlp_job(), {"data": 8}, ("data",), "local", "data"),
    "dp without rows": (mlp_job(), {"data": 4, "dp": 2}, "data", "global", "does not communicate over dp"),
    "built-in model": (language_job(DECODER, batch_size=8, num_tokens=8), {"pp": 2, "tp": 4}, None, "local", "pp, tp"),
    "tp left to XLA": (
        language_job(DECODER, batch_size=8, num_tokens=8, run=Execution(tensor_axis=None)),
        {"dp": 2, "tp": 4}, None, "global", "does not communicate over tp",
    ),
    "model state": (types.SimpleNamespace(model_state=len), {"dp": 8}, None, "global", "the model state"),
    "no model state": (types.SimpleNamespace(model_state=None), {"dp": 8}, None, "local", "dp"),
}  # fmt: skip


@pytest.mark.parametrize("name", CHOICES)
def test_the_choice_of_a_view(name):
    job, sizes, data_axes, view, reason = CHOICES[name]
    choice = choose_view(job, sizes, data_axes=data_axes)
    assert choice.view == view
    assert reason in choice.reason
    assert (view == "local") == (not unknown_axes(job, sizes, data_axes=data_axes)) or name == "model state"


def test_a_loss_of_whole_parameters_trains_on_every_mesh():
    _, expected, loss, _ = train(mlp_job(), "dp:1")
    for mesh, view in (("dp:2,fsdp:2,tp:2", "global"), ("tp:8", "global"), ("fsdp:8", "local")):
        step, params, got, state = train(mlp_job(), mesh)
        assert step.view.view == view, mesh
        np.testing.assert_allclose(got, loss, rtol=1e-5)
        for name, leaf in expected.items():
            np.testing.assert_allclose(params[name], leaf, rtol=1e-5, atol=1e-6, err_msg=f"{mesh} {name}")
        evaluate = make_eval_step(mlp_job(), step.layout)
        assert evaluate.view == step.view
        assert float(evaluate(state, some_batch())["loss"]) < loss


def test_a_declared_axis_runs_in_the_local_view_and_gives_the_same_step():
    _, expected, loss, _ = train(mlp_job(), "dp:1")
    step, params, got, _ = train(mlp_job(loss=summed_over_tp, local_axes=("tp",)), "dp:4,tp:2")
    assert step.view.view == "local"
    np.testing.assert_allclose(got, loss, rtol=1e-5)
    for name, leaf in expected.items():
        np.testing.assert_allclose(params[name], leaf, rtol=1e-5, atol=1e-6, err_msg=name)


def test_forcing_the_local_view_gives_one_clear_message():
    for mesh, match in (
        (
            "dp:4,tp:2",
            r"does not communicate over mesh axis 'tp' \(2 devices\): it works on whole parameters.*\nhint: ",
        ),
        ("fsdp:2,tp:4", r'hint: use view="global" .*, or communicate over the axis .*Job\(local_axes=\("tp",\)\)'),
    ):
        with pytest.raises(mw.MeshError, match=match):
            train(mlp_job(), mesh, view="local")
    rules = [("up", P("tp", "ep")), ("down", P())]
    with pytest.raises(mw.MeshError, match=r"axes 'tp' \(2 devices\) and 'ep' \(4 devices\).*\n.*\(\"tp\", \"ep\"\)"):
        train(mlp_job(rules=rules), "tp:2,ep:4", view="local")


def test_an_axis_that_splits_nothing_is_refused():
    for view in (None, "global", "local"):
        with pytest.raises(mw.MeshError, match="does not use mesh axis 'sp'"):
            train(mlp_job(), "dp:4,sp:2", view=view)
    with pytest.raises(mw.MeshError, match=r"does not use mesh axis 'dpp'.\nhint: did you mean 'dp'"):
        train(mlp_job(), "dpp:8")
    # The rules name tp, but it splits nothing here.
    unsplit = mw.Rules([("up|down", P("fsdp")), ("other", P("tp"))], optional_axes=("fsdp", "tp"))
    with pytest.warns(mw.MeshwrightWarning), pytest.raises(mw.MeshError, match="does not use mesh axis 'tp'"):
        train(mlp_job(rules=unsplit), "fsdp:4,tp:2")


def test_sync_needs_the_local_view():
    with pytest.raises(mw.MeshwrightError, match=r"sync='once' works only in the local view.*not communicate over tp"):
        train(mlp_job(), "dp:4,tp:2", sync="once", num_minibatches=2)


def test_a_collective_in_the_global_view_is_explained():
    match = r"`psum` at .*test_views.py:\d+ uses axis `tp`, which is automatic here.*\nhint: .*local_axes=\(\"tp\",\)"
    with pytest.raises(mw.JobError, match=match):
        train(mlp_job(loss=summed_over_tp), "dp:4,tp:2")


def test_a_loss_that_needs_the_global_view_is_explained():
    def loss(params, batch, rng):
        total, _ = lax.scan(lambda total, x: (total + x, None), jnp.zeros(8), batch["x"])
        return jnp.mean(total @ params["up"] @ params["down"]), {}

    with pytest.raises(mw.JobError, match=r"traced in the local view \(the step handles.*[\s\S]*hint: pass view="):
        train(mlp_job(loss=loss), "dp:8")
    train(mlp_job(loss=loss), "dp:8", view="global")
