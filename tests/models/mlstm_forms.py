"""Forms of the mLSTM, inputs for them, and a float64 loop written from the equations."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from meshwright.models import (
    MLSTMState,
    mlstm_chunkwise,
    mlstm_parallel,
    mlstm_recurrent,
)

B, S, H, K, V = 2, 13, 4, 4, 6


NAMES = ("q", "k", "v", "i", "f")


FORMS = {
    "parallel": mlstm_parallel,
    "recurrent": lambda *args, **kwargs: mlstm_recurrent(*args, **kwargs)[0],
    "ragged chunks of 5": functools.partial(mlstm_chunkwise, chunk_size=5),
    "chunk longer than the sequence": mlstm_chunkwise,
}


WITH_STATE = {
    "recurrent": mlstm_recurrent,
    "chunkwise": functools.partial(mlstm_chunkwise, chunk_size=5, return_state=True),
}


def tokens(seed=0, *, length=S):
    rng = np.random.default_rng(seed)
    q, k, v = (rng.standard_normal((B, length, H, dim)).astype(np.float32) for dim in (K, K, V))
    i, f = (rng.standard_normal((B, length, H)).astype(np.float32) for _ in range(2))
    return q, k, v, 2 * i, 2 * f + 1


def some_state(seed=9):
    rng = np.random.default_rng(seed)
    memory, normaliser = (rng.standard_normal(shape).astype(np.float32) for shape in ((B, H, K, V), (B, H, K)))
    # Also below 0, although our stabiliser is never negative.
    stabiliser = np.linspace(-1.5, 1.5, B * H, dtype=np.float32).reshape(B, H)
    return MLSTMState(memory, normaliser, stabiliser, np.full(B, -1, np.int32))


def by_equations(q, k, v, i, f, *, state=None, segment_ids=None, return_state=False):
    """The paper's recurrence in float64, its stabiliser free to be negative; the state without its stabiliser."""
    q, k, v, i, f = (np.asarray(x, np.float64) for x in (q, k, v, i, f))
    rows, length, heads, key_dim = q.shape
    memory, normaliser = np.zeros((rows, heads, key_dim, v.shape[3])), np.zeros((rows, heads, key_dim))
    m = np.full((rows, heads), -np.inf)
    if state is not None:
        memory, normaliser, m = (np.asarray(x, np.float64) for x in state[:3])
    h, last = np.zeros(v.shape), np.zeros(rows)
    for t in range(length):
        log_f, write = -np.logaddexp(0, -f[:, t]), i[:, t]
        if segment_ids is not None:
            padding, new = segment_ids[:, t] == 0, segment_ids[:, t] != last
            log_f = np.where(padding[:, None], 0.0, np.where(new[:, None], -np.inf, log_f))
            write = np.where(padding[:, None], -np.inf, write)
            last = np.where(padding, last, segment_ids[:, t])
        before, m = m, np.maximum(log_f + m, write)
        finite = np.where(np.isfinite(m), m, 0.0)
        keep, add = np.exp(log_f + before - finite)[..., None], np.exp(write - finite)[..., None]
        memory = keep[..., None] * memory + add[..., None] * k[:, t][..., None] * v[:, t][..., None, :]
        normaliser = keep * normaliser + add * k[:, t]
        asked = q[:, t] / np.sqrt(key_dim)
        size = np.maximum(np.abs(np.sum(normaliser * asked, -1)), np.exp(-finite))
        h[:, t] = np.einsum("bhk,bhkv->bhv", asked, memory) / size[..., None]
        if segment_ids is not None:
            h[:, t][padding] = 0.0
    undo = np.exp(m)[..., None]
    return (h, memory * undo[..., None], normaliser * undo) if return_state else h


def weights(shape, seed=7):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@functools.cache
def value_and_gradients(form):
    """Outputs, and gradients of a sum of outputs with random weights; one program per form."""

    def loss(q, k, v, i, f, segment_ids, w):
        h = FORMS[form](q, k, v, i, f, segment_ids=segment_ids)
        return jnp.sum(h.astype(jnp.float32) * w), h

    gradient = jax.jit(jax.grad(loss, argnums=range(5), has_aux=True))
    return lambda *args: gradient(*args, *(() if len(args) == 7 else (weights(args[2].shape),)))


def assert_close(ours, expected, *, names=NAMES, tolerance=2e-5, floor=1e-2):
    """Compares relative to the largest value, because one output in a hundred divides by a sum near zero."""
    for name, mine, theirs in zip(names, ours, expected, strict=False):
        mine, theirs = np.asarray(mine, np.float64), np.asarray(theirs, np.float64)
        largest = np.abs(theirs).max() + floor
        np.testing.assert_allclose(mine, theirs, rtol=tolerance, atol=tolerance * largest, err_msg=name)


def slope(args, which, *, step=1e-6, **kwargs):
    """The directional derivative of the weighted sum of outputs in one input, by finite differences in float64."""
    towards = weights(args[which].shape, seed=which)

    def moved(by):
        changed = [np.asarray(x, np.float64) + (by * towards if n == which else 0.0) for n, x in enumerate(args)]
        h = by_equations(*changed, **kwargs)
        return np.sum(h * weights(h.shape))

    return towards, (moved(step) - moved(-step)) / (2 * step)


PACKED = np.array([[1, 1, 1, 1, 2, 2, 3, 3, 3, 3, 3, 0, 0], [4, 4, 4, 0, 0, 1, 7, 7, 7, 7, 7, 7, 7]], np.int32)


SEGMENTS = {"one document": np.ones((B, S), np.int32), "packed": PACKED}


def in_units_of_one(state):
    """Returns memory and normaliser multiplied by exp(stabiliser)."""
    return state.memory * jnp.exp(state.stabiliser)[..., None, None], state.normaliser * jnp.exp(state.stabiliser)[
        ..., None
    ]


STATE_NAMES = ("memory", "normaliser", "stabiliser", *NAMES)


@functools.cache
def state_gradients(form):
    """Gradients with respect to the state before, by name, and to the tokens, of outputs and the state after."""

    def loss(memory, normaliser, stabiliser, *args):
        state = MLSTMState(memory, normaliser, stabiliser, jnp.full(B, -1))
        h, after = WITH_STATE[form](*args, state=state)
        return sum(jnp.sum(jnp.sin(x)) for x in (h, *in_units_of_one(after)))

    return jax.jit(jax.value_and_grad(loss, argnums=range(8)))
