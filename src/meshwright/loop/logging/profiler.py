"""Profiler traces of chosen steps, for xprof and Perfetto."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from meshwright.errors import MeshwrightError
from meshwright.loop.callbacks import Callback
from meshwright.loop.settings.config import parse_steps

if TYPE_CHECKING:
    from meshwright.loop.fit import Loop


class StepProfiler(Callback):
    """Callback that traces a range of steps with the JAX profiler: "10:15" traces steps 10 to 14.

    In a custom loop, call `step(n, pending)` before step n, on every process, and `close()` at the end. A run that
    resumes inside the range traces the rest of it.

    Args:
        steps: "first:stop", or None for no trace.
        folder: folder for the traces, each in a subfolder named after its time.

    Example:
        >>> profile = StepProfiler("10:15", "runs/a/profile")
        >>> profile.first, profile.stop
        (10, 15)
        >>> profile.step(9)  # no trace yet
    """

    def __init__(self, steps: str | None, folder: Path | str) -> None:
        self.first, self.stop = parse_steps(steps)
        self.folder = Path(folder)
        self.is_tracing = False

    def step(self, step: int, pending: Any = None) -> str | None:
        """Starts or stops the trace if needed, and returns a message about it.

        Args:
            step: the next step.
            pending: results of the previous step; waits for them, so that a trace holds only whole steps of the range.
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
        """Returns a context manager that marks a step in a trace, as every `Loop` does."""
        return jax.profiler.StepTraceAnnotation("train", step_num=step)

    def close(self) -> str | None:
        """Stops a running trace, and returns a message about it."""
        if not self.is_tracing:
            return None
        self.is_tracing = False
        jax.profiler.stop_trace()
        return f"trace saved in {self.folder}; view it with: xprof --logdir {self.folder}"

    def _start(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            jax.profiler.start_trace(str(self.folder))
        except RuntimeError as error:
            raise MeshwrightError(
                f"cannot start the profiler: {error}", hint="stop the other trace first; only one can run at a time."
            ) from error
        self.is_tracing = True
