"""Drop-in for `xlstm_jax.distributed.tensor_parallel`; the code is in `meshwright.linen.{layers,rings}`."""

from meshwright.linen.layers import ModelParallelismWrapper, TPAsyncDense, TPDense, scale_init
from meshwright.linen.rings import (
    async_gather,
    async_gather_bidirectional,
    async_gather_split,
    async_scatter,
    async_scatter_split,
)

__all__ = [
    "ModelParallelismWrapper",
    "TPAsyncDense",
    "TPDense",
    "async_gather",
    "async_gather_bidirectional",
    "async_gather_split",
    "async_scatter",
    "async_scatter_split",
    "scale_init",
]
