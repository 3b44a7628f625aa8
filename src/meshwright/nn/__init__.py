"""Thin layers over the mechanisms of `meshwright.parallel`: linen modules, and the conversion of their parameters."""

from meshwright.nn.convert import DenseForm, from_global, to_global
from meshwright.nn.linen import ModelParallelismWrapper, TPAsyncDense, TPDense, scale_init

__all__ = [
    "DenseForm",
    "ModelParallelismWrapper",
    "TPAsyncDense",
    "TPDense",
    "from_global",
    "scale_init",
    "to_global",
]
