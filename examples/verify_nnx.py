"""A Flax NNX model as a job, whose step on a mesh is compared with the step on one device.

meshwright verify examples/verify_nnx.py:job --mesh fsdp:8
"""

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import meshwright as mw
from meshwright import P
from meshwright.train import nnx_job
from meshwright.verify import verify

VOCAB, DIM = 64, 16


class Bigram(nnx.Module):
    """Predicts the next token from the last one."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(VOCAB, DIM, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.head = nnx.Linear(DIM, VOCAB, use_bias=False, rngs=rngs)

    def __call__(self, tokens):
        return self.head(self.dropout(self.embed(tokens)))


def loss(model, batch):
    logits, targets = model(batch["tokens"][:, :-1]), batch["tokens"][:, 1:]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    # A metric must combine over devices: a mean does, but exp(losses.mean()), the perplexity, does not.
    hits = (logits.argmax(axis=-1) == targets).astype(jnp.float32)
    return (losses.sum(), jnp.float32(losses.size)), {"accuracy": mw.metrics.Mean(hits.mean())}


job = nnx_job(
    Bigram,
    loss,
    batch={"tokens": np.random.default_rng(0).integers(0, VOCAB, (16, 12), dtype=np.int32)},
    rules=mw.Rules(
        [("embedding", P("tp", "fsdp")), ("head/kernel", P("fsdp", "tp"))],
        optional_axes=("fsdp", "tp"),
    ),
)

if __name__ == "__main__":
    mw.simulate_cpu_devices(8)
    report = verify(job, meshes="fsdp:8")
    print(report)
    report.require()
