"""Drop-in for `fjformer.partition_utils`."""

from meshwright.compat.fjformer.partition_utils.mesh_utils import *  # noqa: F403
from meshwright.compat.fjformer.partition_utils.mesh_utils import __all__ as __all__
