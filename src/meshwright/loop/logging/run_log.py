"""What a run writes down: numbers of every step and events as lines of JSON, and the same for trackers.

A process can be killed at any instant. Lines are therefore appended in one write; what a kill leaves of the last one is
dropped when the file is opened again; cutting a file back makes a new one and puts it in the old one's place.
"""

from __future__ import annotations

import functools
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

from meshwright.files import write_atomically
from meshwright.loop.logging.trackers import OnlineRun, TensorBoard, Tracker, plain

METRICS, EVENTS = "metrics.jsonl", "events.jsonl"


class RunLog:
    """Writes `metrics.jsonl` and `events.jsonl` into a run's folder, on rank 0 only; other ranks' calls do nothing.

    Metrics wait until a second has passed, or until `flush`, which belongs before a checkpoint: a resumed run computes
    again what comes after one, and nothing from before it. Events are written at once, from any thread.

    Args:
        tensorboard: writes events for TensorBoard too (needs tensorboardX).
        wandb, trackio: the name of a project, or the options of their `init`. A resumed run goes on in the same run
            there. Steps that they have seen are not sent again.
        tell: called with a line of text when something cannot be written (a full disk, say), and when it can be again.
            The run goes on, and what could not be written to the files waits.
        flush_seconds: how long metrics wait.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> with RunLog(folder, tensorboard=False) as log:
        ...     for step in (1, 2, 3):
        ...         log.metrics(step, {"loss": 1 / step})
        ...     log.event("checkpoint", 2, "saved")
        ...     log.rewind(2)  # what a run does that goes on from that checkpoint
        1
        >>> [line["step"] for line in read_lines(folder / "metrics.jsonl")]
        [1, 2]
    """

    def __init__(
        self,
        folder: Path | str,
        *,
        rank: int = 0,
        tensorboard: bool = True,
        wandb: str | Mapping[str, Any] | None = None,
        trackio: str | Mapping[str, Any] | None = None,
        tell: Callable[[str], None] | None = None,
        flush_seconds: float = 1.0,
    ) -> None:
        self.folder = Path(folder)
        self.writes = rank == 0
        self._tell = tell
        self._flush_seconds = flush_seconds
        self._last_flush = time.monotonic()
        # Saves and watchdogs tell their events from threads of their own.
        self._lock = threading.RLock()
        self._trackers: list[Tracker] = []
        self._unsent: list[Callable[[Tracker], None]] = []
        self._problems: dict[str, str] = {}
        if not self.writes:
            return
        self._metrics = JsonLines(self.folder / METRICS)
        self._events = JsonLines(self.folder / EVENTS)
        if tensorboard:
            self._trackers.append(TensorBoard(self.folder / "tensorboard"))
        if wandb is not None:
            self._trackers.append(OnlineRun("wandb", self.folder, wandb))
        if trackio is not None:
            self._trackers.append(OnlineRun("trackio", self.folder, trackio))

    def metrics(self, step: int, values: Mapping[str, Any]) -> None:
        """Notes the numbers of a step; those of jax must have been computed, or this waits for them."""
        if not self.writes:
            return
        with self._lock:
            line = {"step": int(step), "time": time.time(), **values}
            self._metrics.add(line)
            self._unsent.append(lambda tracker: tracker.metrics(int(step), line))
            if time.monotonic() - self._last_flush >= self._flush_seconds:
                self.flush()

    def event(self, kind: str, step: int, text: str, **facts: Any) -> None:
        """Notes that something happened; everything noted before it is written too."""
        if not self.writes:
            return
        with self._lock:
            self._events.add({"time": time.time(), "step": int(step), "kind": kind, "text": text, **facts})
            self._unsent.append(lambda tracker: tracker.event(kind, step, text))
            self.flush()

    def flush(self, *, durable: bool = False) -> None:
        """Writes what waits; `durable` also waits until it is on the disk."""
        if not self.writes:
            return
        with self._lock:
            self._last_flush = time.monotonic()
            self._try(METRICS, lambda: self._metrics.flush(durable=durable))
            self._try(EVENTS, lambda: self._events.flush(durable=durable))
            # Files first: what a tracker has seen is in them, which is how `rewind` knows.
            unsent, self._unsent = self._unsent, []
            for tracker in self._trackers:
                self._try(tracker.label, functools.partial(_send, tracker, unsent))

    def _try(self, what: str, act: Callable[[], Any]) -> None:
        """Does what may fail while a run is fine; tells about it when that changes."""
        try:
            act()
        except Exception as error:  # an online tracker can raise anything
            if what not in self._problems and self._tell is not None:
                self._tell(f"{what} cannot be written: {error}. The run goes on.")
            self._problems[what] = str(error)
        else:
            if self._problems.pop(what, None) and self._tell is not None:
                self._tell(f"{what} can be written again.")

    def rewind(self, step: int) -> int:
        """Drops metrics after a step, which will be computed again; returns how many. Events stay: they happened."""
        if not self.writes:
            return 0
        with self._lock:
            self.flush()
            seen = step

            def wanted(line: dict[str, Any]) -> bool:
                nonlocal seen
                at = int(line.get("step", 0))
                seen = max(seen, at)
                return at <= step

            dropped, broken = self._metrics.keep(wanted)
            for tracker in self._trackers:
                self._try(tracker.label, functools.partial(tracker.rewind, step, seen))
            if broken:
                lines = ", ".join(map(str, broken[:5])) + (", ..." if len(broken) > 5 else "")
                self.event("error", step, f"{METRICS} had {len(broken)} unreadable line(s), now dropped: {lines}")
            return dropped

    def close(self) -> None:
        """Writes what waits, and ends the runs of trackers."""
        if not self.writes:
            return
        with self._lock:
            self.flush()
            self.writes = False  # an event that a thread tells too late is left out
            self._try(METRICS, self._metrics.close)
            self._try(EVENTS, self._events.close)
            for tracker in self._trackers:
                self._try(tracker.label, tracker.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _send(tracker: Tracker, what: list[Callable[[Tracker], None]]) -> None:
    for send in what:
        send(tracker)


# --- Lines of JSON ---


class JsonLines:
    """Appends objects to a file.

    Example:
        >>> import tempfile
        >>> lines = JsonLines(Path(tempfile.mkdtemp()) / "metrics.jsonl")
        >>> lines.add({"step": 1, "loss": 2.5})
        >>> lines.flush()
        >>> list(read_lines(lines.path))
        [{'step': 1, 'loss': 2.5}]
        >>> lines.close()
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._waiting: list[str] = []
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._open()

    def add(self, line: Mapping[str, Any]) -> None:
        """Keeps a line for the next `flush`."""
        self._waiting.append(json.dumps(plain(line), ensure_ascii=False))

    def flush(self, *, durable: bool = False) -> None:
        """Writes what waits, in one write; `durable` also waits for the disk. If that fails, all still waits."""
        if self._waiting:
            block = "".join(line + "\n" for line in self._waiting).encode()
            before = os.fstat(self._file).st_size
            try:
                while block:  # one write; a system that took only a part of it gets the rest
                    block = block[os.write(self._file, block) :]
            except OSError:
                os.ftruncate(self._file, before)
                raise
            self._waiting.clear()
        if durable:
            os.fsync(self._file)

    def keep(self, wanted: Callable[[dict[str, Any]], bool]) -> tuple[int, list[int]]:
        """Drops lines that are not wanted, all at once; returns how many, and the numbers of lines that are no JSON.

        Those are dropped as well: a disk that lost power can leave them. A kill on the way leaves the file as it was.
        """
        self.flush()
        kept, dropped, broken = [], 0, []
        with self.path.open("rb") as file:
            for number, raw in enumerate(file, start=1):
                line = _parse(raw)
                if line is None:
                    broken.append(number)
                elif wanted(line):
                    kept.append(raw)
                else:
                    dropped += 1
        if dropped or broken:
            write_atomically(self.path, b"".join(kept))
            os.close(self._file)
            self._file = self._open()
        return dropped, broken

    def close(self) -> None:
        """Writes what waits, and closes the file."""
        if self._file >= 0:
            try:
                self.flush()
            finally:
                os.close(self._file)
                self._file = -1

    def _open(self) -> int:
        file = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        _drop_torn_line(file)
        return file


def read_lines(path: Path | str, *, broken: list[int] | None = None) -> Iterator[dict[str, Any]]:
    """Yields the objects of a file, also while it is being written; a torn last line is left out.

    Args:
        broken: gets the numbers of lines that are no JSON object; 0 for the torn last one.
    """
    with Path(path).open("rb") as file:
        for number, raw in enumerate(file, start=1):
            is_whole = raw.endswith(b"\n")
            line = _parse(raw) if is_whole else None
            if line is not None:
                yield line
            elif broken is not None:
                broken.append(number if is_whole else 0)


def _drop_torn_line(file: int) -> None:
    size = end = os.fstat(file).st_size
    while end:
        start = max(0, end - 65536)
        newline = os.pread(file, end - start, start).rfind(b"\n")
        end = start if newline < 0 else start + newline + 1
        if newline >= 0:
            break
    if end < size:
        os.ftruncate(file, end)


def _parse(raw: bytes) -> dict[str, Any] | None:
    try:
        line = json.loads(raw)
    except ValueError:
        return None
    return line if isinstance(line, dict) else None
