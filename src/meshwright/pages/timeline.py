"""Timelines: lanes of spans and moments, such as the events of a run or the overlap within a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from meshwright.pages.colors import NUM_FILLS, NUM_TONES
from meshwright.pages.figure import figure, legend, nothing, swatch
from meshwright.pages.markup import Markup, join, tag
from meshwright.pages.numbers import Show, duration, time_ticks

NAME_PIXELS, LANE_PIXELS, GAP_PIXELS = 18, 24, 10
_THIN = 0.5  # percent of the width; borders and patterns would hide the color of shorter spans

# Different shapes distinguish kinds without color.
Shape = Literal["diamond", "circle", "triangle", "square", "cross"]
_SHAPES: dict[Shape, str] = {
    "diamond": "M0 -7L7 0L0 7L-7 0Z",
    "circle": "M-5 0a5 5 0 1 0 10 0a5 5 0 1 0 -10 0Z",
    "triangle": "M0 -7L7 6H-7Z",
    "square": "M-5 -5H5V5H-5Z",
    "cross": "M-6 -3.5L-3.5 -6L0 -2.5L3.5 -6L6 -3.5L2.5 0L6 3.5L3.5 6L0 2.5L-3.5 6L-6 3.5L-2.5 0Z",
}


@dataclass(frozen=True)
class Span:
    """An interval; `tone` is the color of its kind."""

    start: float
    end: float
    label: str
    tone: int = 0
    detail: str = ""


@dataclass(frozen=True)
class Moment:
    """An event at a point in time."""

    at: float
    label: str
    shape: Shape = "diamond"
    tone: int = 0


@dataclass(frozen=True)
class Lane:
    """A row of a timeline."""

    name: str
    spans: Sequence[Span] = ()
    moments: Sequence[Moment] = ()


def timeline(
    title: str,
    lanes: Sequence[Lane],
    *,
    unit: str = "",
    keys: Sequence[str] | Mapping[str, int] = (),
    show: Show = duration,
    note: str = "",
) -> Markup:
    """Returns a timeline with one row per lane, starting at the earliest span or moment.

    The page's script zooms it: with buttons, the wheel and Ctrl, two fingers, or the keys + - and 0.

    Args:
        keys: names of the tones for a legend, in order from tone 0 on or with their tones.
        note: remark below the chart.

    Example:
        >>> chart = timeline("Step", [Lane("compute", [Span(0, 2, "matmul")]), Lane("links", [Span(1, 3, "gather")])])
        >>> "links: gather from 1 s to 3 s." in chart
        True
    """
    times = [time for lane in lanes for span in lane.spans for time in (span.start, span.end)]
    times += [moment.at for lane in lanes for moment in lane.moments]
    if not times:
        return nothing(title, unit)
    begin = min(times)
    length = (max(times) - begin) or 1.0
    pitch = NAME_PIXELS + LANE_PIXELS + GAP_PIXELS
    height = pitch * len(lanes)
    drawn = [_axis(length, height, show)]
    for number, lane in enumerate(lanes):
        drawn.append(_lane(lane, begin, length, top=number * pitch, show=show))
    label = f"{title}. {' '.join(_in_words(lane, begin, show) for lane in lanes)}"
    # The script draws finer ticks only if lengths are seconds.
    seconds = f"{length:.9g}" if show is duration else None
    svg = tag("svg", *drawn, width="100%", height=height + 24, role="img", aria_label=label, data_seconds=seconds)
    tones = keys if isinstance(keys, Mapping) else {key: tone for tone, key in enumerate(keys)}
    marks = legend([(swatch(tone), key) for key, tone in tones.items()]) if keys else None
    # A region that scrolls must be reachable by keyboard and then needs a name.
    wide = tag("div", tag("div", svg, class_="wide"), class_="zoom", tabindex=0, role="region", aria_label=title)
    after = tag("p", note, class_="note") if note else None
    return figure(title, unit=unit, keys=marks, body=tag("div", wide, class_="lanes"), after=after, kind="timeline")


def _axis(length: float, height: int, show: Show) -> Markup:
    parts = []
    for index, at in enumerate(time_ticks(length)):
        x = f"{100 * at / length:.3f}%"
        parts.append(tag("line", x1=x, x2=x, y1=0, y2=height, class_="grid"))
        odd = " odd" if index % 2 else ""
        # Left-aligns the first label, which would otherwise cross the edge.
        parts.append(tag("text", show(at), x=x, y=height + 16, class_=f"tick x{odd}{' first' if index == 0 else ''}"))
    return join(parts)


def _lane(lane: Lane, begin: float, length: float, *, top: int, show: Show) -> Markup:
    parts = [
        tag("text", lane.name, x=0, y=top + 12, class_="lane-name"),
        tag("rect", x=0, y=top + NAME_PIXELS, width="100%", height=LANE_PIXELS, rx=4, class_="lane"),
    ]
    for span in lane.spans:
        width = 100 * (span.end - span.start) / length
        x = 100 * (span.start - begin) / length
        what = f"{span.label}: {show(span.end - span.start)}, from {show(span.start - begin)}"
        title = tag("title", f"{what}. {span.detail}" if span.detail else what)
        box = {"x": f"{x:.3f}%", "width": f"{width:.3f}%", "y": top + NAME_PIXELS, "height": LANE_PIXELS}
        thin, tone = width < _THIN, span.tone % NUM_FILLS
        look = {"fill": f"url(#tone-{tone})", "class_": f"span thin thin-{tone}" if thin else "span"}
        parts.append(tag("rect", title, **box, rx=0 if thin else 3, **look))
        # "attention, backward", or at least "attention".
        for text in dict.fromkeys((span.label, span.label.partition(", ")[0])):
            if width > 0.9 * len(text) + 1.5:
                wide = " wide" if width < 2.6 * len(text) + 4 else ""
                middle = {"x": f"{x + width / 2:.3f}%", "y": top + NAME_PIXELS + 16}
                parts.append(tag("text", text, **middle, class_=f"part-label{wide} halo-{span.tone % NUM_TONES}"))
                break
    for moment in lane.moments:
        title = tag("title", f"{moment.label}, at {show(moment.at - begin)}")
        shape = tag("path", title, d=_SHAPES[moment.shape], class_=f"moment tone-{moment.tone % NUM_TONES}")
        # A nested svg keeps the shape's size when the page stretches.
        place = f"{100 * (moment.at - begin) / length:.3f}%"
        parts.append(tag("svg", shape, x=place, y=top + NAME_PIXELS + LANE_PIXELS // 2, overflow="visible"))
    return join(parts)


def _in_words(lane: Lane, begin: float, show: Show) -> str:
    spans = [f"{span.label} from {show(span.start - begin)} to {show(span.end - begin)}" for span in lane.spans]
    moments = [f"{moment.label} at {show(moment.at - begin)}" for moment in lane.moments]
    said = [*spans, *moments]
    more = f" and {len(said) - 12} more" if len(said) > 12 else ""
    return f"{lane.name}: {'; '.join(said[:12])}{more}." if said else f"{lane.name}: nothing."
