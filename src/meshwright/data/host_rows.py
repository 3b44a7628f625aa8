"""A process's share of a batch: which rows its devices hold, and global arrays from those rows alone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding

from meshwright.types import PyTree


def local_rows(shapes: PyTree, shardings: PyTree, *, devices: Iterable[jax.Device] | None = None) -> np.ndarray:
    """Returns the numbers of those rows of a batch that some devices hold, in order.

    Args:
        shapes: of the whole batch's arrays, rows first; scalars have none.
        shardings: of each array.
        devices: those of this process when left out.

    Example:
        >>> import meshwright as mw
        >>> mesh = mw.create_mesh("dp:2,tp:4")
        >>> sharding = jax.NamedSharding(mesh, mw.P("dp"))
        >>> local_rows(jax.ShapeDtypeStruct((6, 3), "int32"), sharding, devices=[mesh.devices[1, 2]]).tolist()
        [3, 4, 5]
    """
    wanted = None if devices is None else set(devices)
    held: np.ndarray | None = None
    for leaf, sharding in _pairs(shapes, shardings):
        if not leaf.shape:
            continue
        held = np.zeros(leaf.shape[0], bool) if held is None else held
        mine = sharding.addressable_devices if wanted is None else wanted
        for device, index in sharding.devices_indices_map(leaf.shape).items():
            if device in mine:
                held[index[0]] = True
    return np.flatnonzero(held) if held is not None else np.zeros(0, np.int64)


def place_rows(rows: PyTree, numbers: np.ndarray, shapes: PyTree, shardings: PyTree) -> PyTree:
    """Returns a batch as global arrays, from the rows with these numbers, which this process's devices need.

    Nothing is exchanged between processes.
    """
    leaves: list[Any]
    structure: Any
    leaves, structure = jax.tree.flatten(rows)
    arrays = [
        _place(leaf, numbers, shape.shape, sharding)
        for leaf, (shape, sharding) in zip(leaves, _pairs(shapes, shardings), strict=True)
    ]
    return structure.unflatten(arrays)


def _place(values: Any, numbers: np.ndarray, shape: tuple[int, ...], sharding: Sharding) -> jax.Array:
    def part(index: tuple[slice, ...] | None) -> Any:
        if not index:
            return values
        # The rows of a device are neighbours in the batch, so they are neighbours among ours.
        start, stop, _ = index[0].indices(shape[0])
        first = int(np.searchsorted(numbers, start))
        return values[(slice(first, first + stop - start), *index[1:])]

    return jax.make_array_from_callback(shape, sharding, part)


def _pairs(shapes: PyTree, shardings: PyTree) -> list[tuple[Any, Any]]:
    leaves = jax.tree.leaves(shapes)
    return list(zip(leaves, jax.tree.leaves(shardings, is_leaf=lambda x: isinstance(x, Sharding)), strict=True))
