"""The part of a save that runs beside training: waits for the arrays, hashes files, writes the manifest."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from meshwright.checkpoint import arrays
from meshwright.checkpoint.manifest import STATE, Manifest, write_manifest
from meshwright.checkpoint.retention import SAVING
from meshwright.checkpoint.step_files import FileHash, hash_files, list_files, sync_folders, write_atomically
from meshwright.errors import CheckpointError

PEER_SECONDS = 600.0
"""How long the first process waits for the hashes of the others."""


def finish_save(folder: Path, response: Any, make_manifest: Callable[[dict[str, FileHash]], Manifest]) -> None:
    """Makes a step out of what Orbax writes into its folder. On the first process, the step is then finished."""
    rank, count = jax.process_index(), jax.process_count()
    alive = None if count == 1 else (folder / SAVING).exists
    arrays.finish_writing(response, is_alive=alive)
    names = [f"{STATE}/{name}" for name in list_files(folder / STATE)]
    hashes = hash_files(folder, names[rank::count], sync=True)
    if rank != 0:
        write_atomically(_note(folder, rank), json.dumps(hashes).encode())
        return
    for peer in range(1, count):
        hashes |= _hashes_of(folder, peer)
    # A file that no process took, because its view of the folder was old, is hashed here.
    hashes |= hash_files(folder, [name for name in names if name not in hashes], sync=True)
    if count > 1:
        for peer in range(1, count):
            _note(folder, peer).unlink()
        (folder / SAVING).unlink()
    sync_folders(folder)
    write_manifest(folder, make_manifest({name: hashes[name] for name in names}))


def _hashes_of(folder: Path, peer: int) -> dict[str, FileHash]:
    note, deadline = _note(folder, peer), time.monotonic() + PEER_SECONDS
    while not note.exists():
        if not (folder / SAVING).exists():
            raise CheckpointError(f"process {peer} of this run could not write its share")
        if time.monotonic() > deadline:
            raise CheckpointError(f"process {peer} of this run gave no hashes in {PEER_SECONDS:.0f} s")
        time.sleep(0.05)
    return {name: FileHash(*item) for name, item in json.loads(note.read_text()).items()}


def _note(folder: Path, rank: int) -> Path:
    return folder / f".hashes-{rank}.json"
