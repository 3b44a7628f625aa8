"""Write a JAX model once, place it on any mesh, check that it computes the same function, and train it there.

The names below follow the flow: mesh -> rules -> layout -> job -> step -> verify -> plan -> train. Importing this
package imports nothing else, not even JAX: each name is imported on first use. That keeps the first moments of a
command short, before it can handle Ctrl-C.
"""

from __future__ import annotations

TYPE_CHECKING = False  # the module `typing` takes longer to import than this package
if TYPE_CHECKING:
    from typing import Any

    from jax.sharding import PartitionSpec as P

    from meshwright import errors, models
    from meshwright.checkpoint.store import Checkpoints
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
        StoreError,
        TrainingError,
        TreeError,
    )
    from meshwright.layout import Layout, LayoutReport, explain_layout, make_layout, match_partition_rules
    from meshwright.loop.run import train
    from meshwright.loop.settings.config import TrainConfig, read_config
    from meshwright.mesh.build import create_abstract_mesh, create_mesh, get_jax_mesh, initialize_mesh
    from meshwright.mesh.current import current_mesh, names_in_current_mesh
    from meshwright.mesh.simulate import simulate_cpu_devices
    from meshwright.metrics import get_metrics
    from meshwright.placement import make_shard_and_gather_fns
    from meshwright.plan.check import assert_plan
    from meshwright.plan.plan import make_plan
    from meshwright.plan.step_setup import Setup
    from meshwright.rng import fold_rng_over_axis, wrap_function_with_rng
    from meshwright.rules import (
        Rules,
        get_names_from_partition_spec,
        get_weight_decay_mask,
        logical_rules,
        match_rules,
    )
    from meshwright.train.job import Job, abstract_init
    from meshwright.train.jobs import equinox_job, linen_job, nnx_job
    from meshwright.train.jobs.job_loading import load_job
    from meshwright.train.jobs.language_job import language_job
    from meshwright.train.state import RunState, init_state, state_layout
    from meshwright.train.step import make_eval_step, make_train_step
    from meshwright.tree import flatten_tree, named_tree_map, tree_apply, tree_path_to_string
    from meshwright.types import Batch, Metrics, Parameter, PRNGKeyArray, PyTree, TrainState
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
    "StoreError",
    "CheckpointError",
    "TrainingError",
    "MeshwrightWarning",
]

# Modules and packages that are imported when they are first used as attributes, e.g. `mw.parallel.local_map`.
# `mw.verify(job)` and `mw.train(config)` call the packages of these names.
_MODULES = {
    "foundation": "remote errors specs tree types dtypes hardware distributed launch",
    "placing": "mesh rules layout constraints placement rng metrics",
    "training": "parallel linen models train data checkpoint generate loop",
    "around": "verify plan testing compat",
}

_NAMES = {
    "errors": "MeshwrightError MeshError TreeError RuleError LayoutError PlacementError RngError JobError ConfigError "
    "DataError CheckpointError StoreError TrainingError MeshwrightWarning",
    "specs": "P",
    "tree": "tree_path_to_string flatten_tree named_tree_map tree_apply",
    "types": "PyTree PRNGKeyArray Metrics Parameter Batch TrainState",
    "mesh.build": "create_mesh create_abstract_mesh get_jax_mesh initialize_mesh",
    "mesh.current": "current_mesh names_in_current_mesh",
    "mesh.simulate": "simulate_cpu_devices",
    "rules": "Rules logical_rules match_rules get_names_from_partition_spec get_weight_decay_mask",
    "layout": "make_layout explain_layout match_partition_rules Layout LayoutReport",
    "placement": "make_shard_and_gather_fns",
    "constraints": "with_sharding_constraint",
    "rng": "fold_rng_over_axis wrap_function_with_rng",
    "metrics": "get_metrics",
    "train.job": "Job abstract_init",
    "train.jobs.job_loading": "load_job",
    "train.jobs.language_job": "language_job",
    "train.jobs": "linen_job nnx_job equinox_job",
    "train.state": "state_layout init_state RunState",
    "train.step": "make_train_step make_eval_step",
    "plan.plan": "make_plan",
    "plan.check": "assert_plan",
    "plan.step_setup": "Setup",
    "loop.settings.config": "TrainConfig read_config",
    "checkpoint.store": "Checkpoints",
}


def __getattr__(name: str) -> Any:
    from importlib import import_module

    from meshwright.lazy import lazy_names

    if any(name in names.split() for names in _MODULES.values()):
        return import_module(f"meshwright.{name}")
    homes = {name: f"meshwright.{module}" for module, names in _NAMES.items() for name in names.split()}
    return lazy_names(__name__, homes)(name)
