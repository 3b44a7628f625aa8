"""A state on the disk: nested dicts of plain global arrays, which Orbax writes and reads, and which it can read alone.

This is the one place that talks to Orbax.
"""

from __future__ import annotations

import functools
import operator
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from meshwright.checkpoint.manifest import is_key, key_impl
from meshwright.errors import CheckpointError
from meshwright.layout import Layout
from meshwright.types import PyTree

Nested = dict[str, Any]

# Files of this size are hashed side by side. They are also read faster than Orbax's of 2 GiB: a GiB in 1.0 s for 1.3.
DATA_FILE_BYTES = 64 * 2**20


# --- A state as nested dicts ---


def check_names(names: Sequence[str]) -> None:
    """Raises where two leaves would be stored in one place.

    Orbax joins names by dots, so `a.b` and `a/b` are one to it, and restores one onto the other without a word.

    Example:
        >>> check_names(["a/b", "a/c.d"])
    """
    seen: dict[str, str] = {}
    for name in names:
        if "" in name.split("/"):
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


def to_stored(state: PyTree, layout: Layout) -> Nested:
    """Returns a state as nested dicts of plain arrays, random keys as their bits; nothing is moved or copied."""
    values = [jax.random.key_data(leaf) if is_key(leaf.dtype) else leaf for leaf in jax.tree.leaves(state)]
    return nest([leaf.name for leaf in layout.leaves], values)


def abstract_stored(layout: Layout) -> Nested:
    """Returns the shapes of what `to_stored` would give for a state of this layout, placed on its mesh."""
    structs = []
    for leaf in layout.leaves:
        struct = jax.ShapeDtypeStruct(leaf.stored_shape, leaf.dtype)
        if is_key(leaf.dtype):
            struct = jax.eval_shape(jax.random.key_data, struct)
        structs.append(struct.update(sharding=NamedSharding(layout.mesh, leaf.spec)))
    return nest([leaf.name for leaf in layout.leaves], structs)


def from_stored(tree: Nested, layout: Layout) -> PyTree:
    """Returns the state that `to_stored` took apart."""
    leaves = []
    for leaf in layout.leaves:
        value = functools.reduce(operator.getitem, leaf.name.split("/"), tree)
        if is_key(leaf.dtype):
            wrap = functools.partial(jax.random.wrap_key_data, impl=key_impl(leaf.dtype))
            value = jax.jit(wrap, out_shardings=NamedSharding(layout.mesh, leaf.spec))(value)
        leaves.append(value)
    return layout.structure.unflatten(leaves)


# --- Orbax ---


def _orbax() -> Any:
    from orbax.checkpoint import v1 as ocp  # takes seconds

    return ocp


def load_ahead() -> None:
    """Imports Orbax in the background, which takes seconds that the first save would wait for."""
    threading.Thread(target=_orbax, name="meshwright-orbax", daemon=True).start()


def start_writing(folder: Path, tree: Nested) -> Any:
    """Starts to write a tree of arrays; returns a response once their buffers may be donated."""
    ocp = _orbax()
    context = ocp.Context()
    # Weights hardly compress: zstd makes float32 some 8% smaller and takes several times as long as the disk.
    context.array.saving.use_compression = False
    context.array.saving.ocdbt_target_data_file_size = DATA_FILE_BYTES
    # Copies of an array are cut up so that every process writes a part: a program for each shape, seconds in all. One
    # process writes everything anyway.
    context.array.saving.use_replica_parallel = jax.process_count() > 1
    with context:
        return ocp.save_async(folder, tree)


def finish_writing(response: Any, *, is_alive: Callable[[], bool] | None = None) -> None:
    """Waits until all processes have written their arrays.

    Args:
        is_alive: asked every second; where it says no, another process gave up, and waiting for it would take minutes.
    """
    if is_alive is None:
        response.result()
        return
    while True:
        asked = time.monotonic()
        try:
            response.result(timeout=1.0)
            return
        except TimeoutError:
            if time.monotonic() - asked < 0.9:  # not ours: Orbax itself ran out of time
                raise
            if not is_alive():
                raise CheckpointError("another process of this run could not write its share") from None


def read(folder: Path, abstract: Nested, *, repad: bool = False, part: bool = False) -> Nested:
    """Reads arrays into the shapes, dtypes and shardings given.

    Args:
        repad: cuts or zero-fills arrays that were padded for another mesh.
        part: reads only the leaves asked for, of a tree that has more.
    """
    ocp = _orbax()
    context = ocp.Context()
    context.array.loading.enable_padding_and_truncation = repad
    context.pytree.loading.partial_load = part
    with context:
        tree: Nested = ocp.load(folder, abstract)
    return tree


def read_anything(folder: Path) -> Nested:
    """Reads a tree that somebody else wrote with Orbax, whole and on the host."""
    ocp = _orbax()
    sharding = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    try:
        found = ocp.metadata(folder).metadata
        shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), found)
        tree: Nested = jax.tree.map(np.asarray, ocp.load(folder, shapes))
    except (ValueError, KeyError, OSError) as error:
        raise CheckpointError(f"Orbax cannot read {folder}: {error}") from None
    return tree
