"""Checks the rows of a mixture: did every source give each of its rows once per epoch, over all restarts?"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np


class MixedRow(NamedTuple):
    """A row of a mixture: its source, its position in the order of that source, and its number in the source."""

    source: str
    position: int
    number: int

    def __str__(self) -> str:
        return f"{self.number} of {self.source}"


def mixed_rows(line: Mapping[str, Any], facts: Mapping[str, Any]) -> list[MixedRow]:
    """Returns the rows of a line of the ledger; unknown source numbers get a name that no source has."""
    names = sorted(facts.get("mixture", {}).get("weights", ()))
    return [
        MixedRow(names[source] if 0 <= source < len(names) else f"?{source}", position, number)
        for source, position, number in zip(line["sources"], line["source_positions"], line["rows"], strict=True)
    ]


def same_mixture(facts: Mapping[str, Any]) -> str:
    """Returns a key of the mixture of a start: steps redone with the same key must have the same rows."""
    mixture = facts.get("mixture")
    if mixture is None:
        return ""
    return json.dumps([mixture.get(name) for name in ("weights", "since", "taken_since")], sort_keys=True)


def mixture_differences(facts: Iterable[Mapping[str, Any]]) -> list[str]:
    """Returns the sources whose data differs between starts."""
    seen: dict[str, Any] = {}
    problems = []
    for start in facts:
        for name, fact in start.get("mixture", {}).get("sources", {}).items():
            if seen.setdefault(name, fact) != fact:
                problems.append(f"starts differ in the data of the source {name}")
    return list(dict.fromkeys(problems))


def check_sources(
    seen: Mapping[int, MixedRow], facts: Sequence[Mapping[str, Any]], problems: list[str], *, whole: bool
) -> tuple[dict[str, list[int]], dict[str, int]]:
    """Adds what is wrong to `problems`; returns the rows used in each epoch of each source, and the rows of each.

    Args:
        seen: the row at each position of the mixture, in the steps that count.
        facts: the first line of each start.
        whole: whether the ledger begins with step 1; otherwise a source may begin at any position.
    """
    sizes: dict[str, int] = {}
    skipped: dict[str, set[int]] = defaultdict(set)
    for start in facts:
        for name, fact in start.get("mixture", {}).get("sources", {}).items():
            sizes.setdefault(name, int(fact["rows"]))
        for skip in start.get("skipped", ()):
            for name, (first, count) in skip.get("sources", {}).items():
                skipped[name] |= set(range(first, first + count))
    used: dict[str, list[MixedRow]] = defaultdict(list)
    for row in seen.values():
        used[row.source].append(row)
    if unknown := sorted(set(used) - set(sizes)):
        problems.append(f"rows belong to unknown sources: {', '.join(unknown)}")
    counts = {
        name: _check(name, used[name], sizes[name], skipped[name], problems, whole=whole)
        for name in sorted(sizes)
        if used[name]
    }
    return counts, sizes


def _check(
    name: str, rows: list[MixedRow], size: int, skipped: set[int], problems: list[str], *, whole: bool
) -> list[int]:
    places = np.array([row.position for row in rows])
    numbers = np.array([row.number for row in rows])
    values, times = np.unique(places, return_counts=True)
    if (times > 1).any():
        problems.append(f"{name}: rows at positions {some_numbers(values[times > 1])} were used more than once")
    first = 0 if whole else int(values[0])
    gaps = np.setdiff1d(np.arange(first, int(values[-1]) + 1), values).tolist()
    missing = [place for place in gaps if place not in skipped]
    if missing:
        problems.append(f"{name}: rows at positions {some_numbers(missing)} were lost")
    if len(outside := numbers[(numbers < 0) | (numbers >= size)]):
        problems.append(f"{name}: rows {some_numbers(outside)} do not exist: it has {size} rows")
    found = []
    for epoch in range(int(places.max()) // size + 1):
        mine = numbers[places // size == epoch]
        different, times = np.unique(mine, return_counts=True)
        found.append(len(different))
        if (times > 1).any():
            problems.append(
                f"{name}, epoch {epoch}: rows {some_numbers(different[times > 1])} were used more than once"
            )
    return found


def some_numbers(numbers: Iterable[int]) -> str:
    """Returns the first five numbers as text."""
    numbers = list(numbers)
    return ", ".join(map(str, numbers[:5])) + (f" and {len(numbers) - 5} more" if len(numbers) > 5 else "")
