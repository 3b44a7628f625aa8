"""Drop-in for `xlstm_jax.distributed.single_gpu`; the code is in `meshwright.linen.accumulate_gradients`."""

from meshwright.linen.accumulate_gradients import (
    accumulate_gradients,
    accumulate_gradients_loop,
    accumulate_gradients_scan,
)

__all__ = ["accumulate_gradients", "accumulate_gradients_loop", "accumulate_gradients_scan"]
