"""Which meshes a job is compared on: those asked for, each axis alone, or every way to split the devices."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from meshwright.errors import MeshwrightError
from meshwright.mesh.build import create_mesh
from meshwright.mesh.string import parse_mesh
from meshwright.rules import Rules
from meshwright.specs import spec_axes

# The order in which meshes list axes: what crosses the slow network first.
AXIS_ORDER = ("dp", "fsdp", "pp", "tp", "sp")


def known_axes(rules: Any, data_axes: Sequence[str] | None = None) -> dict[str, bool]:
    """Returns the axes that rules know, and those that split data, each with whether every mesh must have it.

    Example:
        >>> from meshwright import P
        >>> known_axes(Rules([("w", P("fsdp", "tp"))], optional_axes=("tp",)))
        {'dp': False, 'fsdp': True, 'tp': False}
    """
    rules = rules if isinstance(rules, Rules) else Rules(rules)
    named = dict.fromkeys(axis for _, spec in rules for axis in spec_axes(spec))
    axes = [*(data_axes or ("dp",)), *rules.optional_axes, *named]
    order = {axis: place for place, axis in enumerate(AXIS_ORDER)}
    ordered = sorted(dict.fromkeys(axes), key=lambda axis: order.get(axis, len(order)))
    return {axis: axis in named and axis not in rules.optional_axes for axis in ordered}


def all_meshes(num_devices: int, axes: dict[str, bool]) -> list[str]:
    """Returns every way to split a number of devices over axes, as mesh strings; axes that may be left out are.

    Example:
        >>> all_meshes(4, {"dp": False, "tp": False})
        ['tp:4', 'dp:2,tp:2', 'dp:4']
    """
    return [_string(sizes, axes) for sizes in _factorisations(num_devices, len(axes))]


def each_axis_alone(num_devices: int, axes: dict[str, bool]) -> list[str]:
    """Returns, for each axis, the mesh that has all devices along it."""
    names = list(axes)
    return [_string([num_devices if axis == name else 1 for axis in names], axes) for name in names]


def reference_mesh(axes: dict[str, bool], meshes: Sequence[Mesh], device: Any) -> Mesh:
    """Returns a mesh of one device that has every axis which the rules or another mesh name."""
    names = dict.fromkeys([*axes, *(axis for mesh in meshes for axis in mesh.axis_names)])
    return create_mesh(",".join(f"{axis}:1" for axis in names), devices=[device])


def make_mesh(text: str, devices: Sequence[Any]) -> Mesh:
    """Returns a mesh of all devices, or of the first ones where its sizes say how many."""
    spec = parse_mesh(text)
    size = math.prod(spec.sizes)
    return create_mesh(spec, devices=devices[:size] if -1 not in spec.sizes and size < len(devices) else devices)


def mesh_text(mesh: Mesh) -> str:
    """Returns a mesh as the string that makes it."""
    return ",".join(f"{axis}:{size}" for axis, size in mesh.shape.items())


def pick_devices(devices: Sequence[Any] | int | None) -> list[Any]:
    """Returns the devices to use, of which there must be two at least."""
    available = jax.devices()
    chosen = list(available[:devices] if devices is None or isinstance(devices, int) else devices)
    if isinstance(devices, int) and not 1 <= devices <= len(available):
        raise MeshwrightError(f"devices={devices} of {len(available)} available.", hint=f"use 2 to {len(available)}.")
    if len(chosen) < 2:
        raise MeshwrightError(
            "there is one device only, and nothing to compare it with.",
            hint="simulate some: JAX_PLATFORMS=cpu, and meshwright.simulate_cpu_devices() before JAX starts.",
        )
    return chosen


def _string(sizes: Sequence[int], axes: dict[str, bool]) -> str:
    return ",".join(
        f"{axis}:{size}" for (axis, needed), size in zip(axes.items(), sizes, strict=True) if size > 1 or needed
    )


def _factorisations(number: int, length: int) -> Iterator[tuple[int, ...]]:
    divisors = [size for size in range(1, number + 1) if number % size == 0]
    return (sizes for sizes in itertools.product(divisors, repeat=length) if math.prod(sizes) == number)
