"""Graceful stop on SIGTERM (scheduler), SIGHUP (closed terminal) or Ctrl-C.

The loop finishes its step, saves, and exits with `EXIT_PREEMPTED`, which tells the caller to resume the run with
`--resume`. All processes stop at the same step.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any, Self

import jax

from meshwright.loop.callbacks import Callback

if TYPE_CHECKING:
    from meshwright.loop.fit import Loop

EXIT_PREEMPTED = 75
"""Exit code of a run that saved and stopped on request (EX_TEMPFAIL: try again later)."""

EXIT_INTERRUPTED = 130
"""Exit code of a command that Ctrl-C ended at once, as in shells."""


class Interrupted(KeyboardInterrupt):
    """Signal `number` arrived before there was a run to save."""

    def __init__(self, number: int) -> None:
        self.number = number
        super().__init__(signal.Signals(number).name)


class EarlySignals:
    """Context manager in which SIGINT, SIGTERM and SIGHUP raise `Interrupted`, until a `Preemption` replaces it.

    Python can drop an exception that a signal handler raises, e.g. inside a finalizer; `check_early` raises it again.
    Ignored signals stay ignored, as under `nohup`.

    Example:
        >>> try:
        ...     with EarlySignals():
        ...         signal.raise_signal(signal.SIGTERM)
        ... except Interrupted as error:
        ...     print(error)
        SIGTERM
    """

    def __init__(self) -> None:
        self.number: int | None = None
        self._before: dict[int, Any] = {}
        self._process = os.getpid()
        self._told_by: Callable[[sys.UnraisableHookArgs], Any] = sys.unraisablehook

    def __enter__(self) -> Self:
        global _early
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM, *_HANGUP):
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._handle)
            _early = self
            self._told_by = sys.unraisablehook
            sys.unraisablehook = self._lost
        return self

    def __exit__(self, *_: object) -> None:
        global _early
        if _early is self:
            _early = None
            sys.unraisablehook = self._told_by
        _give_back(self._before)

    def _lost(self, what: sys.UnraisableHookArgs) -> None:
        """Called when Python drops an exception; stays silent for `Interrupted`, which `check_early` raises again."""
        if not isinstance(what.exc_value, Interrupted):
            self._told_by(what)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:  # a forked child ends as it would without this handler
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        self.number = number
        raise Interrupted(number)


_HANGUP = (signal.SIGHUP,) if hasattr(signal, "SIGHUP") else ()
_early: EarlySignals | None = None


def check_early() -> None:
    """Raises `Interrupted` if a signal arrived early and Python dropped its exception."""
    if _early is not None and _early.number is not None and threading.current_thread() is threading.main_thread():
        raise Interrupted(_early.number)


def _give_back(handlers: dict[int, Any]) -> None:
    for number, handler in handlers.items():
        # None stands for a handler written in C, which Python cannot restore.
        signal.signal(number, signal.SIG_DFL if handler is None else handler)
    handlers.clear()


class Preemption(Callback):
    """Context manager in which SIGTERM, SIGHUP and the first SIGINT ask the run to stop; see `requested(step)`.

    A second SIGINT interrupts at once. With several processes, JAX's preemption service receives SIGTERM on any of them
    and agrees on a step that none has reached, so every process must call `requested` at every step. Handlers are set
    only in the main thread, and restored on exit. An ignored SIGHUP stays ignored, as under `nohup`.

    Example:
        >>> with Preemption() as preemption:
        ...     before = preemption.requested(1)
        ...     signal.raise_signal(signal.SIGTERM)
        ...     before, preemption.requested(2), preemption.reason
        (False, True, 'SIGTERM')
    """

    def __init__(self) -> None:
        self.reason: str | None = None
        self._is_shared, self._num_interrupts = False, 0
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

    def __enter__(self) -> Self:
        self._is_shared = jax.process_count() > 1
        if threading.current_thread() is threading.main_thread():
            # With several processes, SIGTERM belongs to JAX's preemption service; a Python handler would silence it.
            taken = [signal.SIGINT, *(number for number in _HANGUP if signal.getsignal(number) is not signal.SIG_IGN)]
            if not self._is_shared:
                taken.append(signal.SIGTERM)
            self._before = {number: signal.signal(number, self._handle) for number in taken}
            try:
                check_early()
            except BaseException:
                _give_back(self._before)
                raise
        return self

    def __exit__(self, *_: object) -> None:
        _give_back(self._before)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            self._num_interrupts += 1
            if self._num_interrupts > 1:
                raise KeyboardInterrupt
            # Bypass Python's streams, which may be in the middle of a write when a handler runs.
            with contextlib.suppress(OSError):  # stderr may be closed
                os.write(2, b"\nStopping after this step and saving. Press Ctrl-C again to stop at once.\n")
        if self._is_shared:
            # JAX's preemption service only handles SIGTERM; it notifies the other processes.
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            self.reason = signal.Signals(number).name
