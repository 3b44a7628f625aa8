"""Low-rank adapters (LoRA): a frozen weight `W [inputs, outputs]` plus `scale * A @ B`, of a small rank.

In a parameter tree, an adapted weight is a dict in place of the array:

    base     [..., inputs, outputs]   the frozen weight, or its blocks of 8 or 4 bits
    scales   [..., blocks, outputs]   the scales of these blocks
    lora_a   [..., inputs, rank]      split like the inputs of the weight
    lora_b   [..., rank, outputs]     split like the outputs of the weight; zero at first

The rank is never split, so a device's slices of A and B multiply to its slice of the weight's change: merging needs no
communication. A matmul need not merge at all. `x @ W + scale * (x @ A) @ B` computes no gradient of the size of W, and
sends activations as wide as the rank.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from meshwright.parallel.lora.block_quantize import dequantize_blocks
from meshwright.parallel.overlap.ring_loops import dot
from meshwright.tree import tree_path_to_string
from meshwright.types import PyTree

BASE, SCALES, LORA_A, LORA_B = "base", "scales", "lora_a", "lora_b"


@dataclass(frozen=True)
class LowRankWeight:
    """An adapted weight as a matmul sees it; `key` draws the dropout of its adapter's input, if there is any."""

    base: Any
    scales: Any
    a: Any
    b: Any
    scale: float
    dropout: float = 0.0
    key: Any = None

    def whole_base(self) -> Any:
        """Returns the frozen weight, restored from its blocks if it is stored in blocks."""
        return self.base if self.scales is None else dequantize_blocks(self.base, self.scales, self.a.dtype)

    def merged(self) -> Any:
        """Returns the frozen weight plus its change, in the wider dtype of both."""
        base = self.whole_base()
        dtype = jnp.promote_types(base.dtype, self.a.dtype)
        wide = jnp.promote_types(jnp.float32, dtype)
        change = jnp.matmul(self.a, self.b, preferred_element_type=wide)
        return (base.astype(wide) + self.scale * change).astype(dtype)


@dataclass(frozen=True)
class Adapters:
    """How the adapters of a tree are used; a loss that takes `lora=` gets it, and parameters with adapters.

    Args:
        scale: factor of all changes.
        dropout: probability with which an adapter's matmul drops each input in training.

    Example:
        >>> w = {"base": jnp.ones((2, 2)), "lora_a": jnp.ones((2, 1)), "lora_b": jnp.ones((1, 2))}
        >>> Adapters(scale=0.5).merged({"up": w, "bias": jnp.zeros(2)})["up"].tolist()
        [[1.5, 1.5], [1.5, 1.5]]
    """

    scale: float
    dropout: float = 0.0

    def weights(self, params: PyTree, key: Any = None) -> PyTree:
        """Returns a tree with a `LowRankWeight` in place of each adapted weight."""

        def wrap(path: Any, node: Any) -> Any:
            if not is_adapted(node):
                return node
            own = None
            if key is not None and self.dropout:
                name = str(tree_path_to_string(path, sep="/"))
                own = jax.random.fold_in(key, zlib.crc32(name.encode()) >> 1)
            return self._weight(node, own)

        return jax.tree.map_with_path(wrap, params, is_leaf=is_adapted)

    def merged(self, params: PyTree) -> PyTree:
        """Returns a tree with plain weights: each adapted one plus its change."""
        return jax.tree.map(
            lambda node: self._weight(node).merged() if is_adapted(node) else node, params, is_leaf=is_adapted
        )

    def _weight(self, node: Mapping[str, Any], key: Any = None) -> LowRankWeight:
        arrays = (node[BASE], node.get(SCALES), node[LORA_A], node[LORA_B])
        return LowRankWeight(*arrays, self.scale, self.dropout, key)


def is_adapted(node: Any) -> bool:
    """Returns whether a node of a tree is the dict of an adapted weight."""
    return isinstance(node, Mapping) and {BASE, LORA_A, LORA_B} <= set(node) <= {BASE, SCALES, LORA_A, LORA_B}


# --- Matmuls ---

Drop = Callable[[Any, LowRankWeight], Any]


def low_rank_columns(dense: Callable[..., Sequence[Any]], x: Any, ws: Sequence[Any], *, drop: Drop) -> list[Any]:
    """Returns `dense(x, ws)`, a function like `fused_column_dense`, with adapters added.

    Args:
        dense: `dense(x, weights, is_narrow=...)`; `is_narrow` says that the inputs are those of a low rank.
        drop: applies the dropout of a weight to `x`.
    """
    ys = list(_on_bases(dense, x, ws))
    for place, w in enumerate(ws):
        if isinstance(w, LowRankWeight):
            narrow = dot(drop(x, w), w.a.astype(x.dtype), x.dtype) * jnp.asarray(w.scale, x.dtype)
            ys[place] = ys[place] + dense(narrow, (w.b.astype(x.dtype),), is_narrow=True)[0]
    return ys


def low_rank_rows(dense: Callable[..., Sequence[Any]], x: Any, w: Any, *, drop: Drop) -> Any:
    """Returns `dense(x, [w])[0]`, a function like `row_dense` of one weight, with its adapter added."""
    (y,) = _on_bases(dense, x, (w,))
    if not isinstance(w, LowRankWeight):
        return y
    (narrow,) = dense(drop(x, w), (w.a.astype(x.dtype),), is_narrow=True)
    return y + dot(narrow * jnp.asarray(w.scale, x.dtype), w.b.astype(x.dtype), x.dtype)


def _on_bases(dense: Callable[..., Sequence[Any]], x: Any, ws: Sequence[Any]) -> Sequence[Any]:
    def run(x: Any, ws: Sequence[Any]) -> Sequence[Any]:
        return dense(x, [w.whole_base() if isinstance(w, LowRankWeight) else w for w in ws], is_narrow=False)

    if not any(isinstance(w, LowRankWeight) and w.scales is not None for w in ws):
        return run(x, ws)
    # Restore blocks again in the backward pass: otherwise the restored weights of all layers would wait for it.
    checkpointed: Sequence[Any] = jax.checkpoint(lambda x: run(x, ws))(x)
    return checkpointed
