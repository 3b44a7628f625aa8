"""The tensors of a family, cut from a decoder's parameters: one layer of one leaf at a time, in host memory."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from meshwright.checkpoint.convert.family import Family
from meshwright.checkpoint.convert.tensor_names import (
    TensorPart,
    leaf_shapes,
    require_same,
    tensor_parts,
    tensor_shapes,
)
from meshwright.checkpoint.convert.tensor_regions import copy_blocks
from meshwright.checkpoint.convert.tensor_writer import Piece, TensorForm
from meshwright.models import Decoder
from meshwright.tree import flatten_tree
from meshwright.types import PyTree

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class LazyLeaf:
    """A leaf of parameters that `load` reads when its turn comes, so that a tree of them takes no memory.

    Example:
        >>> leaf = LazyLeaf((2,), jnp.dtype("float32"), lambda: np.ones(2, np.float32))
        >>> leaf.load().tolist()
        [1.0, 1.0]
    """

    shape: tuple[int, ...]
    dtype: Any
    load: Callable[[], Any]


def tensor_forms(model: Decoder, params: PyTree, family: Family, dtype: Any = None) -> dict[str, TensorForm]:
    """Returns the shapes and dtypes of a decoder's tensors; raises if the parameters are those of another model.

    Args:
        dtype: dtype to cast all tensors to (default: no cast).

    Example:
        >>> from meshwright.checkpoint.convert.families import family_of
        >>> model = Decoder.named("tiny")
        >>> form = tensor_forms(model, model.init(jax.random.key(0)), family_of(model))["model.norm.weight"]
        >>> form.shape, str(form.dtype)
        ((64,), 'float32')
    """
    flat = flatten_tree(params, sep="/")
    require_same("the parameters", {name: tuple(leaf.shape) for name, leaf in flat.items()}, leaf_shapes(model))
    shapes = tensor_shapes(model, family)
    return {
        name: TensorForm(shapes[name], jnp.dtype(dtype or jnp.result_type(*{flat[part.leaf].dtype for part in parts})))
        for name, parts in tensor_parts(model, family).items()
    }


def is_shared(params: PyTree) -> bool:
    """Returns whether other processes hold parts of the parameters."""
    return any(isinstance(leaf, jax.Array) and not leaf.is_fully_addressable for leaf in jax.tree.leaves(params))


def pieces_of(
    model: Decoder, params: PyTree, family: Family, forms: dict[str, TensorForm], *, is_writer: bool = True
) -> Iterator[Piece]:
    """Yields a decoder's parameters as pieces of tensors, in the order of the leaves.

    Arrays that several processes hold are gathered, so all of them must iterate over it.

    Args:
        is_writer: whether this process wants the pieces; others only take part in gathering them.
    """
    found: dict[str, list[tuple[str, TensorPart]]] = {}
    for name, parts in tensor_parts(model, family).items():
        for part in parts:
            found.setdefault(part.leaf, []).append((name, part))
    for leaf, value in flatten_tree(params, sep="/").items():
        fetch = _fetcher(value)
        for name, part in found[leaf]:
            values = fetch(part.layer)
            if is_writer:
                yield Piece(name, part.first_row, _turned(values, part, forms[name].dtype))
            del values  # before the next one is made


def _turned(values: Array, part: TensorPart, dtype: Any) -> Array:
    if not part.turned:
        return values.astype(dtype, copy=False)
    out: Array = np.empty(values.shape[::-1], dtype)
    copy_blocks(out.T, values)
    return out


def _fetcher(value: Any) -> Callable[[int | None], Array]:
    """Returns a function that returns a layer of a leaf, or all of it for None, in host memory."""
    if isinstance(value, LazyLeaf):
        value = value.load()
    if not isinstance(value, jax.Array):
        whole = np.asarray(value)
        return lambda layer: whole if layer is None else whole[layer]
    if not value.is_fully_addressable and not value.is_fully_replicated:
        return functools.partial(_gathered, value)
    # On the CPU these are views; an accelerator sends the leaf once, and not once for each layer.
    held = {str(shard.index): (shard.index, np.asarray(shard.data)) for shard in value.addressable_shards}
    return functools.partial(_joined, tuple(value.shape), value.dtype, list(held.values()))


def _joined(shape: tuple[int, ...], dtype: Any, shards: list[Any], layer: int | None) -> Array:
    if len(shards) == 1:
        whole: Array = shards[0][1]
        return whole if layer is None else whole[layer]
    out = np.empty(shape if layer is None else shape[1:], dtype)
    for index, values in shards:
        if layer is None:
            out[index] = values
            continue
        first, last, _ = index[0].indices(shape[0])
        if first <= layer < last:
            out[index[1:]] = values[layer - first]
    return out


def _gathered(value: jax.Array, layer: int | None) -> Array:
    """Returns a layer of an array that several processes hold."""
    assert isinstance(value.sharding, NamedSharding)
    whole = _gather(NamedSharding(value.sharding.mesh, P()), layer is None)(value, layer or 0)
    return np.asarray(whole.addressable_data(0))


@functools.lru_cache(maxsize=4)
def _gather(sharding: Any, is_whole: bool) -> Any:
    def take(value: jax.Array, layer: jax.Array) -> jax.Array:
        return value if is_whole else jax.lax.dynamic_index_in_dim(value, layer, keepdims=False)

    return jax.jit(take, out_shardings=sharding)
