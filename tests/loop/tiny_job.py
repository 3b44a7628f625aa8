"""A tiny job with data of every form; tests copy this file and add to the copy."""

from pathlib import Path
from types import SimpleNamespace

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax

import meshwright as mw

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


def make(data=ARRAYS, kind=mw.Job, **fields):
    known = {
        "init": init,
        "rules": mw.Rules([("w", mw.P("fsdp")), (".*", mw.P())], optional_axes=("fsdp",)),
        "loss": loss,
        "batch": BATCH,
        "data": data,
        "eval_data": {"x": X[:20], "y": Y[:20]},
    }
    return kind(**known | fields)


arrays = make()
map_dataset = make(DATASET)
source = make(Source())
iter_dataset = make(DATASET.shuffle(seed=1).to_iter_dataset())
batched = make(DATASET.to_iter_dataset().batch(8, drop_remainder=True))
factory = make(Counter, SimpleNamespace)  # any object with these attributes is a job
path = make(Path(__file__).parent / "arrays")
