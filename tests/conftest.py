"""Eight simulated CPU devices, also when this folder is run without the conftest.py above it, and what tests share."""

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import textwrap

import hypothesis
import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding

from meshwright.loop.settings.config import TrainConfig

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

# Derandomized, so that a run either always passes or always fails; no deadline, because compilation takes time.
hypothesis.settings.register_profile(
    "meshwright",
    derandomize=True,
    deadline=None,
    database=None,
    max_examples=100,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("meshwright")

_compilations: list[float] = []


def _listen(event, duration, **_):
    # Fires also when the program comes from the persistent cache: it counts programs, not work.
    if event == "/jax/core/compile/backend_compile_duration":
        _compilations.append(duration)


jax.monitoring.register_event_duration_secs_listener(_listen)


@pytest.fixture
def count_programs():
    """A context manager whose value is a list that grows by one entry per program compiled inside."""

    @contextlib.contextmanager
    def counting():
        found, before = [], len(_compilations)
        try:
            yield found
        finally:
            found.extend(_compilations[before:])

    return counting


@pytest.fixture
def assert_placed():
    """Checks, shard by shard, that an array is split as a spec says and holds the given value."""

    def check(array, mesh, spec, value):
        value = np.asarray(value)
        assert array.shape == value.shape
        expected = NamedSharding(mesh, spec).devices_indices_map(value.shape)
        assert {shard.device for shard in array.addressable_shards} == set(expected)
        for shard in array.addressable_shards:
            np.testing.assert_array_equal(np.asarray(shard.data), value[expected[shard.device]], strict=True)

    return check


@pytest.fixture
def run_python():
    """Runs a program in a fresh interpreter on the CPU; returns the finished process with its text output."""

    def run(code, *args, cwd=None, timeout=180, **env):
        return subprocess.run(
            [sys.executable, "-W", "error::UserWarning:meshwright", "-c", textwrap.dedent(code), *args],
            capture_output=True,
            text=True,
            cwd=cwd,
            timeout=timeout,
            env=os.environ | {"JAX_PLATFORMS": "cpu"} | env,
        )

    return run


@pytest.fixture
def run_compiler(run_python):
    """Like `run_python`, with XLA's defaults: for programs that compile for other hardware, and read the result."""
    return functools.partial(run_python, JAX_DISABLE_MOST_OPTIMIZATIONS="0")


# --- A tiny run on generated text, which all tests of the loop start from ---

TINY_RUN = {
    "model": "decoder-tiny",
    "model_options": ["num_layers=1", "d_model=16", "d_ff=16", "num_heads=2", "dropout=0.1"],
    "batch_size": 8,
    "num_tokens": 16,
    "mesh": "dp:4,fsdp:2",
    "steps": 12,
    "warmup": 2,
    "checkpoint_every": 4,
    "eval_every": 6,
    "eval_batches": 1,
    "sample_tokens": 0,
    "report": False,
    "tensorboard": False,
    "log_seconds": 1000.0,
    "hang": 0.0,
}


@pytest.fixture(scope="session")
def text_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    rng = np.random.default_rng(0)
    for number in range(20):
        words = rng.choice(["mesh", "axis", "ring", "shard", "tree"], size=60)
        (folder / f"{number:02d}.txt").write_text(" ".join(words) + "\n")
    return folder


@pytest.fixture(scope="session")
def token_cache(tmp_path_factory):
    return tmp_path_factory.mktemp("tokens")


@pytest.fixture
def make_config(text_folder, token_cache, tmp_path):
    """A configuration of the tiny run, in a folder of its own unless `run` says otherwise."""

    def make(**changes):
        options = {"data": str(text_folder), "data_cache": str(token_cache), "run": str(tmp_path / "run")}
        return TrainConfig().changed(TINY_RUN | options | changes)

    return make


@pytest.fixture
def read_run():
    """What a run wrote: its losses by step, and its events."""

    def read(folder):
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
        steps = [line for line in lines if "loss" in line]
        evaluations = {line["step"]: line["eval/loss"] for line in lines if "eval/loss" in line}
        return steps, evaluations, events

    return read


@pytest.fixture
def usual_signals():
    """Signals as in a terminal: tests that were started in the background, or under `nohup`, inherit ignored ones."""
    usual = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL, signal.SIGHUP: signal.SIG_DFL}
    before = {number: signal.signal(number, handler) for number, handler in usual.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
