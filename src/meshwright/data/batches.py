"""Batches of rows: shuffled anew in every epoch, each process reading what its own devices hold."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import jax
import numpy as np

from meshwright.data.host_rows import local_rows, place_rows
from meshwright.data.late import load_grain
from meshwright.data.stream import BatchStream, PlacedBatch, Shardings, Writer, start_of
from meshwright.errors import DataError


class RowSource(Protocol):
    """Rows by number: dicts of arrays, alike in shape. `Rows` is one."""

    fingerprint: str

    def __len__(self) -> int: ...

    def __getitem__(self, index: Any) -> Any: ...


class Batches(BatchStream):
    """Batches of shuffled rows as global arrays on a mesh, read ahead in background threads.

    The order of rows is a function of `seed` and the epoch alone. Epochs follow one another without a gap, so that a
    batch may hold the end of one and the beginning of the next. With `epochs`, iteration ends when no whole batch is
    left, on all processes at the same step.

    Args:
        rows: `Rows`, or anything with a length, numbered rows and a `fingerprint`.
        batch_size: rows of a batch, on all processes together.
        shardings: from a batch's shapes to how its arrays are split, as `Step.batch_shardings` says.
        seed: from 0 up to 2**32 - 1.
        start_row: where to begin in the order of all rows.
        epochs: how often all rows are seen; without end when left out.
        prefetch: how many batches are read and put on devices ahead of the one in use; 0 reads when asked.
        ledger: a `Ledger`, into which every batch that is handed out is written.
        first_step: the number of the step that the first batch is for, in the ledger.
        state: of batches before these, from which to go on; instead of `start_row`.

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
        _require_rows(rows, batch_size)
        seed = operator.index(seed)
        if not 0 <= seed < 1 << 32:
            raise DataError(f"seed={seed} is not from 0 to 2**32 - 1.")
        if epochs is not None and epochs < 1:
            raise DataError(f"epochs={epochs} is no data.", hint="1 or more, or None for no end.")
        if state is not None:
            start_row = start_of(state, seed=seed, fingerprint=rows.fingerprint)
        if start_row < 0:
            raise DataError(f"start_row={start_row} is before the first row.")
        grain = load_grain("reading batches")
        order = grain.MapDataset.source(_Numbered(rows)).seed(seed).shuffle().repeat(epochs)
        placer = _Placer(rows, batch_size, shardings)

        def load(first: int) -> PlacedBatch:
            positions = first + placer.numbers
            return placer.batch(first, positions, [order[int(position)] for position in positions])

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


def eval_batches(
    rows: RowSource, batch_size: int, shardings: Shardings, num_batches: int | None = None, *, prefetch: int = 2
) -> Iterator[PlacedBatch]:
    """Gives the first rows in order, the same every time; all of them where `num_batches` is left out.

    The last batch may have fewer rows than it has room for. It is filled up with zeros, whose weights do not count.
    """
    if not len(rows):
        raise DataError("there are no rows to evaluate on.", hint="a larger share of validation, or shorter rows.")
    placer = _Placer(rows, batch_size, shardings)
    available = -(-len(rows) // batch_size)
    num_batches = available if num_batches is None else min(num_batches, available)
    if len(rows) % batch_size and num_batches == available and "weights" not in placer.example:
        raise DataError(
            f"{len(rows)} rows do not fill batches of {batch_size}, and rows without `weights` cannot be filled up.",
            hint=f"num_batches={len(rows) // batch_size}, or rows with weights.",
        )

    def load(first: int) -> PlacedBatch:
        positions = first + placer.numbers
        found = [(int(place), rows[int(place)]) for place in positions if place < len(rows)]
        return placer.batch(first, positions, found)

    stream = BatchStream(
        load,
        batch_size=batch_size,
        start_row=0,
        stop_row=num_batches * batch_size,
        rows_per_epoch=len(rows),
        seed=0,
        fingerprint=rows.fingerprint,
        prefetch=prefetch,
        ledger=None,
        first_step=1,
    )
    with stream:
        yield from stream


class _Numbered:
    """Rows with their numbers, which a shuffle would otherwise not tell."""

    def __init__(self, rows: RowSource) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: Any) -> tuple[int, Any]:
        return int(index), self._rows[int(index)]


class _Placer:
    """Makes global arrays of the rows that this process's devices need."""

    def __init__(self, rows: RowSource, batch_size: int, shardings: Shardings) -> None:
        self.example = rows[0]
        self.batch_size = batch_size
        self.shapes = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct((batch_size, *np.shape(leaf)), leaf.dtype), self.example
        )
        self.shardings = shardings(self.shapes)
        self.numbers = local_rows(self.shapes, self.shardings)

    def batch(self, first: int, positions: np.ndarray, found: list[tuple[int, Any]]) -> PlacedBatch:
        """Returns a batch from numbered rows; where there are fewer than positions, zeros fill it up."""
        empty = jax.tree.map(np.zeros_like, self.example)
        values = [row for _, row in found] + [empty] * (len(positions) - len(found))
        stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *values)
        return PlacedBatch(
            arrays=place_rows(stacked, self.numbers, self.shapes, self.shardings),
            first_row=first,
            num_rows=self.batch_size,
            row_ids=np.array([number for number, _ in found], np.int64),
            positions=positions[: len(found)],
        )


def _require_rows(rows: RowSource, batch_size: int) -> None:
    if batch_size < 1:
        raise DataError(f"batch_size={batch_size} is no batch.", hint="1 or more.")
    if not len(rows):
        raise DataError("the data is empty: it has no rows.", hint="add text, or use shorter rows.")
    if len(rows) < batch_size:
        raise DataError(
            f"the data has {len(rows)} rows, fewer than one batch of {batch_size}.",
            hint=f"batch_size={len(rows)} or less, shorter rows, or more text.",
        )
