"""Train step of the 956M decoder in plain JAX, with the recipe that the library uses on a GPU.

It has no layout, guard, gradient norm or metrics, so the difference to it is the overhead of the library.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

HALF, WIDE = jnp.bfloat16, jnp.float32


def init(key: Any, sizes: dict[str, int]) -> Any:
    d, ff, layers, vocab = (sizes[name] for name in ("d_model", "d_ff", "num_layers", "vocab_size"))
    keys = iter(jax.random.split(key, 9))

    def weight(*shape: int) -> Any:
        return jax.random.normal(next(keys), shape) / math.sqrt(shape[-2])

    blocks = {name: weight(layers, d, d) for name in ("q", "k", "v", "o")}
    blocks |= {"gate": weight(layers, d, ff), "up": weight(layers, d, ff), "down": weight(layers, ff, d)}
    blocks |= {"norm1": jnp.ones((layers, d)), "norm2": jnp.ones((layers, d))}
    table = 0.02 * jax.random.normal(next(keys), (vocab, d))
    return {"table": table, "blocks": blocks, "norm": jnp.ones(d), "head": weight(d, vocab)}


def rms(x: Any, scale: Any) -> Any:
    wide = x.astype(WIDE)
    return (wide * lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-6) * scale).astype(x.dtype)


def turned(x: Any, cos: Any, sin: Any) -> Any:
    halves = x.reshape(*x.shape[:-1], 2, -1).astype(WIDE)
    signs = jnp.array([[-1.0], [1.0]])
    mixed = halves * cos[..., None, :] + lax.rev(halves, (halves.ndim - 2,)) * (signs * sin[..., None, :])
    return mixed.astype(x.dtype).reshape(x.shape)


rotate = jax.custom_vjp(turned)
rotate.defvjp(
    lambda x, cos, sin: (turned(x, cos, sin), (cos, sin)),
    lambda tables, g: (turned(g, tables[0], -tables[1]), None, None),
)


@jax.custom_vjp
def swiglu(gate: Any, up: Any) -> Any:
    wide = gate.astype(WIDE)
    return (wide * jax.nn.sigmoid(wide) * up.astype(WIDE)).astype(gate.dtype)


def _swiglu_bwd(kept: Any, d_out: Any) -> tuple[Any, Any]:
    gate, up, d_out = (t.astype(WIDE) for t in (*kept, d_out))
    sigmoid = jax.nn.sigmoid(gate)
    silu = gate * sigmoid
    return (d_out * up * (sigmoid + silu * (1 - sigmoid))).astype(HALF), (d_out * silu).astype(HALF)


swiglu.defvjp(lambda gate, up: (swiglu(gate, up), (gate, up)), _swiglu_bwd)


@jax.custom_vjp
def unstack(leaf: Any) -> list[Any]:
    return [leaf[i] for i in range(leaf.shape[0])]


unstack.defvjp(lambda leaf: (unstack(leaf), None), lambda _, grads: (jnp.stack(grads),))


@jax.custom_vjp
def embed(table: Any, ids: Any) -> Any:
    return table[ids].astype(HALF)


embed.defvjp(
    lambda table, ids: (embed(table, ids), (ids, table.shape)),
    lambda kept, g: (
        jnp.zeros(kept[1], WIDE).at[kept[0].reshape(-1)].add(g.reshape(-1, g.shape[-1]).astype(WIDE)),
        None,
    ),
)


@jax.custom_vjp
def cross_entropy(x: Any, head: Any, targets: Any) -> Any:
    return _cross_entropy_fwd(x, head, targets)[0]


def _cross_entropy_fwd(x: Any, head: Any, targets: Any) -> tuple[Any, Any]:
    logits = (x @ head).astype(WIDE)
    log_sum = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    hit = lax.broadcasted_iota(jnp.int32, logits.shape, 1) == targets[:, None]
    loss = jnp.sum(log_sum[:, 0] - jnp.where(hit, logits, 0.0).sum(-1)) / targets.size
    d_logits = ((jnp.exp(logits - log_sum) - hit) / targets.size).astype(x.dtype)
    return loss, (d_logits @ head.T, x.T @ d_logits)


cross_entropy.defvjp(_cross_entropy_fwd, lambda grads, g: (grads[0] * g.astype(HALF), grads[1] * g.astype(HALF), None))


def loss_fn(params: Any, tokens: Any, num_heads: int, attention: str | None) -> Any:
    ids, targets = tokens[:, :-1], tokens[:, 1:]
    h = embed(params["table"], ids)
    rows, length, d = h.shape
    size = d // num_heads
    angles = jnp.arange(length)[:, None] / 10000.0 ** (jnp.arange(0, size, 2) / size)
    cos, sin = jnp.cos(angles)[None, :, None], jnp.sin(angles)[None, :, None]
    columns = {name: unstack(leaf) for name, leaf in params["blocks"].items()}
    for number in range(len(columns["q"])):
        w = {name: leaves[number] for name, leaves in columns.items()}
        x = rms(h, w["norm1"])
        q, k, v = ((x @ w[name]).reshape(rows, length, num_heads, size) for name in ("q", "k", "v"))
        y = jax.nn.dot_product_attention(
            rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True, implementation=attention
        )
        h = h + lax.optimization_barrier(y.reshape(h.shape) @ w["o"])
        x = rms(h, w["norm2"])
        h = h + lax.optimization_barrier(swiglu(x @ w["gate"], x @ w["up"]) @ w["down"])
    return cross_entropy(rms(h, params["norm"]).reshape(-1, d), params["head"], targets.reshape(-1))


def make_step(num_heads: int, attention: str | None, options: dict[str, Any] | None) -> Any:
    """Returns `step((params, m, v, t), tokens) -> (state, loss)`: AdamW on float32 weights, computed in bfloat16."""

    def step(state: Any, tokens: Any) -> tuple[Any, Any]:
        params, first, second, t = state
        half = jax.tree.map(lambda leaf: leaf.astype(HALF) if leaf.size > 2**17 else leaf, params)
        half["table"] = params["table"]
        loss, grads = jax.value_and_grad(loss_fn)(half, tokens, num_heads, attention)
        scale1, scale2 = 1 - 0.9**t, 1 - 0.95**t

        def update(p: Any, m: Any, v: Any, g: Any) -> tuple[Any, Any, Any]:
            g = g.astype(WIDE)
            m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g * g
            return p - 3e-4 * ((m / scale1) / (jnp.sqrt(v / scale2) + 1e-8) + 0.1 * p), m, v

        updated = jax.tree.map(update, params, first, second, grads)
        params, first, second = jax.tree.transpose(jax.tree.structure(params), jax.tree.structure((0, 0, 0)), updated)
        return (params, first, second, t + 1), loss

    return jax.jit(step, donate_argnums=0, compiler_options=options)
