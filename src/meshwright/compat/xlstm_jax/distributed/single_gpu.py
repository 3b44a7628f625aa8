"""Drop-in for `xlstm_jax.distributed.single_gpu`; the code is in `meshwright.linen.accumulate_gradients`."""

from meshwright.flax_types import Batch
from meshwright.flax_types import TrainState as TrainState
from meshwright.linen.accumulate_gradients import (
    accumulate_gradients,
    accumulate_gradients_loop,
    accumulate_gradients_scan,
)
from meshwright.types import Metrics as Metrics
from meshwright.types import PRNGKeyArray as PRNGKeyArray
from meshwright.types import PyTree as PyTree

__all__ = ["Batch", "accumulate_gradients", "accumulate_gradients_loop", "accumulate_gradients_scan"]
