"""The layout of a tree on a mesh: one checked spec per leaf, with the rule that decided it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from meshwright.errors import LayoutError, PlacementError, did_you_mean
from meshwright.layout.leaf import (
    HEADINGS,
    LayoutDiff,
    LeafLayout,
    count_leaves,
    diff_leaves,
    format_bytes,
    leaf_rows,
    make_leaf,
    rich_table,
    text_table,
)
from meshwright.layout.picture import tile_svg, tile_text
from meshwright.layout.report import LayoutReport, PadPolicy, explain_layout
from meshwright.mesh.current import AnyMesh, current_mesh, describe_mesh, other_mesh_error
from meshwright.placement import gather_leaves, shard_leaves
from meshwright.rules.rule_set import as_rules
from meshwright.specs import get_names_from_partition_spec, spec_from_json, spec_to_json
from meshwright.tree import named_leaves
from meshwright.types import PyTree

JSON_VERSION = 1


def make_layout(
    rules: Any, abstract_tree: PyTree, mesh: AnyMesh, *, pad: PadPolicy = False, params: PyTree | None = None
) -> Layout:
    """Decides how a mesh splits each leaf of a tree; raises an error that lists all problems.

    Nothing is allocated and no device is touched.

    Args:
        rules: `(regex, PartitionSpec)` pairs or `Rules`; the first one found in a leaf's path wins.
        abstract_tree: parameters, an optimizer state or a whole train state, as arrays or `jax.ShapeDtypeStruct`.
        mesh: a mesh of devices, or a `jax.sharding.AbstractMesh`.
        pad: the leaves whose dims may be padded with zeros to a size that their axes divide: False for none (default),
            True for all, or one or more patterns. `gather` removes the padding.
        params: the parameters; needed only if `abstract_tree` is an optimizer state alone.

    Example:
        >>> import meshwright as mw
        >>> mesh = mw.create_abstract_mesh("fsdp:4,tp:2")
        >>> params = {"up": {"kernel": jax.ShapeDtypeStruct((64, 256), "float32")}}
        >>> print(mw.make_layout([("kernel", P("fsdp", "tp"))], params, mesh))
        leaf       shape   dtype    rule        spec             bytes/device
        ---------  ------  -------  ----------  ---------------  ------------
        up/kernel  64x256  float32  0 `kernel`  P('fsdp', 'tp')       8.0 KiB
        1 leaf on fsdp=4 x tp=2: 64.0 KiB in total, 8.0 KiB per device
    """
    report = explain_layout(rules, abstract_tree, mesh, pad=pad, params=params)
    report.settle()
    return Layout(mesh, report.leaves, jax.tree.structure(abstract_tree), report)


def match_partition_rules(rules: Any, params: PyTree, *, mesh: AnyMesh | None = None) -> PyTree:
    """Returns the tree with each leaf replaced by the spec of the first rule found in its path.

    Works on parameters, on a `TrainState` and on any optax state, without extra rules for the optimizer. Specs are
    checked as in `make_layout`, on `mesh` or the current mesh; without a mesh, only against the leaf's rank.

    Example:
        >>> match_partition_rules([("kernel", P("fsdp", "tp")), (".*", P())], {"a": {"kernel": jax.numpy.ones((4, 4))}})
        {'a': {'kernel': P('fsdp', 'tp')}}
    """
    rules = as_rules(rules)
    mesh = mesh or current_mesh()
    if mesh is None:  # axes of size 1 divide everything
        axes = get_names_from_partition_spec([spec for _, spec in rules])
        mesh = AbstractMesh((1,) * len(axes), tuple(axes))
    report = explain_layout(rules, params, mesh)
    report.settle()
    return jax.tree.unflatten(jax.tree.structure(params), [leaf.spec for leaf in report.leaves])


class Layout:
    """The mesh and the specs of a tree, as returned by `make_layout`."""

    def __init__(
        self, mesh: AnyMesh, leaves: Sequence[LeafLayout], structure: Any, report: LayoutReport | None
    ) -> None:
        self.mesh = mesh
        self.leaves = tuple(leaves)
        self.structure = structure
        self._report = report
        self._by_name = {leaf.name: leaf for leaf in self.leaves}

    # --- Queries ---

    @cached_property
    def specs(self) -> PyTree:
        """The tree with a `PartitionSpec` for each leaf."""
        return self.structure.unflatten([leaf.spec for leaf in self.leaves])

    @cached_property
    def shardings(self) -> PyTree:
        """The tree with a `NamedSharding` for each leaf, for `in_shardings` and `out_shardings` of `jax.jit`."""
        return self.structure.unflatten(self._leaf_shardings)

    @cached_property
    def _leaf_shardings(self) -> list[NamedSharding]:
        made: dict[P, NamedSharding] = {}
        return [made.setdefault(leaf.spec, NamedSharding(self.mesh, leaf.spec)) for leaf in self.leaves]

    @cached_property
    def abstract(self) -> PyTree:
        """The tree with a `jax.ShapeDtypeStruct` for each stored leaf (padded shape, dtype and sharding)."""
        structs = [
            jax.ShapeDtypeStruct(leaf.stored_shape, leaf.dtype, sharding=sharding)
            for leaf, sharding in zip(self.leaves, self._leaf_shardings, strict=True)
        ]
        return self.structure.unflatten(structs)

    @cached_property
    def bytes_total(self) -> int:
        """Bytes of one full copy of the tree, with padding."""
        return sum(leaf.bytes_total for leaf in self.leaves)

    @cached_property
    def bytes_per_device(self) -> int:
        """Bytes on each device."""
        return sum(leaf.bytes_per_device for leaf in self.leaves)

    def __getitem__(self, name: str) -> LeafLayout:
        """Returns the leaf with this `/`-joined path."""
        if name not in self._by_name:
            hint = did_you_mean(name, self._by_name) or f"use a path such as {next(iter(self._by_name), None)!r}."
            raise LayoutError(f"the layout has no leaf {name!r}.", hint=hint)
        return self._by_name[name]

    def report(self) -> LayoutReport:
        """Returns the report: hits per rule, dead and shadowed rules, large replicated leaves, padding."""
        if self._report is None:
            raise LayoutError(
                "this layout has no report, because it was read from JSON, which does not store the rules.",
                hint="call make_layout(rules, tree, mesh).report().",
            )
        return self._report

    def summary(self) -> str:
        """Returns the totals in one line."""
        total, each = format_bytes(self.bytes_total), format_bytes(self.bytes_per_device)
        return f"{count_leaves(len(self.leaves))} on {describe_mesh(self.mesh)}: {total} in total, {each} per device"

    def table(self, *, collapse: bool = True) -> str:
        """Returns the table of leaves as text; with `collapse=False`, every layer has its own row."""
        return text_table(HEADINGS, leaf_rows(self.leaves, collapse=collapse))

    def __str__(self) -> str:
        return f"{self.table()}\n{self.summary()}"

    def __repr__(self) -> str:
        return f"<Layout {self.summary()}>"

    def __rich__(self) -> Any:
        return rich_table(HEADINGS, leaf_rows(self.leaves), title="layout", caption=self.summary())

    def picture(self, name: str, *, svg: bool = False) -> str:
        """Returns a picture of the tiles of a leaf with their devices, as text or SVG."""
        return (tile_svg if svg else tile_text)(self[name], self.mesh)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Layout):
            return NotImplemented
        return _mesh_json(self.mesh) == _mesh_json(other.mesh) and self._by_name == other._by_name

    __hash__ = None  # type: ignore[assignment]

    def diff(self, other: Layout) -> LayoutDiff:
        """Returns the changes from this layout to another: leaves, shapes, dtypes, specs, bytes and mesh."""
        return diff_leaves(self.leaves, self.mesh, other.leaves, other.mesh)

    # --- Moving trees ---

    def shard(self, tree: PyTree, *, donate: bool = False, reshard: bool = False) -> PyTree:
        """Places a tree on the mesh.

        Args:
            donate: donate arrays that are on the mesh with another sharding: their memory is reused or freed.
            reshard: accept arrays on another mesh, which otherwise raise an error.
        """
        values = self._checked_values(tree, "shard", stored=False, any_mesh=reshard)
        padded = [_pad(value, leaf) for leaf, value in zip(self.leaves, values, strict=True)]
        return self.structure.unflatten(shard_leaves(padded, self._leaf_shardings, donate=donate))

    def gather(self, tree: PyTree, *, donate: bool = False) -> PyTree:
        """Returns the tree as numpy arrays without padding; `donate` frees each device array after reading it.

        A numpy array that shares memory with a JAX array is read-only; copy it to change it.
        """
        whole = gather_leaves(self._checked_values(tree, "gather", stored=True, any_mesh=False), donate=donate)
        return self.structure.unflatten([_unpad(value, leaf) for leaf, value in zip(self.leaves, whole, strict=True)])

    def _checked_values(self, tree: PyTree, what: str, *, stored: bool, any_mesh: bool) -> list[Any]:
        """Returns the tree's leaves; raises if their names, shapes, dtypes or mesh differ from the layout's."""
        if not isinstance(self.mesh, Mesh):
            raise PlacementError(
                f"cannot {what}: the mesh {describe_mesh(self.mesh)} of this layout is abstract and has no devices.",
                hint="pass a mesh from create_mesh(...) to make_layout.",
            )
        values, structure = jax.tree.flatten(tree)
        if structure != self.structure:
            raise _structure_error(self, tree)
        for leaf, value in zip(self.leaves, values, strict=True):
            shape, expected = np.shape(value), leaf.stored_shape if stored else leaf.shape
            dtype = value.dtype if hasattr(value, "dtype") else leaf.dtype
            if shape != expected or dtype != leaf.dtype:
                raise PlacementError(
                    f"`{leaf.name}` is {dtype}{list(shape)}, but the layout expects {leaf.dtype}{list(expected)}.",
                    hint="make the layout from this tree, or cast the tree first.",
                )
            own = getattr(value, "sharding", None)
            if any_mesh or not isinstance(own, NamedSharding) or len(own.device_set) == 1:
                continue
            if own.mesh.shape != self.mesh.shape or own.device_set != self._leaf_shardings[0].device_set:
                raise other_mesh_error(f"`{leaf.name}`", own.mesh, self.mesh)
        return values

    # --- JSON ---

    def to_json(self) -> str:
        """Returns the mesh and every leaf as JSON."""
        leaves = [leaf._asdict() | {"dtype": str(leaf.dtype), "spec": spec_to_json(leaf.spec)} for leaf in self.leaves]
        for leaf in leaves:
            del leaf["shard_shape"]  # computed from the other fields
        return json.dumps({"version": JSON_VERSION, "mesh": _mesh_json(self.mesh), "leaves": leaves}, indent=1)

    @classmethod
    def from_json(cls, text: str, *, like: PyTree | None = None, mesh: AnyMesh | None = None) -> Layout:
        """Reads a layout that `to_json` wrote.

        Args:
            like: a tree of the same structure (default: the layout's trees are flat dicts from leaf name to leaf).
            mesh: a mesh with the same axes (default: an abstract mesh).
        """
        try:
            data = json.loads(text)
            version = data["version"]
        except (ValueError, KeyError, TypeError) as error:
            raise LayoutError(f"this is not the JSON of a layout: {error!r}.") from None
        if version != JSON_VERSION:
            raise LayoutError(f"the layout JSON has version {version}; this release reads version {JSON_VERSION}.")
        recorded = _mesh_from_json(data["mesh"])
        if mesh is not None and dict(mesh.shape) != dict(recorded.shape):
            raise LayoutError(
                f"the layout was made for {describe_mesh(recorded)}, but mesh= is {describe_mesh(mesh)}.",
                hint="call make_layout(rules, tree, mesh) again, and compare the two with diff().",
            )
        leaves = [
            make_leaf(
                item.pop("name"),
                tuple(item.pop("shape")),
                _dtype_from_name(item.pop("dtype")),
                spec_from_json(item.pop("spec")),
                dict(recorded.shape),
                stored_shape=tuple(item.pop("stored_shape")),
                **item,
            )
            for item in data["leaves"]
        ]
        if like is None:
            # A dict flattens in sorted order, so the leaves must be sorted too.
            leaves.sort(key=lambda leaf: leaf.name)
            structure = jax.tree.structure({leaf.name: 0 for leaf in leaves})
            return cls(mesh or recorded, leaves, structure, None)
        layout = cls(mesh or recorded, leaves, jax.tree.structure(like), None)
        if [leaf.name for leaf in named_leaves(like)] != [leaf.name for leaf in leaves]:
            raise _structure_error(layout, like)
        return layout


def _structure_error(layout: Layout, tree: PyTree) -> LayoutError:
    given = [leaf.name for leaf in named_leaves(tree)]
    known = [leaf.name for leaf in layout.leaves]
    missing = [name for name in known if name not in set(given)]
    extra = [name for name in given if name not in set(known)]
    parts = [f"missing: {', '.join(missing[:5])}"] * bool(missing) + [f"extra: {', '.join(extra[:5])}"] * bool(extra)
    detail = "; ".join(parts) or "same leaf names, different containers"
    return LayoutError(f"the tree's structure differs from the layout's ({detail}).")


def _pad(value: Any, leaf: LeafLayout) -> Any:
    if not leaf.is_padded:
        return value
    widths = [(0, stored - size) for size, stored in zip(leaf.shape, leaf.stored_shape, strict=True)]
    return (jnp if isinstance(value, jax.Array) else np).pad(value, widths)


def _unpad(value: Any, leaf: LeafLayout) -> Any:
    return value[tuple(slice(size) for size in leaf.shape)] if leaf.is_padded else value


def _mesh_json(mesh: AnyMesh) -> list[list[Any]]:
    types = (kind.name for kind in mesh.axis_types)
    return [[name, size, kind] for (name, size), kind in zip(mesh.shape.items(), types, strict=True)]


def _mesh_from_json(axes: Sequence[Sequence[Any]]) -> AbstractMesh:
    names, sizes, kinds = zip(*axes, strict=True)
    return AbstractMesh(sizes, names, axis_types=tuple(AxisType[kind] for kind in kinds))


def _dtype_from_name(name: str) -> Any:
    if name.startswith("key<"):
        impls = {"fry": "threefry2x32", "rbg": "rbg", "urbg": "unsafe_rbg"}
        impl = impls.get(name[4:-1], name[4:-1])
        return jax.eval_shape(lambda: jax.random.key(0, impl=impl)).dtype
    return jnp.dtype(name)
