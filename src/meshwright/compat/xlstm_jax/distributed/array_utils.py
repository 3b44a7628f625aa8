"""Drop-in for `xlstm_jax.distributed.array_utils`; the code is in `meshwright.linen.stacking` and `meshwright.rng`."""

from meshwright.linen.stacking import split_array_over_mesh, stack_params, unstack_params
from meshwright.rng import fold_rng_over_axis
from meshwright.types import PRNGKeyArray as PRNGKeyArray
from meshwright.types import PyTree as PyTree

__all__ = ["fold_rng_over_axis", "split_array_over_mesh", "stack_params", "unstack_params"]
