"""Fine-tuning a job: which parameters are trained."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from typing import Any, TypeVar

T = TypeVar("T")


def adapt(job: Any, *, freeze: Sequence[str] = (), train: Sequence[str] = ()) -> Any:
    """Returns a job that trains only some of its parameters, as `meshwright train --freeze ... --train ...` does.

    Args:
        freeze: regexes of parameters to freeze, in addition to the job's `frozen`.
        train: regexes; if given, only parameters with a match are trained.

    Example:
        >>> import jax.numpy as jnp, meshwright as mw
        >>> job = mw.Job(init=lambda key: {"embed": jnp.ones(4), "head": jnp.ones(4)}, rules=[])
        >>> adapt(job, freeze=["embed"]).frozen
        ('embed',)
    """
    if not freeze and not train:
        return job
    given = getattr(job, "frozen", ()) or ()
    frozen = (*([given] if isinstance(given, str) else given), *freeze)
    return with_fields(job, frozen=frozen, trained=tuple(train) or getattr(job, "trained", ()))


def with_fields(job: T, **fields: Any) -> T:
    """Returns a copy of a job, which may be any object, with some attributes changed."""
    if dataclasses.is_dataclass(job) and not isinstance(job, type):
        return dataclasses.replace(job, **fields)
    job = copy.copy(job)
    for name, value in fields.items():
        setattr(job, name, value)
    return job
