"""The leaves of a layout with their slices and bytes, tables of leaves, and differences between two layouts."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from jax.sharding import PartitionSpec as P

from meshwright.dtypes import dtype_bits
from meshwright.mesh.current import AnyMesh, describe_mesh
from meshwright.specs import canonical, ceil_div, format_spec, shard_shape

if TYPE_CHECKING:
    from rich.table import Table

HEADINGS = ("leaf", "shape", "dtype", "rule", "spec", "bytes/device")
_RIGHT = ("bytes/device",)
_NARROW = ("dtype", "bytes/device")
_NUMBER = re.compile(r"\d+")


class LeafLayout(NamedTuple):
    """The shape, dtype, spec and rule of one leaf; `stored_shape` includes padding."""

    name: str
    shape: tuple[int, ...]
    dtype: Any
    spec: P
    rule: int | None
    pattern: str
    reason: str
    stored_shape: tuple[int, ...]
    shard_shape: tuple[int, ...]

    @property
    def is_padded(self) -> bool:
        return self.stored_shape != self.shape

    @property
    def is_replicated(self) -> bool:
        return self.shard_shape == self.stored_shape

    @property
    def bytes_total(self) -> int:
        """Bytes of one full copy, with padding."""
        return num_bytes(self.stored_shape, self.dtype)

    @property
    def bytes_per_device(self) -> int:
        return num_bytes(self.shard_shape, self.dtype)

    @property
    def why(self) -> str:
        """The rule that decided and the remark, for tables."""
        decided = "" if self.rule is None else f"{self.rule} `{self.pattern}`"
        return ", ".join(filter(None, [decided, self.reason]))

    def __str__(self) -> str:
        return f"{self.name} {self.shape} {self.dtype} {format_spec(self.spec)}"


def make_leaf(
    name: str,
    shape: tuple[int, ...],
    dtype: Any,
    spec: P,
    axis_sizes: Mapping[str, int],
    *,
    rule: int | None = None,
    pattern: str = "",
    reason: str = "",
    stored_shape: tuple[int, ...] | None = None,
) -> LeafLayout:
    """Builds a leaf whose spec fits."""
    stored = shape if stored_shape is None else stored_shape
    return LeafLayout(name, shape, dtype, spec, rule, pattern, reason, stored, shard_shape(spec, stored, axis_sizes))


def num_bytes(shape: tuple[int, ...], dtype: Any) -> int:
    """Returns the bytes of an array; for sub-byte dtypes, rounded up to whole bytes per array."""
    return ceil_div(math.prod(shape) * dtype_bits(dtype), 8)


def format_bytes(count: float) -> str:
    """Formats a number of bytes.

    >>> format_bytes(3 * 2**20), format_bytes(500)
    ('3.0 MiB', '500 B')
    """
    if count < 1024:
        return f"{int(count)} B"
    power = min(int(np.log2(count) // 10), 5)
    return f"{count / 1024**power:.1f} {('B', 'KiB', 'MiB', 'GiB', 'TiB', 'PiB')[power]}"


def count_leaves(count: int) -> str:
    """Formats a number of leaves."""
    return f"{count} leaf" if count == 1 else f"{count} leaves"


# --- Tables ---


def leaf_rows(leaves: Iterable[LeafLayout], *, collapse: bool = True) -> list[tuple[str, ...]]:
    """Returns one row of cells per leaf; equal leaves of different layers share a row with the sum of their bytes."""
    groups: dict[Any, list[LeafLayout]] = {}
    for leaf in leaves:
        # Leaves of different layers share a row only if every other cell is the same.
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
    """Joins names that differ only in numbers.

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
    """Returns the table for rich."""
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, caption=caption, title_justify="left", caption_justify="left", header_style="bold")
    for heading in headings:
        table.add_column(
            heading, justify="right" if heading in _RIGHT else "left", overflow="fold", no_wrap=heading in _NARROW
        )
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    return table


# --- Differences between two layouts ---


@dataclass(frozen=True)
class LeafChange:
    """One leaf that differs; `before` or `after` is None if only one layout has it."""

    name: str
    before: LeafLayout | None
    after: LeafLayout | None

    @property
    def what(self) -> str:
        before, after = self.before, self.after
        if before is None or after is None:
            return "added" if before is None else "removed"
        changed = []
        if before.shape != after.shape:
            changed.append(f"shape {before.shape} -> {after.shape}")
        if before.dtype != after.dtype:
            changed.append(f"dtype {before.dtype} -> {after.dtype}")
        if canonical(before.spec) != canonical(after.spec):
            changed.append(f"{format_spec(before.spec)} -> {format_spec(after.spec)}")
        if before.stored_shape != after.stored_shape and before.shape == after.shape:
            changed.append(f"stored as {before.stored_shape} -> {after.stored_shape}")
        if before.shard_shape != after.shard_shape and not changed:
            changed.append(f"slices of {before.shard_shape} -> {after.shard_shape}")
        return ", ".join(changed)


@dataclass(frozen=True)
class LayoutDiff:
    """The leaves that differ, and the two meshes; falsy if both layouts are the same."""

    before: AnyMesh
    after: AnyMesh
    changes: tuple[LeafChange, ...]
    bytes_before: int
    bytes_after: int

    def __bool__(self) -> bool:
        return bool(self.changes) or self._mesh_changed

    @property
    def _mesh_changed(self) -> bool:
        return dict(self.before.shape) != dict(self.after.shape)

    def __str__(self) -> str:
        if not self:
            return "no difference"
        lines = []
        if self._mesh_changed:
            lines.append(f"mesh {describe_mesh(self.before)} -> {describe_mesh(self.after)}")
        if self.changes:
            groups: dict[tuple[str, str], list[LeafChange]] = {}
            for change in self.changes:  # layers with the same change share a row
                groups.setdefault((_NUMBER.sub("#", change.name), change.what), []).append(change)
            rows = [
                (
                    fold_names([change.name for change in members]),
                    members[0].what,
                    " -> ".join(_bytes([getattr(change, side) for change in members]) for side in ("before", "after")),
                )
                for members in groups.values()
            ]
            lines.append(text_table(("leaf", "change", "bytes/device"), rows))
        lines.append(f"per device: {format_bytes(self.bytes_before)} -> {format_bytes(self.bytes_after)}")
        return "\n".join(lines)


def _bytes(leaves: Sequence[LeafLayout | None]) -> str:
    there = [leaf.bytes_per_device for leaf in leaves if leaf is not None]
    return format_bytes(sum(there)) if there else "-"


def diff_leaves(
    before: Sequence[LeafLayout], mesh_before: AnyMesh, after: Sequence[LeafLayout], mesh_after: AnyMesh
) -> LayoutDiff:
    """Compares two lists of leaves by name, in the order of the first; new leaves come last."""
    old = {leaf.name: leaf for leaf in before}
    new = {leaf.name: leaf for leaf in after}
    pairs = [LeafChange(name, leaf, new.get(name)) for name, leaf in old.items()]
    pairs += [LeafChange(name, None, leaf) for name, leaf in new.items() if name not in old]
    totals = [sum(leaf.bytes_per_device for leaf in leaves) for leaves in (before, after)]
    return LayoutDiff(mesh_before, mesh_after, tuple(pair for pair in pairs if pair.what), *totals)
