"""Tensor-parallel layers and their plain jnp versions, with test values. Imported by tests."""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from meshwright.parallel import (
    column_dense,
    fused_column_dense,
    row_dense,
    sequence_norm,
    vocab_cross_entropy,
    vocab_embed,
)

# All sizes differ, and every axis size divides them.
BATCH, ROWS, DIM, HIDDEN, VOCAB = 2, 16, 6, 24, 40
SPLIT, WHOLE = P("dp", "tp"), P("dp")
FEATURES = P("dp", None, "tp")
UP, DOWN = P(None, "tp"), P("tp")
R, F = P(None, "tp"), P(None, None, "tp")  # rows and features, without dp


@functools.cache
def values():
    rng = np.random.default_rng(0)
    normal = lambda *shape: rng.standard_normal(shape, np.float32)  # noqa: E731
    return {
        "x": normal(BATCH, ROWS, DIM),
        "hidden": normal(BATCH, ROWS, HIDDEN),
        "gate": normal(DIM, HIDDEN),
        "up": normal(DIM, HIDDEN),
        "b_gate": normal(HIDDEN),
        "b_up": normal(HIDDEN),
        "down": normal(HIDDEN, DIM),
        "b_down": normal(DIM),
        "scale": normal(DIM),
        "table": normal(VOCAB, DIM),
        "head": normal(DIM, VOCAB),
        "ids": rng.integers(0, VOCAB, (BATCH, ROWS), np.int32),
        "targets": rng.integers(0, VOCAB, (BATCH, ROWS), np.int32),
        "mask": rng.random((BATCH, ROWS)) < 0.8,
    }


@dataclass(frozen=True)
class Layer:
    """A layer as a function of named arrays, its plain jnp version, and the specs of arguments and result."""

    ours: Any
    plain: Any
    specs: Any
    out: Any
    name: str


def rows(sp):
    return SPLIT if sp else WHOLE


def normed(x, scale, bias=None, center=False):
    x = x - x.mean(-1, keepdims=True) if center else x
    y = x / jnp.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * scale
    return y if bias is None else y + bias


def cross_entropy(x, head, targets, mask=None):
    loss = -jnp.take_along_axis(jax.nn.log_softmax(x @ head), targets[..., None], -1)[..., 0]
    return loss if mask is None else jnp.where(mask, loss, 0)


def block(a, sp=None, layers=None):
    """A small model of all layers that uses the row-split stream twice, so that its gradients add up."""
    if layers is None:
        embed = lambda ids, table: table[ids]  # noqa: E731
        norm, loss = normed, cross_entropy
        fused, down = lambda x, ws, bs: [x @ w + b for w, b in zip(ws, bs, strict=True)], lambda h, w, b: h @ w + b
    else:
        embed, norm, fused, down, loss = (
            functools.partial(f, axis="tp", **({} if f is sequence_norm else {"sequence_parallel": sp}))
            for f in (vocab_embed, sequence_norm, fused_column_dense, row_dense, vocab_cross_entropy)
        )
    x = embed(a["ids"], a["table"])
    gate, up = fused(norm(x, a["scale"]), (a["gate"], a["up"]), (a["b_gate"], a["b_up"]))
    x = x + down(jnp.tanh(gate) * up, a["down"], a["b_down"])
    return loss(norm(x, a["scale"]), a["head"], a["targets"], mask=a["mask"])


LAYERS = [
    Layer(
        lambda a, sp: column_dense(a["x"], a["gate"], a["b_gate"], axis="tp", sequence_parallel=sp),
        lambda a: a["x"] @ a["gate"] + a["b_gate"],
        lambda sp: {"x": rows(sp), "gate": UP, "b_gate": DOWN},
        lambda sp: FEATURES,
        "column",
    ),
    Layer(
        lambda a, sp: sum(
            fused_column_dense(a["x"], (a["gate"], a["up"]), (None, a["b_up"]), axis="tp", sequence_parallel=sp)
        ),
        lambda a: a["x"] @ a["gate"] + a["x"] @ a["up"] + a["b_up"],
        lambda sp: {"x": rows(sp), "gate": UP, "up": UP, "b_up": DOWN},
        lambda sp: FEATURES,
        "fused",
    ),
    Layer(
        lambda a, sp: row_dense(a["hidden"], a["down"], a["b_down"], axis="tp", sequence_parallel=sp),
        lambda a: a["hidden"] @ a["down"] + a["b_down"],
        lambda sp: {"hidden": FEATURES, "down": DOWN, "b_down": P()},
        rows,
        "row",
    ),
    Layer(
        lambda a, sp: sequence_norm(a["x"], a["scale"], axis="tp"),
        lambda a: normed(a["x"], a["scale"]),
        lambda sp: {"x": rows(sp), "scale": P()},
        rows,
        "norm",
    ),
    Layer(
        lambda a, sp: sequence_norm(a["x"], a["scale"], a["b_down"], axis="tp", center=True),
        lambda a: normed(a["x"], a["scale"], a["b_down"], center=True),
        lambda sp: {"x": rows(sp), "scale": P(), "b_down": P()},
        rows,
        "layer norm",
    ),
    Layer(
        lambda a, sp: vocab_embed(a["ids"], a["table"], axis="tp", sequence_parallel=sp),
        lambda a: a["table"][a["ids"]],
        lambda sp: {"ids": WHOLE, "table": DOWN},
        rows,
        "embed",
    ),
    Layer(
        lambda a, sp: vocab_cross_entropy(
            a["x"], a["head"], a["targets"], axis="tp", mask=a["mask"], sequence_parallel=sp
        ),
        lambda a: cross_entropy(a["x"], a["head"], a["targets"], a["mask"]),
        lambda sp: {"x": rows(sp), "head": UP, "targets": WHOLE, "mask": WHOLE},
        lambda sp: WHOLE,
        "cross-entropy",
    ),
    Layer(
        lambda a, sp: block(a, sp, "ours"),
        block,
        lambda sp: {
            "ids": WHOLE,
            "table": DOWN,
            "scale": P(),
            "gate": UP,
            "up": UP,
            "b_gate": DOWN,
            "b_up": DOWN,
            "down": DOWN,
            "b_down": P(),
            "head": UP,
            "targets": WHOLE,
            "mask": WHOLE,
        },
        lambda sp: WHOLE,
        "model",
    ),
]

BY_NAME = {layer.name: layer for layer in LAYERS}
