"""Helpers for benchmarks: child processes, medians, tables, versions, machine.

Standard library only, because the peers' environments import it too.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import resource
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def run_child(command: Sequence[str], *, keep_pythonpath: bool = True) -> dict[str, Any]:
    """Runs a command and returns the JSON in its last line of output; exits if it fails."""
    variables = os.environ | {"JAX_PLATFORMS": "cpu"}
    if not keep_pythonpath:  # a peer must see only its own packages
        variables.pop("PYTHONPATH", None)
    done = subprocess.run(command, env=variables, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"error: `{' '.join(map(str, command))}` failed with status {done.returncode}.")
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def peak_resident() -> int:
    """Returns the most memory this process has held, in bytes.

    `meshwright.loop` can do it too, but importing it starts threads whose malloc arenas change the peak.
    """
    status = Path("/proc/self/status")
    if status.is_file():
        return int(re.findall(r"^VmHWM:\s+(\d+)", status.read_text(), re.MULTILINE)[0]) * 1024
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used if sys.platform == "darwin" else used * 1024


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def spread(values: Sequence[float]) -> str:
    """Returns the range in milliseconds."""
    return f"{min(values) * 1e3:.0f}-{max(values) * 1e3:.0f}"


def versions(*packages: str) -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "from source"
    return found


def machine() -> str:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{os.cpu_count()} {platform.machine()} cores, {memory:.0f} GiB of memory, {platform.system()}"


def table(headings: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Returns an aligned Markdown table."""
    cells = [[str(cell) for cell in row] for row in (headings, *rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(headings))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in cells
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


def verdict(text: str, met: bool) -> str:
    return f"{'met' if met else 'MISSED'}: {text}"
