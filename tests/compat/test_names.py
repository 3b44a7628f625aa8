"""Every name that the seed documents list or refer to is importable from its drop-in module, and under its old path."""

import importlib

import pytest

# The names that each module defines, and then the types that its documentation names, which it imports.
XLSTM_JAX = {
    "distributed.array_utils": (
        "fold_rng_over_axis split_array_over_mesh stack_params unstack_params",
        "PRNGKeyArray PyTree",
    ),
    "distributed.tensor_parallel": (
        "ModelParallelismWrapper TPAsyncDense TPDense async_gather async_gather_bidirectional async_gather_split "
        "async_scatter async_scatter_split scale_init",
        "",
    ),
    "distributed.single_gpu": (
        "Batch accumulate_gradients accumulate_gradients_loop accumulate_gradients_scan",
        "Metrics PRNGKeyArray PyTree TrainState",
    ),
    "distributed.data_parallel": (
        "gather_array_with_mean_grads gather_params shard_module_params shard_params sync_gradients",
        "Parameter PyTree",
    ),
    "distributed.pipeline_parallel": ("PipelineModule execute_pipeline execute_pipeline_step", ""),
    "distributed.mesh_utils": ("initialize_mesh", ""),
    "distributed.xla_utils": ("set_XLA_flags simulate_CPU_devices", ""),
    "common_types": ("Metrics PRNGKeyArray Parameter PyTree TrainState", ""),
    "dataset": ("Batch", ""),
}
PARTITION_UTILS = (
    "create_mesh flatten_tree get_jax_mesh get_metrics get_names_from_partition_spec get_weight_decay_mask "
    "make_shard_and_gather_fns match_partition_rules named_tree_map names_in_current_mesh tree_apply "
    "tree_path_to_string with_sharding_constraint wrap_function_with_rng"
)
MODULES = {f"xlstm_jax.{module}": names for module, names in XLSTM_JAX.items()} | {
    "fjformer.partition_utils": (PARTITION_UTILS, ""),
    "fjformer.partition_utils.mesh_utils": (PARTITION_UTILS, ""),
}
IMPORTS = [(module, name) for module, parts in MODULES.items() for name in " ".join(parts).split()]


@pytest.mark.parametrize(("module", "name"), IMPORTS, ids=" ".join)
def test_name(module, name):
    scope = {}
    exec(f"from meshwright.compat.{module} import {name}", scope)
    assert scope[name] is not None
    if module.startswith("xlstm_jax.distributed"):  # the package has the names of all its modules
        own = importlib.import_module("meshwright.compat.xlstm_jax.distributed")
        assert (getattr(own, name, None) is scope[name]) is (name in MODULES[module][0].split())


@pytest.mark.parametrize("module", MODULES)
def test_a_module_exports_the_names_that_it_defines(module):
    assert sorted(importlib.import_module(f"meshwright.compat.{module}").__all__) == sorted(MODULES[module][0].split())


def test_old_paths_lead_to_the_same_objects(run_python):
    lines = [f"from {module} import {name}" for module, name in IMPORTS]
    lines += [
        f"assert {name} is importlib.import_module('meshwright.compat.{module}').{name}, ({module!r}, {name!r})"
        for module, name in IMPORTS
    ]
    code = "import importlib\nfrom meshwright.compat import alias\nalias('xlstm_jax')\nalias('fjformer')\n"
    result = run_python(code + "\n".join(lines) + "\nprint('ok')")
    assert result.stdout.strip() == "ok", result.stderr


def test_a_batch_from_single_gpu_is_the_one_of_dataset():
    from meshwright.compat.xlstm_jax import dataset
    from meshwright.compat.xlstm_jax.distributed import single_gpu

    assert single_gpu.Batch is dataset.Batch
