"""Checked standard output: a full disk or a closed pipe is an error of the command, in one line."""

from __future__ import annotations

import contextlib
import errno
import sys
from collections.abc import Iterator
from typing import Any, TextIO, cast

from meshwright.errors import MeshwrightError
from meshwright.loop.logging.progress import Nowhere, let_go


class OutputError(MeshwrightError):
    """The output of a command could not be written."""


class Checked:
    """A stream whose failed writes raise `OutputError`, the first time; what is written after that is discarded.

    Args:
        stream: the stream; None stands for one that was closed before the process started.

    Example:
        >>> with open("/dev/full", "w") as full:
        ...     output = Checked(full)
        ...     output.write("all of it")
        ...     output.flush()
        Traceback (most recent call last):
        meshwright.cli.stdout.OutputError: cannot write to stdout: No space left on device.
    """

    def __init__(self, stream: TextIO | None) -> None:
        self._stream, self._failed = stream, False

    def write(self, text: str) -> int:
        with self._checked() as stream:
            if stream is not None:
                stream.write(text)
        return len(text)

    def flush(self) -> None:
        if self._stream is not None:
            with self._checked() as stream:
                if stream is not None:
                    stream.flush()

    def isatty(self) -> bool:
        return self._stream is not None and self._stream.isatty()

    @contextlib.contextmanager
    def _checked(self) -> Iterator[TextIO | None]:
        try:
            if self._stream is None and not self._failed:
                raise OSError(errno.EBADF, "it is closed")
            yield None if self._failed else self._stream
        except OSError as error:
            self._failed = True
            if self._stream is not None:
                let_go(self._stream)
            raise OutputError(f"cannot write to stdout: {error.strerror or error}.") from None

    def __getattr__(self, name: str) -> Any:
        return getattr(Nowhere() if self._stream is None else self._stream, name)


@contextlib.contextmanager
def checked_output() -> Iterator[None]:
    """Makes stdout checked within the context, also for text that Python buffers until the end."""
    before = sys.stdout
    checked = Checked(before)
    sys.stdout = cast(TextIO, checked)
    try:
        yield
        checked.flush()
    except SystemExit:  # tyro printed its help
        checked.flush()
        raise
    finally:
        sys.stdout = before
        let_go(before)


def print_checked(text: str) -> None:
    """Prints data to the original stdout, also while a training run ignores failing output.

    Example:
        >>> print_checked("steps: 300")
        steps: 300
    """
    stream = sys.stdout
    while hasattr(stream, "_stream"):
        stream = stream._stream
    output = Checked(None if isinstance(stream, Nowhere) else stream)
    output.write(text if text.endswith("\n") else f"{text}\n")
    output.flush()
