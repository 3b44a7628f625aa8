"""Drop-in for `xlstm_jax`: its distribution utilities, and the types they refer to."""

from meshwright.compat.xlstm_jax import common_types as common_types
from meshwright.compat.xlstm_jax import dataset as dataset
from meshwright.compat.xlstm_jax import distributed as distributed
