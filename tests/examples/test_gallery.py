"""Each job in examples/: rules, plan, verify, and a run that dies and resumes, on three meshes, without a view."""

import functools
import os
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import optax
import pytest

import meshwright as mw
from meshwright.loop import Callback, TrainConfig
from meshwright.loop.run import train
from meshwright.plan import Setup, make_plan
from meshwright.train.job_loading import load_job
from meshwright.verify import verify

FOLDER = Path(__file__).parents[2] / "examples"
JOBS = ("vit_shapes", "nnx_batchnorm", "equinox_state", "linen_logical_axes", "two_optimizers")
STATEFUL = ("nnx_batchnorm", "equinox_state")
MESHES = ("dp:8", "fsdp:8", "dp:2,fsdp:2,tp:2")
ONE_DEVICE = functools.partial(mw.create_mesh, devices=1)


@functools.cache
def job_of(name):
    return load_job(f"{FOLDER / name}.py:job")


@pytest.mark.parametrize("name", JOBS)
@pytest.mark.parametrize("mesh", MESHES)
def test_rules_and_plan(name, mesh):
    job = job_of(name)
    params = mw.abstract_init(job.init)
    report = mw.make_layout(job.rules, params, mw.create_abstract_mesh(mesh)).report()
    assert report.ok
    assert not report.concerns()
    assert sum(not leaf.is_replicated for leaf in report.leaves) >= (0 if mesh == "dp:8" else 2)
    plan = make_plan(job, "h200:1x8", Setup(mesh=mesh, optimizer="adam"))
    assert plan.memory.fits


def test_the_layout_explains_annotations():
    job = job_of("linen_logical_axes")
    layout = mw.make_layout(job.rules, mw.abstract_init(job.init), mw.create_abstract_mesh(MESHES[2]))
    query = layout["Block_1/MultiHeadDotProductAttention_0/query/kernel"]
    assert query.spec == mw.P("fsdp", "tp", None)
    assert "annotation of Block_0/" in query.why
    assert "('embed', 'heads', 'head_dim')" in query.why


@pytest.mark.slow  # four programs per example
@pytest.mark.parametrize("name", JOBS)
def test_the_step_is_the_same_on_every_mesh(name):
    verify(job_of(name), meshes=MESHES, num_steps=2).require()


# --- Runs ---


class Killed(BaseException):
    """Ends a run as a kill would: nothing is saved after it."""


class Dies(Callback):
    def __init__(self, at):
        self.at = at

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def wants_stop(self, loop):
        if loop.ticks == self.at:
            raise Killed
        return False


def bits(state):
    def raw(leaf):
        is_key = jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        return np.asarray(jax.random.key_data(leaf) if is_key else leaf).tobytes()

    return {leaf.name: raw(leaf.value) for leaf in mw.tree.named_leaves(state)}


RUN = {"mesh": MESHES[2], "steps": 6, "checkpoint_every": 2, "eval_every": 3, "eval_batches": 4}
QUIET = {"report": False, "tensorboard": False, "log_seconds": 1000.0, "hang": 0.0}


@pytest.mark.slow  # compiles a step, an evaluation and predictions, on a mesh and on one device
@pytest.mark.parametrize("name", JOBS)
def test_a_run_dies_and_resumes_and_equals_one_device(name, read_run, monkeypatch, tmp_path):
    def run(folder, dies=None, **changes):
        monkeypatch.setattr("meshwright.loop.setup.Preemption", lambda: Dies(dies))
        options = {"job": f"{FOLDER / name}.py:job", "run": str(tmp_path / folder)}
        return train(TrainConfig().changed(RUN | QUIET | options | changes), say=said.append)

    said = []
    whole = run("whole")
    assert whole.why == "finished"
    with pytest.raises(Killed):
        run("killed", dies=5)
    resumed = run("killed", resume=True)
    assert any("step 4" in line for line in said)
    assert bits(resumed.state) == bits(whole.state)
    steps, evaluations, _ = read_run(tmp_path / "whole")
    again, same, _ = read_run(tmp_path / "killed")
    assert [line["loss"] for line in again] == [line["loss"] for line in steps]
    assert same == evaluations
    assert sorted(evaluations) == [3, 6]

    monkeypatch.setattr("meshwright.loop.setup.create_mesh", ONE_DEVICE)
    alone = run("alone", mesh="dp:1")
    # Adam divides by the square root of small numbers, which amplifies rounding errors of about 1e-7.
    close = functools.partial(np.testing.assert_allclose, rtol=1e-3)
    one_steps, one_evaluations, _ = read_run(tmp_path / "alone")
    close([line["loss"] for line in steps], [line["loss"] for line in one_steps])
    close(list(evaluations.values()), list(one_evaluations.values()))
    if name == "vit_shapes":
        assert np.sum(whole.metrics["eval/confusion"]) == 256
        assert np.shape(whole.metrics["eval/confusion"]) == (4, 4)
    assert alone.step == 6


def after_steps(job, mesh, num_steps=3):
    """Returns the model state and the metrics after steps with SGD, which does not amplify rounding errors."""
    layout = mw.state_layout(job, optax.sgd(0.1), mesh)
    state = mw.init_state(job, optax.sgd(0.1), layout, jax.random.key(0))
    step = mw.make_train_step(job, optax.sgd(0.1), layout)
    for _ in range(num_steps):
        state, metrics = step(state, job.batch)
    return jax.device_get((state.model_state, {name: metrics[name] for name in ("loss", "accuracy", "grad_norm")}))


@pytest.mark.slow  # four programs per example
@pytest.mark.parametrize("name", STATEFUL)
def test_model_state_and_metrics_equal_one_device(name):
    state, metrics = after_steps(job_of(name), ONE_DEVICE("dp:1"))
    before = jax.device_get(job_of(name).model_state(jax.random.split(jax.random.key(0))[0]))
    changed = [not np.array_equal(*pair) for pair in zip(*map(jax.tree.leaves, (state, before)), strict=True)]
    assert all(changed)
    for mesh in MESHES:
        found = after_steps(job_of(name), mw.create_mesh(mesh))
        # Statistics are sums of up to 64 * 36 terms of size 1: relative rounding errors are below 64 * 36 * 2**-24.
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=2e-4, atol=1e-5), found, (state, metrics))


@pytest.mark.slow  # three processes, each of which compiles a step
def test_a_process_is_killed_and_resumes(tmp_path, read_run):
    """SIGKILL in the middle of a run of the model with batch statistics."""

    def command(folder, *options):
        job = f"{FOLDER / 'nnx_batchnorm'}.py:job"
        common = ["--run", str(tmp_path / folder), "--steps", "40", "--checkpoint-every", "5", "--no-report"]
        start = [] if options else ["--job", job, "--mesh", MESHES[2]]
        return [sys.executable, "-m", "meshwright", "train", *start, *common, *options]

    env = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(FOLDER.parent / "src")}
    started = subprocess.Popen(command("killed"), env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    saved = tmp_path / "killed" / "checkpoints" / "10"
    limit = time.monotonic() + 300
    while not saved.exists() and started.poll() is None and time.monotonic() < limit:
        time.sleep(0.02)
    started.send_signal(signal.SIGKILL)
    assert started.wait() == -signal.SIGKILL
    for options in (["killed", "--resume"], ["whole"]):
        done = subprocess.run(command(*options), env=env, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
    steps, evaluations, _ = read_run(tmp_path / "whole")
    again, same, events = read_run(tmp_path / "killed")
    assert [line["loss"] for line in again] == [line["loss"] for line in steps]
    assert same == evaluations
    assert any(event["kind"] == "resume" for event in events)


# --- The custom loop ---


@pytest.fixture
def own_loop():
    found = runpy.run_path(str(FOLDER / "own_loop.py"))
    return SimpleNamespace(**found)


def test_the_custom_loop_resumes_bitwise_and_equals_one_device(own_loop, tmp_path, monkeypatch):
    whole = own_loop.main(MESHES[2], num_steps=6)
    own_loop.main(MESHES[2], tmp_path, 3)
    resumed = own_loop.main(MESHES[2], tmp_path, 6)
    assert bits(resumed) == bits(whole)
    monkeypatch.setattr(mw, "create_mesh", ONE_DEVICE)
    alone = own_loop.main("dp:1", num_steps=6)
    for one, many in zip(jax.tree.leaves(alone["params"]), jax.tree.leaves(whole["params"]), strict=True):
        np.testing.assert_allclose(one, many, rtol=1e-3, atol=1e-4)
