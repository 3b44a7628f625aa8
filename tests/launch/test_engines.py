"""Real engines on this machine: two processes with four devices each reach the losses of one process with eight."""

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import meshwright as mw
from meshwright.loop.settings.config import TrainConfig

from .small_slurm import small_slurm, why_not

STEPS = 4
CPU = {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}  # as conftest.py sets it
OPTIONS = {
    "model": "decoder-tiny",
    "model_options": ["num_layers=1", "d_model=16", "d_ff=32", "num_heads=2"],
    "batch_size": 8,
    "num_tokens": 16,
    "mesh": "dp:2,fsdp:4",
    "steps": STEPS,
    "eval_every": 0,
    "sample_tokens": 0,
    "report": False,
    "tensorboard": False,
    "log_seconds": 0.0,
}


@pytest.fixture(scope="module")
def alone(text_folder, token_cache, tmp_path_factory):
    """The losses of one process with eight devices."""
    run = tmp_path_factory.mktemp("alone") / "run"
    changes = {**OPTIONS, "run": str(run), "data": str(text_folder), "data_cache": str(token_cache)}
    mw.train(TrainConfig().changed(changes), say=lambda line: None)
    return read_losses(run)


def read_losses(run):
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if "loss" in line]


@pytest.fixture
def command(text_folder, token_cache, tmp_path):
    """The words of the same run for two processes."""
    words = ["train", "--run", str(tmp_path / "run"), "--data", str(text_folder), "--data-cache", str(token_cache)]
    for name, value in OPTIONS.items():
        option = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{'' if value else 'no-'}{option}")
        else:
            words += [f"--{option}", *(value if isinstance(value, list) else [str(value)])]
    return words


def start(launch, command, variables=os.environ):
    words = [sys.executable, "-m", "meshwright", "launch", "--processes", "2", *launch, "--", *command]
    kept = {name: value for name, value in variables.items() if not name.startswith(("OMPI_", "PMIX_"))}
    return subprocess.run(words, capture_output=True, text=True, timeout=300, env=kept | CPU)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("mpirun") is None, reason="Open MPI is not installed")
def test_open_mpi(alone, command, tmp_path):
    done = start(["--backend", "mpi", "--devices-per-process", "4"], command)
    assert done.returncode == 0, done.stderr
    assert "2 processes with mpirun, 4 simulated devices each (8 in all)" in done.stderr
    assert "rank 0 of 2, 4 of 8 devices" in done.stderr
    assert read_losses(tmp_path / "run") == pytest.approx(alone, rel=1e-5)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")
def test_ray(alone, command, tmp_path):
    done = start(["--backend", "ray", "--devices-per-process", "4"], command)
    assert done.returncode == 0, done.stderr
    assert "rank 0 of 2, 4 of 8 devices" in done.stderr
    assert read_losses(tmp_path / "run") == pytest.approx(alone, rel=1e-5)


def slurm_rank(rank, run):
    """Returns the process of a rank that srun started."""
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (place / "cmdline").read_bytes().split(b"\0")
            if str(run).encode() not in words or b"srun" in words[0]:
                continue
            if f"SLURM_PROCID={rank}".encode() in (place / "environ").read_bytes().split(b"\0"):
                return int(place.name)
    raise AssertionError(f"rank {rank} does not run")


@pytest.mark.slow
@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_two_slurm_nodes_and_a_killed_rank(alone, command, tmp_path):
    folder, run = tmp_path / "slurm", tmp_path / "run"
    folder.mkdir()
    launch = ["--backend", "slurm", "--nodes", "2", "--attempts", "2", "--engine-args=--export=ALL"]
    with small_slurm(folder) as variables:
        done = start(launch, [*command, "--devices", "4"], variables)
        assert done.returncode == 0, done.stderr
        said, deadline, killed = "", time.monotonic() + 240, False
        while "attempt 2 ended with exit code" not in said and time.monotonic() < deadline:
            time.sleep(0.1)
            if not killed and (run / "config.yaml").exists():  # the step compiles now
                os.kill(slurm_rank(1, run), signal.SIGKILL)
                killed = True
            said = "".join(path.read_text() for path in tmp_path.glob("meshwright-*.out"))
        logs = "".join(path.read_text() for path in folder.glob("*.log"))
    assert "attempt 1 ended with exit code 137" in said, said + logs
    assert "attempt 2 ended with exit code 0" in said, said + logs
    assert not (tmp_path / ".meshwright.token").exists()
    assert "attempt 1 of 2, restart 0, on " in said
    assert "0: rank 0 of 2, 4 of 8 devices" in said
    assert read_losses(tmp_path / "run") == pytest.approx(alone, rel=1e-5)
