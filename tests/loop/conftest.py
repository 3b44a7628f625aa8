"""A tiny job with data of every form, and runs that stop at given steps."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from meshwright.loop.run import train

from .tiny_run import StopAt, bits

JOB = Path(__file__).parent / "tiny_job.py"


@pytest.fixture
def stop_at(monkeypatch):
    def stop(*steps):
        monkeypatch.setattr("meshwright.loop.setup.Preemption", lambda: StopAt(*steps))

    return stop


@pytest.fixture
def desk(make_config, monkeypatch, tmp_path):
    """Trains the tiny job: `desk.run("arrays", stop=3)`, in folder `desk.folder(name)`."""
    shutil.copy(JOB, tmp_path / "job.py")
    plain = {"model_options": [], "data": None, "batch_size": None, "num_tokens": 128, "eval_batches": 9}
    plain |= {"learning_rate": 0.05, "weight_decay": 0.0, "mesh": "dp:8"}

    def config(job="arrays", *, name="run", **changes):
        run = str(tmp_path / name)
        return make_config(**plain | {"job": f"{tmp_path}/job.py:{job}", "run": run} | changes)

    def run(job="arrays", *, stop=(), say=lambda text: None, **changes):
        monkeypatch.setattr("meshwright.loop.setup.Preemption", lambda: StopAt(*np.atleast_1d(stop)))
        return train(config(job, **changes), say=say)

    def add(text):
        with (tmp_path / "job.py").open("a") as file:
            file.write(text)

    return SimpleNamespace(config=config, run=run, add=add, folder=lambda name="run": tmp_path / name, bits=bits)
