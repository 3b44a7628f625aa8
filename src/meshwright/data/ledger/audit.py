"""Reading a ledger: was every row seen exactly once in each epoch, over all restarts?"""

from __future__ import annotations

import collections
import itertools
import json
import os
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.data.ledger.journal import ledger_files
from meshwright.errors import DataError

_MOST_PROBLEMS = 20


@dataclass(frozen=True)
class LedgerReport:
    """What a ledger says. `problems` is empty where every row was seen once in each epoch.

    Attributes:
        num_steps: how many steps count: those of the latest start that did them.
        num_starts: how often the run was started.
        num_rows: how many rows these steps had.
        num_redone: how many steps were done more than once, after a kill.
        rows_per_epoch: how many rows the data has; None for a job that draws its batches.
        epochs: for each epoch that was begun, how many of its rows were seen.
        notes: what is worth knowing and no problem: steps that a kill left unfinished, rows passed over on purpose.
    """

    num_steps: int
    num_starts: int
    num_rows: int
    num_redone: int
    rows_per_epoch: int | None
    epochs: list[int]
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.problems

    def require(self) -> LedgerReport:
        """Returns the report; raises `DataError` with it where something is wrong."""
        if self.problems:
            raise DataError(str(self))
        return self

    def __str__(self) -> str:
        size = "" if self.rows_per_epoch is None else f", of {self.rows_per_epoch:,} in an epoch"
        redone = f" ({self.num_redone} done again)" if self.num_redone else ""
        counts = [
            f"{number:,} {thing}{'' if number == 1 else 's'}"
            for number, thing in ((self.num_steps, "step"), (self.num_starts, "start"), (self.num_rows, "row"))
        ]
        head = f"{'fine' if self.ok else 'WRONG'}: {counts[0]}{redone}, {counts[1]}; {counts[2]}{size}"
        once = ", each once" if self.ok else ""
        epochs = [f"epoch {n}: {seen:,} of {self.rows_per_epoch:,} rows{once}" for n, seen in enumerate(self.epochs)]
        told = [f"note: {note}" for note in self.notes] + [f"problem: {problem}" for problem in self.problems]
        return "\n".join([head, *epochs, *told])


def check_ledger(
    folder: str | os.PathLike[str],
    *,
    rows_per_epoch: int | None = None,
    upto_step: int | None = None,
    done: Collection[int] = (),
) -> LedgerReport:
    """Reads what all processes of all starts of a run have written, and says whether each row was seen once.

    Of a step that was done again after a kill, the latest counts; it must have had the same rows. The number of
    processes and the batch size may have changed between starts.

    Args:
        rows_per_epoch: how many rows the data has; the ledger says so itself where it is left out.
        upto_step: the last step to look at. Without it all are, and where a kill came while processes wrote, the
            last step may lack some of them: that is a note.
        done: steps that the run has done, as its metrics and checkpoints say: from its first step on, a ledger must
            have them.
    """
    if upto_step is not None and upto_step < 1:
        raise DataError(f"upto_step={upto_step} is no step.", hint="steps are counted from 1.")
    starts, lost = _read(Path(folder))
    notes = [note for start in starts for note in start.notes] + list(lost.values())
    sizes = sorted(filter(None, {rows_per_epoch, *(start.facts.get("rows_per_epoch") for start in starts)}))
    per_epoch = rows_per_epoch or (sizes[0] if sizes else None)
    problems = [*_differences(starts, sizes), *_moved_rows(starts)]

    times = collections.Counter(step for start in starts for step in start.steps)
    counted = _latest(starts)
    steps = [step for step in sorted(counted) if upto_step is None or step <= upto_step]
    if upto_step is None:
        notes += _drop_unfinished(steps, counted, {step for step in done if times[step] <= 1})
    elif upto_step not in counted:
        there = f"ends with step {steps[-1]}, before step {upto_step}" if steps else f"has no step up to {upto_step}"
        problems.append(f"the ledger {there}")
    problems += _lost_beginning(starts, lost, counted)
    # A line is written before its step is done: from the first one on, each step that was done must have one.
    wanted = {step for step in done if upto_step is None or step <= upto_step}
    if missing := sorted(step for step in wanted if step not in times and step > min(times, default=0)):
        problems.append(f"the run has done steps that are not in its ledger, and not proven: {_some(missing)}")
    seen = _follow([(step, counted[step]) for step in steps], problems, notes)
    epochs = _count_epochs(seen, per_epoch, problems)
    rest = len(problems) - _MOST_PROBLEMS
    return LedgerReport(
        num_steps=len(steps),
        num_starts=len(starts),
        num_rows=len(seen),
        num_redone=sum(number > 1 for number in times.values()),
        rows_per_epoch=per_epoch,
        epochs=epochs,
        problems=problems[:_MOST_PROBLEMS] + ([f"and {rest} more"] if rest > 0 else []),
        notes=notes,
    )


# --- Reading the files ---


@dataclass
class _Entry:
    """What the processes of one start have written about one step."""

    first_row: int
    num_rows: int
    start: _Start
    rows: dict[int, int] = field(default_factory=dict)  # by position
    ranks: list[int] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


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


def _read(folder: Path) -> tuple[list[_Start], dict[int, str]]:
    """Returns the starts in order, and of which nothing is left: their numbers, and what to say of them."""
    try:
        files = ledger_files(folder)
        contents = {numbers: _lines(path) for numbers, path in files.items()}
    except OSError as error:
        raise DataError(
            f"cannot read {error.filename}: {error.strerror}.", hint="who may read the run's files?"
        ) from None
    if not files:
        raise DataError(f"there is no ledger in {str(folder)!r}.", hint="the run must be started with its ledger on.")
    starts: dict[int, _Start] = {}
    lost = {number: f"start {number}: its files are gone" for number in range(1, max(files)[0])}
    for (number, rank), (lines, torn) in contents.items():
        lost.pop(number, None)
        if not lines:  # killed before its first line
            continue
        start = starts.setdefault(number, _Start(number, lines[0]))
        if torn:
            start.notes.append(f"start {number}, rank {rank}: the last line is not whole, as a kill leaves it")
        for line in lines[1:]:
            start.add(rank, line)
    for number, rank in files:
        if number not in starts:
            lost[number] = f"start {number}, rank {rank}: not even its first line is whole"
    return [starts[number] for number in sorted(starts)], dict(sorted(lost.items()))


def _lines(path: Path) -> tuple[list[dict[str, Any]], bool]:
    texts = path.read_bytes().split(b"\n")
    # Every whole line ends with a newline, so the last text is empty unless a kill cut it.
    torn = texts.pop() != b""
    return [_line(path, number, text) for number, text in enumerate(texts, 1)], torn


def _line(path: Path, number: int, text: bytes) -> dict[str, Any]:
    try:
        line = json.loads(text.decode("utf-8"))
        if not isinstance(line, dict):
            raise ValueError("not an object")
        if number > 1:
            _require_batch(line)
        elif type(line.get("next_row", 0)) is not int:
            raise ValueError("a first row that is no whole number")
    except ValueError as error:  # what is no text and what is no JSON are such errors as well
        raise DataError(
            f"{path} is damaged in line {number}: {error}.", hint="nothing but a ledger should write there."
        ) from None
    return line


def _require_batch(line: dict[str, Any]) -> None:
    rows, positions = line.get("rows"), line.get("positions")
    if not isinstance(rows, list) or not isinstance(positions, list):
        raise ValueError("no rows")
    if any(not isinstance(pair, list) or len(pair) != 2 for pair in positions):
        raise ValueError("positions that are no pairs")
    numbers = [*(line.get(name) for name in ("step", "first_row", "num_rows")), *rows, *itertools.chain(*positions)]
    if any(type(number) is not int for number in numbers):
        raise ValueError("not all that should be are whole numbers")


# --- What starts say of each other ---


def _differences(starts: list[_Start], sizes: list[int]) -> list[str]:
    """Returns how starts differ in what they must have in common."""
    problems = [] if starts else ["no file of this ledger has a whole first line, so nothing is proven"]
    if len(sizes) > 1:
        problems.append(f"starts differ in how many rows the data has: {', '.join(map(str, sizes))}")
    for name in ("seed", "fingerprint"):
        values = list(dict.fromkeys(str(start.facts[name])[:12] for start in starts if name in start.facts))
        if len(values) > 1:
            problems.append(f"starts differ in {name}: {', '.join(values)}")
    return problems


def _moved_rows(starts: list[_Start]) -> list[str]:
    """Returns the positions that had another row when they were done again."""
    problems = []
    known: dict[int, tuple[int, int, int]] = {}
    for start in starts:
        for step, entry in start.steps.items():
            for place, row in entry.rows.items():
                first = known.setdefault(place, (row, step, start.number))
                if first[0] != row:
                    problems.append(
                        f"position {place} had row {first[0]} (step {first[1]} of start {first[2]}), and row {row} "
                        f"when it was done again (step {step} of start {start.number})"
                    )
    return problems


def _latest(starts: list[_Start]) -> dict[int, _Entry]:
    """Returns what counts for each step.

    A start takes back all that came before from its first step on, also what it has not yet done again.
    """
    counted: dict[int, _Entry] = {}
    for start in starts:
        if start.steps:
            counted = {step: entry for step, entry in counted.items() if step < min(start.steps)}
        counted |= start.steps
    return counted


def _lost_beginning(starts: list[_Start], lost: dict[int, str], counted: dict[int, _Entry]) -> list[str]:
    """Returns that a ledger which begins later than with step 1 has lost its beginning, where it has.

    Starts are numbered from 1, and the first line of each says at which row it began, so this can be known.
    """
    step = min(counted, default=1)
    if step == 1:
        return []
    entry = counted[step]
    row = min([entry.first_row, *(skipped["first_row"] for skipped in entry.start.facts.get("skipped", ()))])
    before = [number for number in lost if number < entry.start.number]
    until = [start for start in starts if start.number <= entry.start.number]
    earlier = [start for start in until if start.facts.get("next_row", row) < row]
    if earlier:
        why = f"start {earlier[0].number} began at row {earlier[0].facts['next_row']}"
    elif before:
        why = f"nothing is left of start {before[0]}"
    else:
        return []
    return [f"steps 1 to {step - 1} are not proven: {why}, and the first step that is written down is {step}"]


def _drop_unfinished(steps: list[int], counted: dict[int, _Entry], done: Collection[int]) -> list[str]:
    """Drops steps at the end that not all processes have written down, unless they are known to have been done."""
    notes = []
    while steps and steps[-1] not in done:
        entry = counted[steps[-1]]
        ranks = entry.start.facts.get("num_ranks", 1)
        if len(entry.ranks) >= ranks:
            break
        notes.append(f"step {steps.pop()} is unfinished: {len(entry.ranks)} of {ranks} processes wrote it down")
    return notes


# --- Following the rows ---


def _follow(steps: list[tuple[int, _Entry]], problems: list[str], notes: list[str]) -> dict[int, int]:
    """Goes through the steps in order; returns the row at each position."""
    seen: dict[int, int] = {}
    next_row, next_step = 0, steps[0][0] if steps else 1
    start: _Start | None = None
    if next_step > 1:
        next_row = steps[0][1].first_row
        notes.append(f"the ledger begins with step {next_step}, at row {next_row}; of steps before, it says nothing")
    for step, entry in steps:
        problems += entry.problems
        if step != next_step:
            problems.append(f"steps {next_step} to {step - 1} are missing")
        for skipped in entry.start.facts.get("skipped", ()) if entry.start is not start else ():
            if next_row == skipped["first_row"]:
                next_row += skipped["num_rows"]
                notes.append(
                    f"{skipped['num_rows']} rows from {skipped['first_row']} on were passed over: {skipped['why']}"
                )
        begin = f"step {step} begins at row {entry.first_row}"
        if entry.first_row > next_row:
            problems.append(f"{begin}: rows {next_row} to {entry.first_row - 1} were lost")
        elif entry.first_row < next_row:
            problems.append(f"{begin}: rows up to {next_row - 1} were seen before")
        start, next_step, next_row = entry.start, step + 1, entry.first_row + entry.num_rows
        if missing := [place for place in range(entry.first_row, next_row) if place not in entry.rows]:
            problems.append(f"step {step}: no process had the rows at positions {_some(missing)}")
        seen |= entry.rows
    return seen


def _count_epochs(seen: dict[int, int], per_epoch: int | None, problems: list[str]) -> list[int]:
    if not seen:
        return []
    places, rows = (np.fromiter(values, np.int64, len(seen)) for values in (seen.keys(), seen.values()))
    if per_epoch is None:
        if len(np.unique(rows)) != len(rows):
            problems.append("rows were seen more than once")
        return []
    outside = rows[(rows < 0) | (rows >= per_epoch)]
    if len(outside):
        problems.append(f"rows {_some(outside)} do not exist: the data has {per_epoch}")
    found = []
    for epoch in range(int(places.max()) // per_epoch + 1):
        mine = rows[places // per_epoch == epoch]
        values, counts = np.unique(mine, return_counts=True)
        found.append(len(values))
        if (counts > 1).any():
            problems.append(f"epoch {epoch}: rows {_some(values[counts > 1])} were seen more than once")
        if len(mine) == per_epoch and len(values) < per_epoch:
            problems.append(f"epoch {epoch}: rows {_some(np.setdiff1d(np.arange(per_epoch), values))} were never seen")
    return found


def _some(numbers: Iterable[int]) -> str:
    numbers = list(numbers)
    return ", ".join(map(str, numbers[:5])) + (f" and {len(numbers) - 5} more" if len(numbers) > 5 else "")
