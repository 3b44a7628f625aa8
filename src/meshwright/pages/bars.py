"""Stacked bars: lying ones for totals, with a line where the room ends, and standing ones for shares over time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshwright.pages.figure import NUM_TONES, behind, figure, legend, nothing, plot, read_out_data, swatch
from meshwright.pages.markup import Markup, join, tag
from meshwright.pages.numbers import Show, compact, number, percent, ticks, whole_ticks
from meshwright.pages.table import table

BAR_PIXELS = 30


@dataclass(frozen=True)
class Bar:
    """A bar by name, with one value per part."""

    name: str
    values: Sequence[float]


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
    """Returns lying bars on one scale, each cut into parts, with all values beneath: in a table, or named for one bar.

    Args:
        capacity: draws a line there; a bar that goes past it says by how much.
    """
    totals = [sum(bar.values) for bar in bars]
    longest = max([*totals, capacity or 0.0], default=0.0)
    if longest <= 0:
        return nothing(title, "Nothing was recorded.", unit=unit)
    scale = 100 / (longest * (1.0 if capacity is None else 1.02))
    lines = [
        _bar(bar, total, parts, scale=scale, capacity=capacity, capacity_label=capacity_label, show=show)
        for bar, total in zip(bars, totals, strict=True)
    ]
    if len(bars) == 1 and capacity is None:
        whole = totals[0]
        amounts = [
            f"{part} {show(value)} ({percent(value / whole)})"
            for part, value in zip(parts, bars[0].values, strict=True)
        ]
        return figure(
            title,
            unit=" ".join(filter(None, [show(whole), unit])),
            body=join(lines),
            after=legend([(swatch(index), amount) for index, amount in enumerate(amounts)]),
            kind="bars",
        )
    rows = []
    for index, part in enumerate(parts):
        cells = [
            f"{show(bar.values[index])} ({percent(bar.values[index] / total)})" if total else show(0.0)
            for bar, total in zip(bars, totals, strict=True)
        ]
        rows.append([join([swatch(index), part]), *cells])
    rows.append([tag("b", "total"), *(tag("b", show(total)) for total in totals)])
    if capacity is not None:
        rows.append([capacity_label, *(show(capacity) for _ in bars)])
    values = table(
        ["part", *(bar.name or "value" for bar in bars)], rows, right=range(1, len(bars) + 1), sortable=False
    )
    return figure(title, unit=unit, body=join(lines), after=values, kind="bars")


def _bar(
    bar: Bar,
    total: float,
    parts: Sequence[str],
    *,
    scale: float,
    capacity: float | None,
    capacity_label: str,
    show: Show,
) -> Markup:
    top = 16 if capacity is not None else 0
    drawn, words, start = [], [], 0.0
    for index, (part, value) in enumerate(zip(parts, bar.values, strict=True)):
        if value <= 0:
            continue
        width = scale * value
        what = f"{part}: {show(value)}"
        words.append(what)
        drawn.append(
            tag(
                "rect",
                tag("title", what),
                x=f"{scale * start:.3f}%",
                y=top,
                width=f"{width:.3f}%",
                height=BAR_PIXELS,
                fill=f"url(#tone-{index % NUM_TONES})",
                class_="part",
            )
        )
        if width > 1.1 * len(part) + 2:  # about what the text takes at full width; narrow pages hide it
            middle = f"{scale * (start + value / 2):.3f}%"
            drawn.append(tag("text", part, x=middle, y=top + 20, class_=f"part-label halo-{index % NUM_TONES}"))
        start += value
    verdict = ""
    if capacity is not None:
        x = f"{scale * capacity:.3f}%"
        drawn.append(tag("line", x1=x, x2=x, y1=top - 4, y2=top + BAR_PIXELS + 4, class_="capacity"))
        drawn.append(tag("text", f"{capacity_label} {show(capacity)}", x=x, y=top - 6, class_="capacity-label"))
        room = capacity - total
        verdict = f"{show(room)} free ({percent(room / capacity)})" if room >= 0 else f"{show(-room)} too much"
    height = top + BAR_PIXELS + (6 if capacity is not None else 0)
    said = f"{bar.name or 'total'}: {show(total)}" + (f", {verdict}" if verdict else "")
    svg = tag("svg", *drawn, width="100%", height=height, role="img", aria_label=f"{said}. {'; '.join(words)}.")
    over = " over" if capacity is not None and total > capacity else ""
    name = tag(
        "p", tag("b", bar.name), f" {show(total)}", f" · {verdict}" if verdict else None, class_=f"bar-name{over}"
    )
    return tag("div", name if bar.name or verdict else None, svg, class_="bar")


def stacked_columns(
    title: str,
    parts: Sequence[str],
    columns: Sequence[tuple[float, float, Sequence[float]]],
    *,
    x_label: str = "step",
    unit: str = "",
    height: int = 200,
    high: float | None = None,
    show: Show = number,
) -> Markup:
    """Returns standing bars side by side; a column is where it starts, where it ends, and one value per part.

    Args:
        high: where the y axis ends; columns that are higher are cut there, marked and counted.
    """
    tallest = max((sum(values) for _, _, values in columns), default=0.0)
    if tallest <= 0:
        return nothing(title, "Nothing was recorded.", unit=unit)
    top = tallest * 1.04 if high is None else high
    low_x, high_x = columns[0][0], columns[-1][1]
    across = 100 / (high_x - low_x)
    drawn: list[Markup] = []
    for level in ticks(0, top, count=4):
        y = round(height * (1 - level / top), 1)
        drawn.append(tag("line", x1=0, x2="100%", y1=y, y2=y, class_="grid"))
        drawn.append(tag("text", show(level), x=0, dx=-8, y=y, dy="0.32em", class_="tick y"))
    cut = []
    for start, end, values in columns:
        x, width = across * (start - low_x), across * (end - start)
        floor = 0.0
        for index, value in enumerate(values):
            roof = min(floor + value, top)
            if roof > floor:
                box = {"x": f"{x + 0.06 * width:.3f}%", "y": round(height * (1 - roof / top), 2)}
                size = {"width": f"{0.88 * width:.3f}%", "height": round(height * (roof - floor) / top, 2)}
                drawn.append(tag("rect", **box, **size, fill=f"url(#tone-{index % NUM_TONES})"))
            floor = roof
        if sum(values) > top:
            cut.append(sum(values))
            drawn.append(tag("text", "▲", x=f"{x + width / 2:.3f}%", y=-2, class_="overflow"))
    for index, place in enumerate(whole_ticks(low_x, high_x)):
        where = f"{across * (place - low_x):.3f}%"
        drawn.append(tag("line", x1=where, x2=where, y1=height, y2=height + 5, class_="axis"))
        odd = " odd" if index % 2 else ""
        drawn.append(tag("text", compact(place), x=where, y=height + 18, class_=f"tick x{odd}"))
    drawn.append(tag("line", x1=0, x2="100%", y1=height, y2=height, class_="axis"))
    drawn.append(tag("text", x_label, x=0, dx=-8, y=height + 18, class_="tick y"))
    svg = tag("svg", tag("title", title), *drawn, width="100%", height=height, role="img", aria_label=title)
    middles = [(start + end) / 2 for start, end, _ in columns]
    data = [(part, middles, [values[index] for _, _, values in columns]) for index, part in enumerate(parts)]
    hint = None
    if cut:
        places = f"{len(cut)} columns are" if len(cut) > 1 else "One column is"
        hint = tag("p", f"{places} higher than the frame (▲), up to {show(max(cut))}.", class_="note")
    after = join(
        [hint, read_out_data(x_label, data, low=low_x, high=high_x, show=show), behind(x_label, data, show=show)]
    )
    label = f"{title}. {len(columns)} columns of {', '.join(parts)}."
    body = plot(svg, label=label, height=height, columns=True)
    keys = legend([(swatch(index), part) for index, part in enumerate(parts)])
    return figure(title, unit=unit, keys=keys, body=body, after=after, kind="lines")
