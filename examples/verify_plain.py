"""Plain functions as a tensor-parallel job, whose step on a mesh is compared with the step on one device.

meshwright verify examples/verify_plain.py:job --mesh "fsdp:4,tp:2"
"""

import jax
import jax.numpy as jnp

import meshwright as mw
from meshwright import P
from meshwright.parallel import column_dense, dropout, row_dense
from meshwright.verify import verify

DIM, HIDDEN = 16, 32


def init(key):
    k_up, k_down = jax.random.split(key)
    return {
        "up": jax.random.normal(k_up, (DIM, HIDDEN)) / DIM**0.5,
        "down": jax.random.normal(k_down, (HIDDEN, DIM)) / HIDDEN**0.5,
    }


def loss(params, batch, rng):
    # These layers communicate over tp in the local view; in the global view XLA does.
    axis = "tp" if mw.names_in_current_mesh("tp") else None
    h = jax.nn.gelu(column_dense(batch["x"], params["up"], axis=axis, sequence_parallel=False))
    y = row_dense(h, params["down"], axis=axis, sequence_parallel=False)
    if rng is not None:
        y = dropout(y, 0.1, rng)
    errors = ((y - batch["y"]) ** 2).mean(axis=-1)
    return (errors.sum(), jnp.float32(errors.size)), {}


batch = {name: jax.ShapeDtypeStruct((16, 4, DIM), jnp.float32) for name in ("x", "y")}
rules = mw.Rules([("up", P("fsdp", "tp")), ("down", P("tp", "fsdp"))], optional_axes=("fsdp", "tp"))
job = mw.Job(init=init, rules=rules, loss=loss, batch=batch, local_axes=("tp",))

if __name__ == "__main__":
    mw.simulate_cpu_devices(8)
    report = verify(job, meshes="fsdp:4,tp:2")
    print(report)
    report.require()
