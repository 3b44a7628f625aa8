"""Where the state lies: every parameter with its rule, spec and bytes, and the largest as pictures of tiles."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from meshwright.layout import Layout, LeafLayout, format_bytes
from meshwright.layout.picture import device_list, heading, tile_panels
from meshwright.layout.table import HEADINGS, leaf_rows
from meshwright.pages import Markup, Section, Tile, TileGrid, fold, join, prose, side_by_side, table, tile_picture

MAX_ROWS, MAX_PICTURES = 60, 4
# Copies of smaller parameters are not worth a word.
LARGE = 2**20


def layout_section(layout: Layout) -> Section:
    """Returns the parameters leaf by leaf, the rest of the state folded."""
    params = [leaf for leaf in layout.leaves if leaf.name.startswith("params/")]
    rest = [leaf for leaf in layout.leaves if not leaf.name.startswith("params/")]
    size = sum(leaf.bytes_total for leaf in params)
    each = sum(leaf.bytes_per_device for leaf in params)
    said = prose(
        f"Parameters take {format_bytes(size)} in all and {format_bytes(each)} on each device (computed, exact).",
        _copies(params, layout.mesh.size),
        "Point at a device to see what it holds.",
    )
    rows = leaf_rows(params)
    options: dict[str, Any] = {"right": (5,), "code": (0, 1, 2, 3, 4)}
    pictures = side_by_side(*(_picture(leaf, layout) for leaf in _largest(params)))
    made = [said, pictures, table(HEADINGS, rows[:MAX_ROWS], **options)]
    if len(rows) > MAX_ROWS:
        made.append(fold(f"{len(rows) - MAX_ROWS:,} more rows", table(HEADINGS, rows[MAX_ROWS:], **options)))
    other = leaf_rows(rest)
    made.append(fold(f"Optimizer and the rest of the state, {len(rest):,} leaves", table(HEADINGS, other, **options)))
    return Section("Parameters", join(made))


def _copies(params: Sequence[LeafLayout], num_devices: int) -> str:
    whole = [leaf for leaf in params if leaf.is_replicated and leaf.bytes_total >= LARGE]
    if num_devices == 1 or not whole:
        return ""
    named = ", ".join(f"{leaf.name} ({format_bytes(leaf.bytes_total)})" for leaf in whole[:4])
    more = f" and {len(whole) - 4} more" if len(whole) > 4 else ""
    return f"Every device holds a whole copy of {named}{more}."


def _largest(params: Sequence[LeafLayout]) -> list[LeafLayout]:
    """Returns the largest that are not split alike; of those that are whole everywhere, one is enough."""
    found: dict[Any, LeafLayout] = {}
    for leaf in sorted(params, key=lambda leaf: -leaf.bytes_total):
        found.setdefault(None if leaf.is_replicated else (leaf.stored_shape, leaf.spec), leaf)
    return list(found.values())[:MAX_PICTURES]


def _picture(leaf: LeafLayout, layout: Layout) -> Markup:
    grids = [
        TileGrid(
            panel.title,
            panel.row_labels,
            panel.column_labels,
            [[Tile(device_list(devices), devices) for devices in row] for row in panel.cells],
            aspect=_extent(panel.column_labels, leaf, -1) / max(_extent(panel.row_labels, leaf, -2), 1),
        )
        for panel in tile_panels(leaf, layout.mesh)
    ]
    what, _, tiles = heading(leaf, layout.mesh).partition(": ")
    return tile_picture(leaf.name, grids, note=f"{what.removeprefix(leaf.name).partition(' on ')[0].strip()}: {tiles}.")


def _extent(labels: Sequence[str], leaf: LeafLayout, dim: int) -> int:
    """Returns the size that a side of the picture stands for; a side that is not cut is the leaf's own dim."""
    if labels[-1]:
        return int(labels[-1].partition(":")[2])
    return leaf.stored_shape[dim] if len(leaf.stored_shape) >= -dim else 1
