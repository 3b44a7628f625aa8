"""Progress output: a live line on a terminal, a plain line every few seconds elsewhere."""

from __future__ import annotations

import contextlib
import io
import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Self, TextIO, cast

import jax

from meshwright.interrupts import check_early
from meshwright.layout import format_bytes
from meshwright.loop.callbacks import Callback, StepRecord

if TYPE_CHECKING:
    from meshwright.loop.fit import Loop


class Steady:
    """A stream whose writes never fail: output to a closed pipe or a full disk is dropped.

    Example:
        >>> broken, writes = os.pipe()
        >>> os.close(broken)
        >>> with open(writes, "w") as pipe:
        ...     print("a line", file=steady(pipe), flush=True)
        ...     let_go(pipe)
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with self._survived():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self._survived():
            self._stream.flush()

    @contextlib.contextmanager
    def _survived(self) -> Iterator[None]:
        try:
            yield
        except OSError:
            pass
        except ValueError:
            if not self._stream.closed:  # an encoding error is not ignored
                raise

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class Nowhere(io.TextIOBase):
    """A stream that discards everything."""

    def write(self, text: str) -> int:
        return len(text)


def steady(stream: TextIO | None) -> TextIO:
    """Returns a `Steady` stream; for None, a closed stream, it discards everything."""
    if isinstance(cast(object, stream), Steady):
        return cast(TextIO, stream)
    return cast(TextIO, Steady(stream or cast(TextIO, Nowhere())))


@contextlib.contextmanager
def steady_output() -> Iterator[None]:
    """Makes stdout and stderr steady within the context, for jobs and libraries too."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = steady(sys.stdout), steady(sys.stderr)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
        for stream in before:
            let_go(stream)


def let_go(stream: TextIO | None) -> None:
    """Discards unwritable output of a stream, which Python would otherwise flush again at exit and fail."""
    if stream is None or stream.closed:
        return
    try:
        stream.flush()
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
        with contextlib.suppress(OSError):
            stream.flush()


class Progress(Callback):
    """Shows step, loss, tokens per second, the remaining time, MFU and memory.

    Args:
        total_steps: the last step of the run.
        start_step: the step that the run starts or resumes at.
        tokens_per_step: used to compute the speed if `update` gets no `tokens_per_second`.
        stream: stream to write to; None shows nothing, for all ranks but 0.
        plain_seconds: seconds between lines if the stream is not a terminal.

    Example:
        >>> progress = Progress(1000, tokens_per_step=4096, stream=sys.stdout)
        >>> progress.update(1, {"loss": 5.5452, "mfu": 0.4123, "memory_bytes": 3 * 2**30})
        step 1/1000  loss 5.545  MFU 41.2%  memory 3.0 GiB
        >>> progress.say("saved step 1")
        saved step 1
        >>> progress.close()
    """

    def __init__(
        self,
        total_steps: int,
        *,
        start_step: int = 0,
        tokens_per_step: int | None = None,
        stream: TextIO | None = sys.stderr,
        plain_seconds: float = 10.0,
    ) -> None:
        self.total_steps, self.tokens_per_step = total_steps, tokens_per_step
        self._step, self._metrics = start_step, dict[str, Any]()
        stream = steady(stream) if stream is not None else None
        self._stream, self._plain_seconds = stream, plain_seconds
        self._next_line = -math.inf
        self._phase: str | None = "starting"
        self._times: deque[tuple[float, int]] = deque(maxlen=64)
        self._live: Any = None
        if stream is not None and stream.isatty():
            self._live = _start_live(self, stream)

    def update(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Shows a finished step; waits for metrics that are JAX arrays."""
        now = time.monotonic()
        self._times.append((now, step))
        self._step, self._metrics, self._phase = step, dict(metrics), None
        if self._stream is None or self._live is not None:
            return
        if now >= self._next_line or step >= self.total_steps:
            self._next_line = now + self._plain_seconds
            self._print("  ".join([f"step {step}/{self.total_steps}", *self.figures()]))

    def phase(self, text: str) -> None:
        """Shows a phase such as compiling or evaluating on the live line, until the next step."""
        self._phase = text

    def on_metrics(self, loop: Loop, record: StepRecord) -> None:
        self.update(record.number, record.line)

    def on_phase(self, loop: Loop, text: str) -> None:
        self.phase(text)

    def say(self, text: str) -> None:
        """Prints a line above the live one."""
        if self._live is not None:
            self._live.console.print(text, markup=False, highlight=False, soft_wrap=True)
        elif self._stream is not None:
            self._print(text)

    def close(self) -> None:
        """Stops the live line and leaves its last state on the screen."""
        if self._live is not None:
            live, self._live = self._live, None
            live.stop()
            self._stream = None

    def figures(self) -> list[str]:
        """Returns the figures of the last step, as text."""
        known, rate = self._metrics, self._rate()
        speed = known.get("tokens_per_second", (rate or 0.0) * (self.tokens_per_step or 0))
        left = None if rate is None else max(0, self.total_steps - self._step) / rate
        found = (
            f"{self._phase} ..." if self._phase else "",
            f"loss {float(known['loss']):.3f}" if "loss" in known else "",
            f"{_short(speed)} tokens/s" if speed else "",
            f"ETA {_clock(left)}" if left is not None else "",
            f"MFU {float(known['mfu']):.1%}" if known.get("mfu") is not None else "",
            f"memory {format_bytes(int(known['memory_bytes']))}" if known.get("memory_bytes") else "",
        )
        return [text for text in found if text]

    @property
    def step(self) -> int:
        """The last finished step."""
        return self._step

    def _rate(self) -> float | None:
        """Returns recent steps per second, without the first step, which compiles."""
        if len(self._times) < 2:
            return None
        (start, first), (end, last) = self._times[0], self._times[-1]
        return (last - first) / (end - start) if end > start and last > first else None

    def _print(self, text: str) -> None:
        assert self._stream is not None
        print(text, file=self._stream, flush=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Voice:
    """Prints messages on process 0, above the progress line if there is one; `event` logs them too."""

    def __init__(self, say: Callable[[str], None] | None) -> None:
        self.say = say or (lambda text: print(text, file=steady(sys.stderr), flush=True))
        self.shows = say is None and jax.process_index() == 0
        self.progress: Progress | None = None
        self.log: Any = None

    def __call__(self, text: str) -> None:
        check_early()
        if jax.process_index() != 0:
            return
        if self.progress is not None and self.shows:
            self.progress.say(text)
        else:
            self.say(text)

    def event(self, kind: str, step: int, text: str) -> None:
        if self.log is not None:
            self.log.event(kind, step, text)
        self(text)

    def end_progress(self) -> None:
        """Stops the live line; later messages are printed below it."""
        if self.progress is not None:
            self.progress.close()
            self.progress = None


def _start_live(progress: Progress, stream: TextIO) -> Any:
    from rich.console import Console
    from rich.live import Live
    from rich.progress_bar import ProgressBar
    from rich.spinner import Spinner
    from rich.table import Table
    from rich.text import Text

    spinner = Spinner("dots", style="cyan")

    class Line:
        """One line, redrawn a few times per second; the last figures are dropped if they do not fit."""

        def __rich_console__(self, console: Any, options: Any) -> Any:
            counter = f"step {progress.step}/{progress.total_steps}"
            figures = progress.figures()

            def room() -> int:
                return int(options.max_width) - len(counter) - sum(map(len, figures)) - 2 * len(figures) - 6

            while len(figures) > 1 and room() < 8:
                figures.pop()
            row = Table.grid(padding=(0, 2, 0, 0))
            cells: list[Any] = [spinner if progress.step < progress.total_steps else Text("✓", style="green")]
            if room() >= 8:
                cells.append(ProgressBar(progress.total_steps, progress.step, width=min(room(), 40)))
            cells += [Text(counter, style="bold"), *map(Text, figures)]
            for _ in cells:
                row.add_column(no_wrap=True)
            row.add_row(*cells)
            yield row

    live = Live(Line(), console=Console(file=stream), refresh_per_second=4)
    live.start()
    return live


def _short(number: float) -> str:
    """Formats a number with three digits and a suffix.

    >>> [_short(number) for number in (7.0, 950.0, 12_345.0, 4_560_000.0)]
    ['7', '950', '12.3k', '4.56M']
    """
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            shown = number / size
            return f"{shown:.{0 if shown >= 100 else 1 if shown >= 10 else 2}f}{letter}"
    return f"{number:.0f}"


def _clock(seconds: float) -> str:
    """Formats a duration.

    >>> [_clock(seconds) for seconds in (5, 75, 3_725, 200_000)]
    ['0:05', '1:15', '1:02:05', '2d 7:33:20']
    """
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days}d {hour}:{minute:02}:{second:02}"
    return f"{hour}:{minute:02}:{second:02}" if hour else f"{minute}:{second:02}"
