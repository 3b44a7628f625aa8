"""Moving whole trees onto a mesh and back, and constraints inside a program that never fail silently."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from meshwright.dtypes import as_dtype, cast_target, is_dtype_like
from meshwright.errors import MeshError, PlacementError
from meshwright.mesh.build import current_concrete_mesh, current_mesh, describe_mesh, require_axes
from meshwright.specs import check_spec_type, dim_axes, format_spec, keep_axes, spec_axes, spec_problem
from meshwright.types import PyTree

# --- Whole trees ---


def shard_leaves(
    values: Sequence[Any],
    shardings: Sequence[NamedSharding],
    dtypes: Sequence[Any] | None = None,
    *,
    donate: bool = False,
) -> list[jax.Array]:
    """Places many values at once: one transfer for what is on the host, one compiled program for what is on the mesh.

    `dtypes` casts floats on the way (None: keep). `donate` gives up arrays already on the mesh that must change.
    """
    targets = [
        cast_target(_dtype_of(value), wanted)
        for value, wanted in zip(values, dtypes or [None] * len(values), strict=True)
    ]
    results: list[Any] = [None] * len(values)
    on_mesh: list[int] = []
    elsewhere: list[int] = []
    for index, (value, sharding, dtype) in enumerate(zip(values, shardings, targets, strict=True)):
        if not isinstance(value, jax.Array) or value.sharding.device_set != sharding.device_set:
            elsewhere.append(index)
        elif value.dtype != dtype or not value.sharding.is_equivalent_to(sharding, value.ndim):
            on_mesh.append(index)
        elif value.sharding == sharding:
            results[index] = value
        else:  # the same placement by another name: device_put renames it without a copy
            elsewhere.append(index)
    current, owned = list(values), set(on_mesh)
    if elsewhere:
        # Arrays on some other accelerator are cast once they are here, in the one program below, not one by one there.
        moved = [_on_host(values[i], targets[i]) for i in elsewhere]
        for i, placed in zip(elsewhere, jax.device_put(moved, [shardings[i] for i in elsewhere]), strict=True):
            current[i] = results[i] = placed
            if placed.dtype != targets[i]:
                on_mesh.append(i)
    if on_mesh:
        # What was just moved here may share memory with the caller's array, which was not on the mesh: never donate it.
        program = _placing_program(
            tuple(shardings[i] for i in on_mesh),
            tuple(targets[i] for i in on_mesh),
            donate and len(owned) == len(on_mesh),
        )
        with warnings.catch_warnings():
            # Other slices or another dtype rarely fit into the old memory; it is freed below all the same.
            warnings.filterwarnings("ignore", "Some donated buffers were not usable")
            made = program([current[i] for i in on_mesh])
        for i, placed in zip(on_mesh, made, strict=True):
            results[i] = placed
            if donate and i in owned and not current[i].is_deleted():
                current[i].delete()
    return results


@functools.lru_cache(maxsize=128)
def _placing_program(shardings: tuple[NamedSharding, ...], dtypes: tuple[Any, ...], donate: bool) -> Any:
    return jax.jit(
        lambda leaves: [leaf.astype(dtype) for leaf, dtype in zip(leaves, dtypes, strict=True)],
        out_shardings=list(shardings),
        donate_argnums=(0,) if donate else (),
    )


def _on_host(value: Any, dtype: Any) -> Any:
    """Returns a value that lies in the host's memory in the dtype it will have on the mesh; others as they are."""
    if isinstance(value, jax.Array):
        device: Any = next(iter(value.sharding.device_set))
        in_reach = value.is_fully_addressable and len(value.sharding.device_set) == 1 and device.platform == "cpu"
        if not in_reach or not isinstance(value.dtype, np.dtype):
            return value
        value = np.asarray(value)  # no copy; device_put would compile a program for each shape to cut it up
    if not hasattr(value, "dtype"):  # a Python number has no precision to lose
        return np.asarray(value, dtype)
    held = jax.dtypes.canonicalize_dtype(dtype, allow_extended_dtype=True)
    if held != dtype:
        raise PlacementError(
            f"an array of {dtype} would become {held} on the mesh, because jax_enable_x64 is off.",
            hint=f'cast it to {held} first, or jax.config.update("jax_enable_x64", True).',
        )
    return _cast(value, dtype)


def gather_leaves(
    values: Sequence[Any], dtypes: Sequence[Any] | None = None, *, donate: bool = False
) -> list[np.ndarray[Any, Any]]:
    """Returns every value whole, on the host; with `donate`, each array's device memory is freed once it is read.

    Arrays that span processes are gathered from all of them, so every process must make the same call.
    """
    gathered = []
    for value, wanted in zip(values, dtypes or [None] * len(values), strict=True):
        if isinstance(value, jax.Array) and not value.is_fully_addressable and not value.is_fully_replicated:
            from jax.experimental import multihost_utils

            host = multihost_utils.process_allgather(value, tiled=True)
        else:
            host = jax.device_get(value)
        if donate and isinstance(value, jax.Array) and not value.is_deleted():
            # On CPU the host array may be a view of the device's memory; it must not outlive it.
            host = np.array(host) if isinstance(host, np.ndarray) and host.base is not None else host
            value.delete()
        gathered.append(_cast(host, cast_target(_dtype_of(host), wanted)))
    return gathered


def _dtype_of(value: Any) -> Any:
    return value.dtype if hasattr(value, "dtype") else jax.dtypes.canonicalize_dtype(np.result_type(value))


def _cast(value: Any, dtype: Any) -> Any:
    if not hasattr(value, "dtype"):
        value = np.asarray(value)
    return value if value.dtype == dtype else value.astype(dtype)


# --- Functions per leaf, for code that wants trees of functions ---


@dataclass(frozen=True, eq=False)
class LeafFunction:
    """Shards or gathers one leaf; `tree_apply` runs a whole tree of these as one call."""

    kind: Literal["shard", "gather"]
    placement: P | NamedSharding
    dtype: Any | None
    mesh: Mesh | None

    def __call__(self, value: Any) -> Any:
        """Applies to one array, or to every array of a subtree."""
        return self.apply_many([self], [value])[0]

    @property
    def apply_many(self) -> Callable[..., list[Any]]:
        return _shard_many if self.kind == "shard" else _gather_many

    def sharding_for(self, value: Any) -> NamedSharding:
        if isinstance(self.placement, NamedSharding):
            return self.placement
        mesh = self.mesh or current_concrete_mesh()
        if mesh is None:
            raise no_mesh_error("make_shard_and_gather_fns")
        require_axes(mesh, spec_axes(self.placement), where=format_spec(self.placement))
        problem = spec_problem(self.placement, np.shape(value), dict(mesh.shape))
        if problem is not None:
            raise PlacementError(problem.message, hint=problem.hint)
        return NamedSharding(mesh, self.placement)


def _shard_many(functions: Sequence[LeafFunction], values: Sequence[Any]) -> list[Any]:
    return _over_subtrees(
        functions,
        values,
        lambda each, leaves: shard_leaves(
            leaves,
            [function.sharding_for(leaf) for function, leaf in zip(each, leaves, strict=True)],
            [function.dtype for function in each],
        ),
    )


def _gather_many(functions: Sequence[LeafFunction], values: Sequence[Any]) -> list[Any]:
    return _over_subtrees(
        functions, values, lambda each, leaves: gather_leaves(leaves, [function.dtype for function in each])
    )


def _over_subtrees(
    functions: Sequence[LeafFunction], values: Sequence[Any], run: Callable[[list[LeafFunction], list[Any]], list[Any]]
) -> list[Any]:
    """Runs all leaves of all values as one call, where a value may be a subtree that shares one function."""
    structure: Any
    leaves, structure = jax.tree.flatten(list(values))
    each = [f for f, value in zip(functions, values, strict=True) for _ in jax.tree.leaves(value)]
    result: list[Any] = structure.unflatten(run(each, leaves))
    return result


def make_shard_and_gather_fns(
    partition_specs: PyTree, dtype_specs: Any = None, *, mesh: Mesh | None = None
) -> tuple[PyTree, PyTree]:
    """Returns two trees of functions: one places each leaf on the mesh, the other brings it back whole to the host.

    Apply them with `tree_apply`, which moves the whole tree at once, or leaf by leaf.

    Args:
        partition_specs: a tree of specs or of `NamedSharding`.
        dtype_specs: a dtype for all float leaves (name, numpy or jnp dtype, struct), or a tree of them; integers and
            random keys are never cast.
        mesh: where to place; by default the mesh in force now or, failing that, when the functions are called.

    Example:
        >>> import meshwright as mw
        >>> shard, gather = make_shard_and_gather_fns({"w": P("tp")}, "bfloat16", mesh=mw.create_mesh("tp:8"))
        >>> placed = mw.tree_apply(shard, {"w": np.ones((16, 4), np.float32)})
        >>> placed["w"].sharding.spec, placed["w"].dtype, mw.tree_apply(gather, placed)["w"].shape
        (P('tp',), dtype(bfloat16), (16, 4))
    """
    mesh = mesh or current_concrete_mesh()
    specs: list[Any]
    structure: Any
    specs, structure = jax.tree.flatten(partition_specs, is_leaf=_is_spec)
    for spec in specs:
        if not isinstance(spec, NamedSharding):
            check_spec_type(spec, where="make_shard_and_gather_fns")
            if mesh is not None:
                require_axes(mesh, spec_axes(spec), where=format_spec(spec))
    if dtype_specs is None or is_dtype_like(dtype_specs):
        dtypes = [None if dtype_specs is None else as_dtype(dtype_specs)] * len(specs)
    else:
        try:
            flat = structure.flatten_up_to(dtype_specs)
        except (ValueError, TypeError) as error:
            raise PlacementError(f"dtype_specs and partition_specs differ in structure: {error}") from None
        dtypes = [None if dtype is None else as_dtype(dtype) for dtype in flat]
    shard = [LeafFunction("shard", spec, dtype, mesh) for spec, dtype in zip(specs, dtypes, strict=True)]
    gather = [LeafFunction("gather", spec, dtype, mesh) for spec, dtype in zip(specs, dtypes, strict=True)]
    return structure.unflatten(shard), structure.unflatten(gather)


def _is_spec(node: Any) -> bool:
    return node is None or isinstance(node, (P, NamedSharding))


# --- Inside a program ---


def with_sharding_constraint(x: PyTree, partition_specs: PyTree, *, optional_axes: Sequence[str] = ()) -> PyTree:
    """Constrains how arrays inside a program are split, under any kind of mesh axis.

    Auto axes are constrained, Explicit axes are resharded, and Manual axes are left out, because inside `shard_map`
    the slice at hand is already what the spec says. `UNCONSTRAINED` dims are left to the compiler by Auto axes and
    as they are by Explicit ones.

    Args:
        x: an array, or a tree of them.
        partition_specs: a spec (or `NamedSharding`), or a tree of them that is a prefix of `x`; None leaves a subtree
            alone.
        optional_axes: axes that the mesh may lack and that are then skipped (`Rules.optional_axes`). Any other unknown
            axis is an error, and so is having no mesh at all.

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
        is_leaf=_is_spec,
    )


def no_mesh_error(who: str) -> MeshError:
    """Returns the error for a call that needs a mesh where none is in force."""
    return MeshError(
        f"{who} needs a mesh, and none is active here.", hint="wrap the call in `with jax.set_mesh(mesh):`."
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

    # Eagerly, the second step would undo the first where both split one dim; in one program they add up.
    return both(x) if isinstance(x, jax.core.Tracer) else jax.jit(both)(x)


def _explicit_part(x: Any, spec: P, types: dict[str, AxisType]) -> P:
    now = jax.typeof(x).sharding.spec
    entries: list[Any] = []
    for dim, entry in enumerate(spec):
        if entry is P.UNCONSTRAINED:  # reshard has no word for "as it is", so say what it is
            entries.append(now[dim] if dim < len(now) else None)
        else:
            entries.append(tuple(axis for axis in dim_axes(entry) if types[axis] is AxisType.Explicit) or None)
    return P(*entries)


def _auto_part(spec: P, types: dict[str, AxisType]) -> P:
    entries: list[Any] = []
    for entry in spec:
        axes = dim_axes(entry)
        auto = tuple(axis for axis in axes if types[axis] is AxisType.Auto)
        # A dim that only Explicit axes split is settled by them; here it must not be pulled back together.
        settled = entry is P.UNCONSTRAINED or (axes and not auto)
        entries.append(P.UNCONSTRAINED if settled else auto or None)
    return P(*entries)


def _require_explicit_first(spec: P, types: dict[str, AxisType]) -> None:
    for dim, entry in enumerate(spec):
        explicit = [types[axis] is AxisType.Explicit for axis in dim_axes(entry)]
        if explicit != sorted(explicit, reverse=True):
            raise PlacementError(
                f"with_sharding_constraint: dim {dim} of {format_spec(spec)} is split by an Auto axis before an "
                "Explicit one, which JAX cannot express.",
                hint="name the Explicit axes of a dim first.",
            )


def _require_fit(spec: P, shape: Sequence[int], mesh: Mesh | AbstractMesh) -> None:
    definite = P(*(None if entry is P.UNCONSTRAINED else entry for entry in spec))
    problem = spec_problem(definite, shape, dict(mesh.shape))
    if problem is not None:
        raise PlacementError(f"with_sharding_constraint: {problem.message}", hint=problem.hint)


def _require_same_mesh(x: Any, mesh: AbstractMesh) -> None:
    if isinstance(x, jax.core.Tracer) or not isinstance(x, jax.Array) or not isinstance(x.sharding, NamedSharding):
        return
    own = x.sharding.mesh
    if own.axis_names and len(x.sharding.device_set) > 1 and dict(own.shape) != dict(mesh.shape):
        raise other_mesh_error("the array", own, mesh)


def other_mesh_error(what: str, own: Any, mesh: Any) -> PlacementError:
    """Returns the error for an array that lives on another mesh than the one in use."""
    return PlacementError(
        f"{what} lives on the mesh {describe_mesh(own)}; the mesh in use is {describe_mesh(mesh)}.",
        hint="bring it over with Layout.shard(tree, reshard=True).",
    )
