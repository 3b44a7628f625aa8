"""Traces chosen steps with JAX's profiler; xprof and Perfetto show them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from meshwright.errors import MeshwrightError
from meshwright.loop.callbacks import Callback
from meshwright.loop.config import parse_steps

if TYPE_CHECKING:
    from meshwright.loop.fit import Loop


class StepProfiler(Callback):
    """Traces the steps of a range such as "10:15": 10, 11, 12, 13 and 14, as Python's slices count.

    A callback of a `Loop`. In a loop of your own, call `step(n, pending)` before step n, on every process, and
    `close()` at the end. A run that resumes inside the range traces what is left of it.

    Args:
        steps: `"first:stop"`, or None for no trace at all.
        folder: where traces go, each into a subfolder with its time.

    Example:
        >>> profile = StepProfiler("10:15", "runs/a/profile")
        >>> profile.first, profile.stop
        (10, 15)
        >>> profile.step(9)  # nothing to tell
    """

    def __init__(self, steps: str | None, folder: Path | str) -> None:
        self.first, self.stop = parse_steps(steps)
        self.folder = Path(folder)
        self.is_tracing = False

    def step(self, step: int, pending: Any = None) -> str | None:
        """Starts or ends the trace where it is time, and returns what to tell about it.

        Args:
            step: the step that comes next.
            pending: results of the step before. They are waited for, so that a trace holds its own steps, whole.
        """
        if not self.is_tracing and self.first <= step < self.stop:
            jax.block_until_ready(pending)
            self._start()
            return f"tracing steps {step} to {self.stop - 1} into {self.folder}"
        if self.is_tracing and step >= self.stop:
            jax.block_until_ready(pending)
            return self.close()
        return None

    def before_step(self, loop: Loop) -> None:
        told = self.step(loop.number + 1, loop.in_flight)
        if told is not None:
            loop.tell("profile", loop.number + 1, told)

    def on_exit(self, loop: Loop) -> None:
        told = self.close()
        if told is not None:
            loop.tell("profile", loop.number, told)

    @staticmethod
    def annotate(step: int) -> Any:
        """Returns a context manager that marks a step in a trace, as every `Loop` does; it costs next to nothing."""
        return jax.profiler.StepTraceAnnotation("train", step_num=step)

    def close(self) -> str | None:
        """Ends a trace that is going on, and returns what to tell about it."""
        if not self.is_tracing:
            return None
        self.is_tracing = False
        jax.profiler.stop_trace()
        return f"the trace is in {self.folder}; xprof --logdir {self.folder} shows it"

    def _start(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            jax.profiler.start_trace(str(self.folder))
        except RuntimeError as error:
            raise MeshwrightError(
                f"the profiler cannot start: {error}", hint="only one trace at a time; end the other one first."
            ) from error
        self.is_tracing = True
