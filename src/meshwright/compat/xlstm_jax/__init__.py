"""Drop-in for the `distributed` package of `xlstm_jax` and its types."""

from meshwright.compat.xlstm_jax import common_types as common_types
from meshwright.compat.xlstm_jax import dataset as dataset
from meshwright.compat.xlstm_jax import distributed as distributed
