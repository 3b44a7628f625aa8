"""Fewer points of a long curve, such that the picture stays the same, and curves made smooth."""

from __future__ import annotations

import math
from collections.abc import Sequence


def thin(xs: Sequence[float], ys: Sequence[float], *, limit: int = 2000) -> tuple[list[float], list[float]]:
    """Returns at most about `limit` points: of each stretch its ends, its extremes and a gap if it has one.

    A spike of one step in a million survives, and so does a value that is not finite.

    >>> thin(range(12), [0, 0, 9, 0, 0, 0, 0, 0, -5, 0, 0, 0], limit=8)
    ([0, 2, 5, 6, 8, 11], [0, 9, 0, 0, -5, 0])
    """
    if len(xs) <= limit:
        return list(xs), list(ys)
    stretches = max(1, limit // 4)
    kept: list[int] = []
    for number in range(stretches):
        start, stop = number * len(xs) // stretches, (number + 1) * len(xs) // stretches
        finite = [i for i in range(start, stop) if math.isfinite(ys[i])]
        gap = next((i for i in range(start, stop) if not math.isfinite(ys[i])), None)
        extremes = [min(finite, key=ys.__getitem__), max(finite, key=ys.__getitem__)] if finite else []
        kept += sorted(dict.fromkeys([start, stop - 1, *extremes, *([] if gap is None else [gap])]))
    return [xs[i] for i in kept], [ys[i] for i in kept]


def smooth(ys: Sequence[float], *, window: int) -> list[float]:
    """Returns the mean of up to `window` values around each; gaps stay gaps and do not count.

    The same number on both sides, fewer towards the ends, so that a falling curve is not drawn too high or too late.

    >>> smooth([8.0, 4.0, 3.0, float("nan"), 2.0], window=3)
    [8.0, 5.0, 3.5, nan, 2.0]
    """
    sums, counts = [0.0], [0]
    for value in ys:
        counted = math.isfinite(value)
        sums.append(sums[-1] + (value if counted else 0.0))
        counts.append(counts[-1] + counted)
    found = []
    for i, value in enumerate(ys):
        reach = min(window // 2, i, len(ys) - 1 - i)
        low, high = i - reach, i + reach + 1
        mean = (sums[high] - sums[low]) / max(counts[high] - counts[low], 1)
        found.append(mean if math.isfinite(value) else math.nan)
    return found
