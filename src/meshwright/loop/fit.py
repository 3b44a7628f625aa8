"""The training loop, with callbacks around each step.

The host runs one step ahead of the devices: it fetches the metrics of step n after starting step n + 1. Before a
checkpoint, an evaluation or the end, the loop first fetches all pending metrics.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax

from meshwright.loop.callbacks import Callback, StepRecord
from meshwright.loop.logging.compiles import StepCompiles, compile_clock
from meshwright.loop.logging.profiler import StepProfiler
from meshwright.loop.logging.run_log import RunLog
from meshwright.loop.logging.trackers import plain
from meshwright.train.state import RunState
from meshwright.train.step import Step
from meshwright.tree import flatten_tree

Why = Literal["finished", "preempted", "out of data", "stopped early"]


@dataclass(frozen=True)
class Result:
    """The outcome of a run.

    Args:
        state: the final state.
        step: the last step.
        why: why the run ended.
        metrics: the last metrics.
        saved: whether the last step is saved.
        last_saved: the last saved step, or None.
        skipped: number of steps skipped because of non-finite values.
        best: step and value of the best evaluation, if the run watched one.
    """

    state: RunState
    step: int
    why: Why
    metrics: Mapping[str, Any]
    saved: bool = False
    last_saved: int | None = None
    skipped: int = 0
    best: tuple[int, float] | None = None

    @property
    def mostly_skipped(self) -> bool:
        """Whether the run ended after skipping more than half of its steps."""
        return self.why != "preempted" and 2 * self.skipped > self.step

    def problems(self) -> list[str]:
        """Returns the problems of a run that ended, such as a failed last save.

        Example:
            >>> Result(state=None, step=4, why="finished", metrics={}, saved=False, last_saved=2).problems()
            ['could not save step 4; the last saved step is 2, so steps 3-4 are lost']
        """
        problems = []
        if self.mostly_skipped:
            learned = "nothing" if self.skipped == self.step else "little"
            problems.append(
                f"{self.skipped} of {self.step} steps were skipped because of non-finite values, so the model learned "
                f"{learned}; try a lower --learning-rate or other data"
            )
        if not self.saved:
            last = self.last_saved
            saved = f"the last saved step is {last}" if last is not None else "no step is saved"
            first = (last or 0) + 1
            lost = f"steps {first}-{self.step} are" if first < self.step else f"step {self.step} is"
            problems.append(f"could not save step {self.step}; {saved}, so {lost} lost")
        return problems


def fit(loop: Loop, state: RunState, batches: Any) -> Result:
    """Trains from `state.step` to `loop.num_steps`.

    Args:
        batches: iterator of batches, with a `state` (its position in the data) and `close()`.

    Example:
        >>> import tempfile
        >>> import numpy as np
        >>> from types import SimpleNamespace as Namespace
        >>> class Batches:
        ...     state = {}
        ...     __next__ = lambda self: Namespace(arrays={}, first_row=0)
        ...     close = lambda self: None
        >>> def step(state, batch):  # stands for `make_train_step(...)`
        ...     return Namespace(step=state.step + 1, skipped=0), {"loss": np.float32(2.5)}
        >>> loop = Loop(step, 3, RunLog(tempfile.mkdtemp(), tensorboard=False))
        >>> result = fit(loop, Namespace(step=0, skipped=0), Batches())
        >>> result.step, result.why, result.metrics["loss"]
        (3, 'finished', 2.5)
    """
    return loop.run(state, batches)


class Loop:
    """Runs steps up to `num_steps`, with callbacks around them.

    Args:
        callbacks: callbacks, in the order of their calls.
        say: function that prints a line; events go to the log as well.

    Attributes:
        number: the last started step.
        ticks: number of started steps; unlike `number`, it does not decrease on a rollback.
        state: the state after step `number`.
        batches: iterator of the next batches.
        last_metrics: the latest metrics, including evaluation.
        last_saved: the last saved step, set at the end.
        best: step and value of the best evaluation so far, if a callback watches one.
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
        self.last_metrics: dict[str, Any] = {}
        self.last_saved: int | None = None
        self.best: tuple[int, float] | None = None
        self._pending: deque[tuple[int, Any, int, Any]] = deque()
        self._spent: dict[str, float] = {}
        self._compiles, self._compiled = StepCompiles(self.tell), 0.0

    def run(self, state: RunState, batches: Any) -> Result:
        """Trains from `state.step` to `num_steps`; see `fit`."""
        self.state, self.batches = state, batches
        self.number = self.ticks = int(state.step)
        self._last_seen, self._compiled = time.perf_counter(), compile_clock().totals().seconds
        why: Why = "finished"
        try:
            while why == "finished" and self.number < self.num_steps:
                over = self._start_step()
                if over is not None:
                    why = over
                # Ask at every step: processes agree on the last step through these calls.
                elif any(callback.wants_stop(self) for callback in self.callbacks):
                    why = "preempted" if self.number < self.num_steps else "finished"
                else:
                    self._between_steps()
            self._catch_up()
            if why == "out of data":
                self.tell("finish", self.number, f"out of data after {self.number} of {self.num_steps} steps")
            for callback in self.callbacks:
                callback.on_end(self, why)
        except BaseException as error:
            self.log.event("error", self.number, f"{type(error).__name__}: {error}", seconds=self.tail())
            raise
        finally:
            for callback in self.callbacks:
                callback.on_exit(self)
            self.batches.close()
        saved, skipped = self.last_saved == self.number, int(self.state.skipped)
        return Result(self.state, self.number, why, self.last_metrics, saved, self.last_saved, skipped, self.best)

    # --- For callbacks ---

    @property
    def in_flight(self) -> list[Any]:
        """The pending metrics of started steps."""
        return [metrics for _, metrics, _, _ in self._pending]

    def tell(self, kind: str, step: int, text: str, **facts: Any) -> None:
        """Logs an event and prints it."""
        self.log.event(kind, step, text, **facts)
        if self.say is not None:
            self.say(text)

    @contextlib.contextmanager
    def timed(self, what: str) -> Iterator[None]:
        """Attributes the time inside to `what` instead of the step; compilation counts separately."""
        began, compiled = time.perf_counter(), compile_clock().totals().seconds
        yield
        compiled = compile_clock().totals().seconds - compiled
        self._spent[what] = self._spent.get(what, 0.0) + max(0.0, time.perf_counter() - began - compiled)

    def tail(self) -> dict[str, float]:
        """Returns the seconds since the last step by cause, for the last event of a run."""
        _, spent = self._take_time()
        return {name: round(part, 6) for name, part in spent.items()}

    def phase(self, text: str) -> None:
        """Notifies all callbacks that a long phase begins."""
        for callback in self.callbacks:
            callback.on_phase(self, text)

    def go_back(self, state: RunState, batches: Any) -> None:
        """Continues from an earlier state, with new batches."""
        self.state, self.batches, self.number = state, batches, int(state.step)
        for callback in self.callbacks:
            callback.on_rollback(self)

    # --- One step ---

    def _start_step(self) -> Why | None:
        """Starts the next step, then fetches the metrics of the previous one; returns why not, if the run is over."""
        for callback in self.callbacks:
            callback.before_step(self)
        for callback in self.callbacks:
            if (over := callback.is_over(self)) is not None:
                return over
        with self.timed("data"):
            batch = next(self.batches, None)
        if batch is None:
            return "out of data"
        number = self.number + 1
        with StepProfiler.annotate(number), self._compiles.watched(self.state, batch.arrays, number):
            self.state, metrics = self.step(self.state, batch.arrays)
        self.number = number
        self.ticks += 1
        self._pending.append((self.number, metrics, batch.first_row, getattr(batch, "tokens", None)))
        while len(self._pending) > 1:
            self._fetch()
        return None

    def _between_steps(self) -> None:
        if self.number == self.num_steps or any(callback.is_due(self) for callback in self.callbacks):
            self._catch_up()
        for callback in self.callbacks:
            if callback.after_step(self):
                return

    def _catch_up(self) -> None:
        while self._pending:
            self._fetch()

    def _fetch(self) -> None:
        number, arrays, first_row, tokens = self._pending.popleft()
        metrics = {name: plain(value) for name, value in flatten_tree(jax.device_get(arrays), sep="/").items()}
        seconds, spent = self._take_time()
        line = {name: value for name, value in metrics.items() if name not in ("bad_leaf", "skipped_in_a_row")}
        parts = {**spent, "step": max(0.0, seconds - sum(spent.values()))}
        line |= {"time": time.time(), "seconds": {name: round(part, 6) for name, part in parts.items()}}
        line |= _by_source(line.pop("by_source", None), tokens)
        record = StepRecord(number, metrics, first_row, seconds, spent, line)
        self.last_metrics = line  # callbacks add to it
        for callback in self.callbacks:
            callback.on_metrics(self, record)

    def _take_time(self) -> tuple[float, dict[str, float]]:
        """Returns the seconds since the last call, and those of them that are not part of a step, by cause."""
        now, compiled = time.perf_counter(), compile_clock().totals().seconds
        seconds, self._last_seen = now - self._last_seen, now
        spent, self._spent = self._spent, {}
        if compiled > self._compiled:
            spent["compile"] = compiled - self._compiled
        self._compiled = compiled
        return seconds, spent


def _by_source(sums: Any, tokens: Mapping[str, int] | None) -> dict[str, float]:
    """Returns the tokens of each source of a mixture, and its loss if the batch holds any."""
    found: dict[str, float] = {f"tokens/{source}": count for source, count in (tokens or {}).items()}
    if sums is not None:
        for source, loss, count in zip(tokens or (), *sums, strict=False):
            if count:
                found[f"loss/{source}"] = loss / count
    return found
