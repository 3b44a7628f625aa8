"""Sharding constraints inside a program that never fail silently."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from meshwright.errors import PlacementError
from meshwright.mesh.current import AnyMesh, current_mesh, no_mesh_error, other_mesh_error, require_axes
from meshwright.specs import check_spec_type, dim_axes, format_spec, is_spec, keep_axes, spec_axes, spec_problem
from meshwright.types import PyTree


def with_sharding_constraint(x: PyTree, partition_specs: PyTree, *, optional_axes: Sequence[str] = ()) -> PyTree:
    """Constrains the sharding of arrays inside a program, with mesh axes of any type.

    Arrays are constrained along Auto axes and resharded along Explicit axes. Manual axes are skipped, because inside
    `shard_map` an array is already one slice. For `UNCONSTRAINED` dims, the compiler chooses the sharding along Auto
    axes, and the sharding along Explicit axes does not change.

    Args:
        x: an array, or a tree of arrays.
        partition_specs: a spec or `NamedSharding`, or a tree of them that is a prefix of `x`; None skips a subtree.
        optional_axes: axes to skip if the mesh lacks them. Any other unknown axis raises an error, and so does a call
            without a mesh.

    Example:
        >>> import meshwright as mw
        >>> with jax.set_mesh(mw.create_mesh("dp:4,tp:2")):
        ...     mw.with_sharding_constraint(jax.numpy.ones((8, 6)), P("dp", P.UNCONSTRAINED)).sharding.spec
        P('dp',)
    """
    return jax.tree.map(
        lambda spec, part: (
            part if spec is None else jax.tree.map(lambda leaf: _constrain(leaf, spec, optional_axes), part)
        ),
        partition_specs,
        x,
        is_leaf=is_spec,
    )


def _constrain(x: Any, spec: Any, optional_axes: Sequence[str]) -> Any:
    mesh = current_mesh()
    if isinstance(spec, NamedSharding):
        if mesh is not None and dict(mesh.shape) != dict(spec.mesh.shape):
            raise other_mesh_error("the NamedSharding", spec.mesh, mesh)
        if mesh is None or spec.memory_kind not in (None, "device"):
            _require_fit(spec.spec, np.shape(x), spec.mesh)
            return jax.lax.with_sharding_constraint(x, spec)
        spec = spec.spec
    check_spec_type(spec, where="with_sharding_constraint")
    known = mesh.axis_names if mesh is not None else ()
    spec = keep_axes(spec, lambda axis: axis in known or axis not in optional_axes)
    if mesh is None:
        if spec_axes(spec):
            raise no_mesh_error(f"with_sharding_constraint({format_spec(spec)})")
        return x
    require_axes(mesh, spec_axes(spec), where=format_spec(spec))
    _require_same_mesh(x, mesh)
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    spec = keep_axes(spec, lambda axis: types[axis] is not AxisType.Manual)
    _require_fit(spec, np.shape(x), mesh)
    kinds = set(types.values())
    if AxisType.Explicit not in kinds:
        return jax.lax.with_sharding_constraint(x, _auto_part(spec, types)) if AxisType.Auto in kinds else x
    if AxisType.Auto not in kinds:
        return jax.reshard(x, _explicit_part(x, spec, types))
    _require_explicit_first(spec, types)

    def both(x: Any) -> Any:
        x = jax.reshard(x, _explicit_part(x, spec, types))
        return jax.lax.with_sharding_constraint(x, _auto_part(spec, types))

    # Run eagerly, the second step would undo the first if both split the same dim.
    return both(x) if isinstance(x, jax.core.Tracer) else jax.jit(both)(x)


def _explicit_part(x: Any, spec: P, types: dict[str, AxisType]) -> P:
    now = jax.typeof(x).sharding.spec
    entries: list[Any] = []
    for dim, entry in enumerate(spec):
        if entry is P.UNCONSTRAINED:  # reshard needs the current sharding to keep it
            entries.append(now[dim] if dim < len(now) else None)
        else:
            entries.append(tuple(axis for axis in dim_axes(entry) if types[axis] is AxisType.Explicit) or None)
    return P(*entries)


def _auto_part(spec: P, types: dict[str, AxisType]) -> P:
    entries: list[Any] = []
    for entry in spec:
        axes = dim_axes(entry)
        auto = tuple(axis for axis in axes if types[axis] is AxisType.Auto)
        # A None here would gather a dim that only Explicit axes split.
        is_free = entry is P.UNCONSTRAINED or (axes and not auto)
        entries.append(P.UNCONSTRAINED if is_free else auto or None)
    return P(*entries)


def _require_explicit_first(spec: P, types: dict[str, AxisType]) -> None:
    for dim, entry in enumerate(spec):
        explicit = [types[axis] is AxisType.Explicit for axis in dim_axes(entry)]
        if explicit != sorted(explicit, reverse=True):
            raise PlacementError(
                f"with_sharding_constraint: dim {dim} of {format_spec(spec)} lists an Auto axis before an Explicit "
                "axis, which JAX does not support.",
                hint="list the Explicit axes of a dim first.",
            )


def _require_fit(spec: P, shape: Sequence[int], mesh: AnyMesh) -> None:
    definite = P(*(None if entry is P.UNCONSTRAINED else entry for entry in spec))
    problem = spec_problem(definite, shape, dict(mesh.shape))
    if problem is not None:
        raise PlacementError(f"with_sharding_constraint: {problem.message}", hint=problem.hint)


def _require_same_mesh(x: Any, mesh: AnyMesh) -> None:
    if isinstance(x, jax.core.Tracer) or not isinstance(x, jax.Array) or not isinstance(x.sharding, NamedSharding):
        return
    own = x.sharding.mesh
    if own.axis_names and len(x.sharding.device_set) > 1 and dict(own.shape) != dict(mesh.shape):
        raise other_mesh_error("the array", own, mesh)
