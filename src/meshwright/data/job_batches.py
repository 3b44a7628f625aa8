"""Batches of jobs without text: drawn by the job itself, from seeds."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from meshwright.data.host_rows import local_rows, place_rows
from meshwright.data.stream import BatchStream, PlacedBatch, Shardings, Writer, start_of
from meshwright.errors import DataError


def job_batches(
    job: Any,
    *,
    shardings: Shardings,
    seed: int,
    start_row: int = 0,
    batch_size: int | None = None,
    prefetch: int = 2,
    ledger: Writer | None = None,
    first_step: int = 1,
    state: Mapping[str, Any] | None = None,
) -> BatchStream:
    """Returns the batches of a job without text: number n is `job.make_batch` of a seed made from `(seed, n)`.

    Positions are counted in rows here too, but only whole batches can be made, of the size that the job makes.
    """
    make = getattr(job, "make_batch", None)
    if make is None:
        raise DataError(
            "the job cannot make batches to train on.", hint="Job(..., make_batch=lambda seed: {...}), or name data."
        )
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(np.shape(leaf), leaf.dtype), make(0))
    sizes = sorted({leaf.shape[0] for leaf in jax.tree.leaves(shapes) if leaf.shape})
    if len(sizes) != 1:
        raise DataError(f"the job's batches have arrays of {sizes} rows.", hint="all arrays have one row per example.")
    if batch_size not in (None, sizes[0]):
        raise DataError(
            f"the job makes batches of {sizes[0]} rows, not of {batch_size}.", hint=f"batch_size={sizes[0]}."
        )
    split = shardings(shapes)
    mine = local_rows(shapes, split)
    described = json.dumps([[list(leaf.shape), str(leaf.dtype)] for leaf in jax.tree.leaves(shapes)])
    fingerprint = hashlib.sha256(f"job {jax.tree.structure(shapes)} {described}".encode()).hexdigest()
    if state is not None:
        start_row = start_of(state, seed=seed, fingerprint=fingerprint)
    if start_row % sizes[0]:
        raise DataError(f"row {start_row} is inside a batch of {sizes[0]} rows, which the job can only make whole.")

    def load(first: int) -> PlacedBatch:
        drawn = np.random.SeedSequence([seed, first // sizes[0]]).generate_state(1)[0]
        whole = jax.tree.map(np.asarray, make(int(drawn)))
        arrays = place_rows(whole, np.arange(sizes[0]), shapes, split)
        return PlacedBatch(arrays, first, sizes[0], first + mine, first + mine)

    return BatchStream(
        load,
        batch_size=sizes[0],
        start_row=start_row,
        stop_row=None,
        rows_per_epoch=None,
        seed=seed,
        fingerprint=fingerprint,
        prefetch=prefetch,
        ledger=ledger,
        first_step=first_step,
    )
