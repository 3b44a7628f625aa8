"""The per-device API of the older toolkit: linen layers and parameters that belong to devices.

`layers` has its tensor-parallel modules, `fsdp_boxes` and `stacking` its boxed parameters, `pipeline_module` its
pipeline, `rings` and `feature_matmul` its collectives, `accumulate_gradients` both of its loops. `global_params`
converts their parameters to and from the global form. New code uses `meshwright.parallel` and `meshwright.train`.
"""

from meshwright.linen.accumulate_gradients import (
    accumulate_gradients,
    accumulate_gradients_loop,
    accumulate_gradients_scan,
)
from meshwright.linen.feature_matmul import gather_matmul_by_features, matmul_scatter_by_features
from meshwright.linen.fsdp_boxes import gather_params, shard_module_params, shard_params, sync_gradients
from meshwright.linen.global_params import DenseForm, from_global, to_global
from meshwright.linen.layers import ModelParallelismWrapper, TPAsyncDense, TPDense, scale_init
from meshwright.linen.pipeline_module import PipelineModule, execute_pipeline, execute_pipeline_step
from meshwright.linen.rings import (
    async_gather,
    async_gather_bidirectional,
    async_gather_split,
    async_scatter,
    async_scatter_split,
)
from meshwright.linen.stacking import split_array_over_mesh, stack_params, unstack_params

__all__ = [
    "ModelParallelismWrapper",
    "TPDense",
    "TPAsyncDense",
    "scale_init",
    "shard_params",
    "gather_params",
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
