"""Drop-in for `fjformer.partition_utils.mesh_utils`: the same names and arguments, without the original's bugs.

Two functions are more permissive here than in `meshwright`, as the original's documentation says. `get_jax_mesh` has
default names, and `with_sharding_constraint` returns its argument if the mesh lacks an axis, or if there is no mesh.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from meshwright.constraints import with_sharding_constraint as _strict_with_sharding_constraint
from meshwright.errors import MeshwrightWarning, did_you_mean
from meshwright.layout import match_partition_rules
from meshwright.mesh.build import create_mesh
from meshwright.mesh.build import get_jax_mesh as _strict_get_jax_mesh
from meshwright.mesh.current import current_mesh, names_in_current_mesh
from meshwright.mesh.string import MeshAxis, parse_mesh
from meshwright.metrics import get_metrics
from meshwright.placement import make_shard_and_gather_fns
from meshwright.rng import wrap_function_with_rng
from meshwright.rules import get_names_from_partition_spec, get_weight_decay_mask
from meshwright.specs import is_spec
from meshwright.tree import flatten_tree, named_tree_map, tree_apply, tree_path_to_string
from meshwright.types import PyTree

__all__ = [
    "create_mesh",
    "flatten_tree",
    "get_jax_mesh",
    "get_metrics",
    "get_names_from_partition_spec",
    "get_weight_decay_mask",
    "make_shard_and_gather_fns",
    "match_partition_rules",
    "named_tree_map",
    "names_in_current_mesh",
    "tree_apply",
    "tree_path_to_string",
    "with_sharding_constraint",
    "wrap_function_with_rng",
]

_DEFAULT_NAMES = ("x", "y", "z")


def get_jax_mesh(axis_dims: str, names: Sequence[str] | None = None) -> Mesh:
    """Builds a mesh over all devices from a string of sizes, or of names and sizes.

    Without `names`, the axes are x, y and z, and missing sizes are 1; a string with other names keeps those.

    Example:
        >>> dict(get_jax_mesh("2,4").shape)
        {'x': 2, 'y': 4, 'z': 1}
        >>> dict(get_jax_mesh("tp:2,dp:-1", ("dp", "tp")).shape)
        {'dp': 4, 'tp': 2}
    """
    if names:
        return _strict_get_jax_mesh(axis_dims, names)
    spec = parse_mesh(axis_dims, None if ":" in axis_dims else _DEFAULT_NAMES[: len(axis_dims.split(","))])
    if set(spec.names) <= set(_DEFAULT_NAMES):
        given = dict(zip(spec.names, spec.axes, strict=True))
        spec = replace(spec, axes=tuple(given.get(name, MeshAxis(name, 1)) for name in _DEFAULT_NAMES))
    return create_mesh(spec)


def with_sharding_constraint(x: PyTree, partition_specs: PyTree) -> PyTree:
    """Constrains arrays if the current mesh has all axes of the specs; otherwise returns `x`.

    A missing axis causes a warning. Without a mesh there is none, so that a model also runs on one device.

    Example:
        >>> from meshwright import P
        >>> with_sharding_constraint(1.0, P("dp"))
        1.0
    """
    specs = jax.tree.leaves(partition_specs, is_leaf=is_spec)
    if any(isinstance(spec, NamedSharding) for spec in specs):  # these bring their own mesh
        return _strict_with_sharding_constraint(x, partition_specs)
    mesh = current_mesh()
    if mesh is None:
        return x
    axes = get_names_from_partition_spec([spec for spec in specs if isinstance(spec, P)])
    missing = [axis for axis in axes if axis not in mesh.axis_names]
    if not missing:
        return _strict_with_sharding_constraint(x, partition_specs)
    guesses = [did_you_mean(axis, mesh.axis_names) for axis in missing]
    named = [f"for {axis!r}, {guess}" for axis, guess in zip(missing, guesses, strict=True) if guess]
    hint = guesses[0] if len(missing) == 1 else "; ".join(named)
    warnings.warn(
        f"with_sharding_constraint had no effect: the mesh lacks {'axis' if len(missing) == 1 else 'axes'} "
        f"{', '.join(map(repr, missing))}; it has axes: {', '.join(mesh.axis_names)}.\n"
        f"hint: {hint or 'add the axis to the mesh, with size 1 if it splits nothing.'}",
        MeshwrightWarning,
        stacklevel=2,
    )
    return x
