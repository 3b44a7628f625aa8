"""Jobs from a file of the user: trained, resumed, and refused."""

import numpy as np
import pytest

from meshwright.errors import ConfigError, DataError, MeshwrightError
from meshwright.loop.run import train

from .tiny_run import QUIET, bits, fit_folder

JOBS = """
import jax, jax.numpy as jnp, numpy as np
import meshwright as mw

def init(key):
    return {"w": jax.random.normal(key, (8, 4))}

def loss(params, batch, rng):
    keep = 1.0 if rng is None else jax.random.bernoulli(rng, 0.5, ())  # needs a key in training
    return jnp.mean((batch["x"] @ params["w"] * keep) ** 2) * batch["a"], {}

def make_batch(seed):
    return {"a": np.float32(1.0), "x": np.random.default_rng(seed).normal(size=(16, 8)).astype(np.float32)}

rules = mw.Rules([("w", mw.P("fsdp"))], optional_axes=("fsdp",))
job = mw.Job(init=init, rules=rules, loss=loss, batch=make_batch(0), make_batch=make_batch)
alone = mw.Job(init=init, rules=rules, loss=loss, batch=make_batch(0))
"""


def test_a_custom_job_is_trained_and_resumed(make_config, read_run, stop_at, tmp_path):
    (tmp_path / "jobs.py").write_text(JOBS)
    plain = {"model_options": [], "data": None, "batch_size": 16, "num_tokens": 128, "job": f"{tmp_path}/jobs.py:job"}
    config = make_config(**plain, steps=4, eval_every=0, view="global", learning_rate=0.1, weight_decay=0.0)
    whole = train(config, **QUIET)
    straight, _, _ = read_run(fit_folder(config))
    again = config.changed({"run": str(tmp_path / "again")})
    stop_at(2)
    train(again, **QUIET)
    stop_at()
    result = train(again.changed({"resume": True}), **QUIET)
    steps, _, _ = read_run(fit_folder(again))
    assert bits(result.state) == bits(whole.state)
    assert [line["loss"] for line in steps] == [line["loss"] for line in straight]
    assert "tokens_per_second" not in steps[0]
    with pytest.raises(ConfigError, match="epochs is 1, which would have no effect: the job makes its own batches"):
        train(again.changed({"epochs": 1, "run": str(tmp_path / "x")}), **QUIET)
    with pytest.raises(ConfigError, match="batch_size is 64, which would have no effect"):
        train(again.changed({"batch_size": 64, "run": str(tmp_path / "x")}), **QUIET)
    with pytest.raises(MeshwrightError, match="the job has no data and no make_batch"):
        train(again.changed({"job": f"{tmp_path}/jobs.py:alone", "run": str(tmp_path / "x")}), **QUIET)


def test_a_loss_that_does_not_know_tp_is_trained_in_the_global_view(make_config, read_run, tmp_path):
    source = JOBS.replace('P("fsdp"))], optional_axes=("fsdp",)', 'P("fsdp", "tp"))], optional_axes=("fsdp", "tp")')
    (tmp_path / "jobs.py").write_text(source)
    plain = {"model_options": [], "data": None, "batch_size": 16, "num_tokens": 128, "job": f"{tmp_path}/jobs.py:job"}
    losses, views = [], []
    for mesh, view in (("dp:8", "global"), ("dp:2,fsdp:2,tp:2", "auto")):
        config = make_config(**plain, steps=2, eval_every=0, mesh=mesh, view=view, run=str(tmp_path / mesh[:4]))
        said = []
        train(config, say=said.append)
        losses.append([line["loss"] for line in read_run(fit_folder(config))[0]])
        views += [line for line in said if line.startswith("view: ")]
    assert views == ["view: global (as requested)", "view: global (the loss does not communicate over tp)"]
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)
    with pytest.raises(MeshwrightError, match="does not communicate over mesh axis 'tp'"):
        train(config.changed({"view": "local", "run": str(tmp_path / "x")}), **QUIET)
    assert not (tmp_path / "x").exists()


def test_text_beyond_the_vocabulary_of_a_job_is_rejected(make_config, tmp_path):
    """JAX would silently clamp such tokens to the last one."""
    (tmp_path / "jobs.py").write_text(
        "import dataclasses\n"
        "from meshwright.models import Decoder\n"
        "from meshwright.train import language_job\n"
        "model = Decoder(vocab_size=100, num_layers=1, d_model=16, num_heads=2, d_ff=16)\n"
        "job = language_job(model, batch_size=8, num_tokens=16, packed=True)\n"
        "silent = dataclasses.replace(job, vocab_size=None)\n"
    )
    config = make_config(job=f"{tmp_path}/jobs.py:job", model_options=[], steps=1)
    with pytest.raises(DataError, match=r"the data has token 120; the model's vocabulary has 100 tokens"):
        train(config, **QUIET)
    assert not fit_folder(config).exists()
    said = []
    train(config.changed({"job": f"{tmp_path}/jobs.py:silent", "eval_every": 0}), say=said.append)
    assert any("the job has no vocab_size" in line for line in said)
