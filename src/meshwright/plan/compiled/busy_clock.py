"""Time that a process had a core: a time limit in these seconds does not depend on how busy the machine is."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

IDLE = 0.05
"""Below this share of a core a process counts as idle, so a process that hangs still reaches its limit."""
_POLL_S = 0.25


def wait_busy(process: subprocess.Popen[bytes], limit_s: float) -> int:
    """Waits for a process and returns its status, or raises `subprocess.TimeoutExpired` after `limit_s` seconds.

    While other programs keep the process from its core, time passes only as fast as the process runs. While it is idle,
    or if its CPU time is unknown, all time counts.

    Example:
        >>> wait_busy(subprocess.Popen(["sleep", "0"]), 60.0)
        0
    """
    counted, last, before = 0.0, time.monotonic(), cpu_seconds(process.pid)
    while counted < limit_s:
        try:
            return process.wait(timeout=min(_POLL_S, limit_s - counted))
        except subprocess.TimeoutExpired:
            now, used = time.monotonic(), cpu_seconds(process.pid)
            counted += running_time(now - last, None if used is None or before is None else used - before)
            last, before = now, used
    raise subprocess.TimeoutExpired(process.args, limit_s)


def running_time(wall: float, cpu: float | None) -> float:
    """Returns the part of `wall` seconds that counts if a process used `cpu` seconds of all cores in them.

    Example:
        >>> running_time(1.0, 0.25), running_time(1.0, 2.0), running_time(1.0, 0.0), running_time(1.0, None)
        (0.25, 1.0, 1.0, 1.0)
    """
    return wall if cpu is None or cpu < IDLE * wall else min(wall, cpu)


def cpu_seconds(pid: int) -> float | None:
    """Returns the CPU seconds of a process and its finished children; None if the system does not tell.

    Example:
        >>> cpu_seconds(-1) is None
        True
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return None
