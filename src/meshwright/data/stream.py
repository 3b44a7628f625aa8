"""Streams of batches: what is next, read ahead in background threads; where a run stands, counted in rows."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from meshwright.errors import DataError
from meshwright.types import PyTree

# From the shapes of a batch to how its arrays are split, as `Step.batch_shardings` says.
Shardings = Callable[[PyTree], PyTree]


@dataclass(frozen=True, eq=False)
class PlacedBatch:
    """A batch on the mesh.

    Attributes:
        arrays: global arrays, rows first.
        first_row: where the batch begins in the order of all rows, which goes on over epochs.
        num_rows: of the whole batch, on all processes.
        row_ids: which rows of the data this process read.
        positions: where in the order of all rows each of these is.
    """

    arrays: PyTree
    first_row: int
    num_rows: int
    row_ids: np.ndarray
    positions: np.ndarray


class Writer(Protocol):
    """Keeps a record of what was read, as `Ledger` does."""

    def begin(self, facts: Mapping[str, Any]) -> None: ...

    def append(self, step: int, batch: PlacedBatch) -> None: ...


class BatchStream(Iterator[PlacedBatch]):
    """An iterator over batches that reads ahead.

    A position is a number of rows, not of batches: a run that goes on from `state` may have another batch size, mesh
    and number of processes. The end of the data is the same for all processes, since it is counted in rows of all.
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
        prefetch: int = 2,
        ledger: Writer | None = None,
        first_step: int = 1,
    ) -> None:
        import grain

        if prefetch < 0:
            raise DataError(f"prefetch={prefetch} batches cannot be read ahead.", hint="0 or more.")
        self.batch_size = batch_size
        self.stop_row = stop_row
        self._next_row = start_row
        self._facts = {"seed": seed, "fingerprint": fingerprint}
        self._load = load
        self._start_row = start_row
        self._ledger = ledger
        self._step = first_step
        self._error: BaseException | None = None
        self._closing = False
        self._reading = 0
        self._idle = threading.Condition()
        length = sys.maxsize // batch_size if self.num_left is None else self.num_left
        # One element is one batch: threads take whole batches, and hand them out in order.
        options = grain.ReadOptions(num_threads=min(prefetch, 4), prefetch_buffer_size=prefetch)
        self._batches: Any = iter(grain.MapDataset.range(length).map(self._read).to_iter_dataset(options))
        if ledger is not None:
            ledger.begin({**self.state, "batch_size": batch_size, "rows_per_epoch": rows_per_epoch})
        if length:
            self._batches.start_prefetch()

    @property
    def state(self) -> dict[str, Any]:
        """Where the stream stands after the batch that was last handed out; JSON can hold it."""
        return {"next_row": self._next_row, **self._facts}

    @property
    def num_left(self) -> int | None:
        """How many batches are left; None where the data never ends."""
        return None if self.stop_row is None else max(self.stop_row - self._next_row, 0) // self.batch_size

    def require_steps(self, num_steps: int) -> None:
        """Raises where the data ends before this many more batches; the same on all processes."""
        if self.num_left is not None and num_steps > self.num_left:
            assert self.stop_row is not None
            rows = max(self.stop_row - self._next_row, 0)
            raise DataError(
                f"the data is used up after {self.num_left} of {num_steps} steps: from row {self._next_row} on there "
                f"are {rows} rows, and {num_steps} steps of {self.batch_size} rows need "
                f"{num_steps * self.batch_size}.",
                hint="more epochs (None for no end), more data, or fewer steps.",
            )

    def __next__(self) -> PlacedBatch:
        if self._error is not None:
            raise self._error
        if self._closing:
            raise DataError("the batches were closed.", hint="make new ones, from the state of these.")
        try:
            batch: PlacedBatch = next(self._batches)
        except StopIteration:
            raise
        except BaseException as error:
            # Were we to go on, the batch that failed would be missing without a trace.
            self._error = error
            self.close()
            raise
        assert batch.first_row == self._next_row, (batch.first_row, self._next_row)
        if self._ledger is not None:
            self._ledger.append(self._step, batch)
        self._step += 1
        self._next_row += self.batch_size
        return batch

    def close(self) -> None:
        """Ends reading; returns when no thread reads any more."""
        with self._idle:
            self._closing = True
        self._batches.close()
        with self._idle:
            self._idle.wait_for(lambda: self._reading == 0)

    def __enter__(self) -> BatchStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read(self, number: int) -> PlacedBatch | None:
        with self._idle:
            if self._closing:
                return None
            self._reading += 1
        try:
            return self._load(self._start_row + int(number) * self.batch_size)
        except StopIteration as error:
            # It would be taken for the end of the data.
            raise DataError("reading rows raised StopIteration.") from error
        finally:
            with self._idle:
                self._reading -= 1
                self._idle.notify_all()


def start_of(state: Mapping[str, Any], *, seed: int, fingerprint: str) -> int:
    """Returns the row to go on from; raises where a state belongs to other data or another order."""
    if state["fingerprint"] != fingerprint:
        raise DataError(
            f"the data is not what it was when the state was saved: fingerprint {fingerprint[:12]} instead of "
            f"{str(state['fingerprint'])[:12]}. Row {state['next_row']} of it would be another one.",
            hint="go on with the same texts, tokenizer, row length and validation share, or start a new run.",
        )
    if state["seed"] != seed:
        raise DataError(
            f"the state was saved with seed {state['seed']}, this run has seed {seed}: rows would come in another "
            "order, some twice and some never.",
            hint=f"seed={state['seed']}.",
        )
    return int(state["next_row"])
