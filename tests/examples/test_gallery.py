"""Each job in examples/: rules, plan, verify, and a run that is killed and resumed, on three meshes, without a view."""

import functools
import json
import os
import runpy
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

import meshwright as mw
from meshwright.loop import TrainConfig
from meshwright.loop.run import train
from meshwright.plan import Setup, make_plan, profile_job
from meshwright.train.jobs.job_loading import load_job
from meshwright.train.views import choose_view
from meshwright.verify import verify

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples"
STATEFUL = ("nnx_batchnorm", "equinox_state")
JOBS = ("vit_shapes", *STATEFUL, "linen_logical_axes", "two_optimizers")
MESHES = ("dp:8", "fsdp:8", "dp:2,fsdp:2,tp:2")
ONE_DEVICE = functools.partial(mw.create_mesh, devices=1)


def job_file(name):
    return f"{FOLDER / name}.py:job"


@functools.cache
def job_of(name):
    return load_job(job_file(name))


@pytest.mark.parametrize("name", JOBS)
def test_rules_and_plan(name):
    job = job_of(name)
    params = mw.abstract_init(job.init)
    profile = profile_job(job, optimizer="adam", platform="gpu", remats=("none",))
    for mesh in MESHES:
        report = mw.make_layout(job.rules, params, mw.create_abstract_mesh(mesh)).report()
        assert report.ok
        assert not report.concerns()
        assert sum(not leaf.is_replicated for leaf in report.leaves) >= (0 if mesh == "dp:8" else 2)
        plan = make_plan(job, "h200:1x8", Setup(mesh=mesh, optimizer="adam"), profile=profile)
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
    """Loss, gradients, metrics, parameters and model state equal one device, in the view that `train` chooses."""
    job = job_of(name)
    views = [choose_view(job, mw.create_abstract_mesh(mesh)).view for mesh in MESHES]
    assert views == (["global"] * 3 if name in STATEFUL else ["local", "local", "global"])
    for view in dict.fromkeys(views):
        meshes = [mesh for mesh, its_view in zip(MESHES, views, strict=True) if its_view == view]
        report = verify(job, meshes=meshes, views=view, num_steps=2)
        report.require()
        compared = [{comparison.what for comparison in case.comparisons} for case in report.cases]
        wanted = {"loss", "gradients", "parameters", "metrics"} | ({"model state"} if name in STATEFUL else set())
        assert all(wanted <= what for what in compared)


# --- Runs ---

RUN = {"steps": 4, "checkpoint_every": 2, "eval_every": 2, "eval_batches": 4}
QUIET = {"report": False, "tensorboard": False, "log_seconds": 1000.0, "hang": 0.0}
RUNS = [(name, mesh) for name in JOBS for mesh in (MESHES if name != "two_optimizers" else MESHES[2:])]

# Starts each command after the third step of the one before it. In the innermost run, the process kills itself, so that
# one process has many runs that end in the middle, without a chance to save or to close anything.
NESTED = """
import json, os, signal, sys, time
from pathlib import Path

import conftest  # the devices and the compilation cache of the tests
from meshwright.cli import main
from meshwright.loop import Callback, setup

commands = json.loads(sys.argv[1])
folders = [Path(command[command.index("--run") + 1]) for command in commands]


def start_next():
    if commands:
        main(commands.pop(0))
    while not all((folder / "checkpoints" / "2" / "manifest.json").exists() for folder in folders):
        time.sleep(0.02)
    os.kill(os.getpid(), signal.SIGKILL)


class StartNext(Callback):
    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def wants_stop(self, loop):
        if loop.ticks == 3:
            start_next()
        return False


setup.Preemption = StartNext
start_next()
"""


def run(folder, name, mesh, **changes):
    options = {"job": job_file(name), "mesh": mesh, "run": str(folder)}
    return train(TrainConfig().changed(RUN | QUIET | options | changes), say=lambda line: None)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The uninterrupted run of an example on a mesh, with its folder."""
    return functools.cache(lambda name, mesh: (folder := tmp_path_factory.mktemp("whole"), run(folder, name, mesh)))


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """The folders of all runs in one process, which was killed after the third of four steps."""
    folders = {each: tmp_path_factory.mktemp("killed") / "run" for each in RUNS}
    commands = []
    for (name, mesh), folder in folders.items():
        command = ["train", "--job", job_file(name), "--mesh", mesh, "--run", str(folder)]
        for option, value in (RUN | QUIET).items():
            flag = option.replace("_", "-")
            command += [f"--no-{flag}"] if value is False else [f"--{flag}", str(value)]
        commands.append(command)
    environment = {"JAX_PLATFORMS": "cpu", "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    done = subprocess.run(
        [sys.executable, "-c", NESTED, json.dumps(commands)],
        # The tests below start the same runs again, and find these programs on disk.
        env=os.environ | environment | {"MESHWRIGHT_KEEP_PROGRAMS": "1"},
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    return folders


def bits(state):
    def raw(leaf):
        is_key = jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        return np.asarray(jax.random.key_data(leaf) if is_key else leaf).tobytes()

    return {leaf.name: raw(leaf.value) for leaf in mw.tree.named_leaves(state)}


@pytest.mark.slow  # one process runs all examples before it is killed
@pytest.mark.parametrize(("name", "mesh"), RUNS)
def test_a_killed_run_resumes_bitwise(name, mesh, killed, whole, read_run):
    (folder, straight), resumed = whole(name, mesh), run(killed[name, mesh], name, mesh, resume=True)
    assert (straight.why, resumed.why) == ("finished", "finished")
    assert bits(resumed.state) == bits(straight.state)
    steps, evaluations, _ = read_run(folder)
    again, same, events = read_run(killed[name, mesh])
    assert [event["step"] for event in events if event["kind"] == "resume"] == [2]
    assert [line["loss"] for line in again] == [line["loss"] for line in steps]
    assert same == evaluations
    assert sorted(evaluations) == [2, 4]


@pytest.mark.slow  # compiles a step, an evaluation and predictions
@pytest.mark.parametrize("name", ["vit_shapes", "nnx_batchnorm"])
def test_a_run_equals_one_device(name, whole, read_run, monkeypatch, tmp_path):
    folder, many = whole(name, MESHES[2])
    monkeypatch.setattr("meshwright.loop.decisions.create_mesh", ONE_DEVICE)
    run(tmp_path / "one", name, "dp:1")
    (steps, evaluations, _), (one_steps, one_evaluations, _) = map(read_run, (folder, tmp_path / "one"))
    # Adam divides by the square root of small numbers, which amplifies rounding errors of about 1e-7.
    close = functools.partial(np.testing.assert_allclose, rtol=1e-3)
    close([line["loss"] for line in steps], [line["loss"] for line in one_steps])
    close(list(evaluations.values()), list(one_evaluations.values()))
    if name == "vit_shapes":
        assert np.sum(many.metrics["eval/confusion"]) == 256
        assert np.shape(many.metrics["eval/confusion"]) == (4, 4)


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
