"""The migration guides list each deliberate difference in one row: name, original, Meshwright, reason."""

import importlib
import re
from pathlib import Path

import pytest

GUIDES = Path(__file__).parents[2] / "docs" / "guides"
MODULES = {
    "from-fjformer.md": "meshwright.compat.fjformer.partition_utils",
    "from-xlstm.md": "meshwright.compat.xlstm_jax.distributed",
}


def rows(guide):
    section = (GUIDES / guide).read_text().partition("## Differences")[2].partition("\n## ")[0]
    table = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table[2:]]


@pytest.mark.parametrize("guide", MODULES)
def test_every_row_has_a_name_both_behaviors_and_a_reason(guide):
    module = importlib.import_module(MODULES[guide])
    found = rows(guide)
    assert len(found) > 20
    for cells in found:
        assert len(cells) == 4, cells
        assert all(cells), cells
        names = re.findall(r"`(\w+)`", cells[0])
        assert names or cells[0].startswith("all functions"), cells
        assert [name for name in names if name not in module.__all__] == []


# Functions that differ from the original, by the contract's list of defects and by later decisions.
DIFFERING = {
    "from-fjformer.md": "create_mesh flatten_tree get_jax_mesh get_metrics get_names_from_partition_spec "
    "get_weight_decay_mask make_shard_and_gather_fns match_partition_rules names_in_current_mesh tree_apply "
    "with_sharding_constraint wrap_function_with_rng",
    "from-xlstm.md": "ModelParallelismWrapper PipelineModule TPAsyncDense TPDense accumulate_gradients "
    "accumulate_gradients_loop async_gather_split async_scatter_split execute_pipeline fold_rng_over_axis "
    "gather_params initialize_mesh set_XLA_flags shard_module_params shard_params simulate_CPU_devices "
    "split_array_over_mesh stack_params sync_gradients",
}


@pytest.mark.parametrize("guide", MODULES)
def test_the_functions_that_differ_are_listed(guide):
    assert sorted({name for cells in rows(guide) for name in re.findall(r"`(\w+)`", cells[0])}) == sorted(
        DIFFERING[guide].split()
    )
