"""What surrounds the steps of a run, as callbacks: a line in the log, skipped steps, evaluation, checkpoints.

`Progress`, `Watchdog`, `StepProfiler`, `Preemption` and `Rollback` are callbacks too, each in its own file.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import jax

if TYPE_CHECKING:
    from meshwright.checkpoint import Checkpoints
    from meshwright.loop.fit import Loop
    from meshwright.loop.setup import RunSetup
    from meshwright.train import NonFiniteGuard, RunState


@dataclass
class StepRecord:
    """A step whose metrics have arrived.

    Args:
        number: of the step.
        metrics: what the step returned, as Python's numbers.
        first_row: where its batch began in the data.
        seconds: how long it took since the step before, over all.
        spent: which part of that went to something else: waiting for data, evaluation, checkpoints.
        line: its line in the log, which callbacks may add to.
    """

    number: int
    metrics: dict[str, float]
    first_row: int
    seconds: float
    spent: dict[str, float]
    line: dict[str, Any] = field(default_factory=dict)


class Callback:
    """Something that takes part in a loop; the hooks of one that does nothing.

    The loop calls the hooks of all its callbacks in their order. `loop` shows where it stands (`number`, `state`,
    `batches`) and what a callback can do there (`tell`, `timed`, `log`).

    Example:
        >>> class StopWhenGood(Callback):
        ...     def wants_stop(self, loop):
        ...         return loop.last_metrics.get("loss", 9.0) < 0.1
    """

    def before_step(self, loop: Loop) -> None:
        """Called before step `loop.number + 1` is started."""

    def on_metrics(self, loop: Loop, record: StepRecord) -> None:
        """Called when a step's metrics have arrived: after the next step was started, so that no device waits."""

    def wants_stop(self, loop: Loop) -> bool:
        """Says whether the run should end; asked after every step."""
        return False

    def is_due(self, loop: Loop) -> bool:
        """Says whether `after_step` has something to do, for which the metrics of all steps must have arrived."""
        return False

    def after_step(self, loop: Loop) -> bool:
        """Acts between two steps. True: the loop was moved to another step, so the callbacks after it wait for that."""
        return False

    def on_phase(self, loop: Loop, text: str) -> None:
        """Called when something long begins, such as an evaluation."""

    def on_rollback(self, loop: Loop) -> None:
        """Called when the loop has gone back to a checkpoint."""

    def on_end(self, loop: Loop, why: str) -> None:
        """Called once all metrics have arrived: "finished", "preempted" or "out of data"."""

    def on_exit(self, loop: Loop) -> None:
        """Called at the very end, also after an error."""


@dataclass
class StepLog(Callback):
    """Logs every step: its metrics, and the learning rate, tokens per second, MFU and memory.

    Args:
        learning_rates: of each step.
        counts_tokens: whether what the loss counts are tokens, whose number per second is told.
        flops_per_step: what the model needs, over all devices; with `peak_flops` of them it gives MFU.
    """

    learning_rates: Any = None
    counts_tokens: bool = True
    flops_per_step: float | None = None
    peak_flops: float | None = None

    def on_metrics(self, loop: Loop, record: StepRecord) -> None:
        from meshwright.loop.logging.memory_use import read_memory

        line, metrics = record.line, record.metrics
        if self.learning_rates is not None:
            # A skipped step does not count for the schedule.
            taken = max(0, record.number - 1 - int(metrics.get("skipped", 0)))
            line["learning_rate"] = float(self.learning_rates[taken])
        training = record.seconds - record.spent.get("eval", 0.0)
        if "tokens" in metrics and self.counts_tokens:
            line["tokens_per_second"] = metrics["tokens"] / training
        if self.flops_per_step and self.peak_flops:
            line["mfu"] = self.flops_per_step / training / self.peak_flops
        line["memory_bytes"] = read_memory().of_a_step
        loop.log.metrics(record.number, line)


@dataclass
class SkippedSteps(Callback):
    """Tells about steps that were skipped because something was not finite, and stops after too many in a row."""

    guard: NonFiniteGuard

    def on_metrics(self, loop: Loop, record: StepRecord) -> None:
        batch = f"of rows from {record.first_row} on"
        told = self.guard.check(record.metrics, step=record.number, batch_id=batch)
        if told is not None:
            loop.tell("skipped", record.number, told)


@dataclass
class Evaluation(Callback):
    """Evaluates every so many steps and at the end, and logs the metrics under `eval/`.

    Args:
        evaluate: from a state to metrics.
        evaluated_at: a step whose evaluation is in the log already.
    """

    evaluate: Callable[[RunState], Mapping[str, float]]
    every: int
    evaluated_at: int | None = None

    def before_step(self, loop: Loop) -> None:
        if loop.number and self.is_due(loop):  # the run was stopped right before it
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
        """Evaluates the state as it is."""
        loop.phase("evaluating")
        with loop.timed("eval"):
            found = {f"eval/{name}": float(value) for name, value in self.evaluate(loop.state).items()}
        self.evaluated_at = loop.number
        loop.log.metrics(loop.number, {"time": time.time(), **found})
        loss = found.get("eval/loss")
        if loss is not None:
            loop.tell("eval", loop.number, f"step {loop.number}: evaluation loss {loss:.4f}", loss=loss)
        loop.last_metrics = {**loop.last_metrics, **found}


def make_evaluation(setup: RunSetup) -> Callable[[RunState], Mapping[str, float]] | None:
    """Returns the mean of a run's metrics over its evaluation batches, as a function of a state; None without any."""
    from meshwright.train import make_eval_step

    config, source, count = setup.config, setup.source, setup.config.run.eval_batches
    if not config.run.eval_every:
        return None
    step = make_eval_step(setup.job, setup.layout, view=config.placement.view, precision=setup.precision)
    if source.evaluation(step, count) is None:
        setup.tell(f"there is no evaluation: {source.why_no_evaluation}")
        return None

    def evaluate(state: RunState) -> Mapping[str, float]:
        sums, weight = dict[str, float](), 0.0
        for batch in source.evaluation(step, count) or ():
            found = {name: float(value) for name, value in jax.device_get(step(state, batch.arrays)).items()}
            tokens = found.pop("tokens", 1.0)
            weight += tokens
            for name, value in found.items():
                sums[name] = sums.get(name, 0.0) + tokens * value
        return {name: total / weight for name, total in sums.items()}

    return evaluate


@dataclass
class Checkpointing(Callback):
    """Saves every so many steps and at the end.

    Args:
        every: 0 saves at the end only.
        facts: returns what is written beside a checkpoint, apart from the position in the data.
    """

    checkpoints: Checkpoints
    every: int = 0
    facts: Callable[[], Mapping[str, Any]] = dict

    def is_due(self, loop: Loop) -> bool:
        return bool(self.every) and loop.number % self.every == 0 and loop.number < loop.num_steps

    def after_step(self, loop: Loop) -> bool:
        if self.is_due(loop):
            self.save(loop)
        return False

    def on_end(self, loop: Loop, why: str) -> None:
        from meshwright.distributed.agreement import from_first

        self.save(loop)
        self.checkpoints.wait()
        found = from_first(max((step for step in self.checkpoints.steps() if step <= loop.number), default=-1))
        loop.last_saved = None if found < 0 else found

    def save(self, loop: Loop) -> None:
        """Saves the state as it is."""
        with loop.timed("checkpoint"):
            # First the log: what comes before a checkpoint is never computed again.
            loop.log.flush(durable=True)
            facts = {**self.facts(), "data": dict(loop.batches.state)}
            self.checkpoints.save(loop.state, step=loop.number, layout=loop.step.layout, facts=facts)
