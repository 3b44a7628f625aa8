"""Write a JAX model once, place it on any mesh, check that it computes the same function, and train it there.

The names below follow the flow: mesh -> rules -> layout -> job -> step -> verify -> plan -> train. Importing this
package starts no backend and loads neither flax nor optax; later names are imported on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from jax.sharding import PartitionSpec as P

from meshwright import errors
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
from meshwright.lazy import lazy_names
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
    from meshwright import models
    from meshwright.checkpoint.store import Checkpoints
    from meshwright.loop.config import TrainConfig, read_config
    from meshwright.loop.run import train
    from meshwright.plan.check import assert_plan
    from meshwright.plan.plan import make_plan
    from meshwright.plan.step_setup import Setup
    from meshwright.train.adapters import equinox_job, linen_job, nnx_job
    from meshwright.train.job import Job, abstract_init
    from meshwright.train.job_loading import load_job
    from meshwright.train.language_job import language_job
    from meshwright.train.state import RunState, init_state, state_layout
    from meshwright.train.step import make_eval_step, make_train_step
    from meshwright.types import Batch, Parameter, TrainState
    from meshwright.verify.equivalence import verify

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
    # models and jobs
    "models",
    "Job",
    "abstract_init",
    "load_job",
    "language_job",
    "linen_job",
    "nnx_job",
    "equinox_job",
    # training step
    "state_layout",
    "init_state",
    "make_train_step",
    "make_eval_step",
    "RunState",
    # verify, plan, train
    "verify",
    "make_plan",
    "assert_plan",
    "Setup",
    "train",
    "TrainConfig",
    "read_config",
    "Checkpoints",
    # types
    "PyTree",
    "PRNGKeyArray",
    "Metrics",
    "Parameter",
    "Batch",
    "TrainState",
    # errors
    "errors",
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

# Packages that are imported when they are first used as attributes, e.g. `mw.parallel.local_map`. `mw.verify(job)` and
# `mw.train(config)` call the packages of these names.
_LATER = (
    "parallel",
    "linen",
    "models",
    "train",
    "data",
    "checkpoint",
    "generate",
    "loop",
    "distributed",
    "verify",
    "plan",
)
_PACKAGES = frozenset((*_LATER, "hardware", "compat", "testing"))

_load = lazy_names(
    __name__,
    {
        "Job": "meshwright.train.job",
        "abstract_init": "meshwright.train.job",
        "load_job": "meshwright.train.job_loading",
        "language_job": "meshwright.train.language_job",
        "linen_job": "meshwright.train.adapters",
        "nnx_job": "meshwright.train.adapters",
        "equinox_job": "meshwright.train.adapters",
        "state_layout": "meshwright.train.state",
        "init_state": "meshwright.train.state",
        "RunState": "meshwright.train.state",
        "make_train_step": "meshwright.train.step",
        "make_eval_step": "meshwright.train.step",
        "make_plan": "meshwright.plan.plan",
        "assert_plan": "meshwright.plan.check",
        "Setup": "meshwright.plan.step_setup",
        "TrainConfig": "meshwright.loop.config",
        "read_config": "meshwright.loop.config",
        "Checkpoints": "meshwright.checkpoint.store",
        "Parameter": "meshwright.types",
        "Batch": "meshwright.types",
        "TrainState": "meshwright.types",
    },
)


def __getattr__(name: str) -> Any:
    return importlib.import_module(f"meshwright.{name}") if name in _PACKAGES else _load(name)
