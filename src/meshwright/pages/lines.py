"""Line charts over steps, and functions to thin and smooth long curves.

Charts stretch to the page's width: x is a share of the width, y is in pixels. Strokes and text keep their size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from meshwright.pages.colors import NUM_TONES
from meshwright.pages.figure import X_NAME, Frame, in_words, legend, nothing, plot
from meshwright.pages.markup import Markup, join, tag
from meshwright.pages.numbers import Show, finite_range, number

WIDTH = 10_000  # x coordinates of curves, about a tenth of a pixel each
LABEL_PIXELS = 16


@dataclass(frozen=True)
class Series:
    """A curve; values that are not finite leave a gap."""

    name: str
    xs: Sequence[float]
    ys: Sequence[float]
    style: Literal["line", "faint", "dots"] = "line"
    tone: int = 0


@dataclass(frozen=True)
class Mark:
    """An event on the x axis, drawn as a labeled line through the chart or, if not `tall`, as a tick below."""

    x: float
    label: str
    tall: bool = True
    low: bool = False  # whether the label is at the bottom, where a curve near the top is not in its way


def line_chart(
    title: str,
    series: Sequence[Series],
    *,
    unit: str = "",
    height: int = 260,
    log: bool = False,
    low: float | None = None,
    high: float | None = None,
    marks: Sequence[Mark] = (),
    show: Show = number,
    x_name: str = X_NAME,
) -> Markup:
    """Returns curves over the steps of a run.

    Args:
        unit: unit of the values, shown next to the title.
        low: lower end of the y axis (default: the smallest value).
        high: upper end of the y axis (default: the largest value); higher values are clipped, marked and counted.
        marks: events to mark on the x axis.
        show: formats a value.
        x_name: what the x axis counts, if not steps.

    Example:
        >>> chart = line_chart("Loss", [Series("train", [1, 2, 3], [4.0, 2.5, 2.0])])
        >>> "train: 4 at step 1, 2 at 3" in chart
        True
    """
    series = [one for one in series if any(map(math.isfinite, one.ys))]
    frame = _frame(series, marks, height, log=log, low=low, high=high)
    if frame is None:
        return nothing(title, unit)
    above = [
        (x, y) for one in series for x, y in zip(one.xs, one.ys, strict=True) if math.isfinite(y) and y > frame.high
    ]
    curves = tag(
        "svg",
        *(_curve(one, frame) for one in series),
        width="100%",
        height=height,
        viewBox=f"0 0 {WIDTH} {height}",
        preserveAspectRatio="none",
        overflow="visible",
    )
    overflow = join(tag("text", "▲", x=f"{100 * frame.x(x):.3f}%", y=9, class_="overflow") for x, _ in above[:200])
    note = ""
    if above:
        places = f"{len(above):,} points lie" if len(above) > 1 else "One point lies"
        note = f"{places} above the frame (▲), the highest at {show(max(y for _, y in above))}."
    several = len(series) > 1
    values = [(one.name, one.xs, one.ys) for one in series]
    return plot(
        title,
        frame,
        [_marks(frame, marks), curves, overflow, _end_labels(series, frame)],
        values,
        label=f"{title}. {' '.join(in_words(*one, show, x_name) for one in values)}",
        show=show,
        unit=unit,
        keys=legend([(_line_swatch(one), one.name) for one in series]) if several else None,
        note=note,
        kind="lines labelled" if several else "lines",
        x_name=x_name,
    )


def _frame(
    series: Sequence[Series], marks: Sequence[Mark], height: int, *, log: bool, low: float | None, high: float | None
) -> Frame | None:
    across = finite_range([x for one in series for x in one.xs] + [mark.x for mark in marks if series])
    values = finite_range([y for one in series for y in one.ys if not log or y > 0])
    if across is None or values is None:
        return None
    bottom = values[0] if low is None else low
    top = values[1] if high is None else high
    if not top > bottom:  # draw a flat line through the middle
        around = 0.5 * abs(top) or 1.0
        bottom, top = (top / 2, top * 2) if log else (bottom - around if low is None else bottom, top + around)
    elif not log:
        air = 0.06 * (top - bottom)
        bottom, top = (bottom - air if low is None else bottom), (top + air if high is None else top)
    left, right = across
    return Frame(left, right if right > left else left + 1, bottom, top, height, log)


def _curve(one: Series, frame: Frame) -> Markup:
    places = [
        f"{WIDTH * frame.x(x):.1f} {frame.y(y):.2f}" if frame.drawable(y) else None
        for x, y in zip(one.xs, one.ys, strict=True)
    ]
    before, after = [None, *places[:-1]], [*places[1:], None]
    steps = [
        f"{'M' if previous is None else 'L'}{place}"
        for place, previous in zip(places, before, strict=True)
        if place is not None
    ]
    # A point between two gaps is drawn as a dot: a stroke of zero length with round ends.
    dots = [
        f"M{place}h0"
        for place, previous, following in zip(places, before, after, strict=True)
        if place is not None and (one.style == "dots" or previous is following is None)
    ]
    tone = f"line-{one.tone % NUM_TONES}"
    drawn = [("".join(steps), f"curve {one.style} {tone}"), ("".join(dots), f"dot {tone}")]
    return join(tag("path", d=line, class_=kind) for line, kind in drawn if "L" in line or "h" in line)


def _marks(frame: Frame, marks: Sequence[Mark]) -> Markup:
    parts = []
    named = -math.inf
    for mark in sorted(marks, key=lambda mark: mark.x):
        share = frame.x(mark.x)
        x = f"{100 * share:.3f}%"
        title = tag("title", f"{mark.label} at {mark.x:,.10g}")
        if not mark.tall:
            parts.append(tag("line", title, x1=x, x2=x, y1=frame.height - 9, y2=frame.height, class_="mark short"))
            continue
        parts.append(tag("line", title, x1=x, x2=x, y1=0, y2=frame.height, class_="mark"))
        if share - named > 0.1:  # labels that would overlap appear only in the tooltip
            named = share
            side = {"dx": -5, "class_": "mark-label end"} if share > 0.85 else {"dx": 5, "class_": "mark-label"}
            parts.append(tag("text", mark.label, x=x, y=frame.height - 8 if mark.low else 11, **side))
    return join(parts)


def _end_labels(series: Sequence[Series], frame: Frame) -> Markup | None:
    if len(series) < 2:
        return None
    lasts = [(next(y for y in reversed(one.ys) if math.isfinite(y)), one) for one in series]
    ends = sorted(((frame.y(y), one) for y, one in lasts if frame.drawable(y)), key=lambda end: end[0])
    places = [y for y, _ in ends]
    # Move overlapping labels down, then move all up until they fit into the frame.
    for i in range(1, len(places)):
        places[i] = max(places[i], places[i - 1] + LABEL_PIXELS)
    bottom = frame.height - 4.0
    for i in reversed(range(len(places))):
        places[i] = min(places[i], bottom)
        bottom = places[i] - LABEL_PIXELS
    parts = []
    for y, (_, one) in zip(places, ends, strict=True):
        style = f"end-label {one.style} ink-{one.tone % NUM_TONES}"
        parts.append(tag("text", one.name, x="100%", dx=8, y=round(y, 1), dy="0.32em", class_=style))
    return join(parts)


def _line_swatch(one: Series) -> Markup:
    tone = one.tone % NUM_TONES
    line = tag("path", d="M1 7H25", class_=f"curve {one.style} line-{tone}")
    dot = tag("path", d="M13 7h0", class_=f"dot line-{tone}") if one.style == "dots" else None
    return tag("svg", line, dot, class_="swatch", width=26, height=14, aria_hidden="true")


# --- Long curves ---


def thin(xs: Sequence[float], ys: Sequence[float], *, limit: int = 2000) -> tuple[list[float], list[float]]:
    """Returns about `limit` points: the ends, extremes and first gap of each interval.

    A one-step spike or a non-finite value in a million steps is kept.

    >>> thin(range(12), [0, 0, 9, 0, 0, 0, 0, 0, -5, 0, 0, 0], limit=8)
    ([0, 2, 5, 6, 8, 11], [0, 9, 0, 0, -5, 0])
    """
    if len(xs) <= limit:
        return list(xs), list(ys)
    stretches = max(1, limit // 4)
    kept: list[int] = []
    for stretch in range(stretches):
        start, stop = stretch * len(xs) // stretches, (stretch + 1) * len(xs) // stretches
        finite = [i for i in range(start, stop) if math.isfinite(ys[i])]
        gap = next((i for i in range(start, stop) if not math.isfinite(ys[i])), None)
        extremes = [min(finite, key=ys.__getitem__), max(finite, key=ys.__getitem__)] if finite else []
        kept += sorted(dict.fromkeys([start, stop - 1, *extremes, *([] if gap is None else [gap])]))
    return [xs[i] for i in kept], [ys[i] for i in kept]


def smooth(ys: Sequence[float], *, window: int) -> list[float]:
    """Returns the centered mean of up to `window` values; gaps stay gaps and are not counted.

    The window is symmetric and shrinks at the ends, so a falling curve is not shifted up or to the right.

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
