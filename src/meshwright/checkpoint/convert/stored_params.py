"""The parameters of a checkpoint as leaves that are read in turn, so that an export never holds a whole model."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from meshwright.checkpoint.arrays import nest
from meshwright.checkpoint.convert.leaf_pieces import LazyLeaf
from meshwright.checkpoint.convert.peft_adapters import merged_params
from meshwright.checkpoint.manifest import Manifest
from meshwright.checkpoint.restoring import read_step
from meshwright.layout import Layout
from meshwright.layout.leaf import make_leaf
from meshwright.mesh.build import create_mesh
from meshwright.parallel.lora.low_rank import is_adapted
from meshwright.tree import flatten_tree, tree_path_to_string
from meshwright.types import PyTree

GROUP = 2**28
"""Leaves are read together up to this many bytes, as each read of a checkpoint has a cost of its own."""


def stored_params(folder: Path, manifest: Manifest) -> PyTree:
    """Returns the parameters of a verified step as a tree of `LazyLeaf`, to be loaded once each, in their order.

    Args:
        folder: the folder of the step.
    """
    whole = host_layout(manifest)
    reader = _GroupReader(folder, whole)
    leaves = [
        LazyLeaf(leaf.shape, leaf.dtype, functools.partial(reader.load, place))
        for place, leaf in enumerate(whole.leaves)
    ]
    found: PyTree = whole.structure.unflatten(leaves)["params"]
    return found


def merged_lazily(params: PyTree, facts: Mapping[str, Any]) -> PyTree:
    """Returns `merged_params` as a tree of `LazyLeaf`, from one: an adapted matrix is merged when it is loaded."""
    if not any(map(is_adapted, jax.tree.leaves(params, is_leaf=is_adapted))):
        return params
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), params)
    merged = flatten_tree(jax.eval_shape(lambda tree: merged_params(tree, facts), shapes), sep="/")

    def change(path: Any, node: Any) -> LazyLeaf:
        made = merged[str(tree_path_to_string(path, sep="/"))]
        return LazyLeaf(made.shape, made.dtype, _merger(node, facts, made.dtype))

    return jax.tree.map_with_path(change, params, is_leaf=is_adapted)


def load_all(params: PyTree, chosen: Callable[[str], bool]) -> PyTree:
    """Returns a tree of `LazyLeaf` with those loaded whose last name is chosen."""

    def change(path: Any, leaf: LazyLeaf) -> Any:
        return leaf.load() if chosen(str(tree_path_to_string(path, sep="/")).rpartition("/")[2]) else leaf

    return jax.tree.map_with_path(change, params)


def host_layout(manifest: Manifest, part: str = "params") -> Layout:
    """Returns a layout of a checkpoint's parameters on one local device."""
    stored = [leaf for leaf in manifest.tree if leaf.name.startswith(f"{part}/")]
    leaves = sorted((leaf.name, leaf.shape, jax.numpy.dtype(leaf.dtype)) for leaf in stored)
    tree = nest([name for name, _, _ in leaves], list(range(len(leaves))))
    # Nested dicts flatten in a different order than sorted full names.
    order, structure = jax.tree.flatten(tree)
    return one_device_layout([leaves[place] for place in order], structure)


def one_device_layout(leaves: list[Any], structure: Any) -> Layout:
    """Returns a layout of leaves (name, shape, dtype) on one local device."""
    described = [make_leaf(name, shape, dtype, P(), {"dp": 1}) for name, shape, dtype in leaves]
    return Layout(create_mesh("dp:1", devices=1), described, structure, None)


class _GroupReader:
    """Reads leaves of a step in groups; a leaf is forgotten when it is loaded."""

    def __init__(self, folder: Path, layout: Layout) -> None:
        self.folder, self.layout = folder, layout
        self._held: dict[int, Any] = {}

    def load(self, place: int) -> Any:
        if place not in self._held:
            self._held.clear()
            group, size = [place], self.layout.leaves[place].bytes_per_device
            for other in range(place + 1, len(self.layout.leaves)):
                size += self.layout.leaves[other].bytes_per_device
                if size > GROUP:
                    break
                group.append(other)
            leaves = [self.layout.leaves[member] for member in group]
            tree = nest([leaf.name for leaf in leaves], group)
            order, structure = jax.tree.flatten(tree)
            layout = Layout(self.layout.mesh, [self.layout.leaves[member] for member in order], structure, None)
            state = read_step(self.folder, layout, cast=False, part=True).state
            self._held = dict(zip(order, jax.tree.leaves(state), strict=True))
        return self._held.pop(place)


def _merger(node: Any, facts: Mapping[str, Any], dtype: Any) -> Callable[[], Any]:
    def load() -> Any:
        if not is_adapted(node):
            value = node.load()
            return value.astype(dtype) if jnp.issubdtype(value.dtype, jnp.floating) else value
        loaded = {name: node[name].load() for name in sorted(node)}
        return merged_params({"weight": loaded}, facts)["weight"].astype(dtype)

    return load
