"""Memory use of a run: of its devices if they report it, else of the process."""

from __future__ import annotations

import os
import resource
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax


@dataclass(frozen=True)
class Memory:
    """Current and peak memory use.

    Args:
        bytes: memory in use, in bytes.
        peak_bytes: peak memory in use so far, in bytes.
        where: "device": the fullest device of this process; "process": the whole process, which holds all simulated
            devices.
        limit: total memory in bytes, if known.
    """

    bytes: int
    peak_bytes: int
    where: str
    limit: int | None = None

    @property
    def of_a_step(self) -> int:
        """Memory of a step: the peak on a device, which between steps holds only the state; else the current use."""
        return self.peak_bytes if self.where == "device" else self.bytes


def read_memory(devices: Sequence[Any] | None = None) -> Memory:
    """Returns the memory in use on this process's devices, or by the process if the backend does not report it (CPU).

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
    try:
        now = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:  # not on Linux
        now = peak
    return Memory(now, max(now, peak), "process")


class MemoryMeter:
    """Reads memory use at most once per `seconds`, because reading it takes about as long as logging a step.

    Example:
        >>> meter = MemoryMeter(60.0)
        >>> meter.read() is meter.read()
        True
    """

    def __init__(self, seconds: float = 1.0, *, read: Callable[[], Memory] = read_memory) -> None:
        self._seconds, self._read = seconds, read
        self._read_at = 0.0
        self._last: Memory | None = None

    def read(self) -> Memory:
        """Returns the newest reading, which is at most `seconds` old."""
        now = time.monotonic()
        if self._last is None or now - self._read_at >= self._seconds:
            self._last, self._read_at = self._read(), now
        return self._last


def peak_resident() -> int:
    """Returns the peak resident memory of this process in bytes."""
    # On Linux, a child inherits `ru_maxrss` from its parent, so read VmHWM first.
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used if sys.platform == "darwin" else used * 1024
