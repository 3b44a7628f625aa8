"""Tables of leaves, as plain text or with rich; siblings that differ only in a layer number share one row."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from meshwright.layout.leaf import LeafLayout, format_bytes
from meshwright.specs import format_spec

if TYPE_CHECKING:
    from rich.table import Table

HEADINGS = ("leaf", "shape", "dtype", "rule", "spec", "bytes/device")
_RIGHT = ("bytes/device",)
_NARROW = ("dtype", "bytes/device")
_NUMBER = re.compile(r"\d+")


def leaf_rows(leaves: Iterable[LeafLayout], *, collapse: bool = True) -> list[tuple[str, ...]]:
    """Returns one row of cells per leaf, or per group of equal siblings; a group's bytes are its sum."""
    groups: dict[Any, list[LeafLayout]] = {}
    for leaf in leaves:
        # Leaves from different layers are one group only if everything a reader sees of them is the same.
        key = (_NUMBER.sub("#", leaf.name), leaf.shape, str(leaf.dtype), leaf.why, leaf.spec) if collapse else leaf.name
        groups.setdefault(key, []).append(leaf)
    rows: list[tuple[str, ...]] = []
    for members in groups.values():
        first = members[0]
        shape = "x".join(map(str, first.shape)) or "scalar"
        if first.is_padded:
            shape += f" (stored {'x'.join(map(str, first.stored_shape))})"
        size = format_bytes(sum(leaf.bytes_per_device for leaf in members))
        name = fold_names([leaf.name for leaf in members])
        rows.append((name, shape, str(first.dtype), first.why, format_spec(first.spec), size))
    return rows


def fold_names(names: Sequence[str]) -> str:
    """Returns one name for several that differ only in numbers.

    >>> fold_names(["layers/0/w", "layers/1/w", "layers/2/w"])
    'layers/{0..2}/w (x3)'
    """
    if len(names) == 1:
        return names[0]
    columns = list(zip(*(_NUMBER.findall(name) for name in names), strict=True))
    parts = _NUMBER.split(names[0])
    folded = parts[0]
    for column, part in zip(columns, parts[1:], strict=True):
        values = sorted({int(number) for number in column})
        if len(values) == 1:
            folded += column[0]
        elif values == list(range(values[0], values[-1] + 1)):
            folded += f"{{{values[0]}..{values[-1]}}}"
        else:
            folded += "{" + ",".join(map(str, values)) + "}" if len(values) < 5 else "*"
        folded += part
    return f"{folded} (x{len(names)})"


def text_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns an aligned table in plain text."""
    widths = [max(len(row[i]) for row in (headings, *rows)) for i in range(len(headings))]

    def line(cells: Sequence[str]) -> str:
        padded = [
            cell.rjust(width) if heading in _RIGHT else cell.ljust(width)
            for cell, width, heading in zip(cells, widths, headings, strict=True)
        ]
        return "  ".join(padded).rstrip()

    return "\n".join([line(headings), "  ".join("-" * width for width in widths), *map(line, rows)])


def rich_table(headings: Sequence[str], rows: Sequence[Sequence[str]], *, title: str, caption: str) -> Table:
    """Returns the same table for a terminal that rich draws on."""
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, caption=caption, title_justify="left", caption_justify="left", header_style="bold")
    for heading in headings:
        table.add_column(
            heading,
            justify="right" if heading in _RIGHT else "left",
            overflow="fold",
            no_wrap=heading in _NARROW,
        )
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    return table
