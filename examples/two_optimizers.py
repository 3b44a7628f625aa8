"""Two optimizers in one job: SGD with momentum for embeddings, AdamW for the rest, and a frozen table.

meshwright train --job examples/two_optimizers.py:job --mesh dp:2,fsdp:2,tp:2 --steps 200
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import meshwright as mw
from meshwright import P

ITEMS, DIM, HIDDEN, ROWS = 64, 16, 32, 64


def make_ratings(num_rows, seed):
    """Returns pairs of a user and an item, and how well they match by hidden tastes."""
    tastes = np.random.default_rng(0).normal(size=(2, ITEMS, 4))  # the same for every seed
    pair = np.random.default_rng(seed).integers(0, ITEMS, (num_rows, 2)).astype(np.int32)
    rating = np.tanh((tastes[0][pair[:, 0]] * tastes[1][pair[:, 1]]).sum(axis=1))
    return {"pair": pair, "rating": rating.astype(np.float32)}


def init(key):
    k_user, k_item, k_code, k_up, k_down = jax.random.split(key, 5)
    return {
        "embed": {
            "user": 0.3 * jax.random.normal(k_user, (ITEMS, DIM)),
            "item": 0.3 * jax.random.normal(k_item, (ITEMS, DIM)),
        },
        "codes": jax.random.normal(k_code, (ITEMS, DIM)),  # random codes of the items, which stay as they are
        "up": jax.random.normal(k_up, (4 * DIM, HIDDEN)) * (4 * DIM) ** -0.5,
        "down": jax.random.normal(k_down, (HIDDEN, 1)) * HIDDEN**-0.5,
    }


def forward(params, pair):
    user, item = params["embed"]["user"][pair[:, 0]], params["embed"]["item"][pair[:, 1]]
    features = jnp.concatenate([user, item, user * item, params["codes"][pair[:, 1]]], axis=1)
    return jnp.tanh((jax.nn.gelu(features @ params["up"]) @ params["down"])[:, 0] + (user * item).sum(axis=1))


def loss(params, batch, rng):
    errors = (forward(params, batch["pair"]) - batch["rating"]) ** 2
    return (errors.sum(), jnp.float32(errors.size)), {"worst": mw.metrics.Max(errors.max())}


def make_optimizer(num_steps):
    def labels(params):
        return mw.named_tree_map(lambda name, _: "sgd" if name.startswith("embed") else "adamw", params, sep="/")

    return optax.partition(
        {"sgd": optax.sgd(1.0, momentum=0.9), "adamw": optax.adamw(optax.cosine_decay_schedule(3e-3, num_steps))},
        labels,
    )


job = mw.Job(
    init=init,
    rules=mw.Rules(
        [("embed|codes", P("fsdp", "tp")), ("up", P("fsdp", "tp")), ("down", P(("fsdp", "tp")))],
        optional_axes=("fsdp", "tp"),
    ),
    loss=loss,
    batch=make_ratings(ROWS, seed=1),
    data=make_ratings(4096, seed=2),
    eval_data=make_ratings(256, seed=3),
    optimizer=make_optimizer,
    frozen=("codes",),
    predict=lambda params, batch: forward(params, batch["pair"]),
)
