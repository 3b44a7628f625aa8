"""The mesh and layout sections of a report."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from meshwright.errors import MeshwrightError
from meshwright.layout import Layout, LeafLayout, format_bytes
from meshwright.layout.leaf import HEADINGS, leaf_rows
from meshwright.layout.picture import device_list, heading, tile_panels
from meshwright.loop.report.run_record import RunRecord
from meshwright.pages import (
    Bar,
    Markup,
    Section,
    Tile,
    TileGrid,
    fold,
    join,
    mesh_picture,
    prose,
    side_by_side,
    stacked_bars,
    table,
    tile_picture,
)

MAX_ROWS, MAX_PICTURES = 60, 4
_NAMES = {"params": "parameters", "opt_state": "optimizer"}


def mesh_section(run: RunRecord) -> Section:
    """Returns a picture of the mesh, with the reason for choosing it."""
    mesh = run.facts.get("mesh")
    if not mesh:
        return Section("Mesh", prose("The mesh was not recorded."))
    total = math.prod(mesh.values())
    axes = " x ".join(f"{axis}:{size}" for axis, size in mesh.items())
    devices = [str(device) for device in run.facts.get("devices") or []]
    kind = run.facts.get("device_kind")
    processes = run.facts.get("num_processes") or 1
    what = f"{total:,} {'device' if total == 1 else 'devices'}{f' ({kind})' if kind else ''}"
    sentence = f"The run used {what} as {axes}, in {'one process' if processes == 1 else f'{processes:,} processes'}."
    reason = str(run.facts.get("mesh_reason") or "").strip()
    why = f"Reason for this mesh: {reason}" if reason else ""
    return Section("Mesh", join([prose(sentence, why), mesh_picture("Devices", mesh, names=devices or None)]))


def recorded_layout_section(run: RunRecord) -> Section:
    """Returns the bytes per device, the spec of every leaf, and pictures of the largest leaves."""
    recorded = run.facts.get("layout")
    if not recorded:
        return Section("Layout", prose("The layout was not recorded."))
    try:
        layout = Layout.from_json(json.dumps(recorded))
    except (MeshwrightError, KeyError, TypeError, ValueError) as error:
        return Section("Layout", prose(f"The recorded layout cannot be read: {error}"))
    groups: dict[str, int] = {}
    for leaf in layout.leaves:
        group = _NAMES.get(leaf.name.partition("/")[0], "rest")
        groups[group] = groups.get(group, 0) + leaf.bytes_per_device
    order = [name for name in (*_NAMES.values(), "rest") if name in groups]
    held = stacked_bars("State per device", order, [Bar("", [groups[name] for name in order])], show=format_bytes)
    copies = layout.bytes_per_device * layout.mesh.size / max(layout.bytes_total, 1)
    params = run.facts.get("num_params")
    counted = f"The model has {params:,} parameters." if params else ""
    whole, each = format_bytes(layout.bytes_total), format_bytes(layout.bytes_per_device)
    stored = f"Its state takes {whole} in total and {each} per device"
    often = ", without replication." if copies < 1.005 else f", so each byte is stored {copies:.1f} times on average."
    rows = leaf_rows(layout.leaves)
    rows = sorted(rows, key=lambda row: (not row[0].startswith("params/"), row[0]))
    folded = f", in {len(rows):,} rows" if len(rows) < len(layout.leaves) else ""
    text = prose(counted, stored + often, "Hover over a device to see its tiles.")
    leaves = fold(f"All {len(layout.leaves):,} leaves{folded}", leaf_table(rows))
    params = [leaf for leaf in layout.leaves if leaf.name.startswith("params/")] or list(layout.leaves)
    return Section("Layout", join([text, held, leaf_pictures(params, layout), leaves]))


def leaf_table(rows: Sequence[Sequence[str]]) -> Markup:
    """Returns the table of `leaf_rows`, with most of a long one folded."""

    def shown(some: Sequence[Sequence[str]]) -> Markup:
        return table(HEADINGS, some, right=(5,), code=(0, 1, 2, 3, 4), whole=(0, 1, 2))

    more = fold(f"{len(rows) - MAX_ROWS:,} more rows", shown(rows[MAX_ROWS:])) if len(rows) > MAX_ROWS else None
    return join([shown(rows[:MAX_ROWS]), more])


def leaf_pictures(leaves: Sequence[LeafLayout], layout: Layout) -> Markup:
    """Returns pictures of the largest leaves, one per shape and spec, and only one replicated leaf."""
    found: dict[Any, LeafLayout] = {}
    for leaf in sorted(leaves, key=lambda leaf: -leaf.bytes_total):
        found.setdefault(None if leaf.is_replicated else (leaf.stored_shape, leaf.spec), leaf)
    return side_by_side(*(_leaf_picture(leaf, layout) for leaf in list(found.values())[:MAX_PICTURES]))


def _leaf_picture(leaf: LeafLayout, layout: Layout) -> Markup:
    """Returns a picture of the tiles of a leaf and the devices that hold them."""
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
    """Returns the array size along one side of the picture; the dim's full size if it is not split."""
    if labels[-1]:
        return int(labels[-1].partition(":")[2])
    return leaf.stored_shape[dim] if len(leaf.stored_shape) >= -dim else 1
