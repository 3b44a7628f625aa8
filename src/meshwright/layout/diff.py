"""What changes between two layouts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from meshwright.layout.leaf import LeafLayout, format_bytes
from meshwright.layout.text_table import fold_names, text_table
from meshwright.mesh.build import AnyMesh, describe_mesh
from meshwright.specs import canonical, format_spec


@dataclass(frozen=True)
class LeafChange:
    """One leaf that differs; `before` or `after` is None where only one layout has it."""

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
    """The differing leaves, and the two meshes; empty (falsy) when both place everything alike."""

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
            for change in self.changes:  # layers that change alike share a row
                groups.setdefault((re.sub(r"\d+", "#", change.name), change.what), []).append(change)
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
    """Compares two lists of leaves by name, in the order of the first, then what only the second has."""
    old = {leaf.name: leaf for leaf in before}
    new = {leaf.name: leaf for leaf in after}
    pairs = [LeafChange(name, leaf, new.get(name)) for name, leaf in old.items()]
    pairs += [LeafChange(name, None, leaf) for name, leaf in new.items() if name not in old]
    totals = [sum(leaf.bytes_per_device for leaf in leaves) for leaves in (before, after)]
    return LayoutDiff(mesh_before, mesh_after, tuple(pair for pair in pairs if pair.what), *totals)
