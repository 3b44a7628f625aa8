"""Where the state lies: every parameter with its rule, spec and bytes, and the largest as pictures of tiles."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from meshwright.layout import Layout, LeafLayout, format_bytes
from meshwright.layout.leaf import HEADINGS, leaf_rows
from meshwright.loop.report.placement_section import leaf_picture
from meshwright.pages import Section, fold, join, prose, side_by_side, table

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
    pictures = side_by_side(*(leaf_picture(leaf, layout) for leaf in _largest(params)))
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
