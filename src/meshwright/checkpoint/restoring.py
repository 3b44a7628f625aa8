"""Restoring: a step is verified, checked against the requested layout, and read directly onto its mesh."""

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
from meshwright.mesh.current import describe_mesh
from meshwright.specs import spec_to_json
from meshwright.types import PyTree

_MOST_ROWS = 30


@dataclass(frozen=True)
class Restored:
    """A restored state.

    Args:
        facts: the facts that were passed to `save`.
        notes: everything unusual, such as skipped steps, another mesh or casts.
    """

    state: PyTree
    step: int
    facts: Mapping[str, Any]
    notes: list[str]


def problems_of(folder: Path) -> list[str]:
    """Returns the problems of a step, on all processes; each of them hashes a share of the files."""
    found = verify_step(folder, share=(jax.process_index(), jax.process_count()))
    lines = [line for text in gather_texts("\n".join(found)) for line in text.split("\n") if line]
    return list(dict.fromkeys(lines))


def read_step(folder: Path, layout: Layout, *, cast: bool, part: bool = False) -> Restored:
    """Reads a verified step onto a layout's mesh; raises if it holds another model or other dtypes.

    Args:
        part: the layout may have fewer leaves than the step.
    """
    if not isinstance(layout.mesh, Mesh):
        raise CheckpointError(
            f"cannot restore onto {describe_mesh(layout.mesh)}, an abstract mesh without devices.",
            hint="make the layout with create_mesh(...) on real devices.",
        )
    manifest = read_manifest(folder)
    arrays.check_names([leaf.name for leaf in layout.leaves])
    stored = {leaf.name: leaf for leaf in manifest.tree}
    require_same_model(manifest, layout, part=part)
    notes = [*_dtype_notes(manifest, layout, cast=cast), *_mesh_notes(manifest, layout)]
    repadded = [leaf for leaf in layout.leaves if stored[leaf.name].stored_shape != leaf.stored_shape]
    if repadded:
        notes.append(f"{count_leaves(len(repadded))} repadded for this mesh, starting with `{repadded[0].name}`")
    fewer = len(layout.leaves) < len(manifest.tree)
    tree = arrays.read(folder / STATE, arrays.abstract_stored(layout), repad=bool(repadded), part=fewer)
    return Restored(arrays.from_stored(tree, layout), manifest.step, manifest.facts, notes)


def require_same_model(manifest: Manifest, layout: Layout, *, part: bool = False) -> None:
    """Raises with a table if a checkpoint and a layout differ in the names or shapes of leaves."""
    stored = {leaf.name: leaf for leaf in manifest.tree}
    asked = {leaf.name: stored_leaf(leaf) for leaf in layout.leaves}
    rows = [("missing", name, "-", _form(leaf)) for name, leaf in asked.items() if name not in stored]
    if not part:
        rows += [("extra", name, _form(leaf), "-") for name, leaf in stored.items() if name not in asked]
    both = [(name, stored[name], leaf) for name, leaf in asked.items() if name in stored]
    rows += [("shape", name, _form(old), _form(new)) for name, old, new in both if old.shape != new.shape]
    if not rows:
        return
    if all(name.startswith("fp8/") for _, name, *_ in rows):
        raise _other_history(manifest.step, {kind for kind, *_ in rows})
    counts = ", ".join(
        f"{sum(row[0] == kind for row in rows)} {what}"
        for kind, what in (("missing", "missing"), ("extra", "extra"), ("shape", "with another shape"))
    )
    table = text_table(("problem", "leaf", "checkpoint", "requested"), rows[:_MOST_ROWS])
    more = f"\n... and {len(rows) - _MOST_ROWS} more" if len(rows) > _MOST_ROWS else ""
    raise CheckpointError(
        f"step {manifest.step} holds a different model or optimizer: {counts}.\n{table}{more}",
        hint="make the layout with the checkpoint's model and optimizer; `meshwright checkpoint show` prints its tree.",
    )


def _other_history(step: int, kinds: set[str]) -> CheckpointError:
    """Returns the error for a checkpoint that differs only in its history of amaxes for matmuls in fp8."""
    if kinds == {"extra"}:
        what = "was saved with --precision fp8 and its delayed scaling, and this run has other options"
        hint = "pass --precision fp8"
    elif kinds == {"missing"}:
        what = "was not saved with --precision fp8 and its delayed scaling, and this run needs its history of amaxes"
        hint = "keep the options it was saved with"
    else:
        what, hint = "was saved with other options for matmuls in fp8", "keep --fp8-matmuls and --fp8-least-dim"
    return CheckpointError(
        f"step {step} {what}.", hint=f"{hint}, or start a new run from its parameters: --init-from RUN."
    )


def part_of(layout: Layout, name: str) -> Layout:
    """Returns the part of a layout below a name such as `params`; its leaves keep their full names."""
    leaves = [leaf for leaf in layout.leaves if leaf.name.startswith(f"{name}/")]
    tree = layout.structure.unflatten(layout.leaves)
    part = tree.get(name) if isinstance(tree, Mapping) else getattr(tree, name, None)
    inside, structure = jax.tree.flatten(part, is_leaf=lambda node: isinstance(node, LeafLayout))
    if not leaves or inside != leaves:
        raise CheckpointError(f"the layout has no part {name!r}.", hint="use part='params' for the state of a run.")
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
        table = text_table(("leaf", "checkpoint", "requested"), rows)
        raise CheckpointError(
            f"the dtypes of step {manifest.step} differ from the requested ones.\n{table}",
            hint="pass cast=True (--cast) to cast them; this does not restore lost precision.",
        )
    return [f"{count_leaves(len(names))} cast from {old} to {new}" for (old, new), names in changes.items()]


def _require_castable(leaf: LeafLayout, old: str) -> None:
    if is_key(leaf.dtype) or old.startswith("key<"):
        raise CheckpointError(
            f"`{leaf.name}` is {old} in the checkpoint but {stored_leaf(leaf).dtype} here; keys cannot be converted "
            "between random generators.",
            hint="use the checkpoint's generator: jax.random.key(seed, impl=...).",
        )
    if not (is_float(leaf.dtype) and is_float(jnp.dtype(old))):
        raise CheckpointError(
            f"`{leaf.name}` is {old} in the checkpoint but {leaf.dtype} here; only floats can be cast to floats.",
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
        return [f"{count_leaves(len(moved))} resharded on the same mesh, starting with `{moved[0]}`"]
    return []
