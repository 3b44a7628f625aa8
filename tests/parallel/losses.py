"""The chunked loss and a naive version, with test values. Imported by tests."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from meshwright.parallel import LossSums, linear_cross_entropy, local_map

from .one_device import mesh_of

# All sizes differ, and every axis size divides them.
BATCH, ROWS, DIM, VOCAB = 2, 16, 6, 40
TOKENS, HEAD = P("dp"), P(None, "tp")


@functools.cache
def values():
    """Weights from 0 to 1, a fifth of them zero; logits large enough to be capped."""
    rng = np.random.default_rng(0)
    return {
        "x": rng.standard_normal((BATCH, ROWS, DIM), np.float32),
        "head": rng.standard_normal((DIM, VOCAB), np.float32),
        "targets": rng.integers(0, 33, (BATCH, ROWS), np.int32),
        "weights": rng.random((BATCH, ROWS), np.float32) * (rng.random((BATCH, ROWS)) < 0.8),
    }


def naive(a, *, vocab_size=None, z_loss=0.0, label_smoothing=0.0, soft_cap=None):
    """The same sums, written naively."""
    logits = a["x"].astype(jnp.float32) @ a["head"].astype(jnp.float32)[:, :vocab_size]
    logits = logits if soft_cap is None else soft_cap * jnp.tanh(logits / soft_cap)
    log_p, weights = jax.nn.log_softmax(logits), a["weights"]
    loss = -jnp.take_along_axis(log_p, a["targets"][..., None], -1)[..., 0]
    z = z_loss * jax.nn.logsumexp(logits, axis=-1) ** 2
    total = (1 - label_smoothing) * loss - label_smoothing * log_p.mean(-1) + z
    terms = total, loss, z, jnp.ones_like(z), logits.argmax(-1) == a["targets"]
    return LossSums(*((term * weights).sum() for term in terms))


@functools.cache
def view_functions():
    def f(x, head, targets, weights):
        return linear_cross_entropy(x, head, targets, weights=weights, axis="tp", chunk_rows=8)

    mapped = local_map(f, mesh=mesh_of(8), in_specs=(P(None, "tp"), HEAD, P(), P()), out_specs=P())
    return {"plain": f, "local": mapped, "global": functools.partial(f)}


@functools.cache
def differentiated(f):
    def total(x, head, targets, weights):
        sums = f(x, head, targets, weights)
        return sums.total, sums

    return jax.jit(jax.value_and_grad(total, argnums=(0, 1), has_aux=True))


def sums_and_grads(f, *args):
    (_, sums), grads = differentiated(f)(*args)
    return sums, grads
