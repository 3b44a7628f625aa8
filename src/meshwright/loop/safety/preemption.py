"""Graceful stop on SIGTERM (scheduler), SIGHUP (closed terminal) or Ctrl-C.

The loop finishes its step, saves, and exits with `EXIT_PREEMPTED`, which tells the caller to resume the run with
`--resume`. All processes stop at the same step.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from types import FrameType
from typing import TYPE_CHECKING, Any, Self

import jax

from meshwright import interrupts
from meshwright.interrupts import (
    EXIT_INTERRUPTED,
    EXIT_PREEMPTED,
    HANGUP,
    EarlySignals,
    Interrupted,
    check_early,
    give_back,
    is_early,
)
from meshwright.loop.callbacks import Callback, StepRecord

if TYPE_CHECKING:
    from meshwright.loop.fit import Loop

__all__ = ["EXIT_INTERRUPTED", "EXIT_PREEMPTED", "EarlySignals", "Interrupted", "Preemption", "check_early"]


class Preemption(Callback):
    """Context manager in which SIGTERM, SIGHUP and the first SIGINT ask the run to stop; see `requested(step)`.

    A second SIGINT interrupts at once. Inside `EarlySignals`, i.e. in the `meshwright` command, any of them ends a run
    of one process at once until its first step is finished, because there is nothing to save yet.

    With several processes, JAX's preemption service receives SIGTERM on any of them and agrees on a step that none has
    reached, so every process must call `requested` at every step. Handlers are set only in the main thread, and
    restored on exit. An ignored SIGHUP stays ignored, as under `nohup`.

    Example:
        >>> with Preemption() as preemption:
        ...     before = preemption.requested(1)
        ...     signal.raise_signal(signal.SIGTERM)
        ...     before, preemption.requested(2), preemption.reason
        (False, True, 'SIGTERM')
    """

    def __init__(self) -> None:
        self.reason: str | None = None
        self._is_shared, self._is_early, self._num_interrupts = False, False, 0
        self._before: dict[int, Any] = {}

    def requested(self, step: int) -> bool:
        """Returns whether the run should save and stop now; true from the agreed step on."""
        if self._is_shared and self.reason is None:
            from jax.experimental import multihost_utils

            if multihost_utils.reached_preemption_sync_point(step):
                self.reason = "preemption"
        return self.reason is not None

    def wants_stop(self, loop: Loop) -> bool:
        return self.requested(loop.ticks)

    def on_metrics(self, loop: Loop, record: StepRecord) -> None:
        if self._is_early:
            self._allow_saving()

    def _allow_saving(self) -> None:
        if interrupts.watch is not None:
            interrupts.watch.can_save = True
        self._is_early = False

    def __enter__(self) -> Self:
        self._is_shared = jax.process_count() > 1
        if threading.current_thread() is threading.main_thread():
            # With several processes, SIGTERM belongs to JAX's preemption service; a Python handler would silence it.
            taken = [signal.SIGINT, *(number for number in HANGUP if signal.getsignal(number) is not signal.SIG_IGN)]
            if not self._is_shared:
                taken.append(signal.SIGTERM)
            self._is_early = is_early() and not self._is_shared
            if not self._is_early:
                self._allow_saving()
            self._before = {number: signal.signal(number, self._handle) for number in taken}
            try:
                check_early()
            except BaseException:
                give_back(self._before)
                raise
        return self

    def __exit__(self, *_: object) -> None:
        give_back(self._before)
        if interrupts.watch is not None:
            interrupts.watch.can_save = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._is_early:
            interrupts.interrupt(number)
        if number == signal.SIGINT:
            self._num_interrupts += 1
            if self._num_interrupts > 1:
                raise Interrupted(number)
            if interrupts.watch is not None:
                interrupts.watch.excused += 1
            # Bypass Python's streams, which may be in the middle of a write when a handler runs.
            with contextlib.suppress(OSError):  # stderr may be closed
                os.write(2, b"\nStopping after this step and saving. Press Ctrl-C again to stop at once.\n")
        if self._is_shared:
            # JAX's preemption service only handles SIGTERM; it notifies the other processes.
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            self.reason = signal.Signals(number).name
