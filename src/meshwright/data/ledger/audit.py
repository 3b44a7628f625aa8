"""Checks a ledger: was every row used exactly once per epoch, over all restarts?"""

from __future__ import annotations

import collections
import itertools
import os
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.bounded_reader import parse_json, read_bytes
from meshwright.data.ledger.journal import ledger_files
from meshwright.data.ledger.mixture_audit import (
    MixedRow,
    check_sources,
    mixed_rows,
    mixture_differences,
    same_mixture,
    some_numbers,
)
from meshwright.errors import DataError

_MOST_PROBLEMS = 20


@dataclass(frozen=True)
class LedgerReport:
    """The result of `check_ledger`. `problems` is empty if every row was used once per epoch.

    Attributes:
        num_steps: number of steps, each as the latest start did it.
        num_starts: number of times the run was started.
        num_rows: number of rows in these steps.
        num_redone: number of steps that were done again after a kill.
        rows_per_epoch: number of rows in the data; None for a job that draws its batches.
        epochs: number of rows used in each epoch.
        sources: for a mixture, the number of rows used in each epoch of each source.
        source_rows: for a mixture, the number of rows of each source.
        notes: other remarks, such as unfinished steps after a kill and rows skipped on purpose.
    """

    num_steps: int
    num_starts: int
    num_rows: int
    num_redone: int
    rows_per_epoch: int | None
    epochs: list[int]
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    sources: dict[str, list[int]] = field(default_factory=dict)
    source_rows: dict[str, int] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return not self.problems

    def require(self) -> LedgerReport:
        """Returns the report; raises `DataError` with its text if there are problems."""
        if self.problems:
            raise DataError(str(self))
        return self

    def __str__(self) -> str:
        size = "" if self.rows_per_epoch is None else f" ({self.rows_per_epoch:,} per epoch)"
        redone = f" ({self.num_redone} redone)" if self.num_redone else ""
        counts = [
            f"{number:,} {thing}{'' if number == 1 else 's'}"
            for number, thing in ((self.num_steps, "step"), (self.num_starts, "start"), (self.num_rows, "row"))
        ]
        head = f"{'ok' if self.ok else 'FAILED'}: {counts[0]}{redone}, {counts[1]}, {counts[2]}{size}"
        once = ", each once" if self.ok else ""
        epochs = [f"epoch {n}: {seen:,} of {self.rows_per_epoch:,} rows{once}" for n, seen in enumerate(self.epochs)]
        epochs += [
            f"{name}, epoch {n}: {seen:,} of {self.source_rows[name]:,} rows{once}"
            for name, counts in self.sources.items()
            for n, seen in enumerate(counts)
        ]
        remarks = [f"note: {note}" for note in self.notes] + [f"problem: {problem}" for problem in self.problems]
        return "\n".join([head, *epochs, *remarks])


def check_ledger(
    folder: str | os.PathLike[str],
    *,
    rows_per_epoch: int | None = None,
    upto_step: int | None = None,
    done: Collection[int] = (),
) -> LedgerReport:
    """Checks the ledgers of all processes and starts of a run: was each row used once per epoch?

    If a step was redone after a kill, the latest counts, and it must have the same rows. The number of processes and
    the batch size may change between starts.

    Args:
        rows_per_epoch: number of rows in the data (default: as the ledger says).
        upto_step: the last step to check (default: all). Without it, last steps that a kill kept some processes from
            recording are notes, not problems.
        done: steps that the run did according to its metrics and checkpoints; the ledger must have all of them from its
            first step on.

    Example:
        >>> import tempfile
        >>> from meshwright.data import Ledger, PlacedBatch
        >>> with Ledger(tempfile.mkdtemp()) as ledger:
        ...     ledger.begin({"next_row": 0, "rows_per_epoch": 4})
        ...     ledger.append(1, PlacedBatch(None, 0, 2, row_ids=np.array([3, 3]), positions=np.array([0, 1])))
        >>> check_ledger(ledger.folder).problems
        ['epoch 0: rows 3 were used more than once']
    """
    if upto_step is not None and upto_step < 1:
        raise DataError(f"upto_step must be at least 1; got {upto_step}.", hint="count steps from 1.")
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
        there = f"ends at step {steps[-1]}, before step {upto_step}" if steps else f"has no step up to {upto_step}"
        problems.append(f"the ledger {there}")
    problems += _lost_beginning(starts, lost, counted)
    # A line is written before its step runs, so every step after the first recorded one must have a line.
    wanted = {step for step in done if upto_step is None or step <= upto_step}
    if missing := sorted(step for step in wanted if step not in times and step > min(times, default=0)):
        problems.append(f"the run did steps that are not in its ledger: {some_numbers(missing)}")
    seen = _follow([(step, counted[step]) for step in steps], problems, notes)
    epochs, sources, source_rows = [], dict[str, list[int]](), dict[str, int]()
    if any("mixture" in start.facts for start in starts):
        facts = [start.facts for start in starts]
        problems += mixture_differences(facts)
        used = {place: row for place, row in seen.items() if isinstance(row, MixedRow)}
        sources, source_rows = check_sources(used, facts, problems, whole=not steps or steps[0] == 1)
    else:
        epochs = _count_epochs(
            {place: row for place, row in seen.items() if not isinstance(row, MixedRow)}, per_epoch, problems
        )
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
        sources=sources,
        source_rows=source_rows,
    )


# --- Reading the files ---


@dataclass
class _Entry:
    """The records of all processes of one start about one step."""

    first_row: int
    num_rows: int
    start: _Start
    rows: dict[int, int | MixedRow] = field(default_factory=dict)  # by position
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
            entry.problems.append(f"{where}: different rows than on rank {entry.ranks[0]}")
        if rank in entry.ranks:
            entry.problems.append(f"{where}: recorded twice")
        entry.ranks.append(rank)
        places = [place for first, count in line["positions"] for place in range(first, first + count)]
        if len(places) != len(line["rows"]):
            entry.problems.append(f"{where}: {len(line['rows'])} rows at {len(places)} positions")
        rows = mixed_rows(line, self.facts) if "sources" in line else line["rows"]
        for place, row in zip(places, rows, strict=False):
            if entry.rows.setdefault(place, row) != row:
                entry.problems.append(f"{where}: row {row} at position {place}, but rank {entry.ranks[0]} has another")


def _read(folder: Path) -> tuple[list[_Start], dict[int, str]]:
    """Returns the starts in order, and a note by number for each start that left no records."""
    try:
        files = ledger_files(folder)
        contents = {numbers: _lines(path) for numbers, path in files.items()}
    except OSError as error:
        raise DataError(f"cannot read {error.filename}: {error.strerror}.", hint="check its permissions.") from None
    if not files:
        raise DataError(f"there is no ledger in {str(folder)!r}.", hint="start the run with --ledger.")
    starts: dict[int, _Start] = {}
    lost = {number: f"start {number}: its files are missing" for number in range(1, max(files)[0])}
    for (number, rank), (lines, torn) in contents.items():
        lost.pop(number, None)
        if not lines:  # killed before its first line
            continue
        start = starts.setdefault(number, _Start(number, lines[0]))
        if torn:
            start.notes.append(f"start {number}, rank {rank}: the last line is incomplete, as after a kill")
        for line in lines[1:]:
            start.add(rank, line)
    for number, rank in files:
        if number not in starts:
            lost[number] = f"start {number}, rank {rank}: its first line is incomplete"
    return [starts[number] for number in sorted(starts)], dict(sorted(lost.items()))


_MOST_BYTES = 2**32


def _lines(path: Path) -> tuple[list[dict[str, Any]], bool]:
    texts = read_bytes(path, most=_MOST_BYTES).split(b"\n")
    # Every complete line ends with a newline, so the last text is empty unless a kill cut it off.
    torn = texts.pop() != b""
    return [_line(path, number, text) for number, text in enumerate(texts, 1)], torn


def _line(path: Path, number: int, text: bytes) -> dict[str, Any]:
    try:
        line = parse_json(text, where="it")
        if not isinstance(line, dict):
            raise ValueError("not an object")
        if number > 1:
            _require_batch(line)
        elif type(line.get("next_row", 0)) is not int:
            raise ValueError("next_row is not an integer")
    except ValueError as error:  # includes decoding and JSON errors
        raise DataError(
            f"line {number} of {path} is damaged: {str(error).rstrip('.')}.", hint="do not edit a ledger."
        ) from None
    return line


def _require_batch(line: dict[str, Any]) -> None:
    rows, positions = line.get("rows"), line.get("positions")
    if not isinstance(rows, list) or not isinstance(positions, list):
        raise ValueError("rows or positions are missing")
    if any(not isinstance(pair, list) or len(pair) != 2 for pair in positions):
        raise ValueError("positions are not pairs")
    numbers = [*(line.get(name) for name in ("step", "first_row", "num_rows")), *rows, *itertools.chain(*positions)]
    for name in ("sources", "source_positions"):
        if not isinstance(line.get(name, []), list) or len(line.get(name, rows)) != len(rows):
            raise ValueError(f"{name} does not fit rows")
        numbers += line.get(name, [])
    if any(type(number) is not int for number in numbers):
        raise ValueError("a number is not an integer")


# --- Comparing starts ---


def _differences(starts: list[_Start], sizes: list[int]) -> list[str]:
    """Returns the facts that differ between starts but must not."""
    problems = [] if starts else ["no file of this ledger has a complete first line, so nothing can be checked"]
    if len(sizes) > 1:
        problems.append(f"starts differ in the number of rows: {', '.join(map(str, sizes))}")
    for name in ("seed", "fingerprint"):
        values = list(dict.fromkeys(str(start.facts[name])[:12] for start in starts if name in start.facts))
        if len(values) > 1:
            problems.append(f"starts differ in {name}: {', '.join(values)}")
    return problems


def _moved_rows(starts: list[_Start]) -> list[str]:
    """Returns the positions that had a different row when they were redone with the same weights."""
    problems = []
    known: dict[tuple[str, int], tuple[int | MixedRow, int, int]] = {}
    for start in starts:
        mixture = same_mixture(start.facts)
        for step, entry in start.steps.items():
            for place, row in entry.rows.items():
                first = known.setdefault((mixture, place), (row, step, start.number))
                if first[0] != row:
                    problems.append(
                        f"position {place} had row {first[0]} (step {first[1]} of start {first[2]}), but row {row} "
                        f"when it was redone (step {step} of start {start.number})"
                    )
    return problems


def _latest(starts: list[_Start]) -> dict[int, _Entry]:
    """Returns the entry that counts for each step.

    A start discards all earlier entries from its first step on, including steps that it has not redone yet.
    """
    counted: dict[int, _Entry] = {}
    for start in starts:
        if start.steps:
            counted = {step: entry for step, entry in counted.items() if step < min(start.steps)}
        counted |= start.steps
    return counted


def _lost_beginning(starts: list[_Start], lost: dict[int, str], counted: dict[int, _Entry]) -> list[str]:
    """Returns a problem if the ledger begins after step 1 and its beginning is lost.

    It is lost, and not merely unrecorded, if an earlier start began at an earlier row or left no records.
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
        why = f"start {before[0]} left no records"
    else:
        return []
    return [f"steps 1 to {step - 1} are not recorded: {why}, but the first recorded step is {step}"]


def _drop_unfinished(steps: list[int], counted: dict[int, _Entry], done: Collection[int]) -> list[str]:
    """Drops last steps that not all processes have recorded, unless they are known to be done."""
    notes = []
    while steps and steps[-1] not in done:
        entry = counted[steps[-1]]
        ranks = entry.start.facts.get("num_ranks", 1)
        if len(entry.ranks) >= ranks:
            break
        notes.append(f"step {steps.pop()} is unfinished: {len(entry.ranks)} of {ranks} processes recorded it")
    return notes


# --- Checking the rows ---


def _follow(steps: list[tuple[int, _Entry]], problems: list[str], notes: list[str]) -> dict[int, int | MixedRow]:
    """Checks the steps in order; returns the row at each position."""
    seen: dict[int, int | MixedRow] = {}
    next_row, next_step = 0, steps[0][0] if steps else 1
    start: _Start | None = None
    if next_step > 1:
        next_row = steps[0][1].first_row
        notes.append(f"the ledger begins with step {next_step}, at row {next_row}; earlier steps are not recorded")
    for step, entry in steps:
        problems += entry.problems
        if step != next_step:
            problems.append(f"steps {next_step} to {step - 1} are missing")
        for skipped in entry.start.facts.get("skipped", ()) if entry.start is not start else ():
            if next_row == skipped["first_row"]:
                next_row += skipped["num_rows"]
                notes.append(f"skipped {skipped['num_rows']} rows from row {skipped['first_row']}: {skipped['why']}")
        begin = f"step {step} begins at row {entry.first_row}"
        if entry.first_row > next_row:
            problems.append(f"{begin}: rows {next_row} to {entry.first_row - 1} were lost")
        elif entry.first_row < next_row:
            problems.append(f"{begin}: rows up to {next_row - 1} were used before")
        start, next_step, next_row = entry.start, step + 1, entry.first_row + entry.num_rows
        if missing := [place for place in range(entry.first_row, next_row) if place not in entry.rows]:
            problems.append(f"step {step}: no process recorded the rows at positions {some_numbers(missing)}")
        seen |= entry.rows
    return seen


def _count_epochs(seen: dict[int, int], per_epoch: int | None, problems: list[str]) -> list[int]:
    if not seen:
        return []
    places, rows = (np.fromiter(values, np.int64, len(seen)) for values in (seen.keys(), seen.values()))
    if per_epoch is None:
        if len(np.unique(rows)) != len(rows):
            problems.append("rows were used more than once")
        return []
    outside = rows[(rows < 0) | (rows >= per_epoch)]
    if len(outside):
        problems.append(f"rows {some_numbers(outside)} do not exist: the data has {per_epoch} rows")
    found = []
    for epoch in range(int(places.max()) // per_epoch + 1):
        mine = rows[places // per_epoch == epoch]
        values, counts = np.unique(mine, return_counts=True)
        found.append(len(values))
        if (counts > 1).any():
            problems.append(f"epoch {epoch}: rows {some_numbers(values[counts > 1])} were used more than once")
        if len(mine) == per_epoch and len(values) < per_epoch:
            problems.append(
                f"epoch {epoch}: rows {some_numbers(np.setdiff1d(np.arange(per_epoch), values))} were never used"
            )
    return found
