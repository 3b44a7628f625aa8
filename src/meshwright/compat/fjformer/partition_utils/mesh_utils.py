"""Drop-in for `fjformer.partition_utils.mesh_utils`: the same names and arguments, without the original's bugs.

Unlike Meshwright's own, `with_sharding_constraint` does nothing without a mesh, as in the original, so that a model
also runs on one device.
"""

from __future__ import annotations

from meshwright.constraints import with_sharding_constraint as _strict_with_sharding_constraint
from meshwright.layout import match_partition_rules
from meshwright.mesh.build import create_mesh, current_mesh, get_jax_mesh, names_in_current_mesh
from meshwright.metrics import get_metrics
from meshwright.placement import make_shard_and_gather_fns
from meshwright.rng import wrap_function_with_rng
from meshwright.rules import get_names_from_partition_spec, get_weight_decay_mask
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


def with_sharding_constraint(x: PyTree, partition_specs: PyTree) -> PyTree:
    """Constrains arrays on the current mesh and raises for an unknown axis; without a mesh, does nothing.

    Example:
        >>> from meshwright import P
        >>> with_sharding_constraint(1.0, P("dp"))
        1.0
    """
    return x if current_mesh() is None else _strict_with_sharding_constraint(x, partition_specs)
