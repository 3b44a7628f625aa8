"""Pictures of the tiles of a leaf and their devices, as text and SVG, for any rank.

The last two split dims become rows and columns; other split dims become one panel per part. Dims that are not split
are not shown, because every tile contains them in full.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

from meshwright.layout.leaf import LeafLayout
from meshwright.mesh.current import AnyMesh, describe_mesh
from meshwright.specs import dim_axes, format_spec

MAX_ROWS = 16
MAX_COLUMNS = 8
_DOTS = ".."


@dataclass(frozen=True)
class Panel:
    """One grid of tiles; `cells[row][column]` lists the devices by their position in the mesh."""

    title: str
    row_labels: tuple[str, ...]
    column_labels: tuple[str, ...]
    cells: tuple[tuple[tuple[int, ...], ...], ...]


def tile_panels(leaf: LeafLayout, mesh: AnyMesh) -> list[Panel]:
    """Returns panels with every tile of a leaf."""
    sizes = dict(mesh.shape)
    split = [
        (dim, dim_axes(entry))
        for dim, entry in enumerate(leaf.spec)
        if math.prod(sizes[axis] for axis in dim_axes(entry)) > 1
    ]
    used = [axis for _, axes in split for axis in axes]
    spare = [axis for axis in mesh.axis_names if axis not in used]
    order = [mesh.axis_names.index(axis) for axis in (*used, *spare)]
    numbers = np.arange(mesh.size).reshape(tuple(sizes.values())).transpose(order)
    counts = [math.prod(sizes[axis] for axis in axes) for _, axes in split]
    tiles = numbers.reshape(*counts, -1)  # the devices that hold copies of a tile come last
    if len(split) == 1 and split[0][0] < len(leaf.shape) - 1:  # only rows are split: draw one column
        split, counts, tiles = [*split, (-1, ())], [*counts, 1], tiles[:, None]
    while len(split) < 2:
        split, counts, tiles = [(-1, ()), *split], [1, *counts], tiles[None]
    panels = []
    for outer in itertools.product(*(range(count) for count in counts[:-2])):
        title = ", ".join(f"dim {split[i][0]} part {part} of {counts[i]}" for i, part in enumerate(outer))
        grid = tiles[outer]
        cells = tuple(tuple(tuple(int(n) for n in sorted(cell)) for cell in row) for row in grid)
        panels.append(Panel(title, _labels(leaf, split[-2]), _labels(leaf, split[-1]), cells))
    return panels


def _labels(leaf: LeafLayout, split: tuple[int, Sequence[str]]) -> tuple[str, ...]:
    dim, _ = split
    if dim < 0:
        return ("",)
    step = leaf.shard_shape[dim]
    return tuple(f"{start}:{start + step}" for start in range(0, leaf.stored_shape[dim], step))


def heading(leaf: LeafLayout, mesh: AnyMesh) -> str:
    """Returns the title of a picture."""
    num_tiles = math.prod(s // max(t, 1) for s, t in zip(leaf.stored_shape, leaf.shard_shape, strict=True) if s)
    copies = mesh.size // max(num_tiles, 1)
    shape = "x".join(map(str, leaf.stored_shape)) or "scalar"
    tile = "x".join(map(str, leaf.shard_shape)) or "scalar"
    plural = "tile" if num_tiles == 1 else "tiles"
    held = f"each on {copies} devices" if copies > 1 else "each on one device"
    what = f"{leaf.name} {shape}, {format_spec(leaf.spec)} on {describe_mesh(mesh)}"
    return f"{what}: {num_tiles} {plural} of {tile}, {held}"


def device_list(devices: Sequence[int]) -> str:
    """Formats device numbers, with ranges for runs.

    >>> device_list([0, 1, 2, 3, 8])
    '0-3,8'
    """
    parts = []
    for _, run in itertools.groupby(enumerate(devices), key=lambda item: item[1] - item[0]):
        numbers = [number for _, number in run]
        parts.append(f"{numbers[0]}-{numbers[-1]}" if len(numbers) > 2 else ",".join(map(str, numbers)))
    return ",".join(parts) if len(parts) <= 4 else f"{','.join(parts[:3])},.. ({len(devices)})"


def tile_text(leaf: LeafLayout, mesh: AnyMesh) -> str:
    """Returns the picture as text."""
    lines = [heading(leaf, mesh)]
    panels = tile_panels(leaf, mesh)
    for panel in panels[:MAX_ROWS]:
        if panel.title:
            lines.append(panel.title)
        lines += _text_grid(panel)
    if len(panels) > MAX_ROWS:
        lines.append(f"... and {len(panels) - MAX_ROWS} more panels")
    return "\n".join(lines)


def _grid(panel: Panel) -> tuple[list[str], list[str], list[list[str]]]:
    """Returns a panel's row labels, column labels and cells as text, with dots for elided ones."""
    rows, columns = _elided(len(panel.row_labels), MAX_ROWS), _elided(len(panel.column_labels), MAX_COLUMNS)
    sides = [_DOTS if row is None else panel.row_labels[row] for row in rows]
    header = [_DOTS if column is None else panel.column_labels[column] for column in columns]
    body = [
        [_DOTS if row is None or column is None else device_list(panel.cells[row][column]) for column in columns]
        for row in rows
    ]
    return sides, header, body


def _elided(count: int, limit: int) -> list[int | None]:
    if count <= limit:
        return list(range(count))
    return [*range(limit // 2), None, *range(count - limit // 2, count)]


def _text_grid(panel: Panel) -> list[str]:
    sides, header, body = _grid(panel)
    width = max(len(text) for text in (*header, *itertools.chain(*body)))
    side = max(len(text) for text in sides)
    rule = " " * (side + 1) + "+" + "+".join("-" * (width + 2) for _ in header) + "+"
    lines = [" " * (side + 2) + " ".join(f" {text:^{width}} " for text in header)] if any(header) else []
    for name, cells in zip(sides, body, strict=True):
        lines += [rule, f"{name:>{side}} |" + "|".join(f" {text:^{width}} " for text in cells) + "|"]
    return [line.rstrip() for line in [*lines, rule]]


def tile_svg(leaf: LeafLayout, mesh: AnyMesh) -> str:
    """Returns the picture as a self-contained SVG, with device numbers, so that it is readable without color."""
    panels = tile_panels(leaf, mesh)[:MAX_ROWS]
    grids = [_grid(panel) for panel in panels]
    num_rows, num_columns = len(grids[0][0]), len(grids[0][1])
    longest = max(len(text) for _, _, body in grids for cells in body for text in cells)
    label = max(len(text) for _, header, _ in grids for text in header)
    left, top, gap = 96, 60, 34
    cell_w, cell_h = max(56, 8 * longest + 14, 7 * label + 14), 30
    panel_h = cell_h * num_rows + gap
    title = heading(leaf, mesh)
    what, _, tiles = title.partition(": ")
    width = max(left + cell_w * num_columns + 16, 7 * max(len(what), len(tiles)) + 24)
    height = top + panel_h * len(panels) + 8
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="system-ui, sans-serif" font-size="12" role="img" aria-label="{escape(title, quote=True)}">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'<text x="12" y="20" font-size="13" fill="#1a1a1a">{escape(what)}</text>',
        f'<text x="12" y="38" font-size="12" fill="#444">{escape(tiles)}</text>',
    ]
    number, total = itertools.count(), len(panels) * num_rows * num_columns
    for index, (panel, (sides, header, body)) in enumerate(zip(panels, grids, strict=True)):
        y0 = top + index * panel_h + gap - 14
        if panel.title:
            parts.append(f'<text x="12" y="{y0 - 18}" fill="#1a1a1a">{escape(panel.title)}</text>')
        for j, text in enumerate(header):
            x = left + j * cell_w + cell_w / 2
            parts.append(f'<text x="{x}" y="{y0 - 5}" text-anchor="middle" fill="#666">{escape(text)}</text>')
        for i, (side, cells) in enumerate(zip(sides, body, strict=True)):
            y = y0 + i * cell_h
            parts.append(f'<text x="{left - 8}" y="{y + 20}" text-anchor="end" fill="#666">{escape(side)}</text>')
            for j, text in enumerate(cells):
                x, hue = left + j * cell_w, round(360 * next(number) / total)
                fill = "#eeeeee" if text == _DOTS else f"hsl({hue}, 70%, 86%)"
                parts.append(
                    f'<rect x="{x}" y="{y}" width="{cell_w}" height="{cell_h}" fill="{fill}" stroke="#444"/>'
                    f'<text x="{x + cell_w / 2}" y="{y + 20}" text-anchor="middle" fill="#1a1a1a">{text}</text>'
                )
    return "\n".join([*parts, "</svg>"])
