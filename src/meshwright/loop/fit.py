"""The loop: step after step, with callbacks around them.

While a device computes one step the host prepares the next: metrics of step n are fetched after step n + 1 was started,
so that nothing waits for a number that is only shown. Whatever needs the true present (a checkpoint, an evaluation, the
end) first fetches what is still out.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import numpy as np

from meshwright.loop.callbacks import Callback, StepRecord
from meshwright.loop.logging.profiler import StepProfiler
from meshwright.loop.logging.run_log import RunLog
from meshwright.train.state import RunState
from meshwright.train.step import Step

Why = Literal["finished", "preempted", "out of data"]


@dataclass(frozen=True)
class Result:
    """How a run ended: its last state, the step it stands at, its last metrics, and whether that step is saved.

    Args:
        last_saved: the last step that is; None where there is none.
        skipped: how many of its steps were skipped, since something was not finite.
    """

    state: RunState
    step: int
    why: Why
    metrics: Mapping[str, float]
    saved: bool = False
    last_saved: int | None = None
    skipped: int = 0

    @property
    def mostly_skipped(self) -> bool:
        """Whether it came to its end, and was trained by less than half of its steps."""
        return self.why != "preempted" and 2 * self.skipped > self.step

    def problems(self) -> list[str]:
        """Returns why a run that came to its end did not end well."""
        problems = []
        if self.mostly_skipped:
            learned = "nothing was learned" if self.skipped == self.step else "little was learned"
            problems.append(
                f"{self.skipped} OF {self.step} STEPS WERE SKIPPED, since something was not finite: {learned}. A lower "
                "--learning-rate, or other data, may help"
            )
        if not self.saved:
            last = self.last_saved
            saved = f"step {last} is the last that is saved" if last is not None else "no step is saved"
            lost = f"those after it, up to {self.step}," if last is not None else f"all {self.step}"
            problems.append(f"step {self.step} COULD NOT BE SAVED: {saved}; {lost} exist nowhere")
        return problems


def fit(loop: Loop, state: RunState, batches: Any) -> Result:
    """Takes a state from its step to `loop.num_steps`, on batches with a `state` that says where they stand."""
    return loop.run(state, batches)


class Loop:
    """Steps up to `num_steps`, and the callbacks around them, in the order in which they are called.

    Args:
        say: where to say what happens, besides the log's events.

    Attributes:
        number: the last step that was started.
        ticks: how many steps were started in all; unlike `number`, it never goes back.
        state: after that step.
        batches: where the next batch comes from.
        last_metrics: of the last step whose metrics have arrived, with those of evaluations since.
        last_saved: the last step that is saved, known at the end.
    """

    state: RunState
    batches: Any

    def __init__(
        self,
        step: Step,
        num_steps: int,
        log: RunLog,
        callbacks: Sequence[Callback] = (),
        *,
        say: Callable[[str], None] | None = None,
    ) -> None:
        self.step, self.num_steps, self.log, self.callbacks, self.say = step, num_steps, log, callbacks, say
        self.number = self.ticks = 0
        self.last_metrics: dict[str, float] = {}
        self.last_saved: int | None = None
        self._pending: deque[tuple[int, Any, int]] = deque()
        self._spent: dict[str, float] = {}

    def run(self, state: RunState, batches: Any) -> Result:
        """Takes a state from its step to the last one; see `fit`."""
        self.state, self.batches = state, batches
        self.number = self.ticks = int(state.step)
        self._last_seen = time.perf_counter()
        why: Why = "finished"
        try:
            while why == "finished" and self.number < self.num_steps:
                if not self._start_step():
                    why = "out of data"
                # Asked at every step: several processes agree on a step by asking.
                elif any(callback.wants_stop(self) for callback in self.callbacks):
                    why = "preempted" if self.number < self.num_steps else "finished"
                else:
                    self._between_steps()
            self._catch_up()
            if why == "out of data":
                self.tell("finish", self.number, f"the data ended after {self.number} of {self.num_steps} steps")
            for callback in self.callbacks:
                callback.on_end(self, why)
        except BaseException as error:
            self.log.event("error", self.number, f"{type(error).__name__}: {error}")
            raise
        finally:
            for callback in self.callbacks:
                callback.on_exit(self)
            self.batches.close()
        saved, skipped = self.last_saved == self.number, int(self.state.skipped)
        return Result(self.state, self.number, why, self.last_metrics, saved, self.last_saved, skipped)

    # --- What callbacks use ---

    @property
    def in_flight(self) -> list[Any]:
        """The metrics of steps that were started, and have not been fetched."""
        return [metrics for _, metrics, _ in self._pending]

    def tell(self, kind: str, step: int, text: str, **facts: Any) -> None:
        """Writes an event down, and says it."""
        self.log.event(kind, step, text, **facts)
        if self.say is not None:
            self.say(text)

    @contextlib.contextmanager
    def timed(self, what: str) -> Iterator[None]:
        """Counts the time inside for `what`, and not for the step."""
        began = time.perf_counter()
        yield
        self._spent[what] = self._spent.get(what, 0.0) + time.perf_counter() - began

    def phase(self, text: str) -> None:
        """Lets all callbacks know that something long begins."""
        for callback in self.callbacks:
            callback.on_phase(self, text)

    def go_back(self, state: RunState, batches: Any) -> None:
        """Continues from an earlier state, on other batches."""
        self.state, self.batches, self.number = state, batches, int(state.step)
        for callback in self.callbacks:
            callback.on_rollback(self)

    # --- One step ---

    def _start_step(self) -> bool:
        """Starts the next step, then fetches the metrics of the one before; False where the data ended."""
        for callback in self.callbacks:
            callback.before_step(self)
        with self.timed("data"):
            batch = next(self.batches, None)
        if batch is None:
            return False
        with StepProfiler.annotate(self.number + 1):
            self.state, metrics = self.step(self.state, batch.arrays)
        self.number += 1
        self.ticks += 1
        self._pending.append((self.number, metrics, batch.first_row))
        while len(self._pending) > 1:
            self._fetch()
        return True

    def _between_steps(self) -> None:
        if self.number == self.num_steps or any(callback.is_due(self) for callback in self.callbacks):
            self._catch_up()
        for callback in self.callbacks:
            if callback.after_step(self):
                return

    def _catch_up(self) -> None:
        """Fetches the metrics of all steps that were started."""
        while self._pending:
            self._fetch()

    def _fetch(self) -> None:
        number, arrays, first_row = self._pending.popleft()
        metrics = {name: value.item() for name, value in jax.device_get(arrays).items() if np.ndim(value) == 0}
        now = time.perf_counter()
        seconds, self._last_seen = now - self._last_seen, now
        spent, self._spent = self._spent, {}
        line = {name: value for name, value in metrics.items() if name not in ("bad_leaf", "skipped_in_a_row")}
        parts = {**spent, "step": max(0.0, seconds - sum(spent.values()))}
        line |= {"time": time.time(), "seconds": {name: round(part, 6) for name, part in parts.items()}}
        record = StepRecord(number, metrics, first_row, seconds, spent, line)
        self.last_metrics = line  # callbacks add to it
        for callback in self.callbacks:
            callback.on_metrics(self, record)
