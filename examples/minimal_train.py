"""A training loop on any mesh in 80 lines: next-byte prediction on a module of Python's standard library.

python examples/minimal_train.py              # dp:2,fsdp:4 on eight simulated CPU devices
python examples/minimal_train.py fsdp:-1      # all devices of this machine
"""

import sys
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

import meshwright as mw
from meshwright import P

CONTEXT, DIM, HIDDEN, ROWS, STEPS = 8, 32, 128, 64, 200


# 1. The model: plain functions. Nothing in them mentions a mesh.
def init(key):
    k_embed, k_up, k_down = jax.random.split(key, 3)
    return {
        "embed": jax.random.normal(k_embed, (256, DIM)) * 0.1,
        "up": jax.random.normal(k_up, (CONTEXT * DIM, HIDDEN)) * (CONTEXT * DIM) ** -0.5,
        "down": jax.random.normal(k_down, (HIDDEN, 256)) * HIDDEN**-0.5,
    }


def loss(params, batch, rng):
    x = params["embed"][batch["context"]].reshape(len(batch["context"]), -1)
    logits = jax.nn.gelu(x @ params["up"]) @ params["down"]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["target"])
    return (losses.sum(), jnp.float32(losses.size)), {}  # a sum and a count, so that any split of the rows adds up


# 2. The rules: how each parameter is split. Axes in `optional_axes` may be missing from the mesh.
rules = mw.Rules([("embed", P()), ("up|down", P("fsdp"))], optional_axes=("fsdp",))
batch_shapes = {
    "context": jax.ShapeDtypeStruct((ROWS, CONTEXT), jnp.int32),
    "target": jax.ShapeDtypeStruct((ROWS,), jnp.int32),
}


# 3. The data: any iterator of host arrays.
def batches(seed):
    text = np.frombuffer(Path(tempfile.__file__).read_bytes(), np.uint8).astype(np.int32)
    rng = np.random.default_rng(seed)
    while True:
        starts = rng.integers(0, len(text) - CONTEXT, ROWS)
        yield {"context": text[starts[:, None] + np.arange(CONTEXT)], "target": text[starts + CONTEXT]}


# The job holds everything that `meshwright verify`, `plan` and `train --job` need.
job = mw.Job(init=init, rules=rules, loss=loss, batch=batch_shapes, make_batch=lambda seed: next(batches(seed)))


# 4. The loop: a layout for the mesh, a state created in shards, one compiled step, checkpoints.
def main(mesh_string="dp:2,fsdp:4"):
    optimizer = optax.adamw(3e-3)
    layout = mw.state_layout(job, optimizer, mw.create_mesh(mesh_string))
    state = mw.init_state(job, optimizer, layout, jax.random.key(0))
    step = mw.make_train_step(job, optimizer, layout, clip=1.0)
    with mw.Checkpoints(tempfile.mkdtemp()) as checkpoints:
        for number, batch in zip(range(1, STEPS + 1), batches(seed=0), strict=False):
            state, metrics = step(state, batch)
            if number % 50 == 0:
                print(f"step {number}  loss {metrics['loss']:.3f}  gradient norm {metrics['grad_norm']:.2f}")
                checkpoints.save(state, step=number, layout=layout, facts={})
    print(f"checkpoints {checkpoints.steps()}; restored step {checkpoints.restore(layout).step}")


if __name__ == "__main__":
    if len(sys.argv) == 1:
        mw.simulate_cpu_devices(8)
    main(*sys.argv[1:2])
