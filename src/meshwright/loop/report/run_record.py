"""Reading of run folders: tolerates missing and damaged files, and notes them."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from meshwright.bounded_reader import read_json
from meshwright.errors import FileFormatError, MeshwrightError, did_you_mean
from meshwright.loop.logging.run_log import read_lines


@dataclass
class Columns:
    """Columns of numbers by name, one value per step; nan if a step has none."""

    steps: list[int] = field(default_factory=list)
    values: dict[str, array[float]] = field(default_factory=dict)

    def append(self, step: int, numbers: dict[str, float]) -> None:
        for name in numbers:
            if name not in self.values:
                self.values[name] = array("d", [math.nan]) * len(self.steps)
        self.steps.append(step)
        for name, column in self.values.items():
            column.append(numbers.get(name, math.nan))

    def __getitem__(self, name: str) -> Sequence[float]:
        """Returns a column; all nan if it does not exist."""
        return self.values[name] if name in self.values else [math.nan] * len(self.steps)

    def known(self, name: str) -> list[tuple[int, float]]:
        """Returns the finite values of a column, with their steps."""
        return [point for point in zip(self.steps, self[name], strict=True) if math.isfinite(point[1])]

    def once(self) -> Columns:
        """Returns the steps in order, each once; for a recomputed step, the last values count."""
        last = {step: index for index, step in enumerate(self.steps)}
        if len(last) == len(self.steps) and all(a < b for a, b in zip(self.steps, self.steps[1:], strict=False)):
            return self
        order = [last[step] for step in sorted(last)]
        columns = {name: array("d", (column[i] for i in order)) for name, column in self.values.items()}
        return Columns([self.steps[i] for i in order], columns)


@dataclass(frozen=True)
class RunRecord:
    """The contents of a run folder; `notes` lists unreadable parts.

    `arrays` holds the last value of each metric that is a vector or matrix, with its step.
    """

    folder: Path
    facts: dict[str, Any]
    steps: Columns
    evals: Columns
    events: list[dict[str, Any]]
    notes: list[str]
    arrays: dict[str, tuple[int, list[list[float]]]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return str(self.facts.get("name") or self.folder.resolve().name)

    @property
    def config(self) -> dict[str, Any]:
        return self.facts.get("config") or {}

    @property
    def last_time(self) -> float | None:
        """Time of the last write, or None if unknown."""
        times = [*map(event_time, self.events[-1:]), *self.steps["time"][-1:], *self.evals["time"][-1:]]
        return max(filter(math.isfinite, times), default=None)

    @cached_property
    def step_seconds(self) -> list[float]:
        """Seconds of each step including all its parts; nan if not recorded."""
        parts = [column for name, column in self.steps.values.items() if name.startswith("seconds/")]
        if not parts:
            return [math.nan] * len(self.steps.steps)
        return [
            sum(value for value in step if value == value) if any(value == value for value in step) else math.nan
            for step in zip(*parts, strict=True)
        ]

    def happened(self, *kinds: str) -> list[dict[str, Any]]:
        """Returns the events of the given kinds, in order."""
        return [event for event in self.events if event["kind"] in kinds]


def read_run(folder: str | Path) -> RunRecord:
    """Reads a run folder, also of a running or killed run."""
    folder = Path(folder)
    if not folder.is_dir():
        siblings = sorted(path.name for path in folder.parent.iterdir()) if folder.parent.is_dir() else []
        close = did_you_mean(folder.name, siblings)
        raise MeshwrightError(f"there is no run folder {folder}.", hint=close or "pass the folder given to --run.")
    if not any((folder / name).is_file() for name in ("run.json", "metrics.jsonl", "events.jsonl")):
        raise MeshwrightError(
            f"{folder} holds no run: it has no run.json, metrics.jsonl or events.jsonl.",
            hint="pass a folder that `meshwright train` wrote, e.g. runs/NAME.",
        )
    notes: list[str] = []
    steps, evals = Columns(), Columns()
    arrays: dict[str, tuple[int, list[list[float]]]] = {}
    homeless = 0
    for entry in _lines(folder / "metrics.jsonl", notes):
        step = step_of(entry)
        if step is None:
            homeless += 1
            continue
        numbers = dict(_numbers(entry))
        arrays.update((name, (step, value)) for name, value in _matrices(entry))
        (evals if any(name.startswith("eval/") for name in numbers) else steps).append(step, numbers)
    if homeless:
        notes.append(f"Ignored {homeless:,} {'line' if homeless == 1 else 'lines'} of metrics.jsonl without a step.")
    events = [event for event in _lines(folder / "events.jsonl", notes) if isinstance(event.get("kind"), str)]
    return RunRecord(folder, _facts(folder / "run.json", notes), steps.once(), evals.once(), events, notes, arrays)


def _facts(path: Path, notes: list[str]) -> dict[str, Any]:
    try:
        facts = read_json(path, object)
    except FileNotFoundError:
        notes.append("run.json is missing: mesh, layout, configuration and versions are unknown.")
        return {}
    except (OSError, ValueError) as error:
        notes.append(f"Cannot read run.json ({error}): mesh, layout, configuration and versions are unknown.")
        return {}
    if not isinstance(facts, dict):
        notes.append("Ignored run.json, which does not hold an object.")
        return {}
    wrong = [name for name, fits in _FACTS.items() if facts.get(name) is not None and not fits(facts[name])]
    if wrong:
        notes.append(f"Ignored invalid values in run.json: {', '.join(wrong)}.")
    return {name: value for name, value in facts.items() if name not in wrong}


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**53


def _is(kind: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, kind)


def _is_mesh(value: Any) -> bool:
    return isinstance(value, dict) and all(_is_count(size) and size > 0 for size in value.values())


# Fields of run.json that the report uses, each with its check.
_FACTS: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("name", "mesh_reason", "device_kind", "resume_command"), _is(str)),
    **dict.fromkeys(("config", "layout", "versions", "mixture"), _is(dict)),
    **dict.fromkeys(("num_processes", "num_params"), _is_count),
    "devices": _is(list),
    "mesh": _is_mesh,
}


def _lines(path: Path, notes: list[str]) -> Iterator[dict[str, Any]]:
    """Yields the objects of a JSON lines file, and notes invalid lines and an unfinished last one."""
    broken: list[int] = []
    try:
        yield from read_lines(path, broken=broken)
    except FileNotFoundError:
        notes.append(f"{path.name} is missing.")
    except (OSError, FileFormatError) as error:
        notes.append(f"Cannot read {path.name} to its end ({error}).")
    if 0 in broken:
        notes.append(f"Ignored the unfinished last line of {path.name}.")
    bad = [number for number in broken if number]
    if bad:
        shown = ", ".join(map(str, bad[:5])) + (", ..." if len(bad) > 5 else "")
        which = f"line {shown}" if len(bad) == 1 else f"{len(bad)} lines ({shown})"
        notes.append(f"Ignored {which} of {path.name}: damaged, or not JSON objects.")


def _numbers(entry: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Yields the numbers of an entry; nested ones are named like `seconds/data`."""
    for name, value in entry.items():
        if isinstance(value, dict) and not prefix:
            yield from _numbers(value, f"{name}/")
        elif isinstance(value, (int, float)) and not isinstance(value, bool) and (prefix or name != "step"):
            yield f"{prefix}{name}", _as_float(value)


def _matrices(entry: dict[str, Any]) -> Iterator[tuple[str, list[list[float]]]]:
    """Yields the metrics that are lists of numbers, as a matrix with one row, or equal lists of numbers."""
    for name, value in entry.items():
        rows = value if isinstance(value, list) and value and isinstance(value[0], list) else [value]
        if all(isinstance(row, list) and len(row) == len(rows[0]) and row for row in rows) and all(
            isinstance(item, (int, float)) for row in rows for item in row
        ):
            yield name, [[_as_float(item) for item in row] for row in rows]


def step_of(entry: dict[str, Any]) -> int | None:
    """Returns the step of an event or a line of metrics, if it has one."""
    step = entry.get("step")
    return step if _is_count(step) else None


def event_time(event: dict[str, Any]) -> float:
    """Returns the time of an event, or nan if unknown."""
    time = event.get("time")
    return _as_float(time) if isinstance(time, (int, float)) else math.nan


def _as_float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:  # an integer too large for a float
        return math.inf
