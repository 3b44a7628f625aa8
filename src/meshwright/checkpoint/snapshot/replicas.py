"""Shards that a host lost, taken from replicas on other hosts with a collective, without changing a bit."""

from __future__ import annotations

import math
from collections.abc import Callable, MutableMapping
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from meshwright.checkpoint.snapshot.rank_file import Key, index_of
from meshwright.layout import Layout
from meshwright.specs import spec_axes

Held = MutableMapping[Key, np.ndarray]


def fill_from_replicas(
    structs: dict[str, Any], layout: Layout, held: Held, *, has: Callable[[Any, Key], bool] | None = None
) -> str:
    """Completes `held` with the shards of other processes; returns the name of a leaf that nobody holds, or "".

    All processes must call it.

    Args:
        structs: shape, dtype and sharding of each leaf.
        has: `has(device, key)` tells whether a device of this process has its shard (default: whether it is held).
    """
    devices = list(layout.mesh.devices.flat)
    maps = {name: struct.sharding.devices_indices_map(struct.shape) for name, struct in structs.items()}
    keys = {name: [(name, index_of(found[device], structs[name].shape)) for device in devices]
            for name, found in maps.items()}  # fmt: skip
    has = has or (lambda device, key: key in held)
    own = [place for place, device in enumerate(devices) if device.process_index == jax.process_index()]
    table = np.array([[has(devices[place], row[place]) for place in own] for row in keys.values()], np.uint8)
    there = _everywhere(table, devices)
    wanted: dict[str, set[int]] = {}
    for row, (name, places) in zip(there, keys.items(), strict=True):
        if not row.all():
            sources = {key: place for place, key in reversed(list(enumerate(places))) if row[place]}
            if len(sources) < len(set(places)):
                return name
            wanted[name] = set(sources.values())
    for name, places_of in wanted.items():
        _spread(structs[name], keys[name], devices, places_of, held)
    return ""


def _everywhere(own: np.ndarray, devices: list[Any]) -> np.ndarray:
    """Returns the table `[leaf, device]` of all processes."""
    if jax.process_count() == 1:
        return own.astype(bool)
    from jax.experimental import multihost_utils

    tables = np.asarray(multihost_utils.process_allgather(own))
    seen = [0] * len(tables)
    columns = []
    for device in devices:
        columns.append(tables[device.process_index][:, seen[device.process_index]])
        seen[device.process_index] += 1
    return np.stack(columns, axis=1).astype(bool)


def _spread(struct: Any, keys: list[Key], devices: list[Any], sources: set[int], held: Held) -> None:
    """Sends one leaf from `sources`, one device for each of its parts, to all replicas.

    The bytes of the sources and zeros of the others are added over the mesh axes along which the leaf is replicated.
    """
    mesh, spec = struct.sharding.mesh, struct.sharding.spec
    copies = tuple(axis for axis in mesh.axis_names if axis not in spec_axes(spec))
    dims = [*spec, *[None] * (len(struct.shape) - len(spec))] or [None]
    # The bytes of an element lie along the last dim, which a TPU would pad if they had a dim of their own.
    shape = [math.prod(mesh.shape[axis] for axis in copies), *(struct.shape or (1,))]
    shape[-1] *= struct.dtype.itemsize
    sharding = NamedSharding(mesh, P(copies, *dims))
    places = sharding.devices_indices_map(tuple(shape))
    parts = []
    for place, device in enumerate(devices):
        if device.process_index == jax.process_index():
            size = [end - start for start, end in index_of(places[device], tuple(shape))]
            data = np.zeros(size, np.uint8)
            if place in sources:
                data = np.frombuffer(held[keys[place]].tobytes(), np.uint8).reshape(size)
            parts.append(jax.device_put(data, device))
    array = jax.make_array_from_single_device_arrays(tuple(shape), sharding, parts)
    added = jax.jit(lambda bits: bits.sum(0, dtype=np.uint8), out_shardings=NamedSharding(mesh, P(*dims)))(array)
    found = {shard.device: shard.data for shard in added.addressable_shards}
    for place, device in enumerate(devices):
        if device in found and keys[place] not in held:
            size = [end - start for start, end in keys[place][1]]
            held[keys[place]] = np.frombuffer(np.asarray(found[device]).tobytes(), struct.dtype).reshape(size)
