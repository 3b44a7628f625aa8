"""Signals before there is a run to save: one line and an exit code, whatever the process is doing.

A signal ends a process of the `meshwright` command at once (`guard_process`), after the cleanup that the command has
asked for (`at_end`). An exception instead could be lost in a finalizer, or crash a library that calls Python from C++,
as JAX does when it traces and compiles. Once a run has finished a step, a signal asks it to save and stop instead; see
`loop.safety.preemption`. In other processes, such as tests, signals raise `Interrupted` (`EarlySignals`).

Python runs signal handlers between two bytecodes of the main thread, so a long compilation delays them. A thread
therefore watches the signals too, and ends the process after `GRACE` seconds if the handler does not. (JAX releases the
GIL while it compiles.) This module imports little, to be ready early.
"""

from __future__ import annotations

import _thread
import contextlib
import os
import signal
import sys
import time

TYPE_CHECKING = False  # `typing` would delay the guard
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType
    from typing import Any, Self

EXIT_PREEMPTED = 75
"""Exit code of a run that stopped on request (EX_TEMPFAIL: try again later)."""

EXIT_INTERRUPTED = 130
"""Exit code of a command that Ctrl-C ended, as in shells."""

GRACE = 0.7
"""Seconds that a command may take to clean up after a signal."""

HANGUP = (signal.SIGHUP,) if hasattr(signal, "SIGHUP") else ()
SIGNALS = (signal.SIGINT, signal.SIGTERM, *HANGUP)


class Interrupted(KeyboardInterrupt):
    """Signal `number` arrived before there was a run to save."""

    def __init__(self, number: int) -> None:
        self.number = number
        super().__init__(signal.Signals(number).name)


def outcome(number: int, *, trains: bool) -> tuple[str, int]:
    """Returns the line to print and the exit code after a signal.

    Example:
        >>> outcome(signal.SIGINT, trains=True)
        ('interrupted', 130)
        >>> outcome(signal.SIGTERM, trains=True)
        ('stopped by SIGTERM before training started', 75)
        >>> outcome(signal.SIGTERM, trains=False)
        ('stopped by SIGTERM', 143)
    """
    if number == signal.SIGINT:
        return "interrupted", EXIT_INTERRUPTED
    text = f"stopped by {signal.Signals(number).name}"
    return (f"{text} before training started", EXIT_PREEMPTED) if trains else (text, 128 + number)


# --- The process of a command ---


class InterruptWatch:
    """Counts the signals of a process in a thread, and ends the process if nobody answers one within `GRACE` seconds.

    Attributes:
        began: time at which the process began, for the accounts of a run.
        trains: whether the command is `train`, which a scheduler may start again.
        can_save: whether the run can answer a first Ctrl-C by saving, after its current step.
        excused: number of Ctrl-Cs answered that way.
    """

    def __init__(self, *, trains: bool) -> None:
        self.began, self.trains = time.time(), trains
        self.can_save, self.excused = False, 0
        self._received = 0
        self._said = _thread.allocate_lock()

    def start(self) -> None:
        """Takes over the process's signals; only its main thread can do that."""
        for number in SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # e.g. under nohup
                signal.signal(number, self._end_at_once)
        reads, writes = os.pipe()
        os.set_blocking(writes, False)
        signal.set_wakeup_fd(writes, warn_on_full_buffer=False)
        os.register_at_fork(after_in_child=self._leave)
        _thread.start_new_thread(self._follow, (reads,))

    def say(self, text: str) -> None:
        """Prints the line that tells why the process ends, once; works in handlers and threads."""
        if self._said.acquire(blocking=False):
            show_cursor = "\x1b[?25h" if os.isatty(2) else ""  # a live progress line hides it
            with contextlib.suppress(OSError):  # stderr may be closed
                os.write(2, f"{show_cursor}{text}\n".encode())

    def end(self, number: int) -> None:
        """Ends the process without running any more Python code, which could hang, crash or print a traceback."""
        text, code = outcome(number, trains=self.trains)
        self.say(text)
        for clean in reversed(_cleanups):
            with contextlib.suppress(Exception):
                clean()
        os._exit(code)

    def _end_at_once(self, number: int, frame: FrameType | None) -> None:
        self.end(number)

    def _follow(self, reads: int) -> None:
        while numbers := os.read(reads, 64):
            self._received += numbers.count(signal.SIGINT)
            saves = self.can_save  # now: a run that saves and ends within the grace period has answered
            time.sleep(GRACE)
            others = [number for number in numbers if number != signal.SIGINT and number in SIGNALS]
            # The handler of a first Ctrl-C may still wait for the current step.
            waiting = 1 if saves and not self.excused else 0
            if self._received - self.excused > waiting:
                self.end(signal.SIGINT)
            elif others and not saves:
                self.end(others[0])

    def _leave(self) -> None:
        """Runs in a forked child, which a signal ends as if this module did not exist."""
        with contextlib.suppress(ValueError):  # not the main thread
            signal.set_wakeup_fd(-1)
            for number in SIGNALS:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    signal.signal(number, signal.SIG_DFL)


watch: InterruptWatch | None = None
"""The watch of this process, if it runs the `meshwright` command."""


def guard_process(arguments: list[str]) -> None:
    """Makes signals end this process with one line and an exit code; call it first in the main thread of a new process.

    Args:
        arguments: the command line, without the program's name.
    """
    global watch
    watch = InterruptWatch(trains=arguments[:1] == ["train"])
    watch.start()


_cleanups: list[Callable[[], None]] = []


@contextlib.contextmanager
def at_end(clean: Callable[[], None]) -> Iterator[None]:
    """Runs `clean` if a signal ends the process inside this context; it must be quick, and safe in any thread."""
    _cleanups.append(clean)
    try:
        yield
    finally:
        _cleanups.remove(clean)


# --- A command ---


class EarlySignals:
    """Context manager in which signals end a process of the command, and raise `Interrupted` in others.

    A `Preemption` can replace its handlers. Python can drop an exception that a signal handler raises, e.g. inside a
    finalizer; `check_early` raises it again. Ignored signals stay ignored, as under `nohup`.

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
        self._told_by: Callable[[Any], Any] = sys.unraisablehook

    def __enter__(self) -> Self:
        global _early
        if _in_main_thread():
            for number in SIGNALS:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self.handle)
            _early = self
            self._told_by = sys.unraisablehook
            sys.unraisablehook = self._lost
        return self

    def __exit__(self, *_: object) -> None:
        global _early
        if _early is self:
            _early = None
            sys.unraisablehook = self._told_by
        give_back(self._before)

    def _lost(self, what: Any) -> None:
        """Called when Python drops an exception; stays silent for `Interrupted`, which `check_early` raises again."""
        if not isinstance(what.exc_value, Interrupted):
            self._told_by(what)

    def handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:  # a forked child ends as it would without this handler
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        interrupt(number)


_early: EarlySignals | None = None


def is_early() -> bool:
    """Returns whether a command runs that has not started to train."""
    return _early is not None


def interrupt(number: int) -> None:
    """Ends the process of a command, or raises `Interrupted`."""
    if watch is not None:
        watch.end(number)
    if _early is not None:
        _early.number = number
    raise Interrupted(number)


def check_early() -> None:
    """Raises `Interrupted` if a signal arrived early and Python dropped its exception."""
    if _early is not None and _early.number is not None and _in_main_thread():
        raise Interrupted(_early.number)


def give_back(handlers: dict[int, Any]) -> None:
    """Restores the handlers that `signal.signal` returned."""
    for number, handler in handlers.items():
        # None stands for a handler written in C, which Python cannot restore.
        signal.signal(number, signal.SIG_DFL if handler is None else handler)
    handlers.clear()


def _in_main_thread() -> bool:
    import threading

    return threading.current_thread() is threading.main_thread()
