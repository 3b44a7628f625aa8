"""Which parameters of a run are used: the moving average if it keeps one, or the last ones."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import meshwright as mw
from meshwright.checkpoint import Checkpoints
from meshwright.cli import main
from meshwright.data import load_tokenizer
from meshwright.loop.results.saved_run import SavedRun
from meshwright.models import Decoder
from meshwright.train import init_state, language_job, state_layout
from meshwright.train.fine_tuning.lora import adapt_job

MODEL = Decoder(vocab_size=32, num_layers=1, d_model=16, num_heads=2, d_ff=16)


def saved_run(folder, *, ema, freeze=()):
    """A run whose averages are its parameters plus 1, and its parameters."""
    config = mw.TrainConfig().changed({"ema": ema, "freeze": freeze})
    job = adapt_job(language_job(MODEL, batch_size=1, num_tokens=1), freeze=freeze, train=(), adapters=None)
    layout = state_layout(job, optax.sgd(0.1), mw.create_mesh("fsdp:2", devices=2), ema=ema)
    state = init_state(job, optax.sgd(0.1), layout, jax.random.key(0))
    if ema is not None:
        state = jax.jit(
            lambda state: mw.train.RunState(**{**vars(state), "ema": jax.tree.map(lambda x: x + 1, state.ema)}),
            out_shardings=layout.shardings,
        )(state)
    with Checkpoints(folder / "checkpoints") as checkpoints:
        checkpoints.save(state, step=3, layout=layout, facts={})
    return SavedRun(folder, config, MODEL, load_tokenizer("bytes"), "float32", None), jax.device_get(state.params)


def test_the_average_is_used_unless_the_last_parameters_are_asked_for(tmp_path):
    run, params = saved_run(tmp_path, ema=0.5)
    mesh = mw.create_mesh("tp:2", devices=2)
    for weights, plus, said in (("auto", 1, "average (decay 0.5)"), ("ema", 1, "average"), ("last", 0, "last")):
        found, step, notes = run.restore(mesh, weights=weights)
        assert step == 3
        assert said in notes[-1]
        wanted = jax.tree.map(functools.partial(np.add, plus), params)
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(found), wanted)
        assert found["head"]["kernel"].sharding.mesh.axis_names == ("tp",)


def test_frozen_parameters_have_no_average(tmp_path):
    run, params = saved_run(tmp_path, ema=0.5, freeze=("embed", "norm"))
    found, _, _ = run.restore(mw.create_mesh("tp:1", devices=1))
    np.testing.assert_array_equal(found["embed"]["table"], params["embed"]["table"])
    np.testing.assert_array_equal(found["head"]["kernel"], params["head"]["kernel"] + 1)


def test_a_run_without_an_average(tmp_path):
    run, params = saved_run(tmp_path, ema=None)
    mesh = mw.create_mesh("tp:1", devices=1)
    found, _, notes = run.restore(mesh)
    assert not [note for note in notes if "average" in note]
    assert jnp.array_equal(found["head"]["kernel"], params["head"]["kernel"])
    with pytest.raises(mw.MeshwrightError, match=r"keeps no moving average of its parameters\.\nhint: use the last"):
        run.restore(mesh, weights="ema")


@pytest.mark.parametrize("command", [["generate"], ["eval", "--data", "text"]])
def test_several_processes_are_refused(command, monkeypatch, capsys):
    for name, value in {"RANK": 1, "SIZE": 4, "LOCAL_RANK": 1, "LOCAL_SIZE": 4}.items():
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", str(value))
    with pytest.raises(SystemExit):
        main([*command, "--run", "runs/x"])
    assert f"meshwright {command[0]} runs in one process, on the devices of one host; mpirun started 4." in (
        capsys.readouterr().err
    )
