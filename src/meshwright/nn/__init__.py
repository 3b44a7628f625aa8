"""Thin layers over the mechanisms of `meshwright.parallel`.

`linen` has the older toolkit's modules, `convert` moves their parameters to and from the global form, and `nnx` (to be
imported from `meshwright.nn.nnx`) has our own layers as NNX modules. `adapters` makes jobs of other libraries' models.
"""

from meshwright.nn.adapters import equinox_job, linen_job, nnx_job
from meshwright.nn.convert import DenseForm, from_global, to_global
from meshwright.nn.linen import ModelParallelismWrapper, TPAsyncDense, TPDense, scale_init

__all__ = [
    "DenseForm",
    "ModelParallelismWrapper",
    "TPAsyncDense",
    "TPDense",
    "equinox_job",
    "from_global",
    "linen_job",
    "nnx_job",
    "scale_init",
    "to_global",
]
