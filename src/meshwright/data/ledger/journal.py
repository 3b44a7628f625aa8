"""The ledger: a record of every row that a run was trained on, kept by each process beside the run.

Each start of a run writes files of its own, one per process, named `start-0001.rank-00000.jsonl`. The first line says
what the start had before it; every other line is a batch, written before its step is done. Rows are given by their
number and by their position in the order of all rows, so that it can be told which were read twice because two
processes hold them.
"""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Callable, Mapping
from io import FileIO
from pathlib import Path
from typing import Any

import jax
import numpy as np

from meshwright.data.stream import PlacedBatch
from meshwright.distributed.agreement import from_first
from meshwright.errors import DataError, MeshwrightWarning

FILE_NAME = re.compile(r"start-(\d+)\.rank-(\d+)\.jsonl")


class Ledger:
    """Writes down the batches of one process; pass it to `Batches`. `check_ledger` reads what all have written.

    Args:
        folder: of the run's ledger, which all processes share.
        rank: of this process; JAX's own when left out.
        num_ranks: how many processes there are; JAX knows when left out.
        start: which start of the run this is; the next after those in the folder when left out.
        tell: called with a line of text when the disk is full; a warning when left out.

    Example:
        >>> import tempfile
        >>> from meshwright.data import check_ledger
        >>> folder = tempfile.mkdtemp()
        >>> with Ledger(folder) as ledger:
        ...     ledger.begin({"next_row": 0, "rows_per_epoch": 4})
        ...     ledger.append(1, PlacedBatch(None, 0, 2, np.array([3, 1]), np.array([0, 1])))
        >>> print(check_ledger(folder))
        fine: 1 step, 1 start; 2 rows, of 4 in an epoch
        epoch 0: 2 of 4 rows, each once
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        rank: int | None = None,
        *,
        num_ranks: int | None = None,
        start: int | None = None,
        tell: Callable[[str], None] | None = None,
    ) -> None:
        self.folder = Path(folder)
        self.rank = jax.process_index() if rank is None else rank
        self.num_ranks = jax.process_count() if num_ranks is None else num_ranks
        self._start = start
        self._tell = tell
        self._file: FileIO | None = None
        self._unwritten = b""
        self._told = False
        self._skipped: list[dict[str, Any]] = []

    def begin(self, facts: Mapping[str, Any]) -> None:
        """Opens the files of a new start; all processes call it, and `Batches` does it for you."""
        self.close()
        self.folder.mkdir(parents=True, exist_ok=True)
        number = self._start
        if number is None:
            number = 1 + max((start for start, _ in ledger_files(self.folder)), default=0)
            # What other ranks see of a shared folder may be a little older.
            number = number if self.num_ranks == 1 else from_first(number)
        else:
            self._start = number + 1
        path = self.folder / f"start-{number:04}.rank-{self.rank:05}.jsonl"
        try:
            self._file = path.open("xb", buffering=0)
        except FileExistsError:
            raise DataError(
                f"{path} is there already, and what is in a ledger stays.", hint="does another run write to it?"
            ) from None
        self._write({**facts, "rank": self.rank, "num_ranks": self.num_ranks, "skipped": self._skipped})
        self._skipped = []

    def skip(self, first_row: int, num_rows: int, *, why: str) -> None:
        """Writes down that rows are passed over on purpose, by the start that comes next."""
        self._skipped.append({"first_row": int(first_row), "num_rows": int(num_rows), "why": why})

    def append(self, step: int, batch: PlacedBatch) -> None:
        """Writes down the batch of a step."""
        if self._file is None:
            raise DataError("the ledger was not begun.", hint="pass it to Batches(..., ledger=ledger).")
        self._write(
            {
                "step": int(step),
                "first_row": int(batch.first_row),
                "num_rows": int(batch.num_rows),
                "positions": _as_ranges(batch.positions),
                "rows": batch.row_ids.tolist(),
            }
        )

    def close(self) -> None:
        """Closes the file; a ledger can be begun again."""
        if self._file is not None:
            self._flush()
            self._file.close()
            self._file, self._unwritten = None, b""

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write(self, entry: dict[str, Any]) -> None:
        self._unwritten += json.dumps(entry, separators=(",", ":")).encode() + b"\n"
        self._flush()

    def _flush(self) -> None:
        """Hands everything to the system, so that a kill of this process loses nothing.

        A full disk does not stop a run: what does not fit is kept, and written when there is room.
        """
        assert self._file is not None
        try:
            while self._unwritten:
                self._unwritten = self._unwritten[self._file.write(self._unwritten) :]
            self._told = False
        except OSError as error:
            if not self._told:
                self._told = True
                told = f"the ledger {self._file.name} cannot be written now: {error.strerror}"
                self._tell(told) if self._tell else warnings.warn(told, MeshwrightWarning, stacklevel=3)


def ledger_files(folder: Path) -> dict[tuple[int, int], Path]:
    """Returns the files of a ledger by the numbers of start and rank, in order."""
    matches = [(FILE_NAME.fullmatch(path.name), path) for path in folder.iterdir()] if folder.is_dir() else []
    return dict(sorted(((int(match[1]), int(match[2])), path) for match, path in matches if match))


def _as_ranges(positions: np.ndarray) -> list[list[int]]:
    """Returns numbers as runs of neighbours: `[[first, count], ...]`."""
    if not len(positions):
        return []
    breaks = np.flatnonzero(np.diff(positions) != 1) + 1
    return [[int(run[0]), len(run)] for run in np.split(positions, breaks)]
