"""Transfer of whole trees onto a mesh and back to the host."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from meshwright.dtypes import as_dtype, cast_target, is_dtype_like
from meshwright.errors import PlacementError
from meshwright.mesh.current import current_concrete_mesh, no_mesh_error, require_axes
from meshwright.specs import check_spec_type, format_spec, is_spec, spec_axes, spec_problem
from meshwright.types import PyTree


def shard_leaves(
    values: Sequence[Any],
    shardings: Sequence[NamedSharding],
    dtypes: Sequence[Any] | None = None,
    *,
    donate: bool = False,
) -> list[jax.Array]:
    """Places many values at once: one transfer from the host, and one compiled program for arrays on the mesh.

    Floats are cast to `dtypes` (None: keep). `donate` donates the arrays on the mesh that must change.
    """
    targets = [
        cast_target(_dtype_of(value), wanted)
        for value, wanted in zip(values, dtypes or [None] * len(values), strict=True)
    ]
    results = list(values)
    on_mesh: list[int] = []
    elsewhere: list[int] = []
    for index, (value, sharding, dtype) in enumerate(zip(values, shardings, targets, strict=True)):
        if not isinstance(value, jax.Array) or value.sharding.device_set != sharding.device_set:
            elsewhere.append(index)
        elif value.dtype != dtype or not value.sharding.is_equivalent_to(sharding, value.ndim):
            on_mesh.append(index)
        elif value.sharding != sharding:  # an equivalent sharding, which device_put replaces without a copy
            elsewhere.append(index)
    owned = set(on_mesh)
    if elsewhere:
        # Arrays on other accelerators are cast after the transfer, by the single program below.
        moved = [_on_host(values[i], targets[i]) for i in elsewhere]
        for i, placed in zip(elsewhere, jax.device_put(moved, [shardings[i] for i in elsewhere]), strict=True):
            results[i] = placed
            if placed.dtype != targets[i]:
                on_mesh.append(i)
    if on_mesh:
        # A moved array may share memory with the caller's array, so it must not be donated.
        program = _placing_program(
            tuple(shardings[i] for i in on_mesh),
            tuple(targets[i] for i in on_mesh),
            donate and len(owned) == len(on_mesh),
        )
        with warnings.catch_warnings():
            # New slices rarely fit into the old buffers, which are deleted below in any case.
            warnings.filterwarnings("ignore", "Some donated buffers were not usable")
            made = program([results[i] for i in on_mesh])
        for i, placed in zip(on_mesh, made, strict=True):
            results[i] = placed
            if donate and i in owned and not values[i].is_deleted():
                values[i].delete()
    return results


@functools.lru_cache(maxsize=128)
def _placing_program(shardings: tuple[NamedSharding, ...], dtypes: tuple[Any, ...], donate: bool) -> Any:
    return jax.jit(
        lambda leaves: [leaf.astype(dtype) for leaf, dtype in zip(leaves, dtypes, strict=True)],
        out_shardings=list(shardings),
        donate_argnums=(0,) if donate else (),
    )


def _on_host(value: Any, dtype: Any) -> Any:
    """Casts a value in host memory to the dtype it will have on the mesh; returns other values unchanged."""
    if isinstance(value, jax.Array):
        device: Any = next(iter(value.sharding.device_set))
        in_reach = value.is_fully_addressable and len(value.sharding.device_set) == 1 and device.platform == "cpu"
        if not in_reach or not isinstance(value.dtype, np.dtype):
            return value
        value = np.asarray(value)  # without a copy; device_put would compile a slicing program for each shape
    if not hasattr(value, "dtype"):
        return np.asarray(value, dtype)
    held = jax.dtypes.canonicalize_dtype(dtype, allow_extended_dtype=True)
    if held != dtype:
        raise PlacementError(
            f"a {dtype} array would become {held} on the mesh, because jax_enable_x64 is off.",
            hint=f'cast it to {held} first, or call jax.config.update("jax_enable_x64", True).',
        )
    return _cast(value, dtype)


def gather_leaves(
    values: Sequence[Any], dtypes: Sequence[Any] | None = None, *, donate: bool = False
) -> list[np.ndarray[Any, Any]]:
    """Returns every value as a full numpy array; with `donate`, frees each device array after reading it.

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
            # On CPU the numpy array may be a view of the device's memory, which is about to be freed.
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


# --- Trees of functions ---


@dataclass(frozen=True, eq=False)
class LeafFunction:
    """A function that shards or gathers one leaf; `tree_apply` runs a whole tree of them as one call."""

    kind: Literal["shard", "gather"]
    placement: P | NamedSharding
    dtype: Any | None
    mesh: Mesh | None

    def __call__(self, value: Any) -> Any:
        """Shards or gathers one array, or every array of a subtree."""
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
    each, leaves, structure = _per_leaf(functions, values)
    shardings = [function.sharding_for(leaf) for function, leaf in zip(each, leaves, strict=True)]
    placed: list[Any] = structure.unflatten(shard_leaves(leaves, shardings, [function.dtype for function in each]))
    return placed


def _gather_many(functions: Sequence[LeafFunction], values: Sequence[Any]) -> list[Any]:
    each, leaves, structure = _per_leaf(functions, values)
    whole: list[Any] = structure.unflatten(gather_leaves(leaves, [function.dtype for function in each]))
    return whole


def _per_leaf(functions: Sequence[LeafFunction], values: Sequence[Any]) -> tuple[list[LeafFunction], list[Any], Any]:
    """Returns a function for each leaf, all leaves, and the structure; a value may be a subtree."""
    leaves, structure = jax.tree.flatten(list(values))
    return [f for f, value in zip(functions, values, strict=True) for _ in jax.tree.leaves(value)], leaves, structure


def make_shard_and_gather_fns(
    partition_specs: PyTree, dtype_specs: Any = None, *, mesh: Mesh | None = None
) -> tuple[PyTree, PyTree]:
    """Returns two trees of functions: one shards each leaf onto the mesh, the other gathers it to the host.

    Apply them with `tree_apply`, which moves the whole tree at once, or leaf by leaf.

    Args:
        partition_specs: a tree of `PartitionSpec` or `NamedSharding`.
        dtype_specs: a dtype or its name for all float leaves, or a tree of them (default: keep); other leaves are not
            cast.
        mesh: the mesh (default: the current mesh, now or when the functions are called).

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
    specs, structure = jax.tree.flatten(partition_specs, is_leaf=is_spec)
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
