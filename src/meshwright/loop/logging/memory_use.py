"""How much memory a run uses: that of its devices where they tell, else that of the process."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax


@dataclass(frozen=True)
class Memory:
    """Memory in use now and at most so far, in bytes.

    Args:
        where: "device": the fullest of this process's devices. "process": all of this process, which on simulated
            devices is the sum of them.
        limit: what there is, if known.
    """

    bytes: int
    peak_bytes: int
    where: str
    limit: int | None = None

    @property
    def of_a_step(self) -> int:
        """What a step needs: of a device the peak, as between steps it holds the state alone; else what is in use."""
        return self.peak_bytes if self.where == "device" else self.bytes


def read_memory(devices: Sequence[Any] | None = None) -> Memory:
    """Returns the memory in use on this process's devices; on CPUs, whose backend does not count it, by the process.

    Example:
        >>> memory = read_memory()
        >>> memory.where, 0 < memory.bytes <= memory.peak_bytes
        ('process', True)
    """
    stats = [
        found
        for device in (jax.local_devices() if devices is None else devices)
        if device.process_index == jax.process_index() and (found := device.memory_stats())
    ]
    if stats:
        fullest = max(stats, key=lambda found: found["bytes_in_use"])
        peak = max(found.get("peak_bytes_in_use", found["bytes_in_use"]) for found in stats)
        return Memory(fullest["bytes_in_use"], peak, "device", fullest.get("bytes_limit"))
    peak = peak_resident()
    now = _resident()
    # Where the system does not tell what is in use now, the peak is the nearest there is.
    now = peak if now is None else now
    return Memory(now, max(now, peak), "process")


def peak_resident() -> int:
    """Returns the most memory that this process has held so far, in bytes."""
    # Linux hands `ru_maxrss` on to what a process starts, so a child of a large process would seem as large.
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used if sys.platform == "darwin" else used * 1024


def _resident() -> int | None:
    try:
        pages = Path("/proc/self/statm").read_text().split()[1]
    except OSError:
        return None
    return int(pages) * os.sysconf("SC_PAGE_SIZE")
