"""The fixture `lab`: a tiny decoder and functions that train it."""

from types import SimpleNamespace

import jax
import numpy as np
import optax
import pytest

import meshwright as mw
from meshwright.models import Decoder
from meshwright.train import init_state, language_job, make_train_step, state_layout

SIZES = {"vocab_size": 64, "num_layers": 2, "d_model": 32, "num_heads": 8, "d_ff": 64}
NUM_ROWS, NUM_TOKENS = 16, 16


def decoder_job(run=None, model=Decoder, **changes):
    return language_job(model(**(SIZES | changes)), batch_size=NUM_ROWS, num_tokens=NUM_TOKENS, run=run)


def make_batch(seed=0):
    """Random tokens, some of them with weight 0."""
    rng = np.random.default_rng(seed)
    shape = (NUM_ROWS, NUM_TOKENS)
    batch = {name: rng.integers(0, SIZES["vocab_size"], shape).astype(np.int32) for name in ("inputs", "targets")}
    return batch | {"weights": (rng.random(shape) < 0.7).astype(np.float32)}


def one_device():
    return mw.create_mesh("dp:1", devices=1)


def start(job, mesh, optimizer=None, *, zero_axis=None, precision="float32", **options):
    """Returns a state on a mesh and a train step."""
    optimizer = optimizer or optax.sgd(0.5)
    mesh = mw.create_mesh(mesh) if isinstance(mesh, str) else mesh
    layout = state_layout(job, optimizer, mesh, zero_axis=zero_axis, precision=precision)
    state = init_state(job, optimizer, layout, jax.random.key(0), precision=precision)
    return state, make_train_step(job, optimizer, layout, precision=precision, **options)


def train(job, mesh, num_steps=2, optimizer=None, make_batch=make_batch, **options):
    """Returns the initial and final parameters and the last metrics, on the host."""
    state, step = start(job, mesh, optimizer, **options)
    first = jax.device_get(state.params)
    for number in range(num_steps):
        state, metrics = step(state, make_batch(number))
    return first, jax.device_get(state.params), jax.device_get(metrics)


def assert_same_change(got, wanted, tolerance=1e-5):
    """Checks that two runs changed their parameters equally, relative to the change of each leaf."""
    for first, other_first in zip(jax.tree.leaves(got[0]), jax.tree.leaves(wanted[0]), strict=True):
        np.testing.assert_array_equal(first, other_first)
    for name, first, a, b in zip(
        mw.flatten_tree(wanted[0], sep="/"),
        *(jax.tree.leaves(tree) for tree in (wanted[0], got[1], wanted[1])),
        strict=True,
    ):
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * np.abs(b - first).max() + 1e-7, err_msg=name)
    np.testing.assert_allclose(got[2]["loss"], wanted[2]["loss"], rtol=1e-5)
    np.testing.assert_allclose(got[2]["grad_norm"], wanted[2]["grad_norm"], rtol=1e-4)


@pytest.fixture(scope="session")
def lab():
    """The functions above, and cached results of training on one device: by default two steps."""
    known = {}

    def reference(num_steps=2, optimizer=None, clip=None, **changes):
        key = (num_steps, optimizer, clip, *sorted(changes.items()))
        if key not in known:
            known[key] = train(decoder_job(**changes), one_device(), num_steps, optimizer, clip=clip)
        return known[key]

    return SimpleNamespace(
        decoder_job=decoder_job,
        make_batch=make_batch,
        one_device=one_device,
        start=start,
        train=train,
        assert_same_change=assert_same_change,
        reference=reference,
    )
