"""Asks a run to end soon: SIGTERM from a scheduler, Ctrl-C from a person; at the same step on all processes.

The loop then finishes its step, saves, and exits with `EXIT_PREEMPTED`. Whoever started it knows by this code that the
run is not done, that nothing is lost, and that it goes on with `--resume`.
"""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self

import jax

EXIT_PREEMPTED = 75
"""The exit code of a run that saved and ended because it was asked to (EX_TEMPFAIL: try again later)."""


class Preemption:
    """While it is entered, SIGTERM and the first SIGINT only ask the run to end; `requested(step)` tells.

    A second SIGINT interrupts at once, as without it. On one process the signals are its own. On several, JAX's service
    receives SIGTERM on any of them and agrees with the others on a step that none has reached, so every process must
    ask `requested` with every step. Signals are only taken over in the main thread, as Python has it, and given back.

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

    def __enter__(self) -> Self:
        self._is_shared = jax.process_count() > 1
        if threading.current_thread() is threading.main_thread():
            # With several processes SIGTERM belongs to JAX's service, which a handler of ours would silence.
            taken = (signal.SIGINT,) if self._is_shared else (signal.SIGINT, signal.SIGTERM)
            self._before = {number: signal.signal(number, self._handle) for number in taken}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            # None: someone's handler in C, which Python cannot put back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before = {}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            self._num_interrupts += 1
            if self._num_interrupts > 1:
                raise KeyboardInterrupt
            # Written around Python's streams, which may be in the middle of a line when a handler runs.
            os.write(2, b"\nThis step is finished, then the run saves and ends. Ctrl-C again: at once.\n")
        if self._is_shared:
            # JAX's service only knows SIGTERM; it tells the other processes.
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            self.reason = signal.Signals(number).name
