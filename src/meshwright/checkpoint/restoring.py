"""Restoring: verified first, held against the layout that is asked for, then read straight onto its mesh."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from meshwright.checkpoint import arrays
from meshwright.checkpoint.manifest import STATE, Manifest, StoredLeaf, is_key, read_manifest, stored_leaf, verify_step
from meshwright.distributed.agreement import gather_texts
from meshwright.dtypes import is_float
from meshwright.errors import CheckpointError
from meshwright.layout import Layout
from meshwright.layout.leaf import LeafLayout, count_leaves, text_table
from meshwright.mesh.build import describe_mesh
from meshwright.specs import spec_to_json
from meshwright.types import PyTree

_MOST_ROWS = 30


@dataclass(frozen=True)
class Restored:
    """What came back from a checkpoint.

    Args:
        facts: what was given to `save`.
        notes: all that was not as plain as it could be: steps passed over, another mesh, casts.
    """

    state: PyTree
    step: int
    facts: Mapping[str, Any]
    notes: list[str]


def problems_of(folder: Path) -> list[str]:
    """Returns what is wrong with a step; several processes read a share of its files each, and all get the answer."""
    found = verify_step(folder, share=(jax.process_index(), jax.process_count()))
    lines = [line for text in gather_texts("\n".join(found)) for line in text.split("\n") if line]
    return list(dict.fromkeys(lines))


def read_step(folder: Path, layout: Layout, *, cast: bool, part: bool = False) -> Restored:
    """Reads a verified step onto a layout's mesh; raises where it holds another model or other dtypes.

    Args:
        part: the layout may have fewer leaves than the step.
    """
    if not isinstance(layout.mesh, Mesh):
        raise CheckpointError(
            f"cannot restore: the layout is for {describe_mesh(layout.mesh)}, a machine that is not here.",
            hint="make the layout with create_mesh(...) on real devices.",
        )
    manifest = read_manifest(folder)
    arrays.check_names([leaf.name for leaf in layout.leaves])
    stored = {leaf.name: leaf for leaf in manifest.tree}
    require_same_model(manifest, layout, part=part)
    notes = [*_dtype_notes(manifest, layout, cast=cast), *_mesh_notes(manifest, layout)]
    repadded = [leaf for leaf in layout.leaves if stored[leaf.name].stored_shape != leaf.stored_shape]
    if repadded:
        notes.append(f"{count_leaves(len(repadded))} padded anew for this mesh, `{repadded[0].name}` first")
    fewer = len(layout.leaves) < len(manifest.tree)
    tree = arrays.read(folder / STATE, arrays.abstract_stored(layout), repad=bool(repadded), part=fewer)
    return Restored(arrays.from_stored(tree, layout), manifest.step, manifest.facts, notes)


def require_same_model(manifest: Manifest, layout: Layout, *, part: bool = False) -> None:
    """Raises with a table where a checkpoint and a layout differ in names or shapes of leaves."""
    stored = {leaf.name: leaf for leaf in manifest.tree}
    asked = {leaf.name: stored_leaf(leaf) for leaf in layout.leaves}
    rows = [("missing", name, "-", _form(leaf)) for name, leaf in asked.items() if name not in stored]
    if not part:
        rows += [("extra", name, _form(leaf), "-") for name, leaf in stored.items() if name not in asked]
    both = [(name, stored[name], leaf) for name, leaf in asked.items() if name in stored]
    rows += [("shape", name, _form(old), _form(new)) for name, old, new in both if old.shape != new.shape]
    if not rows:
        return
    counts = ", ".join(
        f"{sum(row[0] == kind for row in rows)} {what}"
        for kind, what in (("missing", "missing"), ("extra", "extra"), ("shape", "of another shape"))
    )
    table = text_table(("problem", "leaf", "checkpoint", "asked for"), rows[:_MOST_ROWS])
    more = f"\n... and {len(rows) - _MOST_ROWS} more" if len(rows) > _MOST_ROWS else ""
    raise CheckpointError(
        f"step {manifest.step} holds another model or optimizer: {counts}.\n{table}{more}",
        hint="make the layout with the checkpoint's model and optimizer; `meshwright checkpoint show` prints its tree.",
    )


def part_of(layout: Layout, name: str) -> Layout:
    """Returns the part of a layout below one name, such as `params`; its leaves keep their whole names."""
    leaves = [leaf for leaf in layout.leaves if leaf.name.startswith(f"{name}/")]
    tree = layout.structure.unflatten(layout.leaves)
    part = tree.get(name) if isinstance(tree, Mapping) else getattr(tree, name, None)
    inside, structure = jax.tree.flatten(part, is_leaf=lambda node: isinstance(node, LeafLayout))
    if not leaves or inside != leaves:
        raise CheckpointError(f"the layout has no part {name!r}.", hint="part='params' of a run's state.")
    return Layout(layout.mesh, leaves, structure, None)


def _form(leaf: StoredLeaf) -> str:
    return f"{leaf.dtype}{list(leaf.shape)}"


def _dtype_notes(manifest: Manifest, layout: Layout, *, cast: bool) -> list[str]:
    stored = {leaf.name: leaf for leaf in manifest.tree}
    changes: dict[tuple[str, str], list[str]] = {}
    for leaf in layout.leaves:
        old, new = stored[leaf.name].dtype, stored_leaf(leaf).dtype
        if old != new:
            _require_castable(leaf, old)
            changes.setdefault((old, new), []).append(leaf.name)
    if changes and not cast:
        rows = [(names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more", *pair)
                for pair, names in changes.items()]  # fmt: skip
        table = text_table(("leaf", "checkpoint", "asked for"), rows)
        raise CheckpointError(
            f"step {manifest.step} holds other dtypes than asked for.\n{table}",
            hint="cast=True (--cast) casts them; precision that is not stored does not come back.",
        )
    return [f"{count_leaves(len(names))} cast from {old} to {new}" for (old, new), names in changes.items()]


def _require_castable(leaf: LeafLayout, old: str) -> None:
    if is_key(leaf.dtype) or old.startswith("key<"):
        raise CheckpointError(
            f"`{leaf.name}` is {old} in the checkpoint and {stored_leaf(leaf).dtype} here: the bits of one random "
            "generator mean nothing to another.",
            hint="use the generator of the checkpoint: jax.random.key(seed, impl=...).",
        )
    if not (is_float(leaf.dtype) and is_float(jnp.dtype(old))):
        raise CheckpointError(
            f"`{leaf.name}` is {old} in the checkpoint and {leaf.dtype} here; only floats can be cast to floats.",
            hint="make the layout with the dtype of the checkpoint.",
        )


def _mesh_notes(manifest: Manifest, layout: Layout) -> list[str]:
    here = describe_mesh(layout.mesh)
    count = jax.process_count()
    here += f" in {count} processes" if count > 1 else ""
    if here != manifest.mesh_text:
        return [f"saved on {manifest.mesh_text}, resharded to {here}"]
    moved = [leaf.name for leaf in layout.leaves if manifest.layout[leaf.name] != spec_to_json(leaf.spec)]
    if moved:
        return [f"{count_leaves(len(moved))} resharded on the same mesh, `{moved[0]}` first"]
    return []
