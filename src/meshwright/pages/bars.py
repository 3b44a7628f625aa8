"""Stacked bar charts: horizontal bars for totals with a capacity line, and columns for shares over time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshwright.pages.blocks import table
from meshwright.pages.colors import NUM_TONES, fills_of
from meshwright.pages.figure import Frame, figure, legend, nothing, plot, swatch
from meshwright.pages.markup import Markup, join, tag
from meshwright.pages.numbers import Show, number, percent

BAR_PIXELS = 30
_FAR = 0.02  # of the capacity


@dataclass(frozen=True)
class Bar:
    """A named bar with one value per part; `remark` follows its total."""

    name: str
    values: Sequence[float]
    remark: str = ""


def stacked_bars(
    title: str,
    parts: Sequence[str],
    bars: Sequence[Bar],
    *,
    unit: str = "",
    capacity: float | None = None,
    capacity_label: str = "capacity",
    show: Show = number,
) -> Markup:
    """Returns horizontal stacked bars on one scale, with all values below in a table (or a legend for a single bar).

    Args:
        capacity: draws a line at this value; a longer bar is labeled with the excess.

    Example:
        >>> chart = stacked_bars("Memory", ["params", "activations"], [Bar("fsdp:8", [3, 6])], unit="GiB", capacity=8)
        >>> "1 over" in chart
        True
    """
    totals = [sum(bar.values) for bar in bars]
    longest = max([*totals, capacity or 0.0], default=0.0)
    if longest <= 0:
        return nothing(title, unit)
    # Bars that would be too short to see get a scale of their own, without the capacity.
    is_far = capacity is not None and 0 < max(totals) < _FAR * capacity
    scale = 100 / (max(totals) if is_far else longest * (1.0 if capacity is None else 1.02))
    lines = join(_bar(bar, parts, scale, capacity, capacity_label, show) for bar in bars)
    if len(bars) == 1 and capacity is None:
        keys = [
            (swatch(fill), f"{part} {show(value)} ({percent(value / totals[0])})")
            for fill, part, value in zip(fills_of(parts), parts, bars[0].values, strict=True)
        ]
        return figure(title, unit=f"{show(totals[0])} {unit}".strip(), body=lines, after=legend(keys), kind="bars")
    rows = []
    for index, (fill, part) in enumerate(zip(fills_of(parts), parts, strict=True)):
        cells = [
            f"{show(bar.values[index])} ({percent(bar.values[index] / total)})" if total else show(0.0)
            for bar, total in zip(bars, totals, strict=True)
        ]
        rows.append([join([swatch(fill), part]), *cells])
    rows.append([tag("b", "total"), *(tag("b", show(total)) for total in totals)])
    if capacity is not None:
        rows.append([capacity_label, *(show(capacity) for _ in bars)])
    names = ["part", *(bar.name or "value" for bar in bars)]
    values = table(names, rows, right=range(1, len(names)), sortable=False)
    return figure(title, unit=unit, body=lines, after=values, kind="bars")


def _bar(bar: Bar, parts: Sequence[str], scale: float, capacity: float | None, label: str, show: Show) -> Markup:
    total = sum(bar.values)
    top = 16 if capacity is not None else 0
    drawn, words, start = [], [], 0.0
    for fill, part, value in zip(fills_of(parts), parts, bar.values, strict=True):
        if value <= 0:
            continue
        width = scale * value
        what = f"{part}: {show(value)}"
        words.append(what)
        box = {"x": f"{scale * start:.3f}%", "y": top, "width": f"{width:.3f}%", "height": BAR_PIXELS}
        drawn.append(tag("rect", tag("title", what), **box, fill=f"url(#tone-{fill})", class_="part"))
        if width > 1.1 * len(part) + 2:  # roughly the width of the text on a wide page; CSS hides it on narrow ones
            middle = f"{scale * (start + value / 2):.3f}%"
            drawn.append(tag("text", part, x=middle, y=top + 20, class_=f"part-label halo-{fill % NUM_TONES}"))
        start += value
    verdict = ""
    if capacity is not None:
        if scale * capacity > 100:
            drawn.append(
                tag(
                    "text",
                    f"{label} {show(capacity)}, far to the right →",
                    x="100%",
                    y=top - 6,
                    class_="capacity-label",
                )
            )
        else:
            x = f"{scale * capacity:.3f}%"
            drawn.append(tag("line", x1=x, x2=x, y1=top - 4, y2=top + BAR_PIXELS + 4, class_="capacity"))
            drawn.append(tag("text", f"{label} {show(capacity)}", x=x, y=top - 6, class_="capacity-label"))
        room = capacity - total
        verdict = f"{show(room)} free ({percent(room / capacity)})" if room >= 0 else f"{show(-room)} over"
    height = top + BAR_PIXELS + (6 if capacity is not None else 0)
    said = " ".join(filter(None, [f"{bar.name or 'total'}: {show(total)}", bar.remark])) + (verdict and f", {verdict}")
    svg = tag("svg", *drawn, width="100%", height=height, role="img", aria_label=f"{said}. {'; '.join(words)}.")
    over = " over" if capacity is not None and total > capacity else ""
    about = [f" {show(total)}", f" {bar.remark}" if bar.remark else None, f" · {verdict}" if verdict else None]
    name = tag("p", tag("b", bar.name), *about, class_=f"bar-name{over}")
    return tag("div", name if bar.name or verdict else None, svg, class_="bar")


def stacked_columns(
    title: str,
    parts: Sequence[str],
    columns: Sequence[tuple[float, float, Sequence[float]]],
    *,
    unit: str = "",
    height: int = 200,
    high: float | None = None,
    show: Show = number,
) -> Markup:
    """Returns stacked columns over the steps of a run.

    Args:
        columns: start, end and one value per part for each column.
        high: upper end of the y axis (default: the tallest column); taller columns are clipped, marked and counted.

    Example:
        >>> chart = stacked_columns("Time", ["compute", "data"], [(0, 10, [0.9, 0.1]), (10, 20, [0.8, 2])], high=1)
        >>> "One column is higher than the frame" in chart
        True
    """
    tallest = max((sum(values) for _, _, values in columns), default=0.0)
    if tallest <= 0:
        return nothing(title, unit)
    top = tallest * 1.04 if high is None else high
    frame = Frame(columns[0][0], columns[-1][1], 0.0, top, height, log=False)
    drawn = []
    cut = []
    fills = fills_of(parts)
    for start, end, values in columns:
        x, width = 100 * frame.x(start), 100 * (frame.x(end) - frame.x(start))
        floor = 0.0
        for fill, value in zip(fills, values, strict=True):
            roof = min(floor + value, top)
            if roof > floor:
                box = {"x": f"{x + 0.06 * width:.3f}%", "y": round(frame.y(roof), 2)}
                size = {"width": f"{0.88 * width:.3f}%", "height": round(frame.y(floor) - frame.y(roof), 2)}
                drawn.append(tag("rect", **box, **size, fill=f"url(#tone-{fill})"))
            floor = roof
        if sum(values) > top:
            cut.append(sum(values))
            drawn.append(tag("text", "▲", x=f"{x + width / 2:.3f}%", y=-2, class_="overflow"))
    note = ""
    if cut:
        places = f"{len(cut)} columns are" if len(cut) > 1 else "One column is"
        note = f"{places} higher than the frame (▲), up to {show(max(cut))}."
    middles = [(start + end) / 2 for start, end, _ in columns]
    return plot(
        title,
        frame,
        drawn,
        [(part, middles, [values[index] for _, _, values in columns]) for index, part in enumerate(parts)],
        label=f"{title}. {len(columns)} columns of {', '.join(parts)}.",
        show=show,
        unit=unit,
        keys=legend([(swatch(fill), part) for fill, part in zip(fills, parts, strict=True)]),
        note=note,
        columns=True,
    )
