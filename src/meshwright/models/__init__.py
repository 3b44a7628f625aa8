"""Language models as pure functions of parameter trees, with their sharding rules."""

from meshwright.models.attention import attention
from meshwright.models.decoder import Decoder
from meshwright.models.execution import Execution, remat_policy
from meshwright.models.language import LanguageModel
from meshwright.models.layer_context import Context
from meshwright.models.mlstm import MLSTMState, init_mlstm_state, mlstm_parallel, mlstm_recurrent
from meshwright.models.mlstm_chunks import mlstm_chunkwise
from meshwright.models.xlstm import XLSTM

__all__ = [
    "Decoder",
    "XLSTM",
    "LanguageModel",
    "Context",
    "Execution",
    "remat_policy",
    "attention",
    "mlstm_chunkwise",
    "mlstm_recurrent",
    "mlstm_parallel",
    "MLSTMState",
    "init_mlstm_state",
]
