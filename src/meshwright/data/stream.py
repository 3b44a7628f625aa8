"""Streams of batches, read ahead in background threads, with positions counted in rows."""

from __future__ import annotations

import operator
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from meshwright.errors import DataError
from meshwright.types import PyTree

# Maps the shapes of a batch to shardings, like `Step.batch_shardings`.
Shardings = Callable[[PyTree], PyTree]


@dataclass(frozen=True, eq=False)
class PlacedBatch:
    """A batch on the mesh.

    Attributes:
        arrays: global arrays, with rows as dim 0.
        first_row: position of the first row in the order of all rows, counted over epochs.
        num_rows: rows in the global batch, on all processes.
        row_ids: numbers of the rows that this process read.
        positions: position of each of these in the order of all rows.
        place: position of an iterator or a mixture after this batch, as JSON values.
        sources: number of the source of each row in `row_ids`, in a mixture.
        source_positions: position of each of these in the order of its source.
        tokens: targets in the global batch by source, in a mixture of text.
    """

    arrays: PyTree
    first_row: int
    num_rows: int
    row_ids: np.ndarray
    positions: np.ndarray
    place: Mapping[str, Any] | None = None
    sources: np.ndarray | None = None
    source_positions: np.ndarray | None = None
    tokens: Mapping[str, int] | None = None


class EndOfData(Exception):
    """Raised by the `load` of a stream whose length is not known in advance."""


class Writer(Protocol):
    """Records batches, like `Ledger`."""

    def begin(self, facts: Mapping[str, Any]) -> None: ...

    def append(self, step: int, batch: PlacedBatch) -> None: ...


class BatchStream(Iterator[PlacedBatch]):
    """An iterator over batches that reads ahead.

    Positions are counted in rows, not batches, so a run that resumes from `state` may change its batch size, mesh and
    number of processes. All processes reach the end of the data at the same step.

    Args:
        load: function from the position of a batch's first row to the batch.
        position: values that `state` holds besides the row, until a batch brings others in its `place`.
        in_order: whether `load` must be called in order, by one thread.
        on_close: called after the reader threads ended.
    """

    def __init__(
        self,
        load: Callable[[int], PlacedBatch],
        *,
        batch_size: int,
        fingerprint: str,
        seed: int = 0,
        start_row: int = 0,
        stop_row: int | None = None,
        rows_per_epoch: int | None = None,
        position: Mapping[str, Any] | None = None,
        in_order: bool = False,
        on_close: Callable[[], None] | None = None,
        prefetch: int = 2,
        ledger: Writer | None = None,
        first_step: int = 1,
    ) -> None:
        import grain

        if prefetch < 0:
            raise DataError(f"prefetch must be at least 0; got {prefetch}.", hint="pass 0 to read on demand.")
        self.batch_size = batch_size
        self.stop_row = stop_row
        self._next_row = start_row
        self._facts = {"seed": seed, "fingerprint": fingerprint}
        self._place = dict(position or {})
        self._on_close = on_close
        self._has_ended = False
        self._load = load
        self._start_row = start_row
        self._ledger = ledger
        self._step = first_step
        self._error: BaseException | None = None
        self._closing = False
        self._reading = 0
        self._idle = threading.Condition()
        length = sys.maxsize // batch_size if self.num_left is None else self.num_left
        # One element is one batch: each thread loads whole batches, and Grain keeps their order.
        options = grain.ReadOptions(num_threads=min(prefetch, 1 if in_order else 4), prefetch_buffer_size=prefetch)
        self._batches: Any = iter(grain.MapDataset.range(length).map(self._read).to_iter_dataset(options))
        if ledger is not None:
            ledger.begin({**self.state, "batch_size": batch_size, "rows_per_epoch": rows_per_epoch})
        if length:
            self._batches.start_prefetch()

    @property
    def state(self) -> dict[str, Any]:
        """The position after the last batch handed out, as JSON values."""
        return {"next_row": self._next_row, **self._facts, **self._place}

    @property
    def num_left(self) -> int | None:
        """Number of batches left; None if the data repeats forever."""
        return None if self.stop_row is None else max(self.stop_row - self._next_row, 0) // self.batch_size

    def require_steps(self, num_steps: int) -> None:
        """Raises on every process if the data ends before this many more batches."""
        if self.num_left is not None and num_steps > self.num_left:
            assert self.stop_row is not None
            rows = max(self.stop_row - self._next_row, 0)
            raise DataError(
                f"the data ends after {self.num_left} of {num_steps} steps: {rows} rows are left from row "
                f"{self._next_row}, but {num_steps} steps of {self.batch_size} rows need "
                f"{num_steps * self.batch_size}.",
                hint="use more epochs (None repeats forever), more data, or fewer steps.",
            )

    def __next__(self) -> PlacedBatch:
        if self._error is not None:
            raise self._error
        if self._closing:
            raise DataError("this batch stream is closed.", hint="make a new one from its state.")
        if self._has_ended:
            raise StopIteration
        try:
            batch: PlacedBatch | None = next(self._batches).batch
        except StopIteration:
            raise
        except BaseException as error:
            # Continuing would silently drop the batch that failed.
            self._error = error
            self.close()
            raise
        if batch is None:
            self._has_ended = True
            raise StopIteration
        assert batch.first_row == self._next_row, (batch.first_row, self._next_row)
        if self._ledger is not None:
            self._ledger.append(self._step, batch)
        self._step += 1
        self._next_row += self.batch_size
        self._place = dict(batch.place or self._place)
        return batch

    def close(self) -> None:
        """Stops reading, and waits for the reader threads."""
        with self._idle:
            self._closing = True
        self._batches.close()
        with self._idle:
            self._idle.wait_for(lambda: self._reading == 0)
        if self._on_close is not None:
            on_close, self._on_close = self._on_close, None
            on_close()

    def __enter__(self) -> BatchStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read(self, number: int) -> _Read:
        with self._idle:
            if self._closing:
                return _Read(None)
            self._reading += 1
        try:
            return _Read(self._load(self._start_row + int(number) * self.batch_size))
        except EndOfData:
            return _Read(None)
        except StopIteration as error:
            # It would look like the end of the data.
            raise DataError("reading rows raised StopIteration.") from error
        finally:
            with self._idle:
                self._reading -= 1
                self._idle.notify_all()


@dataclass(frozen=True, eq=False)
class _Read:
    """A batch, or the end of the data; Grain would skip a bare None."""

    batch: PlacedBatch | None


def checked_seed(seed: Any, *, batch_size: int, epochs: int | None) -> int:
    """Returns the seed of a stream as an int; raises if it, the batch size or the number of epochs is out of range.

    Example:
        >>> checked_seed(np.int64(3), batch_size=8, epochs=None)
        3
    """
    if batch_size < 1:
        raise DataError(f"batch_size must be at least 1; got {batch_size}.", hint="pass the rows per step.")
    if epochs is not None and epochs < 1:
        raise DataError(f"epochs must be at least 1; got {epochs}.", hint="pass None to repeat forever.")
    seed = operator.index(seed)
    if not 0 <= seed < 1 << 32:
        raise DataError(f"seed must be from 0 to 2**32 - 1; got {seed}.")
    return int(seed)


def start_of(state: Mapping[str, Any], *, seed: int, fingerprint: str) -> int:
    """Returns the row to resume from; raises if the state belongs to other data or another seed."""
    if state["fingerprint"] != fingerprint:
        raise DataError(
            f"the data changed since the state was saved: fingerprint {fingerprint[:12]} instead of "
            f"{str(state['fingerprint'])[:12]}, so row {state['next_row']} is a different one.",
            hint="resume with the same texts, tokenizer, row length and validation share, or start a new run.",
        )
    if state["seed"] != seed:
        raise DataError(
            f"the state was saved with seed {state['seed']}, but this run has seed {seed}: the new order would repeat "
            "some rows and skip others.",
            hint=f"use seed {state['seed']}.",
        )
    return int(state["next_row"])
