"""Options of runs in an object store."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StoreOptions:
    """Runs in an object store (--run s3://..., gs://..., az://...)."""

    upload_every: int | None = None
    """Steps between uploads of checkpoints, a multiple of --checkpoint-every; other checkpoints stay in the local
    folder. The last one is always uploaded (default: upload every checkpoint)."""
    keep_local: int = 1
    """Number of most recent checkpoints to keep in the local folder; --keep-last counts those in the store."""
    upload_seconds: float = 30.0
    """Seconds between uploads of logs and other small files."""
    local_run: str | None = None
    """Local folder of a run in an object store (default: meshwright/runs in the user's cache). If not all processes see
    the folder of process 0, each keeps its part of the run in a folder of its own: this name and its rank."""
