"""A Flax Linen model as a job, whose step on a mesh is compared with the step on one device.

meshwright verify examples/verify_linen.py:job --mesh fsdp:8
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

import meshwright as mw
from meshwright import P
from meshwright.train import linen_job
from meshwright.verify import verify


class MLP(nn.Module):
    """Two layers with dropout between them."""

    @nn.compact
    def __call__(self, x, deterministic):
        x = nn.gelu(nn.Dense(32, name="up")(x))
        x = nn.Dropout(0.1)(x, deterministic=deterministic)
        return nn.Dense(8, name="down")(x)


def loss(apply, batch, rng):
    # Return (sum, count): a mean would give devices with few valid rows the same weight as the others.
    errors = (apply(batch["x"], deterministic=rng is None) - batch["y"]) ** 2
    return (errors.mean(axis=-1) * batch["mask"]).sum(), batch["mask"].sum()


def shape(*dims):
    return jax.ShapeDtypeStruct(dims, jnp.float32)


job = linen_job(
    MLP(),
    loss,
    batch={"x": shape(16, 8), "y": shape(16, 8), "mask": shape(16)},
    rules=mw.Rules(
        [("up/kernel", P("fsdp", "tp")), ("down/kernel", P("tp", "fsdp")), ("bias", P())],
        optional_axes=("fsdp", "tp"),
    ),
)

if __name__ == "__main__":
    mw.simulate_cpu_devices(8)
    # Parameters are gathered along fsdp for any loss, so both views work; over tp, only XLA can split a Linen model.
    report = verify(job, meshes="fsdp:8")
    print(report)
    report.require()
