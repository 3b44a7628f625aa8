"""A state as it is stored: a nested dict of plain global arrays, readable with Orbax alone; and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding

from meshwright.checkpoint.manifest import is_key, key_impl
from meshwright.errors import CheckpointError
from meshwright.layout import Layout
from meshwright.types import PyTree

Nested = dict[str, Any]


def check_names(names: Sequence[str]) -> None:
    """Raises where two leaves would be stored in one place.

    Orbax joins names by dots, so `a.b` and `a/b` are one to it, and restores one onto the other without a word.

    Example:
        >>> check_names(["a/b", "a/c.d"])
    """
    seen: dict[str, str] = {}
    for name in names:
        if not name or any(part == "" for part in name.split("/")):
            raise CheckpointError(f"a leaf is named {name!r}, which cannot be stored.", hint="give every key a name.")
        other = seen.setdefault(name.replace("/", "."), name)
        if other != name:
            raise CheckpointError(
                f"`{other}` and `{name}` would be stored in one place, under {name.replace('/', '.')!r}.",
                hint="rename one of the keys; names must differ in more than dots and slashes.",
            )
    for place, name in seen.items():
        parts = place.split(".")
        for end in range(1, len(parts)):
            folder = ".".join(parts[:end])
            if folder in seen:
                raise CheckpointError(
                    f"`{seen[folder]}` is an array, and `{name}` would be stored below it.",
                    hint="rename one of the keys.",
                )


def nest(names: Sequence[str], values: Sequence[Any]) -> Nested:
    """Returns values in nested dicts, by their `/`-joined names.

    Example:
        >>> nest(["a/b", "a/c", "d"], [1, 2, 3])
        {'a': {'b': 1, 'c': 2}, 'd': 3}
    """
    tree: Nested = {}
    for name, value in zip(names, values, strict=True):
        *folders, last = name.split("/")
        inside = tree
        for folder in folders:
            inside = inside.setdefault(folder, {})
        inside[last] = value
    return tree


def pick(tree: Nested, name: str) -> Any:
    """Returns the value that `nest` put under a name."""
    for part in name.split("/"):
        tree = tree[part]
    return tree


def to_stored(state: PyTree, layout: Layout) -> Nested:
    """Returns a state as nested dicts of plain arrays, random keys as their bits; nothing is moved or copied."""
    values = [jax.random.key_data(leaf) if is_key(leaf.dtype) else leaf for leaf in jax.tree.leaves(state)]
    return nest([leaf.name for leaf in layout.leaves], values)


def abstract_stored(layout: Layout, dtypes: Sequence[Any]) -> Nested:
    """Returns the shapes of what `to_stored` would give for a state of this layout, placed on its mesh."""
    structs = []
    for leaf, dtype in zip(layout.leaves, dtypes, strict=True):
        sharding = NamedSharding(layout.mesh, leaf.spec)
        struct = jax.ShapeDtypeStruct(leaf.stored_shape, dtype, sharding=sharding)
        if is_key(leaf.dtype):
            bits = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(leaf.stored_shape, leaf.dtype))
            struct = jax.ShapeDtypeStruct(bits.shape, bits.dtype, sharding=sharding)
        structs.append(struct)
    return nest([leaf.name for leaf in layout.leaves], structs)


def from_stored(tree: Nested, layout: Layout) -> PyTree:
    """Returns the state that `to_stored` took apart."""
    leaves = []
    for leaf in layout.leaves:
        value = pick(tree, leaf.name)
        if is_key(leaf.dtype):
            impl, sharding = key_impl(leaf.dtype), NamedSharding(layout.mesh, leaf.spec)
            value = jax.jit(lambda bits, impl=impl: jax.random.wrap_key_data(bits, impl=impl), out_shardings=sharding)(
                value
            )
        leaves.append(value)
    return layout.structure.unflatten(leaves)
