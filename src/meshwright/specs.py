"""Functions on `PartitionSpec`: axes, whether a spec fits a shape on a mesh, slice shapes, and text forms."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from meshwright.errors import RuleError, did_you_mean

ProblemKind = Literal["rank", "unknown axis", "axis twice", "indivisible", "unconstrained"]

USUAL_AXES = ("dp", "fsdp", "tp", "sp", "pp", "ep")
"""The usual names of mesh axes."""


@dataclass(frozen=True)
class SpecProblem:
    """The reason why a spec does not fit a leaf; `padded` is the next size of `dim` that would fit."""

    kind: ProblemKind
    message: str
    hint: str
    dim: int = 0
    padded: int = 0


def dim_axes(entry: Any) -> tuple[str, ...]:
    """Returns the axes that split one dim; () for None and UNCONSTRAINED."""
    if entry is None or entry is P.UNCONSTRAINED:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


def spec_axes(spec: P) -> tuple[str, ...]:
    """Returns the axes of a spec, in order of dims."""
    return tuple(axis for entry in spec for axis in dim_axes(entry))


def get_names_from_partition_spec(partition_specs: Any) -> list[str]:
    """Returns the unique axis names in a spec, or in nested dicts and sequences of specs, in order.

    Example:
        >>> get_names_from_partition_spec({"w": P(("dp", "fsdp"), "tp"), "b": P("tp")})
        ['dp', 'fsdp', 'tp']
    """
    found: dict[str, None] = {}

    def visit(node: Any) -> None:
        if node is None or node is P.UNCONSTRAINED:
            return
        if isinstance(node, str):
            found.setdefault(node)
            return
        if isinstance(node, (set, frozenset)):  # the order of a set can differ between hosts
            node = sorted(node)
        for item in node.values() if isinstance(node, Mapping) else node:
            visit(item)

    visit(partition_specs)
    return list(found)


def is_spec(node: Any) -> bool:
    """Returns whether a node in a tree of specs is a leaf: a spec, a sharding or None."""
    return node is None or isinstance(node, (P, NamedSharding))


def check_spec_type(spec: Any, *, where: str) -> P:
    """Returns `spec` if it is a PartitionSpec that names no axis twice; raises otherwise."""
    if not isinstance(spec, P):
        if isinstance(spec, (tuple, list)):
            shown = ", ".join(repr(tuple(entry) if isinstance(entry, list) else entry) for entry in spec)
        else:
            shown = "" if spec is None else repr(spec)
        raise RuleError(
            f"{where}: {spec!r} is a {type(spec).__name__}, not a PartitionSpec.", hint=f"write P({shown})."
        )
    axes = spec_axes(spec)
    for axis in axes:
        if not isinstance(axis, str):
            raise RuleError(f"{where}: {axis!r} in {format_spec(spec)} is not an axis name (a string).")
        if axes.count(axis) > 1:
            dims = [dim for dim, entry in enumerate(spec) for name in dim_axes(entry) if name == axis]
            raise RuleError(
                f"{where}: {format_spec(spec)} uses axis {axis!r} more than once (dims {dims}).",
                hint="an axis can split only one dim; drop it from the others.",
            )
    return spec


def spec_problem(spec: P, shape: Sequence[int], axis_sizes: Mapping[str, int]) -> SpecProblem | None:
    """Returns the first reason why a spec does not fit a shape, or None."""
    if len(spec) > len(shape):
        return SpecProblem(
            "rank",
            f"{format_spec(spec)} has {len(spec)} entries; the shape {tuple(shape)} has rank {len(shape)}.",
            f"use at most {len(shape)} entries, or a pattern that does not match this leaf.",
        )
    for dim, entry in enumerate(spec):
        if entry is P.UNCONSTRAINED:
            return SpecProblem("unconstrained", f"dim {dim} of {format_spec(spec)} is UNCONSTRAINED.", "use None.", dim)
        unknown = next((axis for axis in dim_axes(entry) if axis not in axis_sizes), None)
        if unknown is not None:
            known = ", ".join(axis_sizes)
            message = f"{format_spec(spec)} names axis {unknown!r}; the mesh has axes: {known}."
            if unknown in USUAL_AXES:
                hint = f"if meshes may lack {unknown!r}, pass Rules(..., optional_axes=({unknown!r},))."
            else:
                hint = did_you_mean(unknown, axis_sizes) or f"use one of: {known}; or list it in optional_axes."
            return SpecProblem("unknown axis", message, hint, dim)
        ways = math.prod(axis_sizes[axis] for axis in dim_axes(entry))
        if shape[dim] % ways:
            padded = round_up(shape[dim], ways)
            axes = " x ".join(f"`{axis}`" for axis in dim_axes(entry))
            return SpecProblem(
                "indivisible",
                f"dim {dim} has size {shape[dim]}; {axes} has {ways} devices: {shape[dim]} % {ways} = "
                f"{shape[dim] % ways}.",
                f"pad to {padded}, or drop {axes} here.",
                dim,
                padded,
            )
    return None


def ceil_div(size: int, by: int) -> int:
    """Returns `size / by`, rounded up."""
    return -(-size // by)


def round_up(size: int, multiple: int) -> int:
    """Rounds a size up to a multiple.

    Example:
        >>> round_up(50, 8), round_up(48, 8)
        (56, 48)
    """
    return ceil_div(size, multiple) * multiple


def shard_shape(spec: P, shape: Sequence[int], axis_sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Returns the shape of one device's slice; the spec must fit (see `spec_problem`)."""
    local = list(shape)
    for dim, entry in enumerate(spec):
        for axis in dim_axes(entry):
            local[dim] //= axis_sizes[axis]
    return tuple(local)


def padded_shape(spec: P, shape: Sequence[int], axis_sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Returns the shape with every split dim rounded up to a multiple of its axes' sizes."""
    padded = list(shape)
    for dim, entry in enumerate(spec):
        ways = math.prod(axis_sizes[axis] for axis in dim_axes(entry))
        padded[dim] = round_up(padded[dim], ways)
    return tuple(padded)


def keep_axes(spec: P, keep: Any) -> P:
    """Returns the spec with only the axes for which `keep(axis)` is true; the same object if all are kept."""
    if all(keep(axis) for axis in spec_axes(spec)):
        return spec
    entries: list[Any] = []
    for entry in spec:
        if entry is None or entry is P.UNCONSTRAINED:
            entries.append(entry)
            continue
        kept = tuple(axis for axis in dim_axes(entry) if keep(axis))
        entries.append(None if not kept else kept[0] if isinstance(entry, str) or len(kept) == 1 else kept)
    return P(*entries)


def spread_over(spec: P, axis: str, shape: Sequence[int], axis_sizes: Mapping[str, int]) -> P | None:
    """Returns the spec with one more axis, after the others of the first dim that it divides; None if there is none.

    Example:
        >>> spread_over(P("tp", "fsdp"), "pp", (50257, 768), {"tp": 1, "fsdp": 4, "pp": 2})
        P('tp', ('fsdp', 'pp'))
    """
    if spec_problem(spec, shape, axis_sizes) is not None:
        return None
    entries = [*spec, *[None] * (len(shape) - len(spec))]
    for dim, size in enumerate(shard_shape(spec, shape, axis_sizes)):
        if size % axis_sizes[axis] == 0:
            entries[dim] = (*dim_axes(entries[dim]), axis)
            return canonical(P(*entries))
    return None


def canonical(spec: P) -> P:
    """Returns the canonical form of a spec, without trailing Nones and tuples of one name.

    Example:
        >>> canonical(P(("tp",), None)) == canonical(P("tp"))
        True
    """
    entries = [axes[0] if len(axes) == 1 else axes or None for axes in map(dim_axes, spec)]
    while entries and entries[-1] is None:
        entries.pop()
    return P(*entries)


def format_spec(spec: P) -> str:
    """Returns the spec as Python code."""
    shown = ["UNCONSTRAINED" if entry is P.UNCONSTRAINED else repr(entry) for entry in spec]
    return f"P({', '.join(shown)})"


def spec_to_json(spec: P) -> list[Any]:
    """Returns the spec as a list for JSON: null, a name, or a list of names per dim."""
    return [list(entry) if isinstance(entry, tuple) else entry for entry in spec]


def spec_from_json(entries: Sequence[Any]) -> P:
    """Returns the spec that `spec_to_json` wrote."""
    return P(*(tuple(entry) if isinstance(entry, list) else entry for entry in entries))
