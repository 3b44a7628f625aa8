"""Line charts: curves that keep their text size at any width, named where they end.

The frame is measured in shares of the width and in pixels of height. Only the curves are stretched, and their strokes
are not (`vector-effect`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from meshwright.pages.figure import NUM_TONES, behind, figure, in_words, legend, nothing, plot, read_out_data
from meshwright.pages.markup import Markup, join, tag
from meshwright.pages.numbers import Show, compact, finite_range, log_ticks, number, ticks, whole_ticks

WIDTH = 10_000  # of the coordinates of curves; about a tenth of a pixel each
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
    """Something that happened at a place of the x axis: a line through the chart with its name, or a tick below."""

    x: float
    label: str
    tall: bool = True


@dataclass(frozen=True)
class _Frame:
    """From values to places: x in shares of the width, y in pixels."""

    low_x: float
    high_x: float
    low: float
    high: float
    height: int
    log: bool

    def x(self, value: float) -> float:
        return (value - self.low_x) / (self.high_x - self.low_x)

    def y(self, value: float) -> float:
        low, high = (math.log10(self.low), math.log10(self.high)) if self.log else (self.low, self.high)
        place = math.log10(value) if self.log else value
        share = (place - low) / (high - low)
        return self.height * (1 - min(max(share, 0.0), 1.0))

    def drawable(self, value: float) -> bool:
        return math.isfinite(value) and not (self.log and value <= 0)


def line_chart(
    title: str,
    series: Sequence[Series],
    *,
    x_label: str = "step",
    unit: str = "",
    height: int = 260,
    log: bool = False,
    low: float | None = None,
    high: float | None = None,
    marks: Sequence[Mark] = (),
    show: Show = number,
) -> Markup:
    """Returns curves over a common x axis.

    Args:
        unit: what the values are, beside the title.
        low: where the y axis starts, if not at the least value.
        high: where it ends, if not at the greatest; what lies above is drawn at the edge, marked and counted.
        marks: what to point out along the x axis.
        show: how values are written.
    """
    series = [one for one in series if any(map(math.isfinite, one.ys))]
    frame = _frame(series, marks, height, log=log, low=low, high=high)
    if frame is None:
        return nothing(title, "Nothing was recorded.", unit=unit)
    above = [
        (x, y) for one in series for x, y in zip(one.xs, one.ys, strict=True) if math.isfinite(y) and y > frame.high
    ]
    svg = tag(
        "svg",
        tag("title", title),
        _grid(frame, x_label, show),
        _marks(frame, marks),
        tag(
            "svg",
            *(_curve(one, frame) for one in series),
            width="100%",
            height=height,
            viewBox=f"0 0 {WIDTH} {height}",
            preserveAspectRatio="none",
            overflow="visible",
        ),
        _overflow(frame, above),
        _end_labels(series, frame),
        width="100%",
        height=height,
        role="img",
        aria_label=title,
    )
    data = [(one.name, one.xs, one.ys) for one in series]
    words = [in_words(name, xs, ys, x_label=x_label, show=show) for name, xs, ys in data]
    hint = None
    if above:
        places = f"{len(above):,} points lie" if len(above) > 1 else "One point lies"
        worst = show(max(y for _, y in above))
        hint = tag("p", f"{places} above the frame (▲), the highest at {worst}.", class_="note")
    keys = legend([(_line_swatch(one), one.name) for one in series])
    after = join(
        [
            hint,
            read_out_data(x_label, data, low=frame.low_x, high=frame.high_x, show=show),
            behind(x_label, data, show=show),
        ]
    )
    body = plot(svg, label=f"{title}. {' '.join(words)}", height=height)
    kind = "lines labelled" if len(series) > 1 else "lines"
    return figure(title, unit=unit, keys=keys if len(series) > 1 else None, body=body, after=after, kind=kind)


def _frame(
    series: Sequence[Series], marks: Sequence[Mark], height: int, *, log: bool, low: float | None, high: float | None
) -> _Frame | None:
    across = finite_range([x for one in series for x in one.xs] + [mark.x for mark in marks if series])
    values = finite_range([y for one in series for y in one.ys if not log or y > 0])
    if across is None or values is None:
        return None
    bottom = values[0] if low is None else low
    top = values[1] if high is None else high
    if not top > bottom:  # a flat line runs through the middle
        around = 0.5 * abs(top) or 1.0
        bottom, top = (top / 2, top * 2) if log else (bottom - around if low is None else bottom, top + around)
    elif not log:
        air = 0.06 * (top - bottom)
        bottom, top = (bottom - air if low is None else bottom), (top + air if high is None else top)
    left, right = across
    return _Frame(left, right if right > left else left + 1, bottom, top, height, log)


def _grid(frame: _Frame, x_label: str, show: Show) -> Markup:
    parts = []
    levels = (
        log_ticks(frame.low, frame.high)
        if frame.log
        else ticks(frame.low, frame.high, count=5 if frame.height > 200 else 3)
    )
    for level in levels:
        y = round(frame.y(level), 1)
        parts.append(tag("line", x1=0, x2="100%", y1=y, y2=y, class_="grid"))
        parts.append(tag("text", show(level), x=0, dx=-8, y=y, dy="0.32em", class_="tick y"))
    for index, place in enumerate(whole_ticks(frame.low_x, frame.high_x)):
        x = f"{100 * frame.x(place):.3f}%"
        parts.append(tag("line", x1=x, x2=x, y1=frame.height, y2=frame.height + 5, class_="axis"))
        # On a narrow page only every second one is shown.
        odd = " odd" if index % 2 else ""
        parts.append(tag("text", compact(place), x=x, y=frame.height + 18, class_=f"tick x{odd}"))
    parts.append(tag("line", x1=0, x2="100%", y1=frame.height, y2=frame.height, class_="axis"))
    parts.append(tag("text", x_label, x=0, dx=-8, y=frame.height + 18, class_="tick y"))
    return join(parts)


def _curve(one: Series, frame: _Frame) -> Markup:
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
    # A point between two gaps is no line; it shows as a dot, which is a stroke without length and with round ends.
    dots = [
        f"M{place}h0"
        for place, previous, following in zip(places, before, after, strict=True)
        if place is not None and (one.style == "dots" or previous is following is None)
    ]
    tone = f"line-{one.tone % NUM_TONES}"
    drawn = [("".join(steps), f"curve {one.style} {tone}"), ("".join(dots), f"dot {tone}")]
    return join(tag("path", d=line, class_=kind) for line, kind in drawn if "L" in line or "h" in line)


def _marks(frame: _Frame, marks: Sequence[Mark]) -> Markup:
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
        if share - named > 0.1:  # names that would overlap are left to the read-out of the line
            named = share
            side = {"dx": -5, "class_": "mark-label end"} if share > 0.85 else {"dx": 5, "class_": "mark-label"}
            parts.append(tag("text", mark.label, x=x, y=11, **side))
    return join(parts)


def _overflow(frame: _Frame, above: Sequence[tuple[float, float]]) -> Markup:
    return join(tag("text", "▲", x=f"{100 * frame.x(x):.3f}%", y=9, class_="overflow") for x, _ in above[:200])


def _end_labels(series: Sequence[Series], frame: _Frame) -> Markup | None:
    if len(series) < 2:
        return None
    ends = []
    for one in series:
        last = next(y for y in reversed(one.ys) if math.isfinite(y))
        if frame.drawable(last):
            ends.append((frame.y(last), one))
    ends.sort(key=lambda end: end[0])
    places = [y for y, _ in ends]
    # Labels move apart downwards, then the pile moves up until it is inside the frame.
    for i in range(1, len(places)):
        places[i] = max(places[i], places[i - 1] + LABEL_PIXELS)
    bottom = frame.height - 4.0
    for i in reversed(range(len(places))):
        places[i] = min(places[i], bottom)
        bottom = places[i] - LABEL_PIXELS
    return join(
        tag(
            "text",
            one.name,
            x="100%",
            dx=8,
            y=round(y, 1),
            dy="0.32em",
            class_=f"end-label {one.style} ink-{one.tone % NUM_TONES}",
        )
        for y, (_, one) in zip(places, ends, strict=True)
    )


def _line_swatch(one: Series) -> Markup:
    tone = one.tone % NUM_TONES
    line = tag("path", d="M1 7H25", class_=f"curve {one.style} line-{tone}")
    dot = tag("path", d="M13 7h0", class_=f"dot line-{tone}") if one.style == "dots" else None
    return tag("svg", line, dot, class_="swatch", width=26, height=14, aria_hidden="true")
