"""Drop-in for `xlstm_jax.distributed`, with the names of all its modules."""

from meshwright.compat.xlstm_jax.distributed import (
    array_utils,
    data_parallel,
    mesh_utils,
    pipeline_parallel,
    single_gpu,
    tensor_parallel,
    xla_utils,
)
from meshwright.compat.xlstm_jax.distributed.array_utils import *  # noqa: F403
from meshwright.compat.xlstm_jax.distributed.data_parallel import *  # noqa: F403
from meshwright.compat.xlstm_jax.distributed.mesh_utils import *  # noqa: F403
from meshwright.compat.xlstm_jax.distributed.pipeline_parallel import *  # noqa: F403
from meshwright.compat.xlstm_jax.distributed.single_gpu import *  # noqa: F403
from meshwright.compat.xlstm_jax.distributed.tensor_parallel import *  # noqa: F403
from meshwright.compat.xlstm_jax.distributed.xla_utils import *  # noqa: F403

__all__ = [
    *array_utils.__all__,
    *data_parallel.__all__,
    *mesh_utils.__all__,
    *pipeline_parallel.__all__,
    *single_gpu.__all__,
    *tensor_parallel.__all__,
    *xla_utils.__all__,
]
