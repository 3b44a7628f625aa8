"""Drop-in for `xlstm_jax.distributed`: everything of its modules, under one name."""

from meshwright.compat.xlstm_jax.distributed.array_utils import (
    fold_rng_over_axis,
    split_array_over_mesh,
    stack_params,
    unstack_params,
)
from meshwright.compat.xlstm_jax.distributed.data_parallel import (
    gather_array_with_mean_grads,
    gather_params,
    shard_module_params,
    shard_params,
    sync_gradients,
)
from meshwright.compat.xlstm_jax.distributed.mesh_utils import initialize_mesh
from meshwright.compat.xlstm_jax.distributed.pipeline_parallel import (
    PipelineModule,
    execute_pipeline,
    execute_pipeline_step,
)
from meshwright.compat.xlstm_jax.distributed.single_gpu import (
    accumulate_gradients,
    accumulate_gradients_loop,
    accumulate_gradients_scan,
)
from meshwright.compat.xlstm_jax.distributed.tensor_parallel import (
    ModelParallelismWrapper,
    TPAsyncDense,
    TPDense,
    async_gather,
    async_gather_bidirectional,
    async_gather_split,
    async_scatter,
    async_scatter_split,
    scale_init,
)
from meshwright.compat.xlstm_jax.distributed.xla_utils import set_XLA_flags, simulate_CPU_devices

__all__ = [
    "ModelParallelismWrapper",
    "PipelineModule",
    "TPAsyncDense",
    "TPDense",
    "accumulate_gradients",
    "accumulate_gradients_loop",
    "accumulate_gradients_scan",
    "async_gather",
    "async_gather_bidirectional",
    "async_gather_split",
    "async_scatter",
    "async_scatter_split",
    "execute_pipeline",
    "execute_pipeline_step",
    "fold_rng_over_axis",
    "gather_array_with_mean_grads",
    "gather_params",
    "initialize_mesh",
    "scale_init",
    "set_XLA_flags",
    "shard_module_params",
    "shard_params",
    "simulate_CPU_devices",
    "split_array_over_mesh",
    "stack_params",
    "sync_gradients",
    "unstack_params",
]
