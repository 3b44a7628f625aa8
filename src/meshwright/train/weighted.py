"""Sums over parts of a batch that become averages over the whole: how metrics of minibatches and devices combine.

A metric is a `(sum, count)` pair, whose two numbers are added up, or any other number or array, whose average is taken
with the weights of the parts. A part of no weight (nothing but masked targets) adds nothing, whatever it holds: what it
divided by zero is not looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from meshwright.axes import vary, varying_axes
from meshwright.dtypes import is_float
from meshwright.parallel.overlap_forms import chip_family
from meshwright.types import PyTree


def is_pair(node: Any) -> bool:
    """Returns whether this is a `(sum, count)` pair: a tuple of two scalars."""
    return type(node) is tuple and len(node) == 2 and all(_is_scalar(item) for item in node)


def denominator(metrics: Any, key: str) -> Any:
    """Returns the count of the pair `metrics[key]`; 1 where there is none, which makes all parts weigh the same."""
    pair: Any = metrics.get(key) if isinstance(metrics, Mapping) else None
    return jnp.asarray(pair[1]) if is_pair(pair) else jnp.float32(1)


def weigh(metrics: PyTree, weight: Any) -> PyTree:
    """Returns metrics in the form in which those of several parts are added: sums, of weighted values or of pairs."""

    def summand(node: Any) -> Any:
        if is_pair(node):
            total, count = (wide(item) for item in node)
            return (jnp.where(count > 0, total, jnp.zeros_like(total)), count)
        return times(node, weight)

    return jax.tree.map(summand, metrics, is_leaf=is_pair)


def times(value: Any, weight: Any) -> Any:
    """Returns `value * weight` in float32 or wider, and zero where the weight is zero, even of NaN."""
    value = jnp.asarray(value)
    product = value.astype(jnp.promote_types(value.dtype, jnp.float32)) * weight
    return jnp.where(weight > 0, product, jnp.zeros_like(product))


def over(value: Any, total: Any) -> Any:
    """Returns `value / total`, and zero where the total is zero."""
    return jnp.where(total > 0, value / jnp.where(total > 0, total, 1), jnp.zeros_like(value))


def average(sums: PyTree, total: Any) -> PyTree:
    """Returns what `weigh` made, added up, as metrics again: pairs stay pairs, the rest is divided by the total."""
    return jax.tree.map(lambda node: node if is_pair(node) else over(node, total), sums, is_leaf=is_pair)


def add(first: PyTree, second: PyTree) -> PyTree:
    """Returns the sum of two trees, leaf by leaf."""
    return jax.tree.map(jnp.add, first, second)


def after(done: PyTree, tree: PyTree) -> PyTree:
    """Returns a tree that cannot be used before `done` is computed; XLA keeps this order.

    Only those of `done` are waited for that vary no further than the leaf in question, whose type would change.
    """

    def wait(leaf: Any) -> Any:
        if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):  # random keys cannot be tied to anything
            return leaf
        known = [item for item in jax.tree.leaves(done) if varying_axes(item) <= varying_axes(leaf)]
        return lax.optimization_barrier((leaf, *known))[0]

    return jax.tree.map(wait, tree)


def written_once(tree: PyTree) -> PyTree:
    """Returns a tree whose leaves are in memory before anything uses them, where that pays: on GPUs.

    Layers' gradients are put together to stacked leaves. Fused into an optimizer's update, which then becomes one
    kernel for each of its results, that costs more than it saves (benchmarks/RESULTS.md).
    """
    # Leaf by leaf: what passes a barrier together varies along the same axes after it.
    return jax.tree.map(lax.optimization_barrier, tree) if chip_family() == "gpu" else tree


def zeros_for(function: Callable[..., PyTree], *args: Any) -> PyTree:
    """Returns zeros of the shapes, dtypes and varying axes that `function(*args)` would have; runs nothing."""
    shapes = jax.eval_shape(function, *args)
    return jax.tree.map(lambda leaf: vary(jnp.zeros(leaf.shape, leaf.dtype), sorted(varying_axes(leaf))), shapes)


def wide(value: Any) -> Any:
    """Returns a value in the dtype it is summed in: float32 at least, integers as they are, booleans counted.

    A sum of ones in bfloat16 stops growing at 256.
    """
    value = jnp.asarray(value)
    if value.dtype == jnp.bool_:
        return value.astype(jnp.int32)
    return value.astype(jnp.promote_types(value.dtype, jnp.float32)) if is_float(value.dtype) else value


def _is_scalar(item: Any) -> bool:
    return isinstance(item, (int, float)) or (hasattr(item, "ndim") and item.ndim == 0)
