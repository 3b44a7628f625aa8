"""Drop-in for `xlstm_jax.dataset`."""

from meshwright.flax_types import Batch

__all__ = ["Batch"]
