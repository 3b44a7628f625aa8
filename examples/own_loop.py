"""A custom loop without Meshwright's step: two networks trained against each other, on any mesh.

A generator learns to place points on a ring; a critic learns to tell them from real ones. Meshwright supplies the
layout and the checkpoints; the step and the loop are plain JAX.

python examples/own_loop.py                   # dp:2,fsdp:2,tp:2 on eight simulated CPU devices
python examples/own_loop.py fsdp:-1           # all devices of this machine
"""

import sys
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import optax

import meshwright as mw
from meshwright import P

NOISE, HIDDEN, ROWS, STEPS = 4, 32, 64, 60
adam = optax.adam(2e-3, b1=0.5)


def real_points(step):
    """Returns the batch of a step, so that a resumed run continues with the same data."""
    angle = np.random.default_rng(step).uniform(0, 2 * np.pi, ROWS)
    return np.stack([np.cos(angle), np.sin(angle)], axis=1).astype(np.float32)


# --- The state: any pytree ---


def network(key, num_in, num_out):
    k_up, k_down = jax.random.split(key)
    return {
        "up": {"kernel": jax.random.normal(k_up, (num_in, HIDDEN)) * num_in**-0.5, "bias": jnp.zeros(HIDDEN)},
        "down": {"kernel": jax.random.normal(k_down, (HIDDEN, num_out)) * HIDDEN**-0.5, "bias": jnp.zeros(num_out)},
    }


def make_state(key):
    k_generator, k_critic, k_run = jax.random.split(key, 3)
    params = {"generator": network(k_generator, NOISE, 2), "critic": network(k_critic, 2, 1)}
    opt_state = {name: adam.init(part) for name, part in params.items()}
    return {"params": params, "opt_state": opt_state, "rng": k_run, "step": jnp.int32(0)}


# --- The step ---


def run(params, x):
    h = jax.nn.relu(x @ params["up"]["kernel"] + params["up"]["bias"])
    return h @ params["down"]["kernel"] + params["down"]["bias"]


def critic_loss(critic, generator, real, noise):
    return jax.nn.softplus(-run(critic, real)).mean() + jax.nn.softplus(run(critic, run(generator, noise))).mean()


def generator_loss(generator, critic, noise):
    return jax.nn.softplus(-run(critic, run(generator, noise))).mean()


def step(state, real):
    noise = jax.random.normal(jax.random.fold_in(state["rng"], state["step"]), (ROWS, NOISE))
    params, opt_state, metrics = dict(state["params"]), dict(state["opt_state"]), {}

    def update(name, loss, *args):
        metrics[name], grads = jax.value_and_grad(loss)(params[name], *args)
        updates, opt_state[name] = adam.update(grads, opt_state[name], params[name])
        params[name] = optax.apply_updates(params[name], updates)

    update("critic", critic_loss, params["generator"], real, noise)
    update("generator", generator_loss, params["critic"], noise)
    return {**state, "params": params, "opt_state": opt_state, "step": state["step"] + 1}, metrics


# --- The loop ---

rules = mw.Rules(
    # An axis that does not divide a dim is an error, so the two outputs of the generator stay whole.
    [("up/kernel", P(None, ("fsdp", "tp"))), ("down/kernel", P(("fsdp", "tp"))), ("bias", P())],
    optional_axes=("fsdp", "tp"),
)


def main(mesh_string="dp:2,fsdp:2,tp:2", folder=None, num_steps=STEPS):
    mesh = mw.create_mesh(mesh_string)
    layout = mw.make_layout(rules, mw.abstract_init(make_state), mesh)  # optimizer states follow their parameters
    rows = jax.NamedSharding(mesh, P(tuple(axis for axis in ("dp", "fsdp") if axis in mesh.shape)))
    compiled = jax.jit(
        step, in_shardings=(layout.shardings, rows), out_shardings=(layout.shardings, None), donate_argnums=0
    )
    with mw.Checkpoints(folder or tempfile.mkdtemp()) as checkpoints:
        if checkpoints.latest() is None:
            state = jax.jit(make_state, out_shardings=layout.shardings)(jax.random.key(0))
        else:
            state = checkpoints.restore(layout).state  # on this mesh, whichever one saved it
        for number in range(int(state["step"]), num_steps):
            state, metrics = compiled(state, jax.device_put(real_points(number), rows))
            told = {name: float(value) for name, value in metrics.items()}  # also waits for the step
            if (number + 1) % 20 == 0 or number + 1 == num_steps:
                print(f"step {number + 1}  critic {told['critic']:.3f}  generator {told['generator']:.3f}")
                checkpoints.save(state, step=number + 1, layout=layout, facts={})
    return state


if __name__ == "__main__":
    if len(sys.argv) == 1:
        mw.simulate_cpu_devices(8)
    main(*sys.argv[1:2])
