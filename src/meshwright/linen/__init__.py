"""The xlstm_jax API: linen layers with separate parameters on each device, for use inside `shard_map`.

New code should use `meshwright.parallel` and `meshwright.train`. `meshwright.compat` has the same functions under the
import paths of xlstm_jax. `global_params` converts parameters between this form and global arrays.
"""

from meshwright.linen.accumulate_gradients import (
    accumulate_gradients,
    accumulate_gradients_loop,
    accumulate_gradients_scan,
)
from meshwright.linen.fsdp_boxes import (
    gather_array_with_mean_grads,
    gather_params,
    shard_module_params,
    shard_params,
    sync_gradients,
)
from meshwright.linen.global_params import DenseForm, from_global, to_global
from meshwright.linen.layers import ModelParallelismWrapper, TPAsyncDense, TPDense, scale_init
from meshwright.linen.pipeline_module import PipelineModule, execute_pipeline, execute_pipeline_step
from meshwright.linen.rings import (
    async_gather,
    async_gather_bidirectional,
    async_gather_split,
    async_scatter,
    async_scatter_split,
    gather_matmul_by_features,
    matmul_scatter_by_features,
)
from meshwright.linen.stacking import split_array_over_mesh, stack_params, unstack_params

__all__ = [
    "ModelParallelismWrapper",
    "TPDense",
    "TPAsyncDense",
    "scale_init",
    "shard_params",
    "gather_params",
    "gather_array_with_mean_grads",
    "shard_module_params",
    "sync_gradients",
    "split_array_over_mesh",
    "stack_params",
    "unstack_params",
    "PipelineModule",
    "execute_pipeline",
    "execute_pipeline_step",
    "async_gather",
    "async_gather_bidirectional",
    "async_gather_split",
    "async_scatter",
    "async_scatter_split",
    "gather_matmul_by_features",
    "matmul_scatter_by_features",
    "accumulate_gradients",
    "accumulate_gradients_loop",
    "accumulate_gradients_scan",
    "DenseForm",
    "to_global",
    "from_global",
]
