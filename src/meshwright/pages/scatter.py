"""Scatter charts of candidates by two costs, with the front of those that none beats in both."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from meshwright.pages.figure import Frame, legend, nothing, plot
from meshwright.pages.markup import Markup, join, tag
from meshwright.pages.numbers import Show, number

MAX_POINTS = 500  # besides the front
_HEIGHT = 340


@dataclass(frozen=True)
class Point:
    """A candidate with its two costs; `fits` is whether it is possible at all."""

    x: float
    y: float
    label: str
    fits: bool = True


def pareto_front(points: Sequence[Point]) -> list[Point]:
    """Returns the possible points that no other possible point beats or equals in both costs, by x.

    Example:
        >>> points = [Point(1, 3, "a"), Point(2, 2, "b"), Point(3, 2, "c"), Point(0, 0, "d", fits=False)]
        >>> [point.label for point in pareto_front(points)]
        ['a', 'b']
    """
    front: list[Point] = []
    for point in sorted((one for one in points if one.fits), key=lambda one: (one.x, one.y)):
        if not front or point.y < front[-1].y:
            front.append(point)
    return front


def scatter_chart(
    title: str,
    points: Sequence[Point],
    *,
    x_name: str,
    x_unit: str,
    y_name: str,
    limit: float | None = None,
    limit_label: str = "capacity",
    unit: str = "",
    chosen: Sequence[Point] = (),
    chosen_name: str = "chosen",
    show: Show = number,
    show_x: Show | None = None,
) -> Markup:
    """Returns candidates as dots, the front connected; pointing at a dot names it, and arrow keys walk the front.

    Args:
        limit: draws a line at this x value.
        chosen: points to mark with a ring, not necessarily among the others.
        show_x: formats an x value (default: a number with its unit).

    Example:
        >>> html = scatter_chart(
        ...     "Plans", [Point(1, 3, "a"), Point(2, 2, "b")], x_name="memory", x_unit="GiB", y_name="t"
        ... )
        >>> "a: 3, 1 GiB" in html
        True
    """
    front = pareto_front(points)
    if not points:
        return nothing(title, "")
    show_x = show_x or (lambda x: f"{number(x)} {x_unit}")
    shown = [*(front or points), *chosen]
    # Candidates that are far worse than the front would only squeeze it.
    best, largest = min(point.y for point in shown), max(point.x for point in shown)
    right = 1.05 * max(largest, limit or 0.0, *(point.x for point in points if point.fits))
    near = [point for point in points if point.y <= 8 * best and point.x <= 1.5 * right]
    taken = set(front)
    others = _few([point for point in near if point not in taken])
    right = 1.03 * max([right, *(point.x for point in others)])
    top = 1.1 * max([*(point.y for point in shown), *(point.y for point in others)])
    frame = Frame(0.0, right, best / 1.1, top, _HEIGHT, log=top > 4 * best)
    dots = [
        _dot(point, frame, _words(point, show, show_x), "point" if point.fits else "point over") for point in others
    ]
    dots += [_dot(point, frame, _words(point, show, show_x), "point front", radius=5.5) for point in front]
    dots += [_dot(point, frame, _words(point, show, show_x), "point chosen", radius=9) for point in chosen]
    lines = [_stair(frame, first, second) for first, second in itertools.pairwise(front)]
    edge = None
    if limit is not None:
        x = f"{100 * frame.x(limit):.3f}%"
        side = " end" if frame.x(limit) > 0.5 else ""
        edge = join(
            [
                tag("line", x1=x, x2=x, y1=0, y2=_HEIGHT, class_="capacity-line"),
                # Above the frame, where no dot can be.
                tag("text", f"{limit_label} {show_x(limit)}", x=x, y=-7, class_=f"level-label{side}"),
            ]
        )
    left_out = len(points) - len(others) - len(front)
    note = f"{left_out:,} of {len(points):,} candidates are not drawn: far slower or larger, or between others."
    kinds = {"front": "no candidate is both faster and smaller (Pareto front)", "": "fits"}
    if any(not point.fits for point in others):
        kinds["over"] = "does not fit"
    if chosen:
        kinds["chosen"] = chosen_name
    return plot(
        title,
        frame,
        [edge, *lines, *dots],
        [(y_name, [point.x for point in front], [point.y for point in front])] if front else [],
        label=f"{title}. The front: {'; '.join(_words(point, show, show_x) for point in front)}.",
        show=show,
        unit=", ".join(filter(None, [f"{y_name} against {x_name}", unit])),
        keys=legend([(_mark(kind), text) for kind, text in kinds.items()]),
        note=note if left_out > 0 else "",
        kind="scatter",
        x_name=x_name,
        x_unit=x_unit,
        names={point.x: point.label for point in front},
    )


def _few(points: list[Point]) -> list[Point]:
    """Returns at most `MAX_POINTS`, evenly over their order by y."""
    if len(points) <= MAX_POINTS:
        return points
    ordered = sorted(points, key=lambda point: point.y)
    return [ordered[place * len(ordered) // MAX_POINTS] for place in range(MAX_POINTS)]


def _words(point: Point, show: Show, show_x: Show) -> str:
    over = "" if point.fits else ", does not fit"
    return f"{point.label}: {show(point.y)}, {show_x(point.x)}{over}"


def _dot(point: Point, frame: Frame, about: str, kind: str, *, radius: float = 3.5) -> Markup:
    place = {"cx": f"{100 * frame.x(point.x):.2f}%", "cy": round(frame.y(point.y), 1), "r": radius}
    return tag("circle", tag("title", about), **place, class_=kind)


def _stair(frame: Frame, first: Point, second: Point) -> Markup:
    left, right = (f"{100 * frame.x(point.x):.2f}%" for point in (first, second))
    high, low = (round(frame.y(point.y), 1) for point in (first, second))
    return join(
        [
            tag("line", x1=left, x2=right, y1=high, y2=high, class_="front-line"),
            tag("line", x1=right, x2=right, y1=high, y2=low, class_="front-line"),
        ]
    )


def _mark(kind: str) -> Markup:
    dot = tag("circle", cx=7, cy=7, r=3.5 if kind in ("", "over") else 5.5, class_=f"point {kind}".strip())
    return tag("svg", dot, class_="swatch", width=14, height=14, aria_hidden="true")
