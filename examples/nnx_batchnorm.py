"""A Flax NNX model with batch normalization and dropout. Its running statistics are equal on every mesh.

meshwright train --job examples/nnx_batchnorm.py:job --mesh dp:2,fsdp:2,tp:2 --steps 200
meshwright verify examples/nnx_batchnorm.py:job --mesh dp:8 fsdp:8
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import meshwright as mw
from meshwright import P

SIZE, CHANNELS, CLASSES, ROWS = 12, 16, 4, 64


def make_stripes(num_rows, seed):
    """Returns noisy stripes in four directions."""
    rng = np.random.default_rng(seed)
    label = rng.integers(0, CLASSES, num_rows).astype(np.int32)
    angle, phase = label[:, None, None] * np.pi / CLASSES, rng.uniform(0, 2 * np.pi, (num_rows, 1, 1))
    y, x = np.mgrid[:SIZE, :SIZE]
    image = np.sin(1.5 * (x * np.cos(angle) + y * np.sin(angle)) + phase) + rng.normal(0, 0.5, (num_rows, SIZE, SIZE))
    return {"image": image[..., None].astype(np.float32), "label": label}


class Classifier(nnx.Module):
    """Two convolutions and a dense layer."""

    def __init__(self, rngs):
        # BatchNorm subtracts the mean, so a bias before it would have no effect.
        sizes = [(1, CHANNELS), (CHANNELS, CHANNELS)]
        self.convs = nnx.List([nnx.Conv(*size, (3, 3), 2, use_bias=False, rngs=rngs) for size in sizes])
        self.norms = nnx.List([nnx.BatchNorm(CHANNELS, momentum=0.9, rngs=rngs) for _ in range(2)])
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.head = nnx.Linear(CHANNELS, CLASSES, rngs=rngs)

    def __call__(self, x):
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = nnx.relu(norm(conv(x)))
        return self.head(self.dropout(x.mean(axis=(1, 2))))


def loss(model, batch):
    # In training, BatchNorm normalizes by the statistics of the whole batch, over all devices, and updates its own.
    logits = model(batch["image"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    hits = (logits.argmax(axis=-1) == batch["label"]).astype(jnp.float32)
    return (losses.sum(), jnp.float32(losses.size)), {"accuracy": mw.metrics.Mean(hits.mean())}


job = mw.nnx_job(
    Classifier,
    loss,
    batch=make_stripes(ROWS, seed=0),
    rules=mw.Rules(
        [("convs/.*kernel", P(None, None, None, ("fsdp", "tp"))), ("head/kernel", P("fsdp")), ("bias|scale", P())],
        optional_axes=("fsdp", "tp"),
    ),
    data=make_stripes(2048, seed=1),
    eval_data=make_stripes(256, seed=2),
    optimizer=optax.adam(3e-3),
    predict=lambda model, batch: jax.nn.softmax(model(batch["image"])),
)
