"""A TPU slice as a picture: chips as dots, links as lines, and arcs where a dim closes to a ring."""

from __future__ import annotations

import itertools

from meshwright.pages.figure import figure, legend
from meshwright.pages.grids import shown
from meshwright.pages.markup import Markup, tag
from meshwright.plan.target import Target

# Columns, rows and layers that are drawn at most; the rest is left out, and marked.
LIMITS = (16, 8, 5)
PITCH_X, PITCH_Y, AWAY_X, AWAY_Y = 58, 46, 15, 12
LEFT, TOP, DOT = 52, 26, 3.5
NAMES = "xyz"


def torus_picture(target: Target) -> Markup:
    """Returns the torus of one slice; the longest dim runs right, the next down, the shortest away."""
    known = zip(target.shape, NAMES, target.wraps, strict=False)  # of two dims, only x and y
    dims = sorted(((size, name, wraps) for size, name, wraps in known), key=lambda dim: -dim[0])
    dims += [(1, "", False)] * (3 - len(dims))
    places = [shown(size, limit) for (size, _, _), limit in zip(dims, LIMITS, strict=True)]
    columns, rows, layers = (len(place) for place in places)
    away_x, away_y = AWAY_X * (layers - 1), AWAY_Y * (layers - 1)

    def at(column: int, row: int, layer: int) -> tuple[float, float]:
        # Chips of far layers stand between those of the nearest, up and to the right.
        pitch_x, pitch_y = PITCH_X + away_x // 3, PITCH_Y + away_y // 2
        return LEFT + column * pitch_x + layer * AWAY_X, TOP + away_y + row * pitch_y - layer * AWAY_Y

    def left_out(*place: int) -> bool:
        return any(known[index] is None for known, index in zip(places, place, strict=True))

    lines, dots = [], []
    for layer, row, column in itertools.product(reversed(range(layers)), range(rows), range(columns)):
        here = (column, row, layer)
        x, y = at(*here)
        for dim, limit in enumerate((columns, rows, layers)):
            other = tuple(index + (number == dim) for number, index in enumerate(here))
            if other[dim] < limit and not (left_out(*here) and left_out(*other)):
                end_x, end_y = at(*other)
                lines.append(tag("path", d=f"M{x} {y}L{end_x} {end_y}", class_=f"edge axis-{dim}"))
        if left_out(*here):
            dots.append(tag("text", "…", x=x, y=y + 4, class_="node-text elided"))
        else:
            index = [known[i] for known, i in zip(places, here, strict=True)]
            about = ", ".join(f"{name} {value}" for (_, name, _), value in zip(dims, index, strict=True) if name)
            dots.append(tag("circle", tag("title", f"chip at {about}"), cx=x, cy=y, r=DOT, class_="tone-5"))
    arcs = _arcs(dims, at, (columns, rows, layers))
    right, bottom = at(columns - 1, rows - 1, 0)
    width, height = round(right + away_x + 60), round(bottom + 44)
    sizes = " x ".join(f"{name} {size}" for size, name, _ in dims if name)
    words = [f"{name}: {size}, {'closed to a ring' if wraps else 'a line'}" for size, name, wraps in dims if name]
    svg = tag(
        "svg",
        tag("title", f"torus {sizes}"),
        *lines,
        *arcs,
        *dots,
        width=width,
        height=height,
        viewBox=f"0 0 {width} {height}",
        role="img",
        aria_label=f"torus {sizes}. {'; '.join(words)}.",
    )
    slices = f", {target.num_slices} slices like this" if target.num_slices > 1 else ""
    keys = legend([(_line(number), text) for number, text in enumerate(words)])
    body = tag("div", svg, class_="panels")
    return figure("Torus", unit=f"chips of a slice{slices}", keys=keys, body=body, kind="mesh")


def _arcs(dims: list[tuple[int, str, bool]], at: object, counts: tuple[int, int, int]) -> list[Markup]:
    """Returns an arc along one edge for every dim whose last chip is linked to its first."""
    assert callable(at)
    columns, rows, layers = counts
    ends = [
        (at(0, rows - 1, 0), at(columns - 1, rows - 1, 0), (0, 30)),
        (at(0, 0, 0), at(0, rows - 1, 0), (-44, 0)),
        (at(columns - 1, rows - 1, 0), at(columns - 1, rows - 1, layers - 1), (34, 16)),
    ]
    found = []
    for number, ((size, _, wraps), (start, end, (bend_x, bend_y))) in enumerate(zip(dims, ends, strict=True)):
        if wraps and size > 2:
            curve = (
                f"M{start[0]} {start[1]}C{start[0] + bend_x} {start[1] + bend_y} {end[0] + bend_x} {end[1] + bend_y} "
                f"{end[0]} {end[1]}"
            )
            found.append(tag("path", d=curve, class_=f"edge axis-{number}"))
    return found


def _line(number: int) -> Markup:
    drawn = tag("path", d="M1 7H25", class_=f"edge axis-{number}")
    return tag("svg", drawn, class_="swatch", width=26, height=14, aria_hidden="true")
