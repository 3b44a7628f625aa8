"""Heartbeats: a thread in every rank writes a small record twice a second, and the launcher reads them.

The loop only sets fields, which costs nothing; the thread writes them. A rank whose process is stopped, or whose host
is gone, no longer writes. A rank that runs but makes no progress is the business of its own watchdog. The record has a
fixed size and is written in place, so that a full disk does not silence a rank.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FOLDER = "MESHWRIGHT_HEARTBEAT"
"""Variable with the folder of the heartbeats."""
RANK = "MESHWRIGHT_RANK"
"""Variable with the rank of a process that the local launcher started."""
PARENT = "MESHWRIGHT_LAUNCHER"
"""Variable with the process id of a launcher on the same host, without which the ranks save and stop."""

STOP = "stop"
"""Name of a file in that folder which asks all ranks to save and stop, for engines that cannot pass on a signal."""

INTERVAL = 0.5
_RANKS = (RANK, "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "SLURM_PROCID", "JOB_COMPLETION_INDEX")
_RECORD = 8192


class Pulse:
    """The heartbeat of this process; set `step` and `facts` at any time, the thread writes them.

    Args:
        folder: folder of all heartbeats.
        parent: process id of the launcher; if it is no longer the parent of this process, the run saves and stops.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> with Pulse(folder, rank=1) as pulse:
        ...     pulse.step = 12
        >>> read_pulse(folder, 1)["step"]
        12
    """

    def __init__(self, folder: Path | str, *, rank: int, parent: int | None = None, interval: float = INTERVAL) -> None:
        self.rank, self.step, self.interval = rank, None, interval
        self.facts: dict[str, Any] = {}
        self._parent, self._count = parent, 0
        self._path, self._stop_file = _path(folder, rank), os.path.join(folder, STOP)
        self._file: int | None = None
        self._done = threading.Event()
        self._write()
        self._thread = threading.Thread(target=self._beat, name="meshwright-heartbeat", daemon=True)
        self._thread.start()

    step: int | None

    def flush(self) -> None:
        """Writes the record now, before something irrevocable happens."""
        self._write()

    def close(self) -> None:
        """Writes the last record and stops the thread."""
        self._done.set()
        self._thread.join(timeout=5)
        self._write()

    def __enter__(self) -> Pulse:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _beat(self) -> None:
        while not self._done.wait(self.interval):
            self._write()
            if self._parent is not None and os.getppid() != self._parent:
                self._stop(b"the launcher has died: saving and stopping\n")
            elif os.path.exists(self._stop_file):
                self._stop(b"")

    def _stop(self, text: bytes) -> None:
        """Asks this process to save and stop, once."""
        self._parent, self._stop_file = None, ""
        with contextlib.suppress(OSError):
            os.write(2, text)
        os.kill(os.getpid(), signal.SIGTERM)

    def _write(self) -> None:
        self._count += 1
        record = {"count": self._count, "step": self.step, "pid": os.getpid(), "host": os.uname().nodename}
        data = json.dumps(record | self.facts).encode()
        data = b"%08x %s" % (zlib.crc32(data), data)
        with contextlib.suppress(OSError):  # a heartbeat never ends a run
            if self._file is None:
                self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            os.pwrite(self._file, data.ljust(_RECORD)[:_RECORD], 0)


_own: Pulse | None = None


def start_pulse() -> Pulse | None:
    """Starts the heartbeat of this process if a launcher asked for one, and returns it.

    Example:
        >>> start_pulse() is None  # not started by a launcher
        True
    """
    global _own
    rank = next((os.environ[name] for name in _RANKS if os.environ.get(name, "").isdigit()), None)
    folder = os.environ.get(FOLDER)
    if _own is None and folder and rank is not None:
        parent = os.environ.get(PARENT, "")
        _own = Pulse(folder, rank=int(rank), parent=int(parent) if parent.isdigit() else None)
    return _own


def current_pulse() -> Pulse | None:
    """Returns the heartbeat of this process, or None if no launcher watches it."""
    return _own


def read_pulse(folder: Path | str, rank: int) -> dict[str, Any] | None:
    """Returns the last record of a rank, or None if there is none or it is being written."""
    try:
        with open(_path(folder, rank), "rb") as file:
            data = file.read(_RECORD).rstrip()
        found = json.loads(data[9:])
    except (OSError, ValueError):
        return None
    return found if data[:8] == b"%08x" % zlib.crc32(data[9:]) and isinstance(found, dict) else None


class Pulses:
    """The heartbeats of all ranks, as the launcher sees them; only changes count, so hosts need no common clock.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> Pulse(folder, rank=0).close()
        >>> pulses = Pulses(folder, num_ranks=2, now=0.0)
        >>> pulses.read(now=1.0)
        >>> (
        ...     pulses.silent(now=40.0, seconds=30, start_seconds=300),
        ...     pulses.silent(now=300, seconds=30, start_seconds=300),
        ... )
        ({0: 39.0}, {0: 299.0, 1: 300.0})
    """

    def __init__(self, folder: Path | str, *, num_ranks: int, now: float) -> None:
        self.folder = folder
        self.records: dict[int, Mapping[str, Any]] = {}
        self._seen = dict.fromkeys(range(num_ranks), (0, now))

    def read(self, now: float) -> None:
        """Reads all heartbeats."""
        for rank, (count, _) in self._seen.items():
            record = read_pulse(self.folder, rank)
            if record is not None and record.get("count") != count:
                self.records[rank] = record
                self._seen[rank] = (int(record["count"]), now)

    def silent(self, now: float, *, seconds: float, start_seconds: float) -> dict[int, float]:
        """Returns the ranks that have written nothing for too long, with the time since their last heartbeat.

        Args:
            seconds: limit for a rank that has written before.
            start_seconds: limit for a rank that has not.
        """
        waited = {
            rank: (now - since, seconds if count else start_seconds) for rank, (count, since) in self._seen.items()
        }
        return {rank: since for rank, (since, limit) in waited.items() if since >= limit}

    @property
    def step(self) -> int | None:
        """The last step that any rank has reported."""
        return max((record["step"] for record in self.records.values() if record.get("step") is not None), default=None)

    def fact(self, name: str) -> Any:
        """Returns a fact that a rank has reported, or None."""
        return next((record[name] for record in self.records.values() if record.get(name) is not None), None)


def _path(folder: Path | str, rank: int) -> str:
    return os.path.join(folder, f"rank-{rank}.beat")
