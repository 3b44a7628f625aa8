"""What a run writes down: numbers of every step, events, and the same for TensorBoard, wandb and trackio."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

from meshwright.loop.logging.json_lines import JsonLines
from meshwright.loop.logging.trackers import OnlineRun, TensorBoard, Tracker

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
        >>> from meshwright.loop.logging.json_lines import read_lines
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
