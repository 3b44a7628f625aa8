"""The batch that a job is compared on: the one given, the job's own, or one drawn from its shapes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshwright.dtypes import is_float
from meshwright.errors import JobError
from meshwright.types import PyTree


def example_batch(job: Any, *, seed: int = 0) -> PyTree:
    """Returns a batch for a job, the same for the same seed.

    A job may have `make_batch(seed)` or `example_batch(key)`, which say how one is drawn. If not, it is `job.batch`;
    where that has shapes only, floats are drawn from 0 to 1, and whole numbers are 0 or 1, which all vocabularies have.

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
            "the job has no batch to compare steps on.", hint="Job(..., batch=...), or verify(job, batch=...)."
        )
    generator = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: _draw(leaf, generator), batch)


def _draw(leaf: Any, generator: np.random.Generator) -> Any:
    if not isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.split(jax.random.key(0), leaf.shape)
    if is_float(leaf.dtype):
        return generator.random(leaf.shape).astype(leaf.dtype)
    return generator.integers(0, 2, leaf.shape).astype(leaf.dtype)
