"""An Equinox model on single rows, with batch normalization in an `eqx.nn.State` and dropout keys by row.

meshwright train --job examples/equinox_state.py:job --mesh dp:2,fsdp:2,tp:2 --steps 200
meshwright verify examples/equinox_state.py:job --mesh dp:8 fsdp:8
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import meshwright as mw
from meshwright import P

ARMS, HIDDEN, ROWS = 3, 32, 64


def make_spirals(num_rows, seed):
    """Returns points on the arms of a spiral."""
    rng = np.random.default_rng(seed)
    label = rng.integers(0, ARMS, num_rows).astype(np.int32)
    radius = rng.uniform(0.2, 1, num_rows)
    angle = 4 * radius + label * 2 * np.pi / ARMS + rng.normal(0, 0.1, num_rows)
    point = np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1)
    return {"point": point.astype(np.float32), "label": label}


class Classifier(eqx.Module):
    """Three dense layers for one point, with normalization over the points of a batch."""

    layers: list
    norm: eqx.nn.BatchNorm
    dropout: eqx.nn.Dropout

    def __init__(self, key):
        sizes = [(2, HIDDEN), (HIDDEN, HIDDEN), (HIDDEN, ARMS)]
        self.layers = [eqx.nn.Linear(*size, key=k) for size, k in zip(sizes, jax.random.split(key, 3), strict=True)]
        self.norm = eqx.nn.BatchNorm(HIDDEN, axis_name="rows", mode="batch")
        self.dropout = eqx.nn.Dropout(0.1)

    def __call__(self, x, state, key):
        x, state = self.norm(jax.nn.relu(self.layers[0](x)), state)
        return self.layers[2](self.dropout(jax.nn.relu(self.layers[1](x)), key=key)), state


def forward(model, state, batch, key):
    # row_keys gives each row its own key, whatever device and minibatch it is in; jax.random.split would not.
    keys = None if key is None else mw.parallel.row_keys(key, len(batch["point"]))
    in_axes = (0, None, None if key is None else 0)
    return jax.vmap(model, in_axes=in_axes, out_axes=(0, None), axis_name="rows")(batch["point"], state, keys)


def loss(model, state, batch, key):
    logits, state = forward(model, state, batch, key)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    hits = (logits.argmax(axis=-1) == batch["label"]).astype(jnp.float32)
    return (losses.sum(), jnp.float32(losses.size)), {"accuracy": mw.metrics.Mean(hits.mean())}, state


job = mw.equinox_job(
    eqx.nn.make_with_state(Classifier),
    loss,
    batch=make_spirals(ROWS, seed=0),
    # Equinox stores weights as [out, in].
    rules=mw.Rules(
        [
            ("layers/(0|1)/weight", P(("fsdp", "tp"))),
            ("layers/2/weight", P(None, ("fsdp", "tp"))),
            ("bias|norm/weight", P()),
        ],
        optional_axes=("fsdp", "tp"),
    ),
    data=make_spirals(2048, seed=1),
    eval_data=make_spirals(256, seed=2),
    optimizer=optax.adam(3e-3),
    predict=lambda model, state, batch: jax.nn.softmax(forward(model, state, batch, None)[0]),
)
