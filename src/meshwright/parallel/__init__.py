"""The local view: mechanisms on plain arrays, for use inside `shard_map`."""

from meshwright.axes import axis_size, is_manual, place_on, vary, varying_axes, view_of
from meshwright.parallel.collective_matmul import gather_matmul, matmul_scatter
from meshwright.parallel.compiler_options import overlap_options
from meshwright.parallel.cross_entropy import LossSums, linear_cross_entropy
from meshwright.parallel.data import gather_params, shard_module_params, shard_params, sync_gradients
from meshwright.parallel.dropout import dropout
from meshwright.parallel.feature_matmul import gather_matmul_by_features, matmul_scatter_by_features
from meshwright.parallel.gather import Gather, gather_array, gather_array_with_mean_grads, gather_tree
from meshwright.parallel.heads import local_heads, split_heads
from meshwright.parallel.local import island, local_map
from meshwright.parallel.overlap_forms import Form
from meshwright.parallel.pipeline import pipeline
from meshwright.parallel.pipeline_module import PipelineModule, execute_pipeline, execute_pipeline_step
from meshwright.parallel.ring import (
    async_gather,
    async_gather_bidirectional,
    async_gather_split,
    async_scatter,
    async_scatter_split,
)
from meshwright.parallel.rows import row_key
from meshwright.parallel.schedule import Schedule, circular_schedule, gpipe_schedule
from meshwright.parallel.stacking import split_array_over_mesh, stack_params, unstack_params
from meshwright.parallel.stages import stage_layers, unstage_layers
from meshwright.parallel.tensor import column_dense, fused_column_dense, row_dense, sequence_norm
from meshwright.parallel.vocabulary import vocab_cross_entropy, vocab_embed

__all__ = [
    "async_gather",
    "async_gather_bidirectional",
    "async_gather_split",
    "async_scatter",
    "async_scatter_split",
    "Form",
    "Gather",
    "axis_size",
    "gather_array",
    "gather_array_with_mean_grads",
    "gather_params",
    "gather_tree",
    "gather_matmul",
    "gather_matmul_by_features",
    "is_manual",
    "local_map",
    "matmul_scatter",
    "matmul_scatter_by_features",
    "place_on",
    "shard_module_params",
    "shard_params",
    "split_array_over_mesh",
    "split_heads",
    "stack_params",
    "sync_gradients",
    "unstack_params",
    "vary",
    "varying_axes",
    "PipelineModule",
    "Schedule",
    "circular_schedule",
    "dropout",
    "execute_pipeline",
    "execute_pipeline_step",
    "gpipe_schedule",
    "pipeline",
    "row_key",
    "stage_layers",
    "unstage_layers",
    "column_dense",
    "fused_column_dense",
    "island",
    "overlap_options",
    "linear_cross_entropy",
    "local_heads",
    "LossSums",
    "row_dense",
    "sequence_norm",
    "view_of",
    "vocab_cross_entropy",
    "vocab_embed",
]
