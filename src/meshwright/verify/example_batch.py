"""The batch that `verify` compares steps on."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshwright.distributed.same_batch import content_digest
from meshwright.dtypes import is_float
from meshwright.errors import DataError, JobError
from meshwright.types import PyTree


def example_batch(job: Any, *, seed: int = 0) -> PyTree:
    """Returns a batch for a job, the same for the same seed.

    Calls the job's `make_batch(seed)` or `example_batch(key)` if it has one, and returns `job.batch` otherwise. For
    shapes in `job.batch`, floats are drawn from 0 to 1, and integers are 0 or 1, which are in every vocabulary.

    Example:
        >>> import meshwright as mw
        >>> job = mw.Job(init=None, rules=[], batch={"x": jax.ShapeDtypeStruct((4,), "int32")})
        >>> example_batch(job)["x"].tolist()
        [1, 1, 1, 0]
    """
    if getattr(job, "make_batch", None) is not None:
        return job.make_batch(seed)
    if getattr(job, "example_batch", None) is not None:
        return job.example_batch(jax.random.key(seed))
    batch = getattr(job, "batch", None)
    if batch is None:
        raise JobError(
            "the job has no batch to compare steps on.", hint="use Job(..., batch=...) or verify(job, batch=...)."
        )
    generator = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: _draw(leaf, generator), batch)


def drawn_batch(job: Any, seed: int) -> PyTree:
    """Returns the job's batch; raises if the job draws another one if asked again, as another host would."""
    batch = example_batch(job, seed=seed)
    if content_digest(batch) != content_digest(example_batch(job, seed=seed)):
        name = "make_batch" if getattr(job, "make_batch", None) is not None else "example_batch"
        raise DataError(
            f"`{name}` returns another batch each time, so every host would train on its own.",
            hint="draw the batch from the seed alone: np.random.default_rng(seed), not np.random or the time.",
        )
    return batch


def _draw(leaf: Any, generator: np.random.Generator) -> Any:
    if not isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.split(jax.random.key(0), leaf.shape)
    if is_float(leaf.dtype):
        return generator.random(leaf.shape).astype(leaf.dtype)
    return generator.integers(0, 2, leaf.shape).astype(leaf.dtype)
