"""Write a JAX model once; place it on any mesh, prove it computes the same, and train it there.

The names below follow the flow: mesh -> rules -> layout -> placement. Importing this package starts no backend.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from jax.sharding import PartitionSpec as P

from meshwright.constraints import with_sharding_constraint
from meshwright.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    JobError,
    LayoutError,
    MeshError,
    MeshwrightError,
    MeshwrightWarning,
    PlacementError,
    RngError,
    RuleError,
    TrainingError,
    TreeError,
)
from meshwright.layout import Layout, LayoutReport, explain_layout, make_layout, match_partition_rules
from meshwright.mesh.build import (
    create_abstract_mesh,
    create_mesh,
    current_mesh,
    get_jax_mesh,
    initialize_mesh,
    names_in_current_mesh,
    simulate_cpu_devices,
)
from meshwright.metrics import get_metrics
from meshwright.placement import make_shard_and_gather_fns
from meshwright.rng import fold_rng_over_axis, wrap_function_with_rng
from meshwright.rules import (
    Rules,
    get_names_from_partition_spec,
    get_weight_decay_mask,
    logical_rules,
    match_rules,
)
from meshwright.tree import flatten_tree, named_tree_map, tree_apply, tree_path_to_string
from meshwright.types import Metrics, PRNGKeyArray, PyTree

if TYPE_CHECKING:
    from meshwright.train.job import Job, abstract_init, load_job
    from meshwright.types import Batch, Parameter, TrainState

__version__ = "0.1.0"

__all__ = [
    # mesh
    "create_mesh",
    "create_abstract_mesh",
    "get_jax_mesh",
    "initialize_mesh",
    "current_mesh",
    "names_in_current_mesh",
    "simulate_cpu_devices",
    # rules
    "P",
    "Rules",
    "logical_rules",
    "match_partition_rules",
    "match_rules",
    "get_names_from_partition_spec",
    "get_weight_decay_mask",
    # layout
    "make_layout",
    "explain_layout",
    "Layout",
    "LayoutReport",
    # placement
    "make_shard_and_gather_fns",
    "with_sharding_constraint",
    # trees, keys, metrics
    "tree_path_to_string",
    "flatten_tree",
    "named_tree_map",
    "tree_apply",
    "fold_rng_over_axis",
    "wrap_function_with_rng",
    "get_metrics",
    # jobs
    "Job",
    "abstract_init",
    "load_job",
    # types
    "PyTree",
    "PRNGKeyArray",
    "Metrics",
    "Parameter",
    "Batch",
    "TrainState",
    # errors
    "MeshwrightError",
    "MeshError",
    "TreeError",
    "RuleError",
    "LayoutError",
    "PlacementError",
    "RngError",
    "JobError",
    "ConfigError",
    "DataError",
    "CheckpointError",
    "TrainingError",
    "MeshwrightWarning",
]


# Reached as attributes (`mw.parallel.local_map`), imported when first used.
_LATER_STAGES = (
    "parallel",
    "linen",
    "models",
    "train",
    "data",
    "checkpoint",
    "loop",
    "distributed",
    "verify",
    "plan",
    "hardware",
    "compat",
)


def __getattr__(name: str) -> Any:
    if name in _LATER_STAGES:
        return importlib.import_module(f"meshwright.{name}")
    # These three need flax, whose import would double that of the whole package.
    if name in ("Batch", "Parameter", "TrainState"):
        from meshwright import types

        return getattr(types, name)
    if name in ("Job", "abstract_init", "load_job"):
        from meshwright.train import job

        return getattr(job, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
