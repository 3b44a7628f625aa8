"""The section of a report on goodput: where the wall time went, over all attempts of a run."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from meshwright.loop.logging.goodput import CATEGORIES, Attempt, Goodput, count_goodput
from meshwright.loop.report.run_record import RunRecord
from meshwright.pages import Bar, Section, duration, join, percent, prose, stacked_bars, tag

MAX_ATTEMPTS = 6
_MEANINGS = {
    "recomputed": "steps lost in a kill or a rollback, and computed again",
    "startup": "imports, data and the first state, before the first step",
    "restart": "the same after an interruption",
    "idle": "no process ran, or nothing is known about it",
}


def goodput_section(run: RunRecord) -> Section | None:
    """Returns stacked bars of the whole run and of its last attempts, or None if the log has no times."""
    found = count_goodput(run.events, _lines(run))
    if not found.wall > 0:
        return None
    totals = found.seconds
    shown = [name for name in CATEGORIES if totals[name] > 0]
    bars = [Bar("whole run", [totals[name] for name in shown])]
    if len(found.attempts) > 1:
        last = list(enumerate(found.attempts, start=1))[-MAX_ATTEMPTS:]
        bars += [Bar(f"attempt {number}", _values(attempt, shown)) for number, attempt in last]
    chart = stacked_bars("Wall time", shown, bars, show=duration)
    meanings = "; ".join(f"{name}: {text}" for name, text in _MEANINGS.items() if name in shown)
    note = tag("p", f"{meanings[:1].upper()}{meanings[1:]}.", class_="note") if meanings else None
    return Section("Goodput", join([prose(*_sentences(found)), chart, note]))


def _sentences(found: Goodput) -> list[str]:
    totals, wall = found.seconds, found.wall
    several = f" in {len(found.attempts):,} attempts" if len(found.attempts) > 1 else ""
    said = [f"Of {duration(wall)} wall time{several}, {percent(found.share)} went into steps that count."]
    name, most = max(((name, value) for name, value in totals.items() if name != "compute"), key=lambda item: item[1])
    if most > 0.01 * wall:
        said.append(f"The largest other part was {name}, with {percent(most / wall)}.")
    if len(found.attempts) > len(found.attempts[-MAX_ATTEMPTS:]):
        said.append(f"The chart shows the last {MAX_ATTEMPTS} attempts.")
    return said


def _values(attempt: Attempt, names: list[str]) -> list[float]:
    return [attempt.seconds[name] for name in names]


def _lines(run: RunRecord) -> Iterator[Mapping[str, Any]]:
    """Yields the time and the parts of each step."""
    columns = {name.removeprefix("seconds/"): run.steps[name] for name in run.steps.values if name[:8] == "seconds/"}
    for index, at in enumerate(run.steps["time"]):
        parts = {name: column[index] for name, column in columns.items() if math.isfinite(column[index])}
        yield {"time": at, "seconds": parts}
