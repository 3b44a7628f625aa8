"""What all charts share: frame, caption, legend, the data that read-outs show, and the same data as a table."""

from __future__ import annotations

import math
from collections.abc import Sequence

from meshwright.pages.markup import Markup, data_block, join, tag
from meshwright.pages.numbers import Show
from meshwright.pages.table import table

# Series and parts wear one of six colours, each with its own dash or pattern (page.css, `PATTERNS`).
NUM_TONES = 6


def figure(
    title: str, *, unit: str = "", keys: Markup | None = None, body: Markup, after: Markup | None = None, kind: str
) -> Markup:
    """Returns a chart in its frame: caption and legend above, what belongs to it below."""
    caption = tag("figcaption", tag("b", title), tag("span", unit, class_="unit") if unit else None)
    return tag("figure", caption, keys, body, after, class_=f"chart {kind}")


def swatch(tone: int) -> Markup:
    """Returns a small square in the colour and pattern of a part."""
    square = tag("rect", width=14, height=14, rx=3, fill=f"url(#tone-{tone % NUM_TONES})")
    return tag("svg", square, class_="swatch", width=14, height=14, aria_hidden="true")


def legend(entries: Sequence[tuple[Markup, object]]) -> Markup:
    """Returns a row of marks, each with what it stands for."""
    return tag("ul", *(tag("li", mark, what) for mark, what in entries), class_="legend")


def nothing(title: str, why: str, *, unit: str = "") -> Markup:
    """Returns the frame of a chart for which there are no values, which it says."""
    return figure(title, unit=unit, body=tag("p", why, class_="nothing"), kind="empty")


def plot(svg: Markup, *, label: str, height: int, columns: bool = False) -> Markup:
    """Returns a drawing that reads out its values to the pointer and to arrow keys."""
    return tag(
        "div",
        svg,
        tag("div", class_="cross", hidden=True),
        tag("div", class_="readout", hidden=True, aria_live="polite"),
        class_="plot",
        style=f"height:{height}px",
        tabindex=0,
        role="group",
        aria_roledescription="chart",
        aria_label=f"{label} Left and right arrow keys read out values.",
        data_columns=columns,
    )


def read_out_data(
    x_label: str, series: Sequence[tuple[str, Sequence[float], Sequence[float]]], *, low: float, high: float, show: Show
) -> Markup:
    """Returns the values of a chart for its read-out, as they are to be shown."""
    return data_block(
        {
            "x": x_label,
            "low": low,
            "high": high,
            "series": [
                {"name": name, "x": [float(f"{x:.9g}") for x in xs], "y": [show(y) for y in ys]}
                for name, xs, ys in series
            ],
        }
    )


def behind(
    x_label: str, series: Sequence[tuple[str, Sequence[float], Sequence[float]]], *, show: Show, rows: int = 24
) -> Markup:
    """Returns the numbers behind a chart as a table that opens; of many, some, and it says how many."""
    known = sorted(dict.fromkeys(x for _, xs, _ in series for x in xs))
    # Series with few values, such as evaluations, are the ones to look up: their rows come first.
    wanted: dict[float, None] = {}
    for _, xs, _ in sorted(series, key=lambda one: len(one[1])):
        wanted.update(dict.fromkeys(_spread(xs, rows)))
        if len(wanted) >= rows:
            break
    columns = [dict(zip(xs, ys, strict=True)) for _, xs, ys in series]
    lines = [
        [f"{x:,.10g}", *("" if x not in column else show(column[x]) for column in columns)] for x in sorted(wanted)
    ]
    what = f"{len(lines)} of {len(known):,} drawn points" if len(lines) < len(known) else f"{len(known):,} points"
    shown = table([x_label, *(name for name, _, _ in series)], lines, right=range(len(series) + 1), sortable=False)
    return tag("details", tag("summary", f"Numbers ({what})"), shown, class_="behind")


def _spread(xs: Sequence[float], count: int) -> list[float]:
    if len(xs) <= count:
        return list(xs)
    return [xs[round(i * (len(xs) - 1) / (count - 1))] for i in range(count)]


def in_words(name: str, xs: Sequence[float], ys: Sequence[float], *, x_label: str, show: Show) -> str:
    """Returns what a curve does, for those who do not see it."""
    points = [(x, y) for x, y in zip(xs, ys, strict=True) if math.isfinite(y)]
    if not points:
        return f"{name}: no values."
    (first_x, first), (last_x, last) = points[0], points[-1]
    low_x, low = min(points, key=lambda point: point[1])
    high_x, high = max(points, key=lambda point: point[1])
    return (
        f"{name}: {show(first)} at {x_label} {first_x:,.10g}, {show(last)} at {last_x:,.10g}, "
        f"lowest {show(low)} at {low_x:,.10g}, highest {show(high)} at {high_x:,.10g}."
    )


def patterns() -> Markup:
    """Returns the fills that charts refer to: a colour each, told apart by its pattern where there is none."""
    lines = [
        "",
        "M-2 2L2 -2M0 8L8 0M6 10L10 6",
        "M0 4h8",
        "M-2 6L2 10M0 0L8 8M6 -2L10 2M-2 2L2 -2M0 8L8 0M6 10L10 6",
        "M4 0v8",
        "M2 2h1.6M6 6h1.6",
    ]
    made = [
        tag(
            "pattern",
            tag("rect", width=8, height=8, class_=f"tone-{tone}"),
            tag("path", d=line, class_="hatch") if line else None,
            id=f"tone-{tone}",
            width=8,
            height=8,
            patternUnits="userSpaceOnUse",
        )
        for tone, line in enumerate(lines)
    ]
    return tag("svg", tag("defs", join(made)), class_="patterns", width=0, height=0, aria_hidden="true")
