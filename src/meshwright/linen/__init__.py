"""The per-device API of the older toolkit: linen layers and parameters that belong to devices.

Everything runs inside `shard_map`. New code uses `meshwright.parallel` and `meshwright.train`.

- `layers`: `ModelParallelismWrapper`, `TPDense`, `TPAsyncDense`, `scale_init`
- `fsdp_boxes`: `shard_params`, `gather_params`, `gather_array_with_mean_grads`, `shard_module_params`, `sync_gradients`
- `stacking`: `split_array_over_mesh`, `stack_params`, `unstack_params`
- `pipeline_module`: `execute_pipeline_step`, `execute_pipeline`, `PipelineModule`
- `rings`: `async_gather`, `async_gather_bidirectional`, `async_gather_split`, `async_scatter`, `async_scatter_split`;
  made of them, `gather_matmul_by_features`, `matmul_scatter_by_features`
- `accumulate_gradients`: `accumulate_gradients`, `accumulate_gradients_loop`, `accumulate_gradients_scan`
- `global_params`: `DenseForm`, `to_global`, `from_global`, from parameters per device to global ones, and back

`meshwright.compat` has the same names under the toolkit's import paths.
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
