"""Drop-in for `fjformer`: its partition utilities."""

from meshwright.compat.fjformer import partition_utils as partition_utils
from meshwright.compat.fjformer.partition_utils import *  # noqa: F403
from meshwright.compat.fjformer.partition_utils import __all__ as __all__
