"""A state on disk: nested dicts of plain global arrays, readable with Orbax alone.

This is the only module that calls Orbax.
"""

from __future__ import annotations

import functools
import logging
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

# Files of this size are hashed in parallel, and read faster than Orbax's 2 GiB (1.0 s instead of 1.3 s per GiB).
DATA_FILE_BYTES = 64 * 2**20


def check_names(names: Sequence[str]) -> None:
    """Raises if two leaves would be stored under one name.

    Orbax joins names by dots, so it silently restores `a.b` onto `a/b`.

    Example:
        >>> check_names(["a/b", "a/c.d"])
    """
    seen: dict[str, str] = {}
    for name in names:
        if "" in name.split("/"):
            raise CheckpointError(f"the leaf name {name!r} cannot be stored.", hint="give every key a non-empty name.")
        other = seen.setdefault(name.replace("/", "."), name)
        if other != name:
            raise CheckpointError(
                f"`{other}` and `{name}` would both be stored as {name.replace('/', '.')!r}.",
                hint="rename one of the keys; names must differ in more than dots and slashes.",
            )
    for place, name in seen.items():
        parts = place.split(".")
        for end in range(1, len(parts)):
            folder = ".".join(parts[:end])
            if folder in seen:
                raise CheckpointError(
                    f"`{seen[folder]}` is an array, but `{name}` would be stored below it.",
                    hint="rename one of the keys.",
                )


def nest(names: Sequence[str], values: Sequence[Any]) -> Nested:
    """Returns values as nested dicts, by their `/`-joined names.

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
    """Returns a state as nested dicts of plain arrays, with random keys as their bits; nothing is copied."""
    return nest([leaf.name for leaf in layout.leaves], stored_leaves(state))


def stored_leaves(state: PyTree) -> list[Any]:
    """Returns the leaves of a state as plain arrays, in the order of its layout."""
    return [jax.random.key_data(leaf) if is_key(leaf.dtype) else leaf for leaf in jax.tree.leaves(state)]


def abstract_stored(layout: Layout) -> Nested:
    """Returns the shapes and shardings that `to_stored` gives for a state of this layout."""
    return nest([leaf.name for leaf in layout.leaves], abstract_leaves(layout))


def abstract_leaves(layout: Layout) -> list[jax.ShapeDtypeStruct]:
    """Returns the shapes and shardings that `stored_leaves` gives for a state of this layout."""
    structs = []
    for leaf in layout.leaves:
        struct = jax.ShapeDtypeStruct(leaf.stored_shape, leaf.dtype)
        if is_key(leaf.dtype):
            struct = jax.eval_shape(jax.random.key_data, struct)
        structs.append(struct.update(sharding=NamedSharding(layout.mesh, leaf.spec)))
    return structs


def from_stored(tree: Nested, layout: Layout) -> PyTree:
    """Returns the state from the output of `to_stored`."""
    leaves = []
    for leaf in layout.leaves:
        value = functools.reduce(operator.getitem, leaf.name.split("/"), tree)
        if is_key(leaf.dtype):
            wrap = functools.partial(jax.random.wrap_key_data, impl=key_impl(leaf.dtype))
            value = jax.jit(wrap, out_shardings=NamedSharding(layout.mesh, leaf.spec))(value)
        leaves.append(value)
    return layout.structure.unflatten(leaves)


def _orbax() -> Any:
    from orbax.checkpoint import v1 as ocp  # slow: takes seconds

    return ocp


def load_ahead() -> None:
    """Imports Orbax in the background, which takes seconds, so that the first save does not wait for it."""
    threading.Thread(target=_orbax, name="meshwright-orbax", daemon=True).start()


def start_writing(folder: Path, tree: Nested) -> Any:
    """Starts writing a tree of arrays; returns a response as soon as their buffers may be donated."""
    ocp = _orbax()
    context = ocp.Context()
    # zstd makes float32 weights only about 8% smaller, and takes several times as long as the disk.
    context.array.saving.use_compression = False
    context.array.saving.ocdbt_target_data_file_size = DATA_FILE_BYTES
    # Splitting replicas between processes compiles a program for each shape; one process gains nothing from it.
    context.array.saving.use_replica_parallel = jax.process_count() > 1
    with context:
        return ocp.save_async(folder, tree)


class _AloneResponse:
    """What `start_writing_alone` returns, in the form of Orbax's own responses."""

    def __init__(self, checkpointer: Any) -> None:
        self._checkpointer = checkpointer

    def result(self, timeout: float | None = None) -> None:
        self._checkpointer.wait_until_finished()
        self._checkpointer.close()


def start_writing_alone(folder: Path, tree: Nested) -> Any:
    """Like `start_writing`, but each of several processes writes the shards of its own devices into its own folder.

    There is a file for each shard, so the files of all processes together are one tree that Orbax can read. Orbax's
    newer interface, which `start_writing` uses, insists on one path for all processes.
    """
    import orbax.checkpoint as ocp

    logging.getLogger("absl").addFilter(_without_merge_warning)
    rank = jax.process_index()
    alone = ocp.options.MultiprocessingOptions(
        primary_host=rank, active_processes={rank}, barrier_sync_key_prefix=f"meshwright-{rank}"
    )
    # Replica None: every process writes what it holds, also if another one holds it too.
    shards = ocp.type_handlers.ArrayHandler(
        primary_host=None,
        replica_id=None,
        use_replica_parallel=False,
        enable_write_sharding_file=False,
        array_metadata_store=None,
    )
    handler = ocp.PyTreeCheckpointHandler(
        type_handler_registry=ocp.type_handlers.create_type_handler_registry((jax.Array, shards)),
        use_ocdbt=False,  # one database would have to be merged from the files of all processes
        use_zarr3=False,  # for which Orbax warns that there are no data files
        use_compression=False,
        multiprocessing_options=alone,
    )
    # Otherwise Orbax signals that the folder exists under a name without the process, so one could start too early.
    directly = ocp.options.AsyncOptions(create_directories_asynchronously=False)
    checkpointer = ocp.AsyncCheckpointer(handler, multiprocessing_options=alone, async_options=directly)
    checkpointer.save(folder, args=ocp.args.PyTreeSave(tree))
    return _AloneResponse(checkpointer)


def _without_merge_warning(record: logging.LogRecord) -> bool:
    """Drops Orbax's warning that there is no database to merge."""
    return "Skipping merge of OCDBT" not in str(record.msg)


def finish_writing(response: Any, *, is_alive: Callable[[], bool] | None = None) -> None:
    """Waits until all processes have written their arrays.

    Args:
        is_alive: called every second; False means that another process gave up, for which Orbax would wait minutes.
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
            if time.monotonic() - asked < 0.9:  # Orbax's own timeout
                raise
            if not is_alive():
                raise CheckpointError("another process of this run could not write its share") from None


def read(folder: Path, abstract: Nested, *, repad: bool = False, part: bool = False) -> Nested:
    """Reads arrays with the given shapes, dtypes and shardings.

    Args:
        repad: cuts or zero-pads arrays that were padded for another mesh.
        part: reads only the given leaves of a tree that may have more.
    """
    ocp = _orbax()
    context = ocp.Context()
    context.array.loading.enable_padding_and_truncation = repad
    context.pytree.loading.partial_load = part
    with context:
        tree: Nested = ocp.load(folder, abstract)
    return tree


def read_anything(folder: Path) -> Nested:
    """Reads any tree that Orbax wrote into host memory."""
    ocp = _orbax()
    sharding = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    try:
        found = ocp.metadata(folder).metadata
        shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), found)
        tree: Nested = jax.tree.map(np.asarray, ocp.load(folder, shapes))
    except (ValueError, KeyError, OSError) as error:
        raise CheckpointError(f"Orbax cannot read {folder}: {error}") from None
    return tree
