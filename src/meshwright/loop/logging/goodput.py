"""Goodput: where the wall time of a run went, over all its restarts, read from nothing but its log.

Three things in the log tile the time of a run. A `start` or `resume` event says when its process began. The line of
each step says how its seconds split into parts, since the metrics of the step before. The last event of a process says
the same for the time after its last step. Steps that are computed again after a kill or a rollback are dropped from the
log, so the event that drops them keeps their seconds. All other time is idle: nobody knows what a killed process did
after its last line, and between two processes nothing runs.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

from meshwright.loop.logging.run_log import EVENTS, METRICS, read_lines

CATEGORIES = (
    "compute", "recomputed", "compile", "input wait", "evaluation", "save", "startup", "restart", "idle",
)  # fmt: skip
"""Uses of time; only `compute` is progress."""

_PARTS = {
    "step": "compute",
    "compile": "compile",
    "data": "input wait",
    "eval": "evaluation",
    "checkpoint": "save",
    "restart": "restart",
}


@dataclass
class Attempt:
    """One process of a run: when it began, its last sign of life, and its seconds by category.

    The time until the next process begins belongs to it, as idle.
    """

    began: float
    last_seen: float
    first_step: float = math.inf
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(CATEGORIES, 0.0))

    def add(self, parts: Mapping[str, float], *, lost: bool = False) -> None:
        for part, value in parts.items():
            category = _PARTS.get(part)
            if category is not None:
                # The line of a step also holds the evaluation and the save before it, which are not lost.
                again = lost and category in ("compute", "input wait")
                self.seconds["recomputed" if again else category] += value

    def close(self, until: float, *, is_first: bool) -> None:
        """Counts the time that nothing else explains: before the first step, and idle."""
        stepped = self.first_step if math.isfinite(self.first_step) else self.last_seen
        self.seconds["startup" if is_first else "restart"] += max(0.0, stepped - self.began)
        self.seconds["idle"] += max(0.0, until - self.began - sum(self.seconds.values()))


@dataclass(frozen=True)
class Goodput:
    """The time of a run, by attempt and in total."""

    attempts: Sequence[Attempt]

    @property
    def seconds(self) -> dict[str, float]:
        """Total seconds of each category."""
        return {name: math.fsum(attempt.seconds[name] for attempt in self.attempts) for name in CATEGORIES}

    @property
    def wall(self) -> float:
        """Seconds from the beginning of the first process to the last sign of life."""
        return self.attempts[-1].last_seen - self.attempts[0].began if self.attempts else 0.0

    @property
    def share(self) -> float:
        """Fraction of the wall time spent on steps that count."""
        return self.seconds["compute"] / self.wall if self.wall > 0 else 0.0

    def __str__(self) -> str:
        wall, found = self.wall, self.seconds
        if not wall > 0:
            return "goodput is unknown: no time is recorded"
        others = [f"{name} {value / wall:.1%}" for name, value in found.items() if value > 0.0005 * wall]
        several = f" in {len(self.attempts)} attempts" if len(self.attempts) > 1 else ""
        return f"goodput {self.share:.1%} of {wall:.1f} s{several}: {', '.join(others)}"


def count_goodput(events: Iterable[Mapping[str, Any]], lines: Iterable[Mapping[str, Any]]) -> Goodput:
    """Splits the time of a run into categories, from its events and the lines of its steps.

    Example:
        >>> events = [
        ...     {"kind": "start", "time": 104.0, "began": 100.0},
        ...     {"kind": "finish", "time": 112.0, "seconds": {"checkpoint": 1.0}},
        ... ]
        >>> lines = [{"time": at, "seconds": {"step": 2.5, "data": 0.5}} for at in (108.0, 111.0)]
        >>> print(count_goodput(events, lines))
        goodput 41.7% of 12.0 s: compute 41.7%, input wait 8.3%, save 8.3%, startup 41.7%
    """
    events = [event for event in events if _is_time(event.get("time"))]
    begins = [event for event in events if event.get("kind") in ("start", "resume")]
    attempts: list[Attempt] = []
    for event in begins:
        began = event["began"] if _is_time(event.get("began")) else event["time"]
        # Clocks can be set back; an attempt never begins before the previous one was seen to begin.
        attempts.append(Attempt(max(began, attempts[-1].began if attempts else began), event["time"]))
    if not attempts:
        return Goodput([])
    starts = [attempt.began for attempt in attempts]

    def seen(at: float, seconds: Mapping[str, float], *, since: float | None = None, lost: bool = False) -> None:
        attempt = attempts[max(0, bisect.bisect_right(starts, at) - 1)]
        attempt.last_seen = max(attempt.last_seen, at)
        if since is not None:
            attempt.first_step = min(attempt.first_step, since)
        attempt.add(seconds, lost=lost)

    known: set[tuple[float, float]] = set()
    for event in events:
        seen(event["time"], _parts(event.get("seconds")))
        lost = event.get("lost")
        for group in lost if isinstance(lost, list) else ():
            since, until = (group.get("from"), group.get("until")) if isinstance(group, Mapping) else (None, None)
            if _is_time(since) and _is_time(until) and (since, until) not in known:
                known.add((since, until))
                seen(until, _parts(group.get("seconds")), since=since, lost=True)
    for line in lines:
        parts, at = _parts(line.get("seconds")), line.get("time")
        if parts and _is_time(at):
            seen(at, parts, since=at - sum(parts.values()))
    for number, attempt in enumerate(attempts):
        until = starts[number + 1] if number + 1 < len(attempts) else attempt.last_seen
        attempt.close(until, is_first=number == 0)
    return Goodput(attempts)


def read_goodput(folder: Path, *, ending: Mapping[str, Any] | None = None) -> Goodput:
    """Returns the goodput of a run folder; `ending` is an event that is not written yet.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> _ = (folder / "events.jsonl").write_text('{"kind": "start", "time": 12.0, "began": 10.0}\\n')
        >>> read_goodput(folder, ending={"time": 15.0}).seconds["startup"]
        5.0
    """
    files = [folder / name for name in (EVENTS, METRICS)]
    events, lines = ([*read_lines(path)] if path.is_file() else [] for path in files)
    return count_goodput([*events, *([] if ending is None else [ending])], lines)


def lost_steps(lines: Iterable[Mapping[str, Any]], step: int) -> list[dict[str, Any]]:
    """Returns the time of the steps after `step`, which are about to be dropped, in stretches without a gap.

    Example:
        >>> lines = [{"step": n, "time": 10.0 + n, "seconds": {"step": 1.0}} for n in range(1, 5)]
        >>> lost_steps(lines, 2)
        [{'from': 12.0, 'until': 14.0, 'steps': 2, 'seconds': {'step': 2.0}}]
    """
    groups: list[dict[str, Any]] = []
    for line in lines:
        parts, at = _parts(line.get("seconds")), line.get("time")
        if not parts or not _is_time(at) or not isinstance(line.get("step"), int) or line["step"] <= step:
            continue
        since = at - sum(parts.values())
        if not groups or since - groups[-1]["until"] > 1.0:
            groups.append({"from": since, "until": at, "steps": 0, "seconds": {}})
        group = groups[-1]
        group["until"], group["steps"] = at, group["steps"] + 1
        for part, value in parts.items():
            group["seconds"][part] = round(group["seconds"].get(part, 0.0) + value, 6)
    return groups


class RunningGoodput:
    """The goodput of a run while it trains, over all its attempts.

    Args:
        before: the goodput of earlier attempts.
        began: time at which this attempt began.
    """

    def __init__(self, before: Goodput, began: float) -> None:
        self._began = before.attempts[0].began if before.attempts else began
        self._compute = before.seconds["compute"]

    def add(self, seconds: Mapping[str, float], now: float) -> float:
        """Adds the parts of a step, and returns the goodput so far."""
        self._compute += seconds.get("step", 0.0)
        return self._compute / (now - self._began) if now > self._began else 0.0


_LATEST = 1e15  # seconds; a damaged log may hold any number


def _is_time(value: Any) -> TypeGuard[float]:
    return type(value) in (int, float) and abs(value) < _LATEST  # false for nan and infinity


def _parts(seconds: Any) -> dict[str, float]:
    if not isinstance(seconds, Mapping):
        return {}
    return {str(part): float(value) for part, value in seconds.items() if _is_time(value) and value >= 0}
