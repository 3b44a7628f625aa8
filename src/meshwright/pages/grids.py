"""Pictures of meshes and of sharded arrays, with the devices that hold each tile.

Pointing at a device in one picture highlights it in all pictures of the page.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from meshwright.pages.colors import NUM_TONES, fills_of
from meshwright.pages.figure import figure, legend
from meshwright.pages.markup import Markup, tag

NODE_WIDTH, NODE_HEIGHT = 40, 26
# Offset of each layer, to the right and up, by number of layers.
DEPTHS = {1: (0, 0), 2: (60, 46), 3: (46, 36)}
MAX_PANELS = 8
# Columns, rows and layers of a lattice, by number of axes.
LIMITS = {1: (12, 1, 1), 2: (8, 8, 1), 3: (8, 4, 3)}
MAX_LATTICE_WIDTH = 1060  # of the column of text on a wide screen; wider pictures show fewer columns
MAX_TILE_COLUMNS, MIN_TILE_COLUMNS, MAX_TILE_ROWS = 6, 3, 8
# Pictures of tiles shrink to the page. On a phone, labels of wider ones would be smaller than 9 pixels.
MAX_TILES_WIDTH, MAX_TILE_LETTERS = 470, 12


def shown(count: int, limit: int) -> list[int | None]:
    """Returns the indices to draw, with None for the ones left out in the middle.

    >>> shown(4, 4), shown(100, 4)
    ([0, 1, 2, 3], [0, 1, None, 99])
    """
    if count <= limit:
        return list(range(count))
    first = limit // 2
    return [*range(first), None, *range(count - (limit - first - 1), count)]


def mesh_picture(
    title: str,
    axes: Mapping[str, int],
    *,
    names: Sequence[str] | None = None,
    node: str = "device",
    runs: Mapping[str, Sequence[str]] | None = None,
    mesh_axes: Sequence[str] = (),
) -> Markup:
    """Returns devices as a lattice: the last axis runs right, the one before it down, the one before that backward.

    Further axes give one lattice per index. Axes of size 1 appear only in the legend.

    Args:
        axes: sizes by name, in the order of device numbers (last axis fastest).
        names: tooltip of each device, by device number.
        node: noun for a node; a "device" has its number and is highlighted in other pictures, others have coordinates.
        runs: if the axes are directions of a machine, the mesh axes that run along each; a direction has the color of
            its only one, or is gray.
        mesh_axes: all mesh axes of more than one device, in the order of the mesh, for those colors.

    Example:
        >>> picture = mesh_picture("Mesh", {"fsdp": 4, "tp": 2})
        >>> "8 devices" in picture, "device 5: fsdp 2, tp 1" in picture
        (True, True)
    """
    long = [(axis, size) for axis, size in axes.items() if size > 1]
    outer, inner = long[:-3], long[-3:]
    inner_sizes = [size for _, size in inner]
    places = list(itertools.product(*(range(size) for _, size in outer)))
    block = math.prod(inner_sizes)

    def lattice(index: int) -> tuple[str, Markup]:
        label = ", ".join(f"{axis} {place}" for (axis, _), place in zip(outer, places[index], strict=True))
        about = f"{title} {label}".strip()
        return label, _lattice(inner, colors, first=index * block, names=names, node=node, label=about)

    total = math.prod(axes.values())
    along = {axis: tuple((runs or {}).get(axis, ())) for axis, _ in long}
    drawn = [axis for axis, _ in long] if runs is None else list(mesh_axes)
    fills = dict(zip(drawn, fills_of(drawn), strict=True))
    only = {axis: axis if runs is None else along[axis][0] if len(along[axis]) == 1 else None for axis, _ in long}
    colors = {axis: fills[one] % NUM_TONES for axis, one in only.items() if one is not None}
    rows = enumerate(reversed(inner))
    running = {axis: f" ({', '.join(axes)})" if axes else "" for axis, axes in along.items()}
    entries = [
        (_axis_swatch(colors.get(axis), number), f"{axis}: {size}{running[axis]}") for number, (axis, size) in rows
    ]
    entries += [(Markup(""), f"{axis}: {size}, one lattice each") for axis, size in outer]
    entries += [(Markup(""), f"{axis}: 1") for axis, size in axes.items() if size == 1]
    unit = f"1 {node}" if total == 1 else f"{total:,} {node}s"
    return figure(title, unit=unit, keys=legend(entries), body=_panels(len(places), lattice), kind="mesh")


def _panels(count: int, draw: Callable[[int], tuple[str, Markup]]) -> Markup:
    """Returns up to `MAX_PANELS` named pictures next to each other."""
    pictures = []
    for index in shown(count, MAX_PANELS):
        if index is None:
            pictures.append(tag("p", f"… {count - MAX_PANELS + 1:,} more", class_="note"))
            continue
        name, picture = draw(index)
        pictures.append(tag("div", tag("p", name, class_="panel-name") if name else None, picture))
    return tag("div", *pictures, class_="panels")


def _axis_swatch(tone: int | None, direction: int) -> Markup:
    line = tag("path", d="M1 7H25", class_=_edge(tone, direction))
    return tag("svg", line, class_="swatch", width=26, height=14, aria_hidden="true")


def _edge(tone: int | None, direction: int) -> str:
    """Returns the classes of a line along an axis: its color, and dashes by its direction in the picture."""
    return f"edge dash-{direction} {'plain' if tone is None else f'line-{tone}'}"


def _lattice(
    axes: Sequence[tuple[str, int]],
    colors: Mapping[str, int],
    *,
    first: int,
    names: Sequence[str] | None,
    node: str,
    label: str,
) -> Markup:
    padded = [("", 1)] * (3 - len(axes)) + list(axes)
    (_, depth), (_, height), (_, width) = padded
    limits = LIMITS[max(len(axes), 1)]
    most, *others = limits
    rows, layers = (shown(size, limit) for size, limit in zip((height, depth), others, strict=True))
    # Leaves room for nodes of the back layers between front nodes.
    letters = sum(len(str(size - 1)) + 1 for _, size in axes) if node != "device" else 0
    wide = max(NODE_WIDTH, 7 * letters + 4)
    while True:
        columns = shown(width, most)
        step_x, step_y = DEPTHS[len(layers)]
        if len(columns) > 5:  # keeps the picture within the width of a page
            step_x = step_x * 2 // 3
        away_x, away_y = step_x * (len(layers) - 1), step_y * (len(layers) - 1)
        pitch_x, pitch_y = wide + 28 + away_x, NODE_HEIGHT + 24 + away_y
        if most <= 4 or len(columns) * pitch_x + away_x + 60 <= MAX_LATTICE_WIDTH:
            break
        most -= 1
    left, top = 30 + 8 * len(padded[1][0]) if len(rows) > 1 else 8, 8 + away_y

    # Back layers first; each cell has its index in the mesh, or None if it stands for skipped devices.
    index = {
        (i, j, k): None if layer is None or row is None or column is None else (layer, row, column)
        for i, layer in reversed(list(enumerate(layers)))
        for j, row in enumerate(rows)
        for k, column in enumerate(columns)
    }
    at = {(i, j, k): (left + k * pitch_x + i * step_x, top + j * pitch_y - i * step_y) for i, j, k in index}
    parts: list[Markup] = []
    for i, j, k in index:
        for number, other in enumerate(((i + 1, j, k), (i, j + 1, k), (i, j, k + 1))):
            # A line may end at a skipped cell, but not join two of them.
            if other in index and (index[i, j, k] or index[other]):
                line = f"M{_middle(*at[i, j, k], wide)}L{_middle(*at[other], wide)}"
                parts.append(tag("path", d=line, class_=_edge(colors.get(padded[number][0]), 2 - number)))
    for cell, (x, y) in at.items():
        place = index[cell]
        if place is None:
            parts.append(tag("text", "…", x=x + wide / 2, y=y + 17, class_="node-text elided"))
            continue
        device = first + (place[0] * height + place[1]) * width + place[2]
        about = ", ".join(f"{axis} {number}" for (axis, _), number in zip(padded, place, strict=True) if axis)
        kind = f", {names[device]}" if names is not None and device < len(names) else ""
        is_device = node == "device"
        named = str(device) if is_device else ",".join(map(str, place[3 - len(axes) :]))
        about = f"{node} {named}: {about}{kind}" if about else f"{node} {named}{kind}"
        parts.append(_node(named, x, y, wide, about, data_devices=device if is_device else None))
    bottom = top + (len(rows) - 1) * pitch_y + NODE_HEIGHT
    right = left + (len(columns) - 1) * pitch_x + wide
    words = [
        (padded[2][0], "→", left, bottom + 17, ""),
        (padded[1][0], "↓", left - 10, top + 17, " end"),
        (padded[0][0], "↗", right + away_x // 2 + 2, bottom - away_y // 2 + 8, ""),
    ]
    for name, arrow, x, y, side in words:
        ink = f" ink-{colors[name]}" if name in colors else ""
        parts += [tag("text", f"{name} {arrow}", x=x, y=y, class_=f"axis-name{side}{ink}")] if name else []
    total_width = right + away_x + 12 + (8 * len(padded[0][0]) if away_x else 0)
    return tag(
        "svg",
        tag("title", label),
        *parts,
        **_size(total_width, bottom + (24 if len(columns) > 1 else 8)),
        role="group",
        aria_label=f"{label}: {' x '.join(f'{axis} {size}' for axis, size in axes) or f'one {node}'}",
        class_="lattice",
    )


def _size(width: int, height: int) -> dict[str, object]:
    """Returns the size of a picture, which may shrink in print."""
    return {"width": width, "height": height, "viewBox": f"0 0 {width} {height}"}


def _middle(x: int, y: int, width: int) -> str:
    return f"{x + width / 2} {y + NODE_HEIGHT / 2}"


def _node(name: str, x: int, y: int, width: int, about: str, **data: int | None) -> Markup:
    box = tag("rect", x=x, y=y, width=width, height=NODE_HEIGHT, rx=6)
    label = tag("text", name, x=x + width / 2, y=y + 17, class_="node-text")
    return tag("g", tag("title", about), box, label, class_="node", **data, role="img", aria_label=about)


@dataclass(frozen=True)
class Tile:
    """A part of an array: its label and the device numbers that hold it."""

    text: str
    devices: Sequence[int]


@dataclass(frozen=True)
class TileGrid:
    """A grid of tiles; a single row or column needs no label, and `aspect` is width over height."""

    title: str
    row_labels: Sequence[str]
    column_labels: Sequence[str]
    tiles: Sequence[Sequence[Tile]]
    aspect: float = 1.0


def tile_picture(title: str, grids: Sequence[TileGrid], *, note: str = "") -> Markup:
    """Returns an array cut into tiles, each labeled with the devices that hold it.

    Example:
        >>> grid = TileGrid("", ["0:4", "4:8"], [""], [[Tile("0", [0])], [Tile("1", [1])]])
        >>> tile_picture("up", [grid]).count('class="tile"')
        2
    """

    def tiles(index: int) -> tuple[str, Markup]:
        return grids[index].title, _tiles(grids[index], f"{title} {grids[index].title}".strip())

    unlabeled = any(_letters(grid) > MAX_TILE_LETTERS for grid in grids)
    said = " ".join(filter(None, [note, "Point at a tile or tap it to see its devices." if unlabeled else ""]))
    after = tag("p", said, class_="note") if said else None
    return figure(title, body=_panels(len(grids), tiles), after=after, kind="tiles")


def _letters(grid: TileGrid) -> int:
    return max(len(tile.text) for line in grid.tiles for tile in line)


def _tiles(grid: TileGrid, label: str) -> Markup:
    longest = _letters(grid)
    has_labels = longest <= MAX_TILE_LETTERS
    side = max(len(text) for text in grid.row_labels)
    above = max(len(text) for text in grid.column_labels)
    left, top = (7 * side + 12 if side else 2), (20 if above else 2)
    width = max(34, 7 * longest + 14 if has_labels else 0, 7 * above + 10)
    most = min(MAX_TILE_COLUMNS, max(MIN_TILE_COLUMNS, (MAX_TILES_WIDTH - left) // width))
    rows, columns = shown(len(grid.row_labels), MAX_TILE_ROWS), shown(len(grid.column_labels), most)
    shape = math.sqrt(min(max(grid.aspect, 0.4), 4.0))
    width = max(width, round(150 * shape) // len(columns))
    height = max(26, round(150 / shape) // len(rows))
    parts = []
    for j, column in enumerate(columns):
        text = "…" if column is None else grid.column_labels[column]
        parts.append(tag("text", text, x=left + (j + 0.5) * width, y=top - 7, class_="tile-label"))
    for i, row in enumerate(rows):
        y = top + i * height
        text = "…" if row is None else grid.row_labels[row]
        parts.append(tag("text", text, x=left - 8, y=y + height / 2 + 4, class_="tile-label end"))
        for j, column in enumerate(columns):
            x = left + j * width
            box = {"x": x + 1, "y": y + 1, "width": width - 2, "height": height - 2, "rx": 4}
            middle = {"x": x + width / 2, "y": y + height / 2 + 4}
            if row is None or column is None:
                parts.append(tag("g", tag("rect", **box), tag("text", "…", **middle), class_="tile elided"))
                continue
            tile = grid.tiles[row][column]
            tone = (row * len(grid.column_labels) + column) % NUM_TONES
            devices = " ".join(map(str, tile.devices))
            name = tag("title", f"on device {devices}" if len(tile.devices) == 1 else f"on devices {devices}")
            drawn = tag("rect", **box, class_=f"wash-{tone}"), tag("text", tile.text, **middle) if has_labels else None
            parts.append(tag("g", name, *drawn, class_="tile", data_devices=devices))
    size = _size(left + width * len(columns) + 2, top + height * len(rows) + 2)
    return tag("svg", tag("title", label), *parts, **size, role="img", aria_label=label)
