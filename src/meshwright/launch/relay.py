"""The output of a rank: all of it into a log file, its last lines for the report, and readable lines for the terminal.

On the terminal, a traceback becomes one line that names the error and the log, and the messages of the C++ runtimes
(`E0000 00:00:1.2 ...`) are left out; the log has both.
"""

from __future__ import annotations

import contextlib
import re
import threading
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO

from meshwright.launch.messages import shorten

_TRACEBACK = "Traceback (most recent call last):"
_CHAINED = ("During handling of the above exception", "The above exception was the direct cause")
_RUNTIME = re.compile(
    r"[IWEF]\d{4} \d\d:\d\d:|WARNING: All log messages before absl|\*\*\* Check failure stack"
    r"|.*Expected number of connected peer ranks is"
)
_FRAME = re.compile(r"\s+@\s+0x[0-9a-f]+")


class Reader:
    """Turns the lines of a rank into lines for the terminal.

    Example:
        >>> reader = Reader("rank-0.log")
        >>> text = '''step 1
        ... Traceback (most recent call last):
        ...   File "x.py", line 3, in f
        ...     g()
        ... ValueError: no
        ... E1118 12:00:00.1 1 client.cc:44] lost
        ... step 2'''
        >>> [shown for line in text.splitlines() for shown in reader.feed(line)]
        ['step 1', 'ValueError: no (traceback in rank-0.log)', 'step 2']
    """

    def __init__(self, log: Path | str) -> None:
        self._log = log
        self._inside = False

    def feed(self, line: str) -> list[str]:
        """Takes a line and returns the lines to show."""
        if _RUNTIME.match(line) or _FRAME.match(line):
            return []
        if line.lstrip("| +").startswith(_TRACEBACK):
            self._inside = True
            return []
        if not self._inside:
            return [] if line.startswith(_CHAINED) else [line]
        if not line.strip() or line[0] in " \t|+" or line.startswith(_CHAINED):
            return []
        self._inside = False  # the line with the error
        return [f"{shorten(line)} (traceback in {self._log})"]


class Relay:
    """A thread that reads the output of a rank until it ends.

    Args:
        pipe: the output of the rank.
        log: file to append everything to.
        show: called with each line for the terminal; None shows nothing.
    """

    def __init__(self, pipe: IO[bytes], log: Path, show: Callable[[str], None] | None) -> None:
        self.tail: deque[str] = deque(maxlen=50)
        self._pipe, self._log, self._show = pipe, log, show
        self._thread = threading.Thread(target=self._read, name=f"relay {log.name}", daemon=True)
        self._thread.start()

    @property
    def message(self) -> str:
        """The last line that says something; see `last_message`."""
        return last_message(self.tail)

    def finish(self, seconds: float = 2.0) -> None:
        """Waits until the rank's output has been read; a grandchild may keep the pipe open for longer."""
        self._thread.join(seconds)

    def silence(self) -> None:
        """Shows nothing from now on."""
        self._show = None

    def _read(self) -> None:
        reader = Reader(self._log)
        log: IO[bytes] | None = None
        with self._pipe, contextlib.ExitStack() as stack:
            for data in self._pipe:
                with contextlib.suppress(OSError):  # a full disk: the terminal and the report still get the line
                    log = log or stack.enter_context(open(self._log, "ab", buffering=0))
                    log.write(data)
                line = data.decode(errors="replace").rstrip("\r\n")
                self.tail.append(line)
                show = self._show
                for shown in reader.feed(line):
                    if show is not None:
                        show(shown)


def last_message(lines: Iterable[str]) -> str:
    """Returns the last line that says something, or the last error if there is one.

    Example:
        >>> last_message(["step 1", "error: no space", "hint: free some", "-----"])
        'no space'
    """
    told = [line for line in lines if line.strip(" -*=") and not _RUNTIME.match(line) and not _FRAME.match(line)]
    errors = [line for line in told if line.startswith("error: ") or re.match(r"[\w.]*(Error|Exception)\b", line)]
    return (errors or told or [""])[-1].removeprefix("error: ")
