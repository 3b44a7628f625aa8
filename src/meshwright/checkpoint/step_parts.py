"""The files of a step that this process needs: all that describe it, and the shards that its devices hold."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from meshwright.checkpoint import arrays
from meshwright.checkpoint.manifest import STATE
from meshwright.layout import Layout
from meshwright.specs import ceil_div
from meshwright.tree import flatten_tree

_FORM = ".zarray"


def is_shard(name: str) -> bool:
    """Returns whether a file of a step holds a shard of one array, as several processes with their own folders write.

    Example:
        >>> is_shard("state/params.w/0.1"), is_shard("state/params.w/.zarray"), is_shard("state/d/ab12")
        (True, False, False)
    """
    parts = name.split("/")
    return len(parts) == 3 and parts[0] == STATE and parts[2].replace(".", "").isdecimal()


def needed_files(place: Path, names: Iterable[str], layout: Layout | None) -> list[str]:
    """Returns the files of a step that this process reads to restore a layout; without a layout, all of them.

    Args:
        place: folder of the step, which holds the files that describe it.
        names: all files of the step.
    """
    if layout is None:
        return list(names)
    leaves = flatten_tree(arrays.abstract_stored(layout), sep=".")
    wanted: dict[str, set[str] | None] = {}

    def is_needed(name: str) -> bool:
        if not is_shard(name):
            return True
        _, leaf, shard = name.split("/")
        if leaf not in wanted:
            wanted[leaf] = _shards(place / STATE / leaf / _FORM, leaves[leaf]) if leaf in leaves else set()
        kept = wanted[leaf]
        return kept is None or shard in kept

    return [name for name in names if is_needed(name)]


def _shards(form: Path, leaf: Any) -> set[str] | None:
    """Returns the names of the shards of an array that overlap with those of this process; None for all."""
    try:
        held = json.loads(form.read_bytes())
        shape, chunk = [int(size) for size in held["shape"]], [int(size) for size in held["chunks"]]
        separator = str(held.get("dimension_separator", "."))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if separator != "." or len(shape) != len(leaf.shape) or 0 in chunk:
        return None
    found = set()
    for index in leaf.sharding.addressable_devices_indices_map(leaf.shape).values():
        # An array that was padded for another mesh may be shorter or longer than the leaf.
        bounds = [part.indices(size)[:2] for part, size in zip(index, leaf.shape, strict=True)]
        ranges = [
            range(start // step, ceil_div(min(stop, size), step))
            for (start, stop), size, step in zip(bounds, shape, chunk, strict=True)
        ]
        found |= {".".join(map(str, place)) or "0" for place in itertools.product(*ranges)}
    return found
