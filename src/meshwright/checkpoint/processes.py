"""What the processes of a run tell each other about a checkpoint; with one process, nothing happens here.

These are collectives: they belong on the main thread, between steps, in the same order on every process.
"""

from __future__ import annotations

import jax
import numpy as np

_TEXT_BYTES = 2048


def gather_texts(text: str) -> list[str]:
    """Returns the text of every process, by rank; long ones are cut."""
    if jax.process_count() == 1:
        return [text]
    from jax.experimental import multihost_utils

    data = text.encode()[:_TEXT_BYTES]
    row = np.zeros(_TEXT_BYTES, np.uint8)
    row[: len(data)] = np.frombuffer(data, np.uint8)
    rows = np.asarray(multihost_utils.process_allgather(row))
    return [bytes(row).rstrip(b"\0").decode(errors="ignore") for row in rows]


def from_first(number: int) -> int:
    """Returns the number that the first process has."""
    if jax.process_count() == 1:
        return number
    return int(gather_texts(str(number))[0])


def is_first() -> bool:
    """Returns whether this is the process that writes manifests and removes folders."""
    return jax.process_index() == 0
