"""A small state with all kinds of leaves, and functions to save and compare it: the fixture `lab`."""

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import meshwright as mw
from meshwright.checkpoint import Checkpoints
from meshwright.train import make_state, state_layout

RULES = mw.Rules(
    [("up", P("fsdp", "tp")), ("down", P("tp", "fsdp")), ("bias|scale", P())], optional_axes=("fsdp", "tp")
)


def init(key, width=32):
    k_up, k_down, k_bias = jax.random.split(key, 3)
    return {
        "up": jax.random.normal(k_up, (16, width)),
        "down": jax.random.normal(k_down, (width, 16)),
        "bias": jax.random.normal(k_bias, (8,)),
        "scale": jnp.ones(()),
    }


ADAM = optax.adam(1e-3)


def start(mesh="fsdp:4,tp:2", *, seed=0, init=init, rules=RULES, optimizer=ADAM, precision="float32"):
    """Returns a layout and the first state on it."""
    layout = state_layout(mw.Job(init=init, rules=rules), optimizer, mw.create_mesh(mesh), precision=precision)
    return layout, layout.shard(first_state(init, optimizer, seed, precision))


@functools.cache
def first_state(init, optimizer, seed, precision):
    """Returns a state on one device, compiled once for all meshes."""
    job = mw.Job(init=init, rules=RULES)
    return jax.jit(lambda key: make_state(job, optimizer, key, precision=precision))(jax.random.key(seed))


def bits(state):
    """Returns all leaves of a state as bytes."""
    leaves = [
        jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
        for leaf in jax.tree.leaves(state)
    ]
    return [(str(leaf.dtype), np.shape(leaf), np.asarray(leaf).tobytes()) for leaf in leaves]


def saved(folder, layout, state, *steps, **options):
    """Saves a state as several steps, and returns the `Checkpoints`."""
    checkpoints = Checkpoints(folder, **options)
    for step in steps:
        assert checkpoints.save(state, step=step, layout=layout, facts={"step": step})
    checkpoints.wait()
    assert checkpoints.problems == []
    return checkpoints


def flip(path, place=0, mask=1):
    """Changes a byte of a file."""
    data = bytearray(path.read_bytes())
    data[place] ^= mask
    path.write_bytes(data)


def largest(folder):
    """Returns the file of a step that holds the arrays."""
    return max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


@pytest.fixture(scope="session")
def lab():
    return SimpleNamespace(
        init=init, rules=RULES, start=start, bits=bits, saved=saved, flip=flip, largest=largest, Checkpoints=Checkpoints
    )


@pytest.fixture(scope="session")
def first(lab):
    """A layout on fsdp:4,tp:2 and a state that no test changes."""
    return lab.start()
