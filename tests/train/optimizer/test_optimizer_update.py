"""Optimizers that ask for the loss take the same steps on a mesh as on one device."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import meshwright as mw
from meshwright import P
from meshwright.train import init_state, make_train_step, state_layout
from meshwright.verify import verify

RULES = mw.Rules([("up$", P("fsdp", "tp")), ("down$", P("tp"))], optional_axes=("fsdp", "tp"))
NUM_STEPS = 4


def init(key):
    k_up, k_down = jax.random.split(key)
    return {"up": jax.random.normal(k_up, (8, 16)) / 3, "down": jax.random.normal(k_down, (16,)) / 4}


def loss(params, batch, rng):
    errors = (jnp.tanh(batch["x"] @ params["up"]) @ params["down"] - batch["y"]) ** 2
    return ((errors * batch["mask"]).sum(), batch["mask"].sum()), {}


def make_batch(rows=16):
    generator = np.random.default_rng(0)
    x, y = (generator.standard_normal(shape).astype(np.float32) for shape in ((rows, 8), (rows,)))
    return {"x": x, "y": y, "mask": (np.arange(rows) % 3 > 0).astype(np.float32)}


JOB = mw.Job(init=init, rules=RULES, loss=loss, batch=make_batch())

# Only a loss that falls by half is an improvement, so the plateau comes at once.
PLATEAU = optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau(patience=1, factor=0.5, rtol=0.5))
OPTIMIZERS = {
    "reduce_on_plateau": PLATEAU,
    "lbfgs": optax.lbfgs(),
    "backtracking": optax.chain(optax.sgd(1.0), optax.scale_by_backtracking_linesearch(8, store_grad=True)),
    "polyak_sgd": optax.polyak_sgd(max_learning_rate=0.5),
}


def train(optimizer, mesh, *, zero_axis=None, **options):
    layout = state_layout(JOB, optimizer, mesh, zero_axis=zero_axis)
    state = init_state(JOB, optimizer, layout, jax.random.key(0))
    step = make_train_step(JOB, optimizer, layout, **options)
    losses = []
    for _ in range(NUM_STEPS):
        state, metrics = step(state, make_batch())
        losses.append(float(metrics["loss"]))
    return np.array(losses), jax.device_get(state.params), jax.device_get(state.opt_state)


def by_hand(optimizer):
    """The same steps on one device, without Meshwright: `value_fn` is the loss itself."""
    batch, params = make_batch(), init(jax.random.split(jax.random.key(0))[0])
    full = optax.with_extra_args_support(optimizer)
    state, losses = full.init(params), []

    def value(params):
        (total, count), _ = loss(params, batch, None)
        return total / count

    @jax.jit
    def step(params, state):
        now, grads = jax.value_and_grad(value)(params)
        updates, state = full.update(grads, state, params, value=now, grad=grads, value_fn=value)
        return now, optax.apply_updates(params, updates), state

    for _ in range(NUM_STEPS):
        now, params, state = step(params, state)
        losses.append(float(now))
    return np.array(losses)


# Line searches compile the loss several times.
SLOW = ("lbfgs", "backtracking")


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow if n in SLOW else ()) for n in OPTIMIZERS])
def test_the_same_steps_as_on_one_device(name):
    optimizer = OPTIMIZERS[name]
    # `verify` measures by how much the optimizer amplifies rounding errors.
    for mesh, options in (
        ("dp:4,fsdp:2", {"views": "local", "num_minibatches": 2}),
        ("fsdp:2,tp:4", {"views": "global"}),
    ):
        verify(JOB, meshes=mesh, optimizer=optimizer, num_steps=NUM_STEPS, **options).require()
    losses = by_hand(optimizer)
    assert losses[-1] != losses[0]
    # Four steps, each with fewer than 100 roundings of 6e-8 in a row.
    np.testing.assert_allclose(train(optimizer, mw.create_mesh("dp:8"))[0], losses, rtol=4 * 100 * 6e-8)


def test_the_plateau_lowers_the_rate():
    _, _, state = train(PLATEAU, mw.create_mesh("dp:8"))
    assert state[1].scale < 1


def test_lbfgs_keeps_its_memory_split_like_the_parameters():
    layout = state_layout(JOB, optax.lbfgs(memory_size=5), mw.create_mesh("fsdp:4,tp:2"))
    assert layout["opt_state/0/diff_params_memory/up"].spec == P(None, "fsdp", "tp")
    assert layout["opt_state/0/diff_updates_memory/down"].spec == P(None, "tp")


@pytest.mark.slow
def test_a_line_search_on_statistics_split_by_zero_one():
    losses = by_hand(OPTIMIZERS["lbfgs"])
    got = train(OPTIMIZERS["lbfgs"], mw.create_mesh("dp:8"), zero_axis="dp")
    np.testing.assert_allclose(got[0], losses, rtol=4 * 100 * 6e-8)


def test_a_line_search_refuses_clipped_gradients():
    with pytest.raises(mw.MeshwrightError, match=r"searches along its update.*unclipped gradients"):
        train(OPTIMIZERS["lbfgs"], mw.create_mesh("dp:8"), clip=1.0)


@pytest.mark.filterwarnings("ignore")
def test_lookahead_is_refused_by_name():
    optimizer = optax.chain(optax.lookahead(optax.sgd(0.1), 5, 0.5))
    with pytest.raises(mw.MeshwrightError, match=r"optax.lookahead does not work in a train step.*LookaheadParams"):
        train(optimizer, mw.create_mesh("dp:8"))
