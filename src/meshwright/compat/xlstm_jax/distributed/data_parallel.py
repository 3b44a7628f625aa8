"""Drop-in for `xlstm_jax.distributed.data_parallel`; the code is in `meshwright.linen.fsdp_boxes`."""

from meshwright.flax_types import Parameter as Parameter
from meshwright.linen.fsdp_boxes import (
    gather_array_with_mean_grads,
    gather_params,
    shard_module_params,
    shard_params,
    sync_gradients,
)
from meshwright.types import PyTree as PyTree

__all__ = ["gather_array_with_mean_grads", "gather_params", "shard_module_params", "shard_params", "sync_gradients"]
