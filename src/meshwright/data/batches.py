"""Batches on a mesh, of shuffled rows or drawn by a job. Each process reads only the rows that its devices hold."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import Sharding

from meshwright.data.stream import BatchStream, PlacedBatch, Shardings, Writer, checked_seed, start_of
from meshwright.errors import DataError
from meshwright.specs import ceil_div
from meshwright.types import PyTree


class RowSource(Protocol):
    """Rows by number: trees of arrays with equal shapes. `Rows` is one.

    A source whose rows change with the epoch, e.g. by random crops, also has `read(number, epoch)`. A source that knows
    the number of targets in a row without reading it has `num_targets(number)`, which mixtures count.
    """

    fingerprint: str

    def __len__(self) -> int: ...

    def __getitem__(self, index: Any) -> Any: ...


def read_row(rows: RowSource, number: int, epoch: int) -> PyTree:
    """Returns a row in an epoch; most sources have the same rows in all epochs.

    Example:
        >>> from meshwright.data import Rows, Tokens
        >>> read_row(Rows(Tokens.of([[1, 2, 3, 0]]), 3), 0, epoch=5)["inputs"].tolist()
        [1, 2, 3]
    """
    read = getattr(rows, "read", None)
    return rows[number] if read is None else read(number, epoch)


class Batches(BatchStream):
    """Batches of shuffled rows as global arrays on a mesh, read ahead in background threads.

    The order of rows depends only on `seed` and the epoch. Epochs follow one another without a gap, so a batch may hold
    the end of one and the beginning of the next. With `epochs`, iteration ends when no full batch is left, on all
    processes at the same step.

    Args:
        rows: `Rows`, or any object with a length, numbered rows and a `fingerprint`.
        batch_size: rows per global batch, on all processes together.
        shardings: maps the shapes of a batch to shardings, like `Step.batch_shardings`.
        seed: seed of the shuffle, from 0 to 2**32 - 1.
        start_row: position in the order of all rows to start at.
        epochs: number of passes over the data (default: reshuffle and repeat forever).
        prefetch: number of batches to read and transfer ahead; 0 reads on demand.
        ledger: a `Ledger` that records every batch handed out.
        first_step: step number of the first batch in the ledger.
        state: the `state` of an earlier stream to resume from, instead of `start_row`.

    Example:
        >>> import meshwright as mw
        >>> from meshwright.data import Rows, Tokens
        >>> rows = Rows(Tokens.of([[*range(1, 100), 0]]), 9)
        >>> whole = jax.NamedSharding(mw.create_mesh("dp:8"), mw.P("dp"))
        >>> batches = Batches(rows, batch_size=8, shardings=lambda batch: jax.tree.map(lambda _: whole, batch), seed=1)
        >>> batch = next(batches)
        >>> batch.arrays["inputs"].shape, batches.state["next_row"]
        ((8, 9), 8)
        >>> batches.close()
    """

    def __init__(
        self,
        rows: RowSource,
        *,
        batch_size: int,
        shardings: Shardings,
        seed: int,
        start_row: int = 0,
        epochs: int | None = None,
        prefetch: int = 2,
        ledger: Writer | None = None,
        first_step: int = 1,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        seed = checked_seed(seed, batch_size=batch_size, epochs=epochs)
        if not len(rows):
            raise DataError("the data is empty: it has no rows.", hint="add text, or use shorter rows.")
        if len(rows) < batch_size:
            raise DataError(
                f"the data has {len(rows)} rows, fewer than one batch of {batch_size}.",
                hint=f"use batch_size={len(rows)} or less, shorter rows, or more text.",
            )
        if state is not None:
            start_row = start_of(state, seed=seed, fingerprint=rows.fingerprint)
        if start_row < 0:
            raise DataError(f"start_row must be at least 0; got {start_row}.")
        import grain

        order = grain.MapDataset.range(len(rows)).seed(seed).shuffle().repeat(epochs)
        placer = RowPlacer(rows, batch_size, shardings)

        def load(first: int) -> PlacedBatch:
            positions = first + placer.numbers
            numbers = [int(order[int(position)]) for position in positions]
            epochs = [int(position) // len(rows) for position in positions]
            values = [read_row(rows, number, epoch) for number, epoch in zip(numbers, epochs, strict=True)]
            return placer.batch(first, positions, numbers, values)

        super().__init__(
            load,
            batch_size=batch_size,
            start_row=start_row,
            stop_row=None if epochs is None else epochs * len(rows),
            rows_per_epoch=len(rows),
            seed=seed,
            fingerprint=rows.fingerprint,
            prefetch=prefetch,
            ledger=ledger,
            first_step=first_step,
        )


def can_pad(rows: RowSource) -> bool:
    """Returns whether rows have `weights`, so that rows of zeros do not count."""
    example = rows[0]
    return isinstance(example, Mapping) and "weights" in example


def eval_batches(
    rows: RowSource, batch_size: int, shardings: Shardings, num_batches: int | None = None, *, prefetch: int = 2
) -> Iterator[PlacedBatch]:
    """Yields the first rows in order, the same at every call.

    The last batch may have fewer rows; it is padded with zeros, which have weight 0.

    Args:
        num_batches: number of batches (default: all rows).

    Example:
        >>> import meshwright as mw
        >>> from meshwright.data import Rows, Tokens
        >>> rows = Rows(Tokens.of([[*range(1, 100), 0]]), 9)
        >>> whole = jax.NamedSharding(mw.create_mesh("dp:8"), mw.P("dp"))
        >>> batches = eval_batches(rows, 8, lambda batch: jax.tree.map(lambda _: whole, batch))
        >>> [batch.row_ids.tolist() for batch in batches]
        [[0, 1, 2, 3, 4, 5, 6, 7], [8, 9, 10]]
    """
    if not len(rows):
        raise DataError("there are no rows to evaluate on.", hint="use a larger validation share or shorter rows.")
    placer = RowPlacer(rows, batch_size, shardings)
    available = ceil_div(len(rows), batch_size)
    num_batches = available if num_batches is None else min(num_batches, available)
    if len(rows) % batch_size and num_batches == available and not can_pad(rows):
        raise DataError(
            f"{len(rows)} rows do not fill batches of {batch_size}, and rows without `weights` cannot be padded.",
            hint=f"pass num_batches={len(rows) // batch_size}, or rows with weights.",
        )

    def load(first: int) -> PlacedBatch:
        positions = first + placer.numbers
        return placer.batch(first, positions, [int(place) for place in positions if place < len(rows)])

    stop = num_batches * batch_size
    with BatchStream(
        load, batch_size=batch_size, fingerprint=rows.fingerprint, stop_row=stop, prefetch=prefetch
    ) as stream:
        yield from stream


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
    """Returns the batches that a job draws: number n is `job.make_batch` of a seed made from `(seed, n)`.

    Positions are counted in rows here too, but the job makes only whole batches of its own size. See `Batches` for the
    other arguments.

    Example:
        >>> import meshwright as mw
        >>> draw = lambda seed: {"x": np.random.default_rng(seed).normal(size=(8, 2)).astype("float32")}
        >>> job = mw.Job(init=lambda key: {}, rules=[], make_batch=draw)
        >>> split = jax.NamedSharding(mw.create_mesh("dp:8"), mw.P("dp"))
        >>> with job_batches(job, shardings=lambda batch: {"x": split}, seed=0) as batches:
        ...     next(batches).arrays["x"].shape, batches.state["next_row"]
        ((8, 2), 8)
    """
    make = getattr(job, "make_batch", None)
    if make is None:
        raise DataError("the job has no make_batch to draw batches.", hint="set Job(make_batch=...), or pass data.")
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(np.shape(leaf), leaf.dtype), make(0))
    sizes = sorted({leaf.shape[0] for leaf in jax.tree.leaves(shapes) if leaf.shape})
    if len(sizes) != 1:
        raise DataError(f"arrays of the job's batches have {sizes} rows.", hint="give all arrays one row per example.")
    if batch_size not in (None, sizes[0]):
        raise DataError(f"the job's batches have {sizes[0]} rows, not {batch_size}.", hint=f"use {sizes[0]} rows.")
    split = shardings(shapes)
    mine = local_rows(shapes, split)
    described = json.dumps([[list(leaf.shape), str(leaf.dtype)] for leaf in jax.tree.leaves(shapes)])
    fingerprint = hashlib.sha256(f"job {jax.tree.structure(shapes)} {described}".encode()).hexdigest()
    if state is not None:
        start_row = start_of(state, seed=seed, fingerprint=fingerprint)
    if start_row % sizes[0]:
        raise DataError(f"row {start_row} is inside a batch of {sizes[0]} rows; the job makes only whole batches.")

    def load(first: int) -> PlacedBatch:
        drawn = np.random.SeedSequence([seed, first // sizes[0]]).generate_state(1)[0]
        whole = jax.tree.map(np.asarray, make(int(drawn)))
        arrays = place_rows(whole, np.arange(sizes[0]), shapes, split)
        return PlacedBatch(arrays, first, sizes[0], first + mine, first + mine)

    return BatchStream(
        load,
        batch_size=sizes[0],
        fingerprint=fingerprint,
        seed=seed,
        start_row=start_row,
        prefetch=prefetch,
        ledger=ledger,
        first_step=first_step,
    )


class RowPlacer:
    """Builds global arrays from the rows that this process's devices hold.

    Args:
        example: a row (default: the first).
    """

    def __init__(self, rows: RowSource, batch_size: int, shardings: Shardings, *, example: PyTree = None) -> None:
        self.rows = rows
        self.example = jax.tree.map(np.asarray, rows[0] if example is None else example)
        self.batch_size = batch_size
        self.shapes = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct((batch_size, *np.shape(leaf)), leaf.dtype), self.example
        )
        self.shardings = shardings(self.shapes)
        self.numbers = local_rows(self.shapes, self.shardings)

    def batch(
        self, first: int, positions: np.ndarray, numbers: list[int], values: list[PyTree] | None = None
    ) -> PlacedBatch:
        """Returns a batch of the rows with these numbers, padded with zeros up to the number of positions.

        Args:
            values: the rows, if they are not those of epoch 0.
        """
        empty = jax.tree.map(np.zeros_like, self.example)
        values = [self.rows[number] for number in numbers] if values is None else values
        stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *values, *[empty] * (len(positions) - len(numbers)))
        return PlacedBatch(
            arrays=place_rows(stacked, self.numbers, self.shapes, self.shardings),
            first_row=first,
            num_rows=self.batch_size,
            row_ids=np.array(numbers, np.int64),
            positions=positions[: len(numbers)],
        )


def local_rows(shapes: PyTree, shardings: PyTree, *, devices: Iterable[jax.Device] | None = None) -> np.ndarray:
    """Returns the indices of a batch's rows that some devices hold, in order.

    Args:
        shapes: shapes of the global batch's arrays, with rows as dim 0; scalars have no rows.
        shardings: sharding of each array.
        devices: the devices (default: those of this process).

    Example:
        >>> import meshwright as mw
        >>> mesh = mw.create_mesh("dp:2,tp:4")
        >>> sharding = jax.NamedSharding(mesh, mw.P("dp"))
        >>> local_rows(jax.ShapeDtypeStruct((6, 3), "int32"), sharding, devices=[mesh.devices[1, 2]]).tolist()
        [3, 4, 5]
    """
    wanted = None if devices is None else set(devices)
    held: np.ndarray | None = None
    for leaf, sharding in _pairs(shapes, shardings):
        if not leaf.shape:
            continue
        held = np.zeros(leaf.shape[0], bool) if held is None else held
        mine = sharding.addressable_devices if wanted is None else wanted
        for device, index in sharding.devices_indices_map(leaf.shape).items():
            if device in mine:
                held[index[0]] = True
    return np.flatnonzero(held) if held is not None else np.zeros(0, np.int64)


def place_rows(rows: PyTree, numbers: np.ndarray, shapes: PyTree, shardings: PyTree) -> PyTree:
    """Builds the global arrays of a batch from this process's rows, without communication.

    Args:
        rows: arrays with the rows that this process's devices hold.
        numbers: indices of these rows in the batch, as `local_rows` returns them.
        shapes: shapes of the global batch's arrays.
        shardings: sharding of each array.

    Example:
        >>> import meshwright as mw
        >>> sharding = jax.NamedSharding(mw.create_mesh("dp:2,tp:4"), mw.P("dp"))
        >>> shape = jax.ShapeDtypeStruct((6, 3), "int32")
        >>> rows = np.arange(18, dtype="int32").reshape(6, 3)
        >>> batch = place_rows(rows, local_rows(shape, sharding), shape, sharding)
        >>> batch.shape, batch.sharding.shard_shape(batch.shape)
        ((6, 3), (3, 3))
    """
    leaves, structure = jax.tree.flatten(rows)
    pairs = zip(leaves, _pairs(shapes, shardings), strict=True)
    placed = [_place(leaf, numbers, shape.shape, sharding) for leaf, (shape, sharding) in pairs]
    return jax.tree.unflatten(structure, placed)


def _place(values: Any, numbers: np.ndarray, shape: tuple[int, ...], sharding: Sharding) -> jax.Array:
    def part(index: tuple[slice, ...] | None) -> Any:
        if not index:
            return values
        # A device's rows are contiguous in the batch, so they are also contiguous in this process's rows.
        start, stop, _ = index[0].indices(shape[0])
        first = int(np.searchsorted(numbers, start))
        return values[(slice(first, first + stop - start), *index[1:])]

    return jax.make_array_from_callback(shape, sharding, part)


def _pairs(shapes: PyTree, shardings: PyTree) -> list[tuple[Any, Any]]:
    leaves = jax.tree.leaves(shapes)
    return list(zip(leaves, jax.tree.leaves(shardings, is_leaf=lambda x: isinstance(x, Sharding)), strict=True))
