"""A tiny job with data of every form, and runs that stop at given steps."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest

from meshwright.loop.callbacks import Callback
from meshwright.loop.run import train

JOB = """
import grain, jax, jax.numpy as jnp, numpy as np, optax
from types import SimpleNamespace
import meshwright as mw
from meshwright.loop.callbacks import Callback

NUM_ROWS, NUM_CLASSES = 40, 4
rng = np.random.default_rng(0)
X = rng.normal(size=(NUM_ROWS, 8)).astype(np.float32)
Y = (X[:, :NUM_CLASSES].argmax(1)).astype(np.int32)
BATCH = {"x": X[:8], "y": Y[:8]}


def init(key):
    return {"w": 0.1 * jax.random.normal(key, (8, NUM_CLASSES)), "b": jnp.zeros(NUM_CLASSES)}


def loss(params, batch, rng):
    x = batch["x"]
    if rng is not None:
        x = x * jax.random.bernoulli(rng, 0.9, x.shape)
    logits = x @ params["w"] + params["b"]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
    right = (logits.argmax(-1) == batch["y"]).astype(jnp.float32)
    count = jnp.float32(losses.size)
    return (losses.sum(), count), {"accuracy": (right.sum(), count)}


def predict(params, batch):
    return {"class": (batch["x"] @ params["w"] + params["b"]).argmax(-1)}


def row(i):
    return {"x": X[i], "y": Y[i]}


class Counter:
    def __init__(self, seed):
        self.order, self.place = np.random.default_rng(seed).permutation(NUM_ROWS), 0

    def __next__(self):
        if self.place == NUM_ROWS:
            raise StopIteration
        self.place += 1
        return row(self.order[self.place - 1])

    def get_state(self):
        return {"place": self.place}

    def set_state(self, state):
        self.place = state["place"]


class Source:
    def __len__(self):
        return NUM_ROWS

    def __getitem__(self, index):
        return row(index)


DATASET = grain.MapDataset.range(NUM_ROWS).map(row)
ARRAYS = {"x": X, "y": Y}


def make(data=ARRAYS, **fields):
    known = dict(
        init=init, rules=mw.Rules([("w", mw.P("fsdp")), (".*", mw.P())], optional_axes=("fsdp",)), loss=loss,
        batch=BATCH, data=data, eval_data={"x": X[:20], "y": Y[:20]},
    )
    return SimpleNamespace(**known | fields)


arrays = make()
map_dataset = make(DATASET)
source = make(Source())
iter_dataset = make(DATASET.shuffle(seed=1).to_iter_dataset())
batched = make(DATASET.to_iter_dataset().batch(8, drop_remainder=True))
factory = make(Counter)
path = make(__file__.replace("job.py", "arrays"))
"""


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
    (tmp_path / "job.py").write_text(JOB)
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
