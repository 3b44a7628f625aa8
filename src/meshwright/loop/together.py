"""What all processes of a run do at once: where it fails on one, all stop, and say on which.

A process that stopped alone would leave the others waiting for it. With one process, nothing happens here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import jax

from meshwright.checkpoint.processes import gather_texts
from meshwright.errors import MeshwrightError

T = TypeVar("T")


def together(what: str, act: Callable[[], T]) -> T:
    """Returns what `act` returns; raises on every process where it raises on one.

    Example:
        >>> together("counting", lambda: 3)
        3
    """
    if jax.process_count() == 1:
        return act()
    problem: Exception | None = None
    try:
        result = act()
    except Exception as error:
        problem = error
    told = gather_texts("" if problem is None else f"{type(problem).__name__}: {problem}")
    if problem is not None:
        raise problem
    for rank, text in enumerate(told):
        if text:
            raise MeshwrightError(f"rank {rank} of {len(told)} stopped while {what}. {text}")
    return result


def as_first(text: str) -> str:
    """Returns the text that process 0 has."""
    return gather_texts(text)[0]
