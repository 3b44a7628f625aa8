"""A tiny job with data of every form, and runs that stop at given steps."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from meshwright.loop.callbacks import Callback
from meshwright.loop.run import train

JOB = Path(__file__).parent / "tiny_job.py"


class StopAt(Callback):
    """Asks a run to stop at given steps, as SIGTERM does."""

    def __init__(self, *steps):
        self.steps = steps

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def wants_stop(self, loop):
        return loop.ticks in self.steps


def bits(state):
    state = jax.tree.map(
        lambda leaf: jax.random.key_data(leaf) if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf,
        state,
    )
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(state)]


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
