"""The ledger: a record of every row that a run trains on, written by each process.

Each start of a run writes new files, one per process, named `start-0001.rank-00000.jsonl`. The first line describes the
start; every other line is a batch, written before its step runs. Rows are given by number and by position in the order
of all rows, which tells a row that two processes hold from a row that was read twice. In a mixture, each row also has
the number of its source and the position in the order of that source.
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
from meshwright.distributed.agreement import gather_texts
from meshwright.errors import DataError, MeshwrightWarning

FILE_NAME = re.compile(r"start-(\d+)\.rank-(\d+)\.jsonl")


class Ledger:
    """Records the batches of one process; pass it to `Batches`. `check_ledger` checks the records of all processes.

    Args:
        folder: the run's ledger folder, shared by all processes.
        rank: rank of this process (default: from JAX).
        num_ranks: number of processes (default: from JAX).
        start: number of this start of the run (default: the next one in the folder).
        tell: called with a line of text if the disk is full (default: a warning).

    Example:
        >>> import tempfile
        >>> from meshwright.data import check_ledger
        >>> folder = tempfile.mkdtemp()
        >>> with Ledger(folder) as ledger:
        ...     ledger.begin({"next_row": 0, "rows_per_epoch": 4})
        ...     ledger.append(1, PlacedBatch(None, 0, 2, np.array([3, 1]), np.array([0, 1])))
        >>> print(check_ledger(folder))
        ok: 1 step, 1 start, 2 rows (4 per epoch)
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
        """Opens the files of a new start. Every process must call it; `Batches` does."""
        self.close()
        self.folder.mkdir(parents=True, exist_ok=True)
        number = self._start
        if number is None:
            number = 1 + max((start for start, _ in ledger_files(self.folder)), default=0)
            # Other ranks may see an older state of the shared folder, or have folders of their own.
            number = number if self.num_ranks == 1 else max(map(int, gather_texts(str(number))))
        else:
            self._start = number + 1
        path = self.folder / f"start-{number:04}.rank-{self.rank:05}.jsonl"
        try:
            self._file = path.open("xb", buffering=0)
        except FileExistsError:
            raise DataError(
                f"{path} already exists; a ledger is never overwritten.", hint="give each run its own folder."
            ) from None
        self._write({**facts, "rank": self.rank, "num_ranks": self.num_ranks, "skipped": self._skipped})
        self._skipped = []

    def skip(
        self, first_row: int, num_rows: int, *, why: str, sources: Mapping[str, tuple[int, int]] | None = None
    ) -> None:
        """Records that rows are skipped on purpose, in the first line of the next start.

        Args:
            sources: in a mixture, the first position and the number of rows in the order of each source.
        """
        entry: dict[str, Any] = {"first_row": int(first_row), "num_rows": int(num_rows), "why": why}
        if sources is not None:
            entry["sources"] = {name: [int(first), int(count)] for name, (first, count) in sources.items()}
        self._skipped.append(entry)

    def append(self, step: int, batch: PlacedBatch) -> None:
        """Records the batch of a step."""
        if self._file is None:
            raise DataError("the ledger has not begun a start.", hint="pass it to Batches(..., ledger=ledger).")
        line = {
            "step": int(step),
            "first_row": int(batch.first_row),
            "num_rows": int(batch.num_rows),
            "positions": _as_ranges(batch.positions),
            "rows": batch.row_ids.tolist(),
        }
        if batch.sources is not None and batch.source_positions is not None:
            line |= {"sources": batch.sources.tolist(), "source_positions": batch.source_positions.tolist()}
        self._write(line)

    def close(self) -> None:
        """Closes the file; `begin` opens the next."""
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
        """Writes everything to the operating system, so that killing this process loses nothing.

        A full disk does not stop a run: the rest is kept in memory and written when there is space.
        """
        assert self._file is not None
        try:
            while self._unwritten:
                self._unwritten = self._unwritten[self._file.write(self._unwritten) :]
            self._told = False
        except OSError as error:
            if not self._told:
                self._told = True
                text = f"cannot write the ledger {self._file.name} now: {error.strerror}"
                self._tell(text) if self._tell else warnings.warn(text, MeshwrightWarning, stacklevel=3)


def ledger_files(folder: Path) -> dict[tuple[int, int], Path]:
    """Returns the files of a ledger by start and rank, in order."""
    matches = [(FILE_NAME.fullmatch(path.name), path) for path in folder.iterdir()] if folder.is_dir() else []
    return dict(sorted(((int(match[1]), int(match[2])), path) for match, path in matches if match))


def _as_ranges(positions: np.ndarray) -> list[list[int]]:
    """Returns numbers as runs of consecutive ones: `[[first, count], ...]`."""
    if not len(positions):
        return []
    breaks = np.flatnonzero(np.diff(positions) != 1) + 1
    return [[int(run[0]), len(run)] for run in np.split(positions, breaks)]
