"""Batches from iterators that can save their position, such as those of a Grain `IterDataset`."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from meshwright.data.batches import local_rows, place_rows
from meshwright.data.row_check import content_hash, describe, mismatch
from meshwright.data.stream import BatchStream, EndOfData, PlacedBatch, Shardings, Writer, checked_seed, start_of
from meshwright.errors import DataError
from meshwright.types import PyTree


class IteratedRows:
    """Data without row numbers: `make(seed)` returns an iterator over rows, or over whole batches.

    The iterator needs `get_state()` and `set_state(state)`, or a `state` that can be read and assigned. All processes
    iterate over the same elements and keep their own rows. The fingerprint covers the contents of the first element.

    Args:
        make: called with the run's seed for the first epoch, and with other seeds for later ones.
        batch: example batch of the job; an element has its shapes, or those of one row.

    Example:
        >>> import grain
        >>> rows = grain.MapDataset.range(20).map(lambda i: {"x": np.int64(i)}).to_iter_dataset()
        >>> IteratedRows(lambda seed: iter(rows), {"x": np.zeros(8, "int64")}).by_row
        True
    """

    def __init__(self, make: Callable[[int], Iterator[Any]], batch: PyTree, *, seed: int = 0, name: str = "data"):
        self._make, self.name = make, name
        iterator = self.open(seed, 0)
        try:
            first = next(iterator, None)
        finally:
            _close(iterator)
        if first is None:
            raise DataError(f"{name} is empty: its iterator ends at once.")
        problem = mismatch(first, batch, lead=1)
        self.by_row = problem is None
        if problem is not None and mismatch(first, batch, lead=0) is not None:
            raise DataError(f"{name}: {problem}", hint="give rows or whole batches with the shapes of the job's batch.")
        self.batch = batch
        self.fingerprint = content_hash(f"iterator {describe(first)}", [first])

    def open(self, seed: int, epoch: int) -> Any:
        """Returns the iterator of an epoch."""
        drawn = seed if not epoch else int(np.random.SeedSequence([seed, epoch]).generate_state(1)[0])
        iterator = self._make(drawn)
        if not hasattr(iterator, "__next__") and hasattr(iterator, "__iter__"):
            iterator = iter(iterator)
        has_methods = hasattr(iterator, "get_state") and hasattr(iterator, "set_state")
        if not hasattr(iterator, "__next__") or not (has_methods or hasattr(iterator, "state")):
            raise DataError(
                f"{self.name} makes a {type(iterator).__name__}, which cannot save its position.",
                hint="return an iterator with get_state() and set_state(state), such as iter(grain.IterDataset).",
            )
        return iterator


def iterated_batches(
    rows: IteratedRows,
    *,
    batch_size: int,
    shardings: Shardings,
    seed: int,
    epochs: int | None = None,
    prefetch: int = 2,
    ledger: Writer | None = None,
    first_step: int = 1,
    state: Mapping[str, Any] | None = None,
) -> BatchStream:
    """Returns the batches of an iterator; its saved position is part of the stream's `state`.

    See `Batches` for the arguments. Rows at the end of the last epoch that fill no batch are left out.

    Example:
        >>> import grain, meshwright as mw
        >>> data = grain.MapDataset.range(20).map(lambda i: {"x": np.int32(i)}).to_iter_dataset()
        >>> rows = IteratedRows(lambda seed: iter(data), {"x": np.zeros(8, "int32")})
        >>> split = jax.NamedSharding(mw.create_mesh("dp:8"), mw.P("dp"))
        >>> with iterated_batches(rows, batch_size=8, shardings=lambda batch: {"x": split}, seed=0) as batches:
        ...     next(batches).arrays["x"].tolist(), batches.state["iterator"]
        ([0, 1, 2, 3, 4, 5, 6, 7], {'epoch': 0, 'position': {'next_index': 8}})
    """
    seed = checked_seed(seed, batch_size=batch_size, epochs=epochs)
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((batch_size, *leaf.shape[1:]), leaf.dtype), rows.batch)
    size = jax.tree.leaves(rows.batch)[0].shape[0]
    if not rows.by_row and batch_size != size:
        raise DataError(f"{rows.name} gives batches of {size} rows, not {batch_size}.", hint=f"use {size} rows.")
    split = shardings(shapes)
    mine = local_rows(shapes, split)
    start_row = 0 if state is None else start_of(state, seed=seed, fingerprint=rows.fingerprint)
    reader = _Reader(rows, seed, epochs, None if state is None else state["iterator"])

    def load(first: int) -> PlacedBatch:
        elements = [reader.next() for _ in range(batch_size if rows.by_row else 1)]
        whole = jax.tree.map(lambda *leaves: np.stack(leaves), *elements) if rows.by_row else elements[0]
        problem = mismatch(whole, shapes, lead=0)
        if problem is not None:
            raise DataError(
                f"{rows.name}: {problem}", hint="give elements of equal shapes, without a smaller last one."
            )
        arrays = place_rows(jax.tree.map(np.asarray, whole), np.arange(batch_size), shapes, split)
        return PlacedBatch(arrays, first, batch_size, first + mine, first + mine, {"iterator": reader.position()})

    return BatchStream(
        load,
        batch_size=batch_size,
        fingerprint=rows.fingerprint,
        seed=seed,
        start_row=start_row,
        position={"iterator": reader.position()},
        in_order=True,
        on_close=reader.close,
        prefetch=prefetch,
        ledger=ledger,
        first_step=first_step,
    )


class _Reader:
    """Reads the elements of all epochs, one after the other."""

    def __init__(self, rows: IteratedRows, seed: int, epochs: int | None, place: Mapping[str, Any] | None) -> None:
        self.rows, self.seed, self.epochs = rows, seed, epochs
        self.epoch = 0 if place is None else int(place["epoch"])
        self.iterator = rows.open(seed, self.epoch)
        self.is_new = place is None
        if place is not None:
            try:
                _set_position(self.iterator, _decoded(place["position"]))
            except Exception as error:  # user code and Grain raise anything
                raise DataError(f"{rows.name} rejects its saved position: {error}") from error

    def next(self) -> Any:
        while self.epochs is None or self.epoch < self.epochs:
            try:
                element = next(self.iterator)
            except StopIteration:
                if self.is_new:
                    raise DataError(f"{self.rows.name} is empty in epoch {self.epoch}.") from None
                _close(self.iterator)
                self.epoch, self.is_new = self.epoch + 1, True
                self.iterator = self.rows.open(self.seed, self.epoch)
            else:
                self.is_new = False
                return element
        raise EndOfData

    def position(self) -> dict[str, Any]:
        getter = getattr(self.iterator, "get_state", None)
        value = getter() if getter is not None else self.iterator.state
        return {"epoch": self.epoch, "position": _encoded(value, self.rows.name)}

    def close(self) -> None:
        _close(self.iterator)


def _set_position(iterator: Any, value: Any) -> None:
    if hasattr(iterator, "set_state"):
        iterator.set_state(value)
    else:
        iterator.state = value


def _encoded(value: Any, name: str) -> Any:
    """Returns a position as JSON values, which checkpoints hold."""
    if isinstance(value, bytes):
        return {"base64": base64.b64encode(value).decode()}
    try:
        text = json.dumps(value, default=lambda item: item.item())  # NumPy numbers
        is_same = json.loads(text) == value
    except (TypeError, ValueError, AttributeError):
        is_same = False
    if not is_same:
        raise DataError(
            f"the position of {name} is not JSON: {str(value)[:80]}.",
            hint="return bytes, or lists and dicts (with strings as keys) of numbers and strings.",
        )
    return json.loads(text)


def _decoded(value: Any) -> Any:
    if isinstance(value, Mapping) and set(value) == {"base64"}:
        return base64.b64decode(value["base64"])
    return value


def _close(iterator: Any) -> None:
    close = getattr(iterator, "close", None)
    if close is not None:
        close()
