"""Hang detection, with a dump of all thread stacks."""

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
"""Seconds allowed for a phase that includes compilation."""

EXIT_HUNG = 70
"""Exit code of a process that its watchdog ended (EX_SOFTWARE)."""


class Watchdog(Callback):
    """Expects a beat per step; if none comes in time, dumps all stacks into `hang-<last step>.txt` and reports it once.

    A step may take `seconds` or `factor` times the median of recent steps, whichever is longer. The first step, which
    compiles, may take `first_seconds`. Time in which the whole process was suspended does not count.

    Args:
        tell: called with a line of text, from the watchdog's thread.
        folder: folder for the dumps.
        rank: rank of this process; the file names of ranks above 0 include it.
        ends_process: end the process with exit code 70 after the dump, so that a supervisor can restart it.

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
                f"Watchdog({seconds}, factor={factor}) cannot detect hangs.", hint="use seconds > 0 and factor >= 1."
            )
        self.seconds, self.factor = seconds, factor
        self._tell, self._folder, self._rank, self._ends_process = tell, Path(folder), rank, ends_process
        self._lock = threading.RLock()
        self._durations: deque[float] = deque(maxlen=64)
        self._step = 0
        self._last = time.monotonic()
        self._allowance: float | None = max(seconds, first_seconds)
        self._is_first, self._told = True, False
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="meshwright-watchdog", daemon=True)
        self._thread.start()

    def beat(self, step: int | None = None, *, allowance: float | None = None) -> None:
        """Signals that the run is alive.

        Args:
            step: the last finished step (default: one more than before).
            allowance: seconds until the next beat, if a long phase such as a first evaluation begins.
        """
        with self._lock:
            now = time.monotonic()
            # Long phases and hangs do not count as the usual duration of a step.
            if self._allowance is None and not self._told:
                self._durations.append(now - self._last)
            self._step = self._step + 1 if step is None else step
            self._last, self._told = now, False
            # Steps are dispatched ahead of time, so the beat after the first may still wait for compilation.
            first, self._is_first = self._is_first, False
            self._allowance = allowance if allowance is not None else self._allowance if first else None

    def on_metrics(self, loop: Loop, record: StepRecord) -> None:
        self.beat(record.number)

    def on_phase(self, loop: Loop, text: str) -> None:
        self.beat(loop.number, allowance=COMPILES)

    def limit(self) -> float:
        """Returns the seconds allowed between the last beat and the next."""
        with self._lock:
            if self._allowance is not None:
                return max(self._allowance, self.seconds)
            usual = statistics.median(self._durations) if self._durations else 0.0
            return max(self.seconds, self.factor * usual)

    def close(self) -> None:
        """Stops the watchdog."""
        self._done.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=5)

    def _watch(self) -> None:
        looked = time.monotonic()
        while True:
            pause = min(1.0, self.seconds / 4)
            if self._done.wait(pause):
                return
            with self._lock:
                now = time.monotonic()
                # A suspended process (Ctrl-Z, a sleeping machine) does not hang.
                stopped = now - looked - pause
                if stopped > max(5.0, pause):
                    self._last += stopped
                looked = now
                waited, limit, step = now - self._last, self.limit(), self._step
                hangs = waited > limit and not self._told
                self._told = self._told or hangs
            if hangs:
                self._report(step, waited, limit)

    def _report(self, step: int, waited: float, limit: float) -> None:
        name = f"hang-{step}.txt" if self._rank == 0 else f"hang-{step}-rank{self._rank}.txt"
        path = self._folder / name
        text = f"no progress since step {step}, {waited:.0f} s ago (limit {limit:.0f} s)"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with path.open("a") as file:  # the same step can hang again after a restart
                file.write(f"{time.ctime()}, rank {self._rank}, process {os.getpid()}: {text}. All threads:\n")
                file.flush()
                faulthandler.dump_traceback(file, all_threads=True)
            self._tell(f"{text}; the stacks of all threads are in {path}")
        except OSError as error:
            self._tell(f"{text}; could not write the stacks: {error}")
        if self._ends_process:
            os._exit(EXIT_HUNG)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
