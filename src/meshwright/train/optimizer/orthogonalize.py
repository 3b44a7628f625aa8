"""Orthogonalizing matrices on any mesh, with one exchange in each direction.

Newton-Schulz iterations multiply whole matrices, so a matrix that is split over devices has to be put together first.
Left to XLA, that is a gather per matmul. Here matrices of one shape form a stack, one all-to-all gives each device
whole matrices of the stack, and one brings their updates back:

    gradients [N, m / fsdp, n / tp]  ->  [N / devices, m, n]  ->  iterations  ->  [N, m / fsdp, n / tp]

Devices that hold the same values (`dp`) share the work, and gather the updates of the others.

Shapes: N matrices of a stack, m rows, n columns, m <= n.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from meshwright.errors import MeshwrightError
from meshwright.hardware.chips import chip_family
from meshwright.mesh.axes import varying_axes
from meshwright.mesh.current import current_mesh, require_axes
from meshwright.parallel.local_map import local_map
from meshwright.specs import dim_axes, round_up, spec_axes
from meshwright.train.optimizer.newton_schulz import DION_COEFFICIENTS, newton_schulz, sums_of_squares
from meshwright.tree import NamedLeaf, named_leaves
from meshwright.types import PyTree


class Split(NamedTuple):
    """The mesh axes that split a leaf of matrices: their leading dims, rows and columns."""

    lead: tuple[tuple[str, ...], ...] = ()
    rows: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()

    @property
    def lead_axes(self) -> tuple[str, ...]:
        return tuple(axis for axes in self.lead for axis in axes)

    def turned(self) -> Split:
        return Split(self.lead, self.columns, self.rows)

    def spec(self, num_dims: int) -> P:
        lead = [*self.lead, *[()] * (num_dims - 2 - len(self.lead))]
        return P(*(axes or None for axes in (*lead, self.rows, self.columns)))


def orthogonalize(
    tree: PyTree,
    *,
    specs: PyTree = None,
    num_iterations: int = 4,
    dtype: Any = None,
    coefficients: Sequence[Sequence[float]] = DION_COEFFICIENTS,
) -> PyTree:
    """Returns a tree of matrices (or stacks of them) with singular values near 1.

    Args:
        specs: the spec of each leaf on the current mesh; the tree may have more leaves (default: those of the types of
            arrays on explicit axes).
        num_iterations, dtype, coefficients: see `muon`.

    Example:
        >>> tall = orthogonalize({"w": jax.random.normal(jax.random.key(0), (8, 4))}, num_iterations=9)["w"]
        >>> values = jnp.linalg.svd(tall, compute_uv=False)
        >>> bool((values > 0.6).all() and (values < 1.3).all())
        True
    """
    check_iterations(num_iterations, dtype, coefficients)
    iterate = functools.partial(newton_schulz, num_iterations=num_iterations, coefficients=coefficients)
    mesh = current_mesh()
    if dtype is None:
        dtype = jnp.float32 if chip_family(mesh) == "cpu" else jnp.bfloat16
    named, structure = named_leaves(tree), jax.tree.structure(tree)
    known = {} if specs is None else {leaf.name: leaf.value for leaf in named_leaves(specs)}
    splits, turns = _wide_splits(named, known, mesh)
    # Behind a barrier, so that XLA transposes the narrow values and not the momentum that they come from.
    narrow = [lax.optimization_barrier(leaf.value.astype(dtype)) for leaf in named]
    wide = [_turned(leaf, turn) for leaf, turn in zip(narrow, turns, strict=True)]
    groups: dict[Any, list[int]] = {}
    if _is_whole(mesh):
        # Nothing is exchanged, so sums share the pass over the momentum, and results are transposed by the last matmul.
        for place, (leaf, turn) in enumerate(zip(wide, turns, strict=True)):
            groups.setdefault((leaf.shape[-2:], turn), []).append(place)
        for (_, turn), places in groups.items():
            leaves = [named[place].value for place in places]
            squares = jnp.concatenate([sums_of_squares(_flat(leaf)) for leaf in leaves])
            stack = jnp.concatenate([_flat(wide[place]) for place in places])
            done = _parts(iterate(stack, squares=squares, turned=turn), leaves)
            for place, leaf in zip(places, done, strict=True):
                wide[place] = leaf.astype(named[place].value.dtype)
        return jax.tree.unflatten(structure, wide)
    for place, (leaf, split) in enumerate(zip(wide, splits, strict=True)):
        groups.setdefault((leaf.shape[-2:], split.lead_axes, split.rows, split.columns), []).append(place)
    for places in groups.values():
        leaves = [wide[place] for place in places]
        done = _orthogonalize_stack(leaves, [splits[place] for place in places], mesh, iterate)
        for place, leaf in zip(places, done, strict=True):
            back = lax.optimization_barrier(_turned(leaf, True)) if turns[place] else leaf
            wide[place] = back.astype(named[place].value.dtype)
    return jax.tree.unflatten(structure, wide)


def same_stack(leaves: list[NamedLeaf], specs: Mapping[str, P], mesh: Any) -> list[list[tuple[NamedLeaf, Split]]]:
    """Returns the leaves that are exchanged together on a mesh of several devices, with their splits if turned wide."""
    groups: dict[Any, list[tuple[NamedLeaf, Split]]] = {}
    for leaf, split in zip(leaves, _wide_splits(leaves, specs, mesh)[0], strict=True):
        key = (*sorted(leaf.value.shape[-2:]), split.lead_axes, split.rows, split.columns)
        groups.setdefault(key, []).append((leaf, split))
    return list(groups.values())


def _wide_splits(named: list[NamedLeaf], known: Mapping[str, P], mesh: Any) -> tuple[list[Split], list[bool]]:
    """Returns how leaves are split, and whether they are turned first.

    Matrices and their transposes have the same iterations, so they share a stack: wide, or split in the same order.
    """
    splits = [_split(leaf, known.get(leaf.name), mesh) for leaf in named]
    turns = [_turns(leaf.value, split) for leaf, split in zip(named, splits, strict=True)]
    return [split.turned() if turn else split for split, turn in zip(splits, turns, strict=True)], turns


def _turns(leaf: Any, split: Split) -> bool:
    rows, columns = leaf.shape[-2:]
    return bool(rows > columns or (rows == columns and split.rows > split.columns))


def _turned(leaf: Any, turn: bool) -> Any:
    return jnp.swapaxes(leaf, -1, -2) if turn else leaf


def _split(named: NamedLeaf, spec: P | None, mesh: Any) -> Split:
    """Returns how a leaf is split; XLA gathers leaves without spec, or with dims that do not divide."""
    name, leaf = named.name, named.value
    if leaf.ndim < 2 or not jnp.issubdtype(leaf.dtype, jnp.floating):
        raise MeshwrightError(
            f"`{name}` has shape {leaf.shape} and dtype {leaf.dtype}, so it is not a matrix of real numbers.",
            hint="orthogonalize parameters with two or more dims.",
        )
    if _is_whole(mesh):
        if mesh is not None and (axes := varying_axes(leaf)):
            raise MeshwrightError(
                f"muon cannot orthogonalize `{name}` here: it differs along {', '.join(sorted(axes))}, so each device "
                "may have only a part of the matrix.",
                hint="update the parameters outside of the local view (`shard_map`), on global arrays.",
            )
        return Split()
    if spec is None:
        spec = jax.typeof(leaf).sharding.spec  # names the axes of the mesh that are explicit
    require_axes(mesh, list(spec_axes(spec)), where=f"the spec of `{name}`")
    entries = [dim_axes(entry) for entry in (*spec, *[None] * (leaf.ndim - len(spec)))]
    entries = [tuple(axis for axis in axes if mesh.shape[axis] > 1) for axes in entries]
    ways = [math.prod(mesh.shape[axis] for axis in axes) for axes in entries]
    if any(size % count for size, count in zip(leaf.shape, ways, strict=True)):
        return Split()
    *lead, rows, columns = entries
    return Split(tuple(lead), rows, columns)


def _is_whole(mesh: Any) -> bool:
    """Returns whether each device sees whole arrays, so that no collectives are needed."""
    return mesh is None or mesh.size == 1 or bool(mesh.manual_axes)


def _orthogonalize_stack(leaves: list[Any], splits: list[Split], mesh: Any, iterate: Callable[[Any], Any]) -> list[Any]:
    """Returns leaves with matrices of one shape and split, orthogonalized."""

    def local(blocks: list[Any]) -> list[Any]:
        moved, back = _share(jnp.concatenate([_flat(block) for block in blocks]), splits[0], mesh)
        return _parts(back(iterate(moved)), blocks)

    specs = [split.spec(leaf.ndim) for leaf, split in zip(leaves, splits, strict=True)]
    result: list[Any] = local_map(local, in_specs=(specs,), out_specs=specs)(leaves)
    return result


def _flat(leaf: Any) -> Any:
    return leaf.reshape(-1, *leaf.shape[-2:])


def _parts(stack: Any, leaves: Sequence[Any]) -> list[Any]:
    """Returns the parts of a stack with the shapes of the leaves that it was made of."""
    counts = [math.prod(leaf.shape[:-2]) for leaf in leaves]
    ends = itertools.accumulate(counts)
    parts = [stack[end - count : end] for count, end in zip(counts, ends, strict=True)]
    return [part.reshape(leaf.shape) for part, leaf in zip(parts, leaves, strict=True)]


def _share(stack: Any, split: Split, mesh: Any) -> tuple[Any, Callable[[Any], Any]]:
    """Returns this device's share of a stack as whole matrices, and the function that brings results back."""
    if _is_whole(mesh):
        return stack, lambda done: done
    sizes = {axis: size for axis, size in mesh.shape.items() if size > 1}
    dims = [(axes, dim) for dim, axes in ((1, split.rows), (2, split.columns)) if axes]
    used = {*split.lead_axes, *split.rows, *split.columns}
    copies = tuple(axis for axis in sizes if axis not in used)
    num_copies = math.prod(sizes[axis] for axis in copies)
    count = stack.shape[0]
    ways = num_copies * math.prod(sizes[axis] for axes, _ in dims for axis in axes)
    # Behind a barrier, because XLA:CPU can give the operands of an all-to-all of padded parts different layouts.
    moved = lax.optimization_barrier(jnp.pad(stack, ((0, round_up(count, ways) - count), (0, 0), (0, 0))))
    if copies:
        share = moved.shape[0] // num_copies
        moved = lax.dynamic_slice_in_dim(moved, lax.axis_index(copies) * share, share)
    for axes, dim in reversed(dims):
        moved = lax.all_to_all(moved, axes, split_axis=0, concat_axis=dim, tiled=True)

    def back(done: Any) -> Any:
        for axes, dim in dims:
            done = lax.all_to_all(done, axes, split_axis=dim, concat_axis=0, tiled=True)
        if copies:
            done = lax.all_gather(done, copies, axis=0, tiled=True, to="invarying")
        return done[:count]

    return moved, back


def check_iterations(num_iterations: Any, dtype: Any, coefficients: Any) -> None:
    """Raises if the arguments of `orthogonalize` are invalid."""
    if not isinstance(num_iterations, (int, np.integer)) or num_iterations < 1:
        raise MeshwrightError(
            f"num_iterations must be a whole number of at least 1; got {num_iterations!r}.", hint="use 4."
        )
    triples = np.asarray(coefficients, dtype=object)
    if triples.ndim != 2 or triples.shape[1] != 3 or not triples[:, 2].all():
        raise MeshwrightError(
            f"coefficients are {coefficients!r}.", hint="use triples of numbers whose last is not 0, one or more."
        )
    try:
        has_fractions = dtype is None or jnp.issubdtype(jnp.dtype(dtype), jnp.floating)
    except TypeError:  # no dtype has this name
        has_fractions = False
    if not has_fractions:
        raise MeshwrightError(f"dtype is {dtype!r}, not a dtype of real numbers.", hint="use float32 or bfloat16.")
