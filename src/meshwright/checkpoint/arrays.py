"""Arrays on the disk: the one place that talks to Orbax, which writes and reads them."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from meshwright.errors import CheckpointError

# Files of this size are hashed side by side. They are also read faster than Orbax's of 2 GiB: a GiB in 1.0 s for 1.3.
DATA_FILE_BYTES = 64 * 2**20


def load_ahead() -> None:
    """Imports Orbax in the background, which takes seconds that the first save would wait for."""

    def load() -> None:
        with contextlib.suppress(CheckpointError):  # told by the save
            _orbax()

    threading.Thread(target=load, name="meshwright-orbax", daemon=True).start()


def start_writing(folder: Path, tree: dict[str, Any]) -> Any:
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
        except TimeoutError:
            if time.monotonic() - asked < 0.9:  # not ours: Orbax itself ran out of time
                raise
            if not is_alive():
                raise CheckpointError("another process of this run could not write its share") from None
        else:
            return


def read(folder: Path, abstract: dict[str, Any], *, repad: bool = False, part: bool = False) -> dict[str, Any]:
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
        tree: dict[str, Any] = ocp.load(folder, abstract)
    return tree


def read_anything(folder: Path) -> dict[str, Any]:
    """Reads a tree that somebody else wrote with Orbax, whole and on the host."""
    import jax
    import numpy as np

    ocp = _orbax()
    sharding = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    try:
        found = ocp.metadata(folder).metadata
        shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), found)
        tree: dict[str, Any] = jax.tree.map(np.asarray, ocp.load(folder, shapes))
    except (ValueError, KeyError, OSError) as error:
        raise CheckpointError(f"Orbax cannot read {folder}: {error}") from None
    return tree


def _orbax() -> Any:
    try:
        from orbax.checkpoint import v1 as ocp
    except ModuleNotFoundError:
        raise CheckpointError("checkpoints need Orbax.", hint="pip install orbax-checkpoint") from None
    return ocp
