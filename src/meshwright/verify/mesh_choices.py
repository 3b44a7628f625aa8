"""The meshes that `verify` compares."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from meshwright.errors import MeshwrightError
from meshwright.mesh.build import create_mesh
from meshwright.mesh.string import parse_mesh
from meshwright.rules import as_rules
from meshwright.specs import spec_axes

# Order of the axes in generated meshes: axes that may cross the slow network come first.
AXIS_ORDER = ("dp", "fsdp", "pp", "tp", "sp")


def rule_axes(rules: Any, data_axes: Sequence[str] | None = None) -> dict[str, bool]:
    """Returns the axes of the rules and the data axes (default: `dp`), each with whether every mesh must have it.

    Example:
        >>> from meshwright import P, Rules
        >>> rule_axes(Rules([("w", P("fsdp", "tp"))], optional_axes=("tp",)))
        {'dp': False, 'fsdp': True, 'tp': False}
    """
    rules = as_rules(rules)
    named = dict.fromkeys(axis for _, spec in rules for axis in spec_axes(spec))
    axes = [*(data_axes or ("dp",)), *rules.optional_axes, *named]
    order = {axis: place for place, axis in enumerate(AXIS_ORDER)}
    ordered = sorted(dict.fromkeys(axes), key=lambda axis: order.get(axis, len(order)))
    return {axis: axis in named and axis not in rules.optional_axes for axis in ordered}


def all_meshes(num_devices: int, axes: dict[str, bool]) -> list[str]:
    """Returns every way to split devices over axes, as mesh strings without optional axes of size 1.

    Example:
        >>> all_meshes(4, {"dp": False, "tp": False})
        ['tp:4', 'dp:2,tp:2', 'dp:4']
    """
    divisors = [size for size in range(1, num_devices + 1) if num_devices % size == 0]
    splits = itertools.product(divisors, repeat=len(axes))
    return [_string(sizes, axes) for sizes in splits if math.prod(sizes) == num_devices]


def each_axis_alone(num_devices: int, axes: dict[str, bool]) -> list[str]:
    """Returns a mesh string for each axis, with all devices along that axis."""
    return [_string([num_devices if axis == name else 1 for axis in axes], axes) for name in axes]


def _string(sizes: Sequence[int], axes: dict[str, bool]) -> str:
    named = zip(axes.items(), sizes, strict=True)
    return ",".join(f"{axis}:{size}" for (axis, needed), size in named if size > 1 or needed)


def make_mesh(text: str, devices: Sequence[Any]) -> Mesh:
    """Returns the mesh on all devices, or on the first ones if it needs fewer."""
    spec = parse_mesh(text)
    size = math.prod(spec.sizes)
    return create_mesh(spec, devices=devices[:size] if -1 not in spec.sizes and size < len(devices) else devices)


def pick_devices(devices: Sequence[Any] | int | None) -> list[Any]:
    """Returns the devices to use; raises if there are fewer than 2."""
    available = jax.devices()
    chosen = list(available[:devices] if devices is None or isinstance(devices, int) else devices)
    if isinstance(devices, int) and not 1 <= devices <= len(available):
        count = len(available)
        raise MeshwrightError(f"devices={devices}, but {count} are available.", hint=f"pass 2 to {count}.")
    if len(chosen) < 2:
        raise MeshwrightError(
            "verify needs at least 2 devices, but there is only one.",
            hint="set JAX_PLATFORMS=cpu and call meshwright.simulate_cpu_devices() before JAX starts.",
        )
    return chosen
