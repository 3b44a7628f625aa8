"""A run folder as it is found: whatever is there is read, and what cannot be read is told, not hidden."""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from meshwright.errors import MeshwrightError, did_you_mean
from meshwright.loop.logging.run_log import read_lines


@dataclass
class Columns:
    """Numbers by name, one per step; nan where a step has none."""

    steps: list[int] = field(default_factory=list)
    values: dict[str, array[float]] = field(default_factory=dict)

    def append(self, step: int, numbers: dict[str, float]) -> None:
        """Adds a step."""
        for name in numbers:
            if name not in self.values:
                self.values[name] = array("d", [math.nan]) * len(self.steps)
        self.steps.append(step)
        for name, column in self.values.items():
            column.append(numbers.get(name, math.nan))

    def __getitem__(self, name: str) -> Sequence[float]:
        """Returns a column; of nan where nothing has that name."""
        return self.values[name] if name in self.values else [math.nan] * len(self.steps)

    def known(self, name: str) -> list[tuple[int, float]]:
        """Returns the steps at which a finite value was recorded, with it."""
        if name not in self.values:
            return []
        return [
            (step, value) for step, value in zip(self.steps, self.values[name], strict=True) if math.isfinite(value)
        ]

    def once(self) -> Columns:
        """Returns the steps in order, each once: a step that was taken again counts as it was the last time."""
        last = {step: index for index, step in enumerate(self.steps)}
        if len(last) == len(self.steps) and all(a < b for a, b in zip(self.steps, self.steps[1:], strict=False)):
            return self
        order = [last[step] for step in sorted(last)]
        columns = {name: array("d", (column[i] for i in order)) for name, column in self.values.items()}
        return Columns([self.steps[i] for i in order], columns)


@dataclass(frozen=True)
class RunRecord:
    """What a run folder holds; `notes` say what in it could not be read."""

    folder: Path
    facts: dict[str, Any]
    steps: Columns
    evals: Columns
    events: list[dict[str, Any]]
    notes: list[str]

    @property
    def name(self) -> str:
        return str(self.facts.get("name") or self.folder.resolve().name)

    @property
    def config(self) -> dict[str, Any]:
        return self.facts.get("config") or {}

    @property
    def last_time(self) -> float | None:
        """When something was last written; None where no time is known."""
        times = (
            [event_time(event) for event in self.events[-1:]]
            + list(self.steps["time"][-1:])
            + list(self.evals["time"][-1:])
        )
        return max((time for time in times if math.isfinite(time)), default=None)

    @cached_property
    def step_seconds(self) -> list[float]:
        """How long each step took with all its parts; nan where that was not recorded."""
        parts = [column for name, column in self.steps.values.items() if name.startswith("seconds/")]
        if not parts:
            return [math.nan] * len(self.steps.steps)
        return [
            sum(value for value in step if value == value) if any(value == value for value in step) else math.nan
            for step in zip(*parts, strict=True)
        ]

    def happened(self, *kinds: str) -> list[dict[str, Any]]:
        """Returns the events of some kinds, in order."""
        return [event for event in self.events if event["kind"] in kinds]


def read_run(folder: str | Path) -> RunRecord:
    """Reads a run folder, also one of a run that goes on or that was killed in the middle of a line."""
    folder = Path(folder)
    if not folder.is_dir():
        siblings = sorted(path.name for path in folder.parent.iterdir()) if folder.parent.is_dir() else []
        close = did_you_mean(folder.name, siblings)
        raise MeshwrightError(f"there is no run folder {folder}.", hint=close or "give the folder that --run named.")
    if not any((folder / name).is_file() for name in ("run.json", "metrics.jsonl", "events.jsonl")):
        raise MeshwrightError(
            f"{folder} holds no run: neither run.json nor metrics.jsonl nor events.jsonl is there.",
            hint="give a folder that `meshwright train` wrote, such as runs/NAME.",
        )
    notes: list[str] = []
    steps, evals = Columns(), Columns()
    homeless = 0
    for entry in _lines(folder / "metrics.jsonl", notes):
        step = step_of(entry)
        if step is None:
            homeless += 1
            continue
        numbers = dict(_numbers(entry))
        (evals if any(name.startswith("eval/") for name in numbers) else steps).append(step, numbers)
    if homeless:
        notes.append(f"{homeless:,} {'line' if homeless == 1 else 'lines'} of metrics.jsonl without a step left out.")
    events = [event for event in _lines(folder / "events.jsonl", notes) if isinstance(event.get("kind"), str)]
    return RunRecord(folder, _facts(folder / "run.json", notes), steps.once(), evals.once(), events, notes)


def _facts(path: Path, notes: list[str]) -> dict[str, Any]:
    try:
        facts = json.loads(path.read_bytes())
    except FileNotFoundError:
        notes.append("run.json is missing: mesh, layout, configuration and versions are not known.")
        return {}
    except (OSError, ValueError) as error:
        notes.append(f"run.json cannot be read ({error}): mesh, layout, configuration and versions are not known.")
        return {}
    if not isinstance(facts, dict):
        notes.append("run.json does not hold an object and is left out.")
        return {}
    wrong = [name for name, fits in _FACTS.items() if facts.get(name) is not None and not fits(facts[name])]
    if wrong:
        notes.append(f"run.json: {', '.join(wrong)} cannot be what it says and is left out.")
    return {name: value for name, value in facts.items() if name not in wrong}


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**53


def _is(kind: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, kind)


def _is_mesh(value: Any) -> bool:
    return isinstance(value, dict) and all(_is_count(size) and size > 0 for size in value.values())


# What the report uses of run.json, and what each must be.
_FACTS: dict[str, Callable[[Any], bool]] = {
    "name": _is(str),
    "config": _is(dict),
    "mesh": _is_mesh,
    "mesh_reason": _is(str),
    "layout": _is(dict),
    "devices": _is(list),
    "device_kind": _is(str),
    "num_processes": _is_count,
    "num_params": _is_count,
    "versions": _is(dict),
    "resume_command": _is(str),
}


def _lines(path: Path, notes: list[str]) -> Iterator[dict[str, Any]]:
    """Yields the objects of a file of JSON lines; a last line without its end is left out, and bad ones are noted."""
    broken: list[int] = []
    try:
        yield from read_lines(path, broken=broken)
    except FileNotFoundError:
        notes.append(f"{path.name} is missing.")
    if 0 in broken:
        notes.append(f"The last line of {path.name} is unfinished and left out.")
    bad = [number for number in broken if number]
    if bad:
        shown = ", ".join(map(str, bad[:5])) + (", ..." if len(bad) > 5 else "")
        which = f"Line {shown} of {path.name} is" if len(bad) == 1 else f"{len(bad)} lines of {path.name} ({shown}) are"
        notes.append(f"{which} not a JSON object and left out.")


def _numbers(entry: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Yields the numbers of an entry; those inside of others as `seconds/data`."""
    for name, value in entry.items():
        if isinstance(value, dict) and not prefix:
            yield from _numbers(value, f"{name}/")
        elif isinstance(value, (int, float)) and not isinstance(value, bool) and (prefix or name != "step"):
            try:
                yield f"{prefix}{name}", float(value)
            except OverflowError:  # an integer beyond floats
                yield f"{prefix}{name}", math.inf


def step_of(entry: dict[str, Any]) -> int | None:
    """Returns the step that an event or a line of metrics belongs to, if it names one."""
    step = entry.get("step")
    return step if _is_count(step) else None


def event_time(event: dict[str, Any]) -> float:
    """Returns when an event happened; nan where it does not say."""
    time = event.get("time")
    return float(time) if isinstance(time, (int, float)) else math.nan
