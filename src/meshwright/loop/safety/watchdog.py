"""Notices a run that hangs, and writes down where each of its threads stands."""

from __future__ import annotations

import faulthandler
import os
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Self

from meshwright.errors import MeshwrightError
from meshwright.loop.callbacks import Callback, StepRecord

if TYPE_CHECKING:
    from meshwright.loop.fit import Loop

COMPILES = 1800.0
"""How many seconds something may take that compiles first."""

EXIT_HUNG = 70
"""The exit code of a process that its watchdog ended, where that was asked for (EX_SOFTWARE)."""


class Watchdog(Callback):
    """Waits for a beat per step; where none comes, dumps all stacks into `hang-<last step>.txt` and tells, once.

    A step may take `seconds`, or `factor` times the median of recent steps, whichever is longer. The first one, which
    compiles, may take `first_seconds`. Time in which the whole process was stopped does not count.

    Args:
        tell: called with a line of text, from the watchdog's thread.
        folder: where dumps go.
        rank: of this process; ranks above 0 put theirs into the name of a dump.
        ends_process: after the dump, ends the process with exit code 70, for whoever starts it again.

    Example:
        >>> import tempfile
        >>> told, folder = [], Path(tempfile.mkdtemp())
        >>> with Watchdog(0.05, tell=told.append, folder=folder, first_seconds=0.05) as watchdog:
        ...     watchdog.beat(7)
        ...     while not told:
        ...         time.sleep(0.01)  # a step that hangs
        >>> "hang-7.txt" in told[0], "doctest" in (folder / "hang-7.txt").read_text()
        (True, True)
    """

    def __init__(
        self,
        seconds: float,
        *,
        tell: Callable[[str], None],
        folder: Path | str,
        factor: float = 10.0,
        first_seconds: float = COMPILES,
        rank: int = 0,
        ends_process: bool = False,
    ) -> None:
        if not seconds > 0 or not factor >= 1:
            raise MeshwrightError(
                f"Watchdog({seconds}, factor={factor}) has nothing to wait for.", hint="seconds > 0 and factor >= 1."
            )
        self.seconds, self.factor = seconds, factor
        self._tell, self._folder, self._rank, self._ends_process = tell, Path(folder), rank, ends_process
        self._lock = threading.Lock()
        self._durations: deque[float] = deque(maxlen=64)
        self._step = 0
        self._last = time.monotonic()
        self._allowance: float | None = max(seconds, first_seconds)
        self._is_first, self._told = True, False
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="meshwright-watchdog", daemon=True)
        self._thread.start()

    def beat(self, step: int | None = None, *, allowance: float | None = None) -> None:
        """Says that the run is alive.

        Args:
            step: the last step that ended; counted when left out.
            allowance: how many seconds the next beat may take, where something long begins: a first evaluation, say.
        """
        with self._lock:
            now = time.monotonic()
            # What was allowed to take long, or hung, says nothing about how long a step takes.
            if self._allowance is None and not self._told:
                self._durations.append(now - self._last)
            self._step = self._step + 1 if step is None else step
            self._last, self._told = now, False
            # Steps are sent to devices ahead of time: the beat after the first may still wait for its compilation.
            first, self._is_first = self._is_first, False
            self._allowance = allowance if allowance is not None else self._allowance if first else None

    def on_metrics(self, loop: Loop, record: StepRecord) -> None:
        self.beat(record.number)

    def on_phase(self, loop: Loop, text: str) -> None:
        self.beat(loop.number, allowance=COMPILES)

    def limit(self) -> float:
        """Returns how many seconds after the last beat the next one must come."""
        with self._lock:
            return self._limit()

    def close(self) -> None:
        """Ends the watch."""
        self._done.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=5)

    def _limit(self) -> float:
        if self._allowance is not None:
            return max(self._allowance, self.seconds)
        usual = statistics.median(self._durations) if self._durations else 0.0
        return max(self.seconds, self.factor * usual)

    def _watch(self) -> None:
        looked = time.monotonic()
        while True:
            pause = min(1.0, self.seconds / 4)
            if self._done.wait(pause):
                return
            with self._lock:
                now = time.monotonic()
                # A process that was stopped as a whole (Ctrl-Z, a suspended machine) did not hang.
                stopped = now - looked - pause
                if stopped > max(5.0, pause):
                    self._last += stopped
                looked = now
                waited, limit, step = now - self._last, self._limit(), self._step
                hangs = waited > limit and not self._told
                self._told = self._told or hangs
            if hangs:
                self._report(step, waited, limit)

    def _report(self, step: int, waited: float, limit: float) -> None:
        name = f"hang-{step}.txt" if self._rank == 0 else f"hang-{step}-rank{self._rank}.txt"
        path = self._folder / name
        text = f"nothing has happened since step {step}, {waited:.0f} s ago ({limit:.0f} s are allowed)"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with path.open("a") as file:  # a step can hang again, after a restart
                file.write(f"{time.ctime()}, rank {self._rank}, process {os.getpid()}: {text}. All threads:\n")
                file.flush()
                faulthandler.dump_traceback(file, all_threads=True)
            self._tell(f"{text}; where each thread stands is in {path}")
        except OSError as error:
            self._tell(f"{text}; its stacks could not be written: {error}")
        if self._ends_process:
            os._exit(EXIT_HUNG)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
