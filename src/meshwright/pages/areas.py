"""Stacked area charts of amounts over time, with the peak marked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from meshwright.pages.colors import fills_of
from meshwright.pages.figure import Frame, legend, nothing, plain_fill, plot, swatch
from meshwright.pages.lines import WIDTH
from meshwright.pages.markup import Markup, join, tag
from meshwright.pages.numbers import Show, number, percent

COLUMNS = 300
_HEIGHT = 240
_LABEL_HEIGHT = 18
_NEARLY_ALL = 0.95  # of the time; a peak of that length has no place


@dataclass(frozen=True)
class Level:
    """Amounts by part from `start` to `end`."""

    start: float
    end: float
    amounts: Mapping[str, float]

    @property
    def total(self) -> float:
        return sum(self.amounts.values())


def area_chart(
    title: str,
    levels: Sequence[Level],
    *,
    unit: str = "",
    x_name: str,
    x_unit: str,
    capacity: float | None = None,
    capacity_label: str = "capacity",
    show: Show = number,
    show_x: Show | None = None,
    note: str = "",
) -> Markup:
    """Returns stacked areas, the parts that are large at the peak at the bottom, with their amounts at the peak.

    Args:
        levels: in order; many short ones are drawn as their highest.
        capacity: draws a line at this amount, if the peak comes near it.
        show_x: formats the place of the peak (default: a number with the unit of the axis).

    Example:
        >>> levels = [Level(0, 2, {"parameters": 3}), Level(2, 4, {"parameters": 3, "activations": 6})]
        >>> "peak 9 at 3 ms" in area_chart("Memory", levels, x_name="time", x_unit="ms")
        True
    """
    levels = [level for level in levels if level.end > level.start]
    peak = max(levels, key=lambda level: level.total, default=None)
    if peak is None or peak.total <= 0:
        return nothing(title, unit)
    low, high = levels[0].start, levels[-1].end
    is_near = capacity is not None and peak.total > 0.4 * capacity
    top = 1.06 * max(peak.total, (capacity or 0.0) if is_near else 0.0)
    frame = Frame(low, high, 0.0, top, _HEIGHT, log=False)
    # Constant parts are at the bottom, so that their areas are flat.
    names = list(dict.fromkeys(name for level in levels for name in level.amounts))
    spread = {name: _spread(levels, name) for name in names}
    names.sort(key=lambda name: (spread[name] > 0.02 * peak.total, spread[name]))
    shown = drawn_levels(levels)
    fills = dict(zip(names, fills_of(names), strict=True))
    floors = [0.0] * len(shown)
    areas = []
    for name in names:
        roofs = [floor + level.amounts.get(name, 0.0) for floor, level in zip(floors, shown, strict=True)]
        if any(roof > floor for roof, floor in zip(roofs, floors, strict=True)):
            path = _outline(shown, floors, roofs, frame)
            areas.append(tag("path", tag("title", name), d=path, class_=f"area {plain_fill(fills[name])}"))
        floors = roofs
    curves = tag(
        "svg", *areas, width="100%", height=_HEIGHT, viewBox=f"0 0 {WIDTH} {_HEIGHT}", preserveAspectRatio="none"
    )
    middle = (peak.start + peak.end) / 2
    place = f"{number(float(f'{middle:.3g}'))}{'' if x_unit == '%' else ' '}{x_unit}"
    flat = sum(level.end - level.start for level in levels if level.total > 0.999 * peak.total)
    is_flat = flat > _NEARLY_ALL * (high - low)
    where = "nearly all the time" if is_flat else f"at {place if show_x is None else show_x(middle)}"
    said = f"peak {show(peak.total)} {where}"
    marked = [(peak.total, said, "peak", frame.x(middle))]
    if capacity is not None and is_near:
        marked.append((capacity, f"{capacity_label} {show(capacity)}", "capacity", 1.0))
    heights = [frame.y(value) for value, *_ in marked]
    # Of two lines that are too close for a label between them, the lower one has its label below.
    is_tight = max(heights) - min(heights) < _LABEL_HEIGHT
    lines = [_level_line(frame, *line, below=len(marked) > 1 and is_tight and line == min(marked)) for line in marked]
    at_peak = sorted(peak.amounts.items(), key=lambda item: -item[1])
    keys = [
        (swatch(fills[name], plain=True), f"{name} {show(amount)} ({percent(amount / peak.total)})")
        for name, amount in at_peak
        if amount > 0
    ]
    centers = [(level.start + level.end) / 2 for level in shown]
    values = [(name, centers, [level.amounts.get(name, 0.0) for level in shown]) for name, _ in at_peak]
    named = tag("p", "Live at the peak:", class_="note")
    return plot(
        title,
        frame,
        [curves, *lines],
        [("total", centers, [level.total for level in shown]), *values],
        label=f"{title}: {said}, with {', '.join(f'{name} {show(amount)}' for name, amount in at_peak if amount > 0)}.",
        show=show,
        unit=unit,
        keys=join([named, legend(keys)]),
        note=note,
        kind="areas",
        columns=True,
        x_name=x_name,
        x_unit=x_unit,
    )


def drawn_levels(levels: Sequence[Level]) -> list[Level]:
    """Returns at most `COLUMNS` levels, each the highest of its time; equal neighbors are one."""
    low, high = levels[0].start, levels[-1].end
    width = (high - low) / COLUMNS
    columns: list[Level | None] = [None] * COLUMNS
    for level in levels:
        first = min(COLUMNS - 1, int((level.start - low) / width))
        last = min(COLUMNS - 1, max(first, int((level.end - low) / width - 1e-9)))
        for place in range(first, last + 1):
            known = columns[place]
            if known is None or level.total > known.total:
                columns[place] = level
    found: list[Level] = []
    for place, one in enumerate(columns):
        if one is None:
            continue
        start, end = low + place * width, low + (place + 1) * width
        if found and found[-1].amounts == one.amounts:
            found[-1] = Level(found[-1].start, end, one.amounts)
        else:
            found.append(Level(start, end, one.amounts))
    return found


def _spread(levels: Sequence[Level], name: str) -> float:
    values = [level.amounts.get(name, 0.0) for level in levels]
    return max(values) - min(values)


def _outline(levels: Sequence[Level], floors: Sequence[float], roofs: Sequence[float], frame: Frame) -> str:
    def x(value: float) -> str:
        return f"{WIDTH * frame.x(value):.0f}"

    there = [f"{x(level.start)} {frame.y(roof):.1f}H{x(level.end)}" for level, roof in zip(levels, roofs, strict=True)]
    back = [
        f"{x(level.end)} {frame.y(floor):.1f}H{x(level.start)}"
        for level, floor in reversed(list(zip(levels, floors, strict=True)))
    ]
    return f"M{'L'.join(there)}L{'L'.join(back)}Z"


def _level_line(frame: Frame, value: float, said: str, kind: str, share: float, *, below: bool) -> Markup:
    y = round(frame.y(value), 1)
    end = " end" if share > 0.7 else " middle" if share > 0.3 else ""
    at = {"x": f"{100 * share:.2f}%", "dx": {"": 8, " end": -8}.get(end, 0)}
    line = tag("line", x1=0, x2="100%", y1=y, y2=y, class_=f"{kind}-line")
    dot = tag("circle", cx=f"{100 * share:.2f}%", cy=y, r=4.5, class_="peak-dot") if kind == "peak" else None
    # A label in the middle is above the dot, not beside it.
    up = 9 if end == " middle" and dot is not None else 5
    return join([line, dot, tag("text", said, **at, y=y + (16 if below else -up), class_=f"level-label{end}")])
