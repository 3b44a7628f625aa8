"""An Equinox model as a job, whose step on a mesh is compared with the step on one device.

meshwright verify examples/verify_equinox.py:job --mesh fsdp:8
"""

import equinox as eqx
import jax
import jax.numpy as jnp

import meshwright as mw
from meshwright import P
from meshwright.train import equinox_job
from meshwright.verify import verify


class Classifier(eqx.Module):
    """An MLP on single examples, with dropout on the whole batch."""

    mlp: eqx.nn.MLP
    head: eqx.nn.Linear
    rate: float = 0.1

    def __init__(self, key):
        k_mlp, k_head = jax.random.split(key)
        self.mlp = eqx.nn.MLP(8, 16, width_size=32, depth=1, key=k_mlp)
        self.head = eqx.nn.Linear(16, 8, key=k_head)

    def __call__(self, x, key):
        h = jax.vmap(self.mlp)(x)
        if key is not None:
            # One mask for the whole batch is the same on any mesh; with jax.random.split, the first row of every device
            # would get the same mask.
            h = mw.parallel.dropout(h, self.rate, key)
        return jax.vmap(self.head)(h)


def loss(model, batch, key):
    logits = jax.nn.log_softmax(model(batch["x"], key))
    losses = -jnp.take_along_axis(logits, batch["label"][:, None], axis=1)
    return losses.sum(), jnp.float32(losses.size)


job = equinox_job(
    Classifier,
    loss,
    batch={"x": jax.ShapeDtypeStruct((16, 8), jnp.float32), "label": jax.ShapeDtypeStruct((16,), jnp.int32)},
    rules=mw.Rules([("weight", P("fsdp", "tp")), ("bias", P())], optional_axes=("fsdp", "tp")),
)

if __name__ == "__main__":
    mw.simulate_cpu_devices(8)
    report = verify(job, meshes="fsdp:8")
    print(report)
    report.require()
