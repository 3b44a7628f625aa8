"""Asks a run to end soon: SIGTERM from a scheduler, SIGHUP from a terminal that is closed, Ctrl-C from a person.

All processes end at the same step.

The loop then finishes its step, saves, and exits with `EXIT_PREEMPTED`. Whoever started it knows by this code that the
run is not done, that nothing is lost, and that it goes on with `--resume`.
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
"""The exit code of a run that saved and ended because it was asked to (EX_TEMPFAIL: try again later)."""


EXIT_INTERRUPTED = 130
"""The exit code of a command that Ctrl-C ended at once, as shells have it."""


class Interrupted(KeyboardInterrupt):
    """A signal came before there was a run to save.

    Args:
        number: of the signal.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        super().__init__(signal.Signals(number).name)


class EarlySignals:
    """While it is entered, SIGINT, SIGTERM and SIGHUP raise `Interrupted`, until a `Preemption` takes them over.

    An exception that a signal raises can get lost, inside a callback of the garbage collector say. `check_early` then
    raises it again. Signals that were ignored stay so, as `nohup` wants it.

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
        """Called by Python where an exception gets lost; ours is raised again, so nothing is to be told."""
        if not isinstance(what.exc_value, Interrupted):
            self._told_by(what)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:  # a child of ours, which ends as it would without us
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        self.number = number
        raise Interrupted(number)


_HANGUP = (signal.SIGHUP,) if hasattr(signal, "SIGHUP") else ()
_early: EarlySignals | None = None


def check_early() -> None:
    """Raises `Interrupted` where a signal came early and its exception got lost."""
    if _early is not None and _early.number is not None and threading.current_thread() is threading.main_thread():
        raise Interrupted(_early.number)


def _give_back(handlers: dict[int, Any]) -> None:
    for number, handler in handlers.items():
        # None: someone's handler in C, which Python cannot put back.
        signal.signal(number, signal.SIG_DFL if handler is None else handler)
    handlers.clear()


class Preemption(Callback):
    """While it is entered, SIGTERM, SIGHUP and the first SIGINT only ask the run to end; `requested(step)` tells.

    A second SIGINT interrupts at once, as without it. On one process the signals are its own. On several, JAX's service
    receives SIGTERM on any of them and agrees with the others on a step that none has reached, so every process must
    ask `requested` with every step. Signals are only taken over in the main thread, as Python has it, and given back. A
    SIGHUP that was ignored stays so, as `nohup` wants it.

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
        """Returns whether the run should save and end now; true from the agreed step on."""
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
            # With several processes SIGTERM belongs to JAX's service, which a handler of ours would silence.
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
            # Written around Python's streams, which may be in the middle of a line when a handler runs.
            with contextlib.suppress(OSError):  # nobody reads it
                os.write(2, b"\nThis step is finished, then the run saves and ends. Ctrl-C again: at once.\n")
        if self._is_shared:
            # JAX's service only knows SIGTERM; it tells the other processes.
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            self.reason = signal.Signals(number).name
