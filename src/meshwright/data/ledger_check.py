"""Reading a ledger: was every row seen exactly once in each epoch, over all restarts?"""

from __future__ import annotations

import collections
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.data.ledger import ledger_files
from meshwright.data.ledger_report import LedgerReport
from meshwright.errors import DataError

_MOST_PROBLEMS = 20


def check_ledger(
    folder: str | os.PathLike[str], *, rows_per_epoch: int | None = None, upto_step: int | None = None
) -> LedgerReport:
    """Reads what all processes of all starts of a run have written, and says whether each row was seen once.

    Of a step that was done again after a kill, the latest counts; it must have had the same rows. The number of
    processes and the batch size may have changed between starts.

    Args:
        rows_per_epoch: how many rows the data has; the ledger says so itself where it is left out.
        upto_step: the last step to look at. Without it all are, and where a kill came while processes wrote, the
            last step may lack some of them: that is a note.
    """
    starts = _read(Path(folder))
    problems = _Problems()
    notes = [note for start in starts for note in start.notes]
    sizes = sorted({start.facts.get("rows_per_epoch") or 0 for start in starts} | {rows_per_epoch or 0})
    sizes = [size for size in sizes if size]
    if len(sizes) > 1:
        problems.add(f"starts differ in how many rows the data has: {', '.join(map(str, sizes))}")
    per_epoch = rows_per_epoch or (sizes[0] if sizes else None)
    for name in ("seed", "fingerprint"):
        values = list(dict.fromkeys(str(start.facts[name])[:12] for start in starts if name in start.facts))
        if len(values) > 1:
            problems.add(f"starts differ in {name}: {', '.join(values)}")
    _same_rows_at_same_place(starts, problems)

    counted, num_redone = _latest(starts)
    steps = [step for step in sorted(counted) if upto_step is None or step <= upto_step]
    if upto_step is None:
        steps, unfinished = _without_unfinished(steps, counted)
        notes += unfinished
    elif upto_step not in counted and steps:
        problems.add(f"the ledger ends with step {steps[-1]}, before step {upto_step}")
    seen = _follow(steps, counted, problems, notes)
    epochs = _count_epochs(seen, per_epoch, problems)
    return LedgerReport(
        num_steps=len(steps),
        num_starts=len(starts),
        num_rows=len(seen),
        num_redone=num_redone,
        rows_per_epoch=per_epoch,
        epochs=epochs,
        problems=problems.lines(),
        notes=notes,
    )


@dataclass
class _Entry:
    """What the processes of one start have written about one step."""

    first_row: int
    num_rows: int
    start: _Start
    rows: dict[int, int] = field(default_factory=dict)  # by position
    ranks: list[int] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def missing(self) -> list[int]:
        return [place for place in range(self.first_row, self.first_row + self.num_rows) if place not in self.rows]


@dataclass
class _Start:
    number: int
    facts: dict[str, Any]
    steps: dict[int, _Entry] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def add(self, rank: int, line: dict[str, Any]) -> None:
        entry = self.steps.setdefault(line["step"], _Entry(line["first_row"], line["num_rows"], self))
        where = f"step {line['step']} of start {self.number}, rank {rank}"
        if (entry.first_row, entry.num_rows) != (line["first_row"], line["num_rows"]):
            entry.problems.append(f"{where}: other rows than on rank {entry.ranks[0]}")
        if rank in entry.ranks:
            entry.problems.append(f"{where}: written twice")
        entry.ranks.append(rank)
        places = [place for first, count in line["positions"] for place in range(first, first + count)]
        if len(places) != len(line["rows"]):
            entry.problems.append(f"{where}: {len(line['rows'])} rows at {len(places)} positions")
        for place, row in zip(places, line["rows"], strict=False):
            if entry.rows.setdefault(place, row) != row:
                entry.problems.append(
                    f"{where}: row {row} at position {place}, where rank {entry.ranks[0]} has another"
                )


class _Problems:
    """Collects problems, of which a few are enough."""

    def __init__(self) -> None:
        self._lines: list[str] = []

    def add(self, line: str) -> None:
        self._lines.append(line)

    def lines(self) -> list[str]:
        rest = len(self._lines) - _MOST_PROBLEMS
        return self._lines[:_MOST_PROBLEMS] + ([f"and {rest} more"] if rest > 0 else [])


def _read(folder: Path) -> list[_Start]:
    files = ledger_files(folder)
    if not files:
        raise DataError(f"there is no ledger in {str(folder)!r}.", hint="the run must be started with its ledger on.")
    starts: dict[int, _Start] = {}
    for (number, rank), path in files.items():
        lines, torn = _lines(path)
        if not lines:
            continue  # killed before its first line
        start = starts.setdefault(number, _Start(number, lines[0]))
        if torn:
            start.notes.append(f"start {number}, rank {rank}: the last line is not whole, as a kill leaves it")
        for line in lines[1:]:
            start.add(rank, line)
    return [starts[number] for number in sorted(starts)]


def _lines(path: Path) -> tuple[list[dict[str, Any]], bool]:
    texts = path.read_text(encoding="utf-8").split("\n")
    # Every whole line ends with a newline, so the last text is empty unless a kill cut it.
    torn = texts.pop() != ""
    try:
        return [json.loads(text) for text in texts], torn
    except json.JSONDecodeError as error:
        raise DataError(f"{path} is damaged: {error}.", hint="nothing but a ledger should write there.") from None


def _same_rows_at_same_place(starts: list[_Start], problems: _Problems) -> None:
    known: dict[int, tuple[int, int, int]] = {}
    for start in starts:
        for step, entry in start.steps.items():
            for place, row in entry.rows.items():
                first = known.setdefault(place, (row, step, start.number))
                if first[0] != row:
                    problems.add(
                        f"position {place} had row {first[0]} (step {first[1]} of start {first[2]}), and row {row} "
                        f"when it was done again (step {step} of start {start.number})"
                    )


def _latest(starts: list[_Start]) -> tuple[dict[int, _Entry], int]:
    """Returns what counts for each step, and how many were done again.

    A start takes back all that came before from its first step on, also what it has not yet done again.
    """
    counted: dict[int, _Entry] = {}
    times: collections.Counter[int] = collections.Counter()
    for start in starts:
        if start.steps:
            counted = {step: entry for step, entry in counted.items() if step < min(start.steps)}
        counted |= start.steps
        times.update(list(start.steps))
    return counted, sum(number > 1 for number in times.values())


def _without_unfinished(steps: list[int], counted: dict[int, _Entry]) -> tuple[list[int], list[str]]:
    """Drops steps at the end that not all processes have written down."""
    notes = []
    while steps:
        entry = counted[steps[-1]]
        ranks = entry.start.facts.get("num_ranks", 1)
        if len(entry.ranks) >= ranks:
            break
        notes.append(f"step {steps.pop()} is unfinished: {len(entry.ranks)} of {ranks} processes wrote it down")
    return steps, notes


def _follow(steps: list[int], counted: dict[int, _Entry], problems: _Problems, notes: list[str]) -> dict[int, int]:
    """Goes through the steps in order; returns the row at each position."""
    seen: dict[int, int] = {}
    next_row = 0
    previous: _Start | None = None
    if steps and steps[0] > 1:
        next_row = counted[steps[0]].first_row
        notes.append(f"the ledger begins with step {steps[0]}, at row {next_row}; of steps before, it says nothing")
    for before, step in zip([None, *steps], steps, strict=False):
        entry = counted[step]
        for told in entry.problems:
            problems.add(told)
        if before is not None and step != before + 1:
            problems.add(f"steps {before + 1} to {step - 1} are missing")
        if entry.start is not previous:
            for skipped in entry.start.facts.get("skipped", ()):
                if next_row == skipped["first_row"]:
                    next_row += skipped["num_rows"]
                    notes.append(
                        f"{skipped['num_rows']} rows from {skipped['first_row']} on were passed over: {skipped['why']}"
                    )
        begin = f"step {step} begins at row {entry.first_row}"
        if entry.first_row > next_row:
            problems.add(f"{begin}: rows {next_row} to {entry.first_row - 1} were lost")
        elif entry.first_row < next_row:
            problems.add(f"{begin}: rows up to {next_row - 1} were seen before")
        if missing := entry.missing():
            problems.add(f"step {step}: no process had the rows at positions {_some(missing)}")
        seen |= entry.rows
        next_row, previous = entry.first_row + entry.num_rows, entry.start
    return seen


def _count_epochs(seen: dict[int, int], per_epoch: int | None, problems: _Problems) -> list[int]:
    if not seen:
        return []
    places, rows = (np.fromiter(values, np.int64, len(seen)) for values in (seen.keys(), seen.values()))
    if per_epoch is None:
        if len(np.unique(rows)) != len(rows):
            problems.add("rows were seen more than once")
        return []
    outside = rows[(rows < 0) | (rows >= per_epoch)]
    if len(outside):
        problems.add(f"rows {_some(outside)} do not exist: the data has {per_epoch}")
    found = []
    for epoch in range(int(places.max()) // per_epoch + 1):
        mine = rows[places // per_epoch == epoch]
        values, counts = np.unique(mine, return_counts=True)
        found.append(len(values))
        if (counts > 1).any():
            problems.add(f"epoch {epoch}: rows {_some(values[counts > 1])} were seen more than once")
        if len(mine) == per_epoch and len(values) < per_epoch:
            problems.add(f"epoch {epoch}: rows {_some(np.setdiff1d(np.arange(per_epoch), values))} were never seen")
    return found


def _some(numbers: Iterable[int]) -> str:
    numbers = list(numbers)
    return ", ".join(str(number) for number in numbers[:5]) + (
        f" and {len(numbers) - 5} more" if len(numbers) > 5 else ""
    )
