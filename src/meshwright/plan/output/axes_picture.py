"""A small picture of where each mesh axis runs: along which dims of the torus, inside or between hosts and slices."""

from __future__ import annotations

import math
from dataclasses import dataclass

from meshwright.mesh.string import MeshSpec
from meshwright.pages import Markup, join, tag
from meshwright.pages.colors import NUM_TONES, fills_of
from meshwright.pages.figure import figure, legend, swatch
from meshwright.plan.target import Target

CELL, GAP, ROW = 15, 3, 52
MAX_CELLS = 16


@dataclass(frozen=True)
class GridPlace:
    """One direction of a machine: a dim of the torus, the GPUs of a host, the hosts or the slices.

    Args:
        dim: its short name: x, y, z, chip, gpu, host or slice.
        axes: the axes that run along it with their number of devices there, the fastest first.
    """

    name: str
    dim: str
    size: int
    axes: tuple[tuple[str, int], ...]


def places(target: Target, spec: MeshSpec) -> list[GridPlace]:
    """Returns the directions of a machine with the mesh axes that run along each; none for CPUs.

    Example:
        >>> from meshwright.mesh.string import parse_mesh
        >>> from meshwright.plan.target import parse_target
        >>> target = parse_target("h200:8x8")
        >>> [(place.name, place.axes) for place in places(target, parse_mesh("fsdp:16,tp:4"))]
        [('8 GPUs of a host (nvlink)', (('tp', 4), ('fsdp', 2))), ('8 hosts (network)', (('fsdp', 8),))]
    """
    if target.platform == "gpu":
        return _hosts(target, spec)
    return _torus(target, spec) if target.platform == "tpu" else []


def _hosts(target: Target, spec: MeshSpec) -> list[GridPlace]:
    inside: list[tuple[str, int]] = []
    between: list[tuple[str, int]] = []
    left = target.shape[1]
    for axis in reversed(spec.axes):
        here = math.gcd(axis.size, left)
        left //= here
        inside += [(axis.name, here)] if here > 1 else []
        between += [(axis.name, axis.size // here)] if axis.size > here else []
    link = "" if target.chip is None else f" ({target.chip.links.kind})"
    found = [GridPlace(f"{target.shape[1]} GPUs of a host{link}", "gpu", target.shape[1], tuple(inside))]
    found.append(GridPlace(f"{target.shape[0]} hosts (network)", "host", target.shape[0], tuple(between)))
    return [place for place in found if place.size > 1]


def _torus(target: Target, spec: MeshSpec) -> list[GridPlace]:
    """Places axes as `plan.costs.links` does: the last axis first, on whole dims if any fit, else on parts of dims."""
    dims = list(zip("xyz", target.shape, target.wraps, strict=False))
    left = {name: size for name, size, _ in dims}
    taken: dict[str, list[tuple[str, int]]] = {name: [] for name in left}
    per_chip = 1 if target.chip is None else target.chip.devices_per_chip
    chips: list[tuple[str, int]] = []
    for axis, size in reversed(list(zip(spec.axes, spec.ici_sizes, strict=True))):
        ways = size
        if per_chip > 1 and axis is spec.axes[-1] and ways % per_chip == 0:
            ways //= per_chip
            chips.append((axis.name, per_chip))
        for name, part in _parts(left, ways):
            left[name] //= part
            taken[name].append((axis.name, part))
    found = [
        GridPlace(f"{name}: {size} chips, {'a ring' if wraps else 'a line'}", name, size, tuple(taken[name]))
        for name, size, wraps in dims
        if size > 1
    ]
    found += [GridPlace(f"{per_chip} devices of a chip", "chip", per_chip, tuple(chips))] if chips else []
    if target.num_slices > 1:
        crossing = [(axis.name, count) for axis, count in zip(spec.axes, spec.dcn_sizes, strict=True) if count > 1]
        found.append(GridPlace(f"{target.num_slices} slices (network)", "slice", target.num_slices, tuple(crossing)))
    return found


def _parts(left: dict[str, int], ways: int) -> list[tuple[str, int]]:
    free = [(name, size) for name, size in left.items() if size > 1]
    for chosen in sorted(range(2 ** len(free)), key=lambda bits: -bits.bit_count()):
        dims = [dim for place, dim in enumerate(free) if chosen >> place & 1]
        if math.prod(size for _, size in dims) == ways:
            return dims
    found = []
    for name, size in sorted(free, key=lambda dim: -dim[1]):
        part = math.gcd(size, ways)
        ways //= part
        found += [(name, part)] if part > 1 else []
    return found


def axes_picture(target: Target, spec: MeshSpec) -> Markup | None:
    """Returns one row of devices per direction, in groups and colors of the axes that run along it."""
    rows = [place for place in places(target, spec) if place.axes]
    if not rows:
        return None
    names = [axis.name for axis in spec.axes if axis.size > 1]
    fills = dict(zip(names, fills_of(names), strict=True))
    keys = legend([(swatch(fills[axis.name]), f"{axis.name}: {axis.size}") for axis in spec.axes if axis.size > 1])
    drawn = [_row(place, fills, top=ROW * number) for number, place in enumerate(rows)]
    width = max(max(_width(place), 8 * len(_label(place)) + 8) for place in rows)
    said = "; ".join(map(_label, rows))
    size = {"width": width, "height": ROW * len(rows), "viewBox": f"0 0 {width} {ROW * len(rows)}"}
    svg = tag("svg", join(drawn), **size, role="img", aria_label=f"Where the axes run. {said}.")
    return figure("Where the axes run", unit="devices next to each other", keys=keys, body=svg, kind="tiles axes")


def machine_axes(target: Target, spec: MeshSpec) -> dict[str, tuple[str, ...]]:
    """Returns the mesh axes that run along each direction of a machine, by its short name, the fastest first.

    Example:
        >>> from meshwright.mesh.string import parse_mesh
        >>> from meshwright.plan.target import parse_target
        >>> machine_axes(parse_target("v5p:4x4x8"), parse_mesh("fsdp:32,tp:4"))
        {'x': ('tp',), 'y': ('fsdp',), 'z': ('fsdp',)}
    """
    return {place.dim: tuple(axis for axis, _ in place.axes) for place in places(target, spec)}


def _label(place: GridPlace) -> str:
    axes = ", ".join(f"{axis} {'all' if ways == place.size else ways}" for axis, ways in place.axes)
    return f"{place.name}: {axes}"


def _cells(place: GridPlace) -> int:
    return min(place.size, MAX_CELLS)


def _width(place: GridPlace) -> int:
    count = _cells(place)
    return 8 + count * (CELL + GAP) + count * 2 + (44 if place.size > count else 0)


def _row(place: GridPlace, fills: dict[str, int], *, top: int) -> Markup:
    parts = [tag("text", _label(place), x=0, y=top + 13)]
    x = 0
    for number in range(_cells(place)):
        stride = 1
        inner = place.axes[0]
        for axis, ways in place.axes:
            # A cell has the color of the axis along which it differs from the cell before.
            if number % stride == 0:
                inner = (axis, ways)
            stride *= ways
        first = place.axes[0]
        x += 6 if number and number % first[1] == 0 else 0
        fill = fills[(inner if number else first)[0]]
        parts.append(tag("rect", x=x, y=top + 20, width=CELL, height=CELL, rx=3, fill=f"url(#tone-{fill})"))
        if number + 1 < _cells(place):
            edge = next((axis for axis, span in _spans(place) if (number + 1) % span), place.axes[-1][0])
            bridge = GAP + (6 if (number + 1) % first[1] == 0 else 0)
            line = {"x1": x + CELL, "x2": x + CELL + bridge, "y1": top + 20 + CELL / 2, "y2": top + 20 + CELL / 2}
            parts.append(tag("line", **line, class_=f"line-{fills[edge] % NUM_TONES}", stroke_width=3))
        x += CELL + GAP
    if place.size > _cells(place):
        parts.append(tag("text", f"… {place.size}", x=x + 4, y=top + 33, class_="tile-label-left"))
    return join(parts)


def _spans(place: GridPlace) -> list[tuple[str, int]]:
    """Returns each axis with the number of neighbors that it and the faster axes connect."""
    found, span = [], 1
    for axis, ways in place.axes:
        span *= ways
        found.append((axis, span))
    return found
