"""A Flax Linen transformer with logical annotations, which become rules through a table of mesh axes.

meshwright rules examples/linen_logical_axes.py:job --mesh dp:2,fsdp:2,tp:2
meshwright train --job examples/linen_logical_axes.py:job --mesh dp:2,fsdp:2,tp:2 --steps 300
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

import meshwright as mw

MODULUS, DIM, HEADS, LAYERS, ROWS = 8, 32, 4, 2, 64
NUM_TOKENS = 12


def make_sums(num_rows, seed):
    """Returns sequences in which each token is the sum of the two before it, modulo 8, after a random start."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, MODULUS, (num_rows, NUM_TOKENS + 1)).astype(np.int32)
    for place in range(2, NUM_TOKENS + 1):
        tokens[:, place] = (tokens[:, place - 1] + tokens[:, place - 2]) % MODULUS
    return {"tokens": tokens}


def named(*names, init=None):
    """Returns an initializer whose dims have logical names; the model knows no mesh axes."""
    return nn.with_logical_partitioning(init or nn.initializers.lecun_normal(), names)


class Block(nn.Module):
    """Attention and two dense layers."""

    @nn.compact
    def __call__(self, x, train):
        attention = nn.MultiHeadDotProductAttention(
            num_heads=HEADS,
            kernel_init=named("embed", "heads", "head_dim"),
            out_kernel_init=named("heads", "head_dim", "embed"),
            use_bias=False,
        )
        x = x + attention(nn.LayerNorm(use_bias=False)(x), mask=nn.make_causal_mask(x[..., 0]))
        h = nn.Dense(4 * DIM, kernel_init=named("embed", "mlp"), use_bias=False)(nn.LayerNorm(use_bias=False)(x))
        h = nn.Dense(DIM, kernel_init=named("mlp", "embed"), use_bias=False)(nn.gelu(h))
        return x + nn.Dropout(0.1, deterministic=not train)(h)


class Transformer(nn.Module):
    """Predicts the next token."""

    @nn.compact
    def __call__(self, tokens, train):
        embedding_init = named("vocab", "embed", init=nn.initializers.normal(1.0))
        x = nn.Embed(MODULUS, DIM, embedding_init=embedding_init)(tokens)
        position_init = named("position", "embed", init=nn.initializers.normal(0.1))
        x = x + self.param("position", position_init, (NUM_TOKENS, DIM))
        for _ in range(LAYERS):
            x = Block()(x, train)
        return nn.Dense(MODULUS, kernel_init=named("embed", "vocab"), use_bias=False)(nn.LayerNorm(use_bias=False)(x))


def loss(apply, batch, rng):
    logits, targets = apply(batch["tokens"][:, :-1], train=rng is not None), batch["tokens"][:, 1:]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)[:, 1:]  # the second token is random
    hits = (logits.argmax(axis=-1) == targets)[:, 1:].astype(jnp.float32)
    return (losses.sum(), jnp.float32(losses.size)), {"accuracy": mw.metrics.Mean(hits.mean())}


job = mw.linen_job(
    Transformer(),
    loss,
    batch=make_sums(ROWS, seed=0),
    # The table maps logical names to mesh axes. None replicates, and a mesh may lack any of these axes.
    rules={"embed": "fsdp", "heads": "tp", "mlp": "tp", "vocab": "tp", "head_dim": None, "position": None},
    unannotated=[("LayerNorm.*scale", mw.P())],
    data=make_sums(2048, seed=1),
    eval_data=make_sums(256, seed=2),
    optimizer=optax.adam(3e-3),
    predict=lambda apply, batch: jax.nn.softmax(apply(batch["tokens"][:, :-1], train=False)),
)
