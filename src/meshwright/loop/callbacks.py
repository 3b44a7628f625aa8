"""Callbacks of the training loop: skipped steps, evaluation and checkpoints.

`StepLog`, `Progress`, `Watchdog`, `StepProfiler`, `Preemption` and `Rollback` are callbacks too, each in its own file.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import jax

from meshwright.errors import StoreError

if TYPE_CHECKING:
    from meshwright.checkpoint import Checkpoints
    from meshwright.loop.decisions import RunSetup
    from meshwright.loop.fit import Loop, Why
    from meshwright.loop.sources import HeldOut
    from meshwright.train import NonFiniteGuard, RunState


@dataclass
class StepRecord:
    """A step whose metrics have arrived on the host.

    Args:
        number: the step.
        metrics: metrics that the step returned, as Python numbers, or lists of them.
        first_row: index of the first data row in its batch.
        seconds: wall time since the previous step.
        spent: seconds of that time not spent on the step, by cause: data, evaluation, checkpoints.
        line: the step's line in the log; callbacks may add to it.
    """

    number: int
    metrics: dict[str, Any]
    first_row: int
    seconds: float
    spent: dict[str, float]
    line: dict[str, Any] = field(default_factory=dict)


class Callback:
    """Base class of loop callbacks, with hooks that do nothing.

    The loop calls each hook on all its callbacks, in order. Callbacks can read `loop.number`, `loop.state` and
    `loop.batches`, and use `loop.tell`, `loop.timed` and `loop.log`.

    Example:
        >>> class StopWhenGood(Callback):
        ...     def wants_stop(self, loop):
        ...         return loop.last_metrics.get("loss", 9.0) < 0.1
    """

    def before_step(self, loop: Loop) -> None:
        """Called before step `loop.number + 1` starts."""

    def on_metrics(self, loop: Loop, record: StepRecord) -> None:
        """Called when a step's metrics arrive, which is after the next step started, so that no device waits."""

    def wants_stop(self, loop: Loop) -> bool:
        """Returns whether the run should stop; called after every step."""
        return False

    def is_over(self, loop: Loop) -> Why | None:
        """Returns why the run should end before its next step, or None; called after `before_step`."""
        return None

    def is_due(self, loop: Loop) -> bool:
        """Returns whether `after_step` needs the metrics of all steps to have arrived."""
        return False

    def after_step(self, loop: Loop) -> bool:
        """Called between steps. Returns True if it moved the loop to another step; later callbacks are then skipped."""
        return False

    def on_phase(self, loop: Loop, text: str) -> None:
        """Called when a long phase such as an evaluation begins."""

    def on_evaluation(self, loop: Loop, metrics: Mapping[str, Any]) -> None:
        """Called after an evaluation with its metrics, whose names begin with `eval/`."""

    def on_rollback(self, loop: Loop) -> None:
        """Called after the loop rolled back to a checkpoint."""

    def on_end(self, loop: Loop, why: str) -> None:
        """Called after the last metrics arrived; `why` is a `meshwright.loop.fit.Why`."""

    def on_exit(self, loop: Loop) -> None:
        """Called last, also after an error."""


@dataclass
class SkippedSteps(Callback):
    """Reports steps skipped because of non-finite values, and stops the run after too many in a row."""

    guard: NonFiniteGuard

    def on_metrics(self, loop: Loop, record: StepRecord) -> None:
        told = self.guard.check(record.metrics, step=record.number, batch_id=f"starting at row {record.first_row}")
        if told is not None:
            loop.tell("skipped", record.number, told)


@dataclass
class Evaluation(Callback):
    """Evaluates periodically and at the end, and logs the metrics under `eval/`.

    Args:
        evaluate: function from a state to metrics.
        every: steps between evaluations.
        evaluated_at: step whose evaluation is already in the log.
    """

    evaluate: Callable[[RunState], Mapping[str, Any]]
    every: int
    evaluated_at: int | None = None

    def before_step(self, loop: Loop) -> None:
        if loop.number and self.is_due(loop):  # the run stopped just before this evaluation
            self.run(loop)

    def is_due(self, loop: Loop) -> bool:
        return loop.number % self.every == 0 and self.evaluated_at != loop.number

    def after_step(self, loop: Loop) -> bool:
        if self.is_due(loop):
            self.run(loop)
        return False

    def on_rollback(self, loop: Loop) -> None:
        self.evaluated_at = loop.number

    def on_end(self, loop: Loop, why: str) -> None:
        if why != "preempted" and self.evaluated_at != loop.number:
            self.run(loop)

    def run(self, loop: Loop) -> None:
        from meshwright.loop.logging.trackers import plain

        loop.phase("evaluating")
        with loop.timed("eval"):
            found = {f"eval/{name}": plain(value) for name, value in self.evaluate(loop.state).items()}
        self.evaluated_at = loop.number
        loop.log.metrics(loop.number, {"time": time.time(), **found})
        loss = found.get("eval/loss")
        if loss is not None:
            loop.tell("eval", loop.number, f"step {loop.number}: evaluation loss {loss:.4f}", loss=loss)
        loop.last_metrics = {**loop.last_metrics, **found}
        for callback in loop.callbacks:
            callback.on_evaluation(loop, found)


def make_evaluation(setup: RunSetup) -> Callable[[RunState], Mapping[str, Any]] | None:
    """Returns a function from a state to its metrics over the evaluation batches, or None if there are none."""
    from meshwright.metrics import compute, merge
    from meshwright.train import make_eval_step
    from meshwright.tree import flatten_tree

    config, held_out = setup.config, setup.held_out
    if not config.run.eval_every:
        return None
    if held_out is None:
        setup.tell(f"evaluation is off: {setup.source.why_no_evaluation}")
        return None
    step = make_eval_step(
        setup.job,
        setup.layout,
        view=setup.step.view.view,
        precision=setup.dtypes,
        raw=True,
        ema=config.adapt.eval_ema,
    )

    def measure(state: RunState, part: HeldOut) -> Any:
        return functools.reduce(merge, (jax.device_get(step(state, batch.arrays)) for batch in part.batches(step)))

    def values_of(found: Any) -> dict[str, Any]:
        values = flatten_tree(jax.device_get(compute(found)), sep="/")
        return {name: value for name, value in values.items() if name != "tokens"}

    def evaluate(state: RunState) -> Mapping[str, Any]:
        if not held_out.parts:
            return values_of(measure(state, held_out))
        sources = {source: measure(state, part) for source, part in held_out.parts.items()}
        found = values_of(functools.reduce(merge, sources.values()))
        for source, metrics in sources.items():
            found |= {f"{name}/{source}": value for name, value in values_of(metrics).items()}
        return found

    return evaluate


@dataclass
class Checkpointing(Callback):
    """Saves a checkpoint periodically and at the end.

    Args:
        every: steps between checkpoints; 0 saves only at the end.
        facts: function that returns metadata to save besides the position in the data.
        also: function that tells whether to save at another step too, such as the best one so far.
    """

    checkpoints: Checkpoints
    every: int = 0
    facts: Callable[[], Mapping[str, Any]] = dict
    also: Callable[[Loop], bool] = lambda loop: False

    def is_due(self, loop: Loop) -> bool:
        return bool(self.every) and loop.number % self.every == 0 and loop.number < loop.num_steps

    def after_step(self, loop: Loop) -> bool:
        if self.is_due(loop) or self.also(loop):
            self.save(loop)
        return False

    def on_end(self, loop: Loop, why: str) -> None:
        from meshwright.distributed.agreement import from_first, is_first

        self.save(loop)
        found = -1
        loop.phase("saving")  # the last upload to a store may take long
        with loop.timed("checkpoint"):
            self.checkpoints.wait()
            self.checkpoints.make_durable(loop.number)
            with contextlib.suppress(StoreError):  # an unreachable store has no step; the run says so
                if is_first():
                    steps = (step for step in self.checkpoints.durable_steps() if step <= loop.number)
                    found = max(steps, default=-1)
        found = from_first(found)
        loop.last_saved = None if found < 0 else found

    def save(self, loop: Loop) -> None:
        with loop.timed("checkpoint"):
            # Flush the log first: steps before a checkpoint are never recomputed.
            loop.log.flush(durable=True)
            facts = {**self.facts(), "data": dict(loop.batches.state)}
            self.checkpoints.save(loop.state, step=loop.number, layout=loop.step.layout, facts=facts)
