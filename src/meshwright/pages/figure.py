"""Shared parts of all charts: frame, caption, axes, legend, readout data and the table of values."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from meshwright.pages.blocks import table
from meshwright.pages.colors import NUM_FILLS, NUM_TONES
from meshwright.pages.markup import Markup, data_block, join, tag
from meshwright.pages.numbers import Show, compact, duration, log_ticks, number, plural, ticks, time_levels, whole_ticks

Values = tuple[str, Sequence[float], Sequence[float]]
"""Name, x values and y values of a series."""

X_NAME = "step"


def figure(
    title: str, *, unit: str = "", keys: Markup | None = None, body: Markup, after: Markup | None = None, kind: str
) -> Markup:
    """Returns a chart with its caption and legend above and its notes or values below."""
    caption = tag("figcaption", tag("b", title), tag("span", unit, class_="unit") if unit else None)
    return tag("figure", caption, keys, body, after, class_=f"chart {kind}")


def swatch(tone: int, *, plain: bool = False) -> Markup:
    """Returns a small square in the color and, if it is not plain, the pattern of a part."""
    fill = {"class_": plain_fill(tone)} if plain else {"fill": f"url(#tone-{tone % NUM_FILLS})"}
    square = tag("rect", width=14, height=14, rx=3, **fill)
    return tag("svg", square, class_="swatch", width=14, height=14, aria_hidden="true")


def plain_fill(tone: int) -> str:
    """Returns the classes of a fill without its pattern, for shapes that stretch; the second of a color is paler."""
    return f"tone-{tone % NUM_TONES}{' pale' if tone >= NUM_TONES else ''}"


def legend(entries: Sequence[tuple[Markup, object]]) -> Markup:
    """Returns a row of marks with their labels."""
    return tag("ul", *(tag("li", mark, what) for mark, what in entries), class_="legend")


def nothing(title: str, unit: str) -> Markup:
    """Returns the frame of a chart without values."""
    return figure(title, unit=unit, body=tag("p", "No data recorded.", class_="nothing"), kind="empty")


@dataclass(frozen=True)
class Frame:
    """Ranges of both axes; maps x to a share of the width and y to pixels."""

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


def plot(
    title: str,
    frame: Frame,
    drawn: Sequence[Markup | None],
    values: Sequence[Values],
    *,
    label: str,
    show: Show,
    unit: str = "",
    keys: Markup | None = None,
    note: str = "",
    kind: str = "lines",
    columns: bool = False,
    x_name: str = X_NAME,
    x_unit: str = "",
    names: Mapping[float, str] | None = None,
) -> Markup:
    """Returns a chart with axes; pointer and arrow keys read out its values.

    Args:
        label: description for screen readers.
        note: remark below the chart.
        columns: whether values belong to intervals of the x axis instead of points.
        x_name, x_unit: quantity and unit of the x axis (default: steps, which are whole numbers).
        names: names of places on the x axis.
    """
    parts = [*_axes(frame, show, x_name, x_unit), *drawn]
    longest = max((len(show(level)) for level in _levels(frame, show)), default=0)
    body = tag(
        "div",
        tag("svg", *parts, width="100%", height=frame.height, role="img", aria_label=title),
        tag("div", class_="cross", hidden=True),
        tag("div", class_="readout", hidden=True, aria_live="polite"),
        class_="plot",
        # The margin at the left grows with the labels of the y axis.
        style=f"height:{frame.height}px;--letters:{longest}",
        tabindex=0,
        role="group",
        aria_roledescription="chart",
        aria_label=f"{label} Left and right arrow keys read out values.",
        data_columns=columns,
    )
    series = [
        {"name": name, "x": [float(f"{x:.9g}") for x in xs], "y": [show(y) for y in ys]} for name, xs, ys in values
    ]
    # Keys as JavaScript writes numbers.
    named = {repr(float(f"{x:.9g}")).removesuffix(".0"): name for x, name in (names or {}).items()}
    data = {"x": x_name, "unit": x_unit, "low": frame.low_x, "high": frame.high_x, "series": series, "names": named}
    heading = f"{x_name} ({x_unit})" if x_unit else x_name
    after = join([tag("p", note, class_="note") if note else None, data_block(data), _numbers(values, show, heading)])
    return figure(title, unit=unit, keys=keys, body=body, after=after, kind=kind)


def _axes(frame: Frame, show: Show, x_name: str, x_unit: str) -> list[Markup]:
    parts, height = [], frame.height
    for level in _levels(frame, show):
        y = round(frame.y(level), 1)
        parts.append(tag("line", x1=0, x2="100%", y1=y, y2=y, class_="grid"))
        parts.append(tag("text", show(level), x=0, dx=-8, y=y, dy="0.32em", class_="tick y"))
    across = ticks(frame.low_x, frame.high_x, count=7) if x_unit else whole_ticks(frame.low_x, frame.high_x)
    for index, place in enumerate(across):
        x = f"{100 * frame.x(place):.3f}%"
        parts.append(tag("line", x1=x, x2=x, y1=height, y2=height + 5, class_="axis"))
        # Narrow pages hide every second label.
        odd = " odd" if index % 2 else ""
        said = number(place) if x_unit else compact(place)
        parts.append(tag("text", said, x=x, y=height + 18, class_=f"tick x{odd}"))
    parts.append(tag("line", x1=0, x2="100%", y1=height, y2=height, class_="axis"))
    if x_unit:  # on the right, where no level can be in its way
        parts.append(tag("text", f"{x_name}, {x_unit}", x="100%", y=height + 34, class_="tick y"))
    else:
        parts.append(tag("text", x_name, x=0, dx=-8, y=height + 18, class_="tick y"))
    return parts


def _levels(frame: Frame, show: Show) -> list[float]:
    """Returns the labeled values of the y axis."""
    count = 5 if frame.height >= 200 else 3
    if show is duration:
        return time_levels(frame.low, frame.high, log=frame.log, count=count)
    return log_ticks(frame.low, frame.high) if frame.log else ticks(frame.low, frame.high, count=count)


def _numbers(series: Sequence[Values], show: Show, heading: str, *, rows: int = 24) -> Markup:
    """Returns a collapsible table of at most about `rows` points of a chart."""
    known = sorted(dict.fromkeys(x for _, xs, _ in series for x in xs))
    # Short series, such as evaluations, come first: readers look up their values.
    wanted: dict[float, None] = {}
    for _, xs, _ in sorted(series, key=lambda one: len(one[1])):
        wanted.update(dict.fromkeys(_spread(xs, rows)))
        if len(wanted) >= rows:
            break
    columns = [dict(zip(xs, ys, strict=True)) for _, xs, ys in series]
    lines = [
        [f"{x:,.10g}", *("" if x not in column else show(column[x]) for column in columns)] for x in sorted(wanted)
    ]
    what = f"{len(lines)} of {len(known):,} drawn points" if len(lines) < len(known) else plural(len(known), "point")
    shown = table([heading, *(name for name, _, _ in series)], lines, right=range(len(series) + 1), sortable=False)
    return tag("details", tag("summary", f"Numbers ({what})"), shown, class_="behind")


def _spread(xs: Sequence[float], count: int) -> list[float]:
    return list(xs) if len(xs) <= count else [xs[round(i * (len(xs) - 1) / (count - 1))] for i in range(count)]


def in_words(name: str, xs: Sequence[float], ys: Sequence[float], show: Show, x_name: str = X_NAME) -> str:
    """Returns a description of a curve for screen readers."""
    points = [(x, y) for x, y in zip(xs, ys, strict=True) if math.isfinite(y)]
    if not points:
        return f"{name}: no values."
    (first_x, first), (last_x, last) = points[0], points[-1]
    low_x, low = min(points, key=lambda point: point[1])
    high_x, high = max(points, key=lambda point: point[1])
    return (
        f"{name}: {show(first)} at {x_name} {first_x:,.10g}, {show(last)} at {last_x:,.10g}, "
        f"lowest {show(low)} at {low_x:,.10g}, highest {show(high)} at {high_x:,.10g}."
    )


def patterns() -> Markup:
    """Returns the fills that charts refer to; patterns distinguish them in print without color."""
    lines = [
        "",
        "M-2 2L2 -2M0 8L8 0M6 10L10 6",
        "M0 4h8",
        "M-2 6L2 10M0 0L8 8M6 -2L10 2M-2 2L2 -2M0 8L8 0M6 10L10 6",
        "M4 0v8",
        "M2 2h1.6M6 6h1.6",
    ]
    made = []
    for tone in range(NUM_FILLS):
        # The second round of colors gets the patterns of other tones.
        line = lines[(tone + 3 * (tone // NUM_TONES)) % NUM_TONES]
        fill = tag("rect", width=8, height=8, class_=plain_fill(tone))
        hatch = tag("path", d=line, class_="hatch") if line else None
        made.append(tag("pattern", fill, hatch, id=f"tone-{tone}", width=8, height=8, patternUnits="userSpaceOnUse"))
    return tag("svg", tag("defs", join(made)), class_="patterns", width=0, height=0, aria_hidden="true")
