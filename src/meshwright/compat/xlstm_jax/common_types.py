"""Drop-in for `xlstm_jax.common_types`."""

from meshwright.flax_types import Parameter, TrainState
from meshwright.types import Metrics, PRNGKeyArray, PyTree

__all__ = ["Metrics", "PRNGKeyArray", "Parameter", "PyTree", "TrainState"]
