"""Jobs from Flax Linen, Flax NNX and Equinox models.

Parameters become nested dicts with the paths of the model, so rules use these paths, and a checkpoint can be read
without the library. All other arrays (batch statistics, caches, counters, buffers) become the job's model state, with
the paths `model_state/...`. A loss returns a mean or, for correct weights with masks and minibatches, a `(sum, count)`
pair, optionally followed by a dict of metrics. Any other field of `Job` (`data`, `optimizer`, `mesh`, ...) is a keyword
argument of all three functions.
"""

from __future__ import annotations

from meshwright.train.jobs.equinox_models import equinox_job
from meshwright.train.jobs.linen_models import linen_job
from meshwright.train.jobs.nnx_models import nnx_job

__all__ = ["equinox_job", "linen_job", "nnx_job"]
