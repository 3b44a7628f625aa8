"""The loop: step after step, with what surrounds it: logs, checkpoints, evaluation, and all that can go wrong.

While a device computes one step the host prepares the next: metrics of step n are fetched after step n + 1 was started,
so that nothing waits for a number that is only shown. Whatever needs the true present (a checkpoint, an evaluation, the
end) first fetches what is still out.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import jax
import numpy as np

from meshwright.checkpoint import Checkpoints
from meshwright.distributed.agreement import from_first
from meshwright.errors import TrainingError
from meshwright.loop.logging.memory_use import read_memory
from meshwright.loop.logging.profiler import StepProfiler
from meshwright.loop.logging.progress import Progress
from meshwright.loop.logging.run_log import RunLog
from meshwright.loop.safety.preemption import Preemption
from meshwright.loop.safety.spike import SpikeGuard
from meshwright.loop.safety.watchdog import Watchdog
from meshwright.train.guards import NonFiniteGuard
from meshwright.train.state import RunState
from meshwright.train.step import Step

COMPILES = 1800.0
"""How many seconds something may take that compiles first."""

MAX_ROLLBACKS = 3
"""Rollbacks in a row to the same checkpoint after which a run stops."""


@dataclass
class Loop:
    """What surrounds the steps of a run; everything but the first three may be left out.

    Args:
        facts: what is written beside each checkpoint, apart from the position in the data.
        evaluate: from a state to metrics, which are logged under `eval/`.
        evaluated_at: a step whose evaluation is in the log already.
        learning_rates: of each step, for the logs.
        tell: where to say what happens; above the progress by default.
        reopen: `reopen(undone, after, first_step)`, batches that go on after the second state of the data; a rollback
            needs it. What lies between the first and the second is not used again.
        counts_tokens: whether what the loss counts are tokens, whose number per second is told.
        flops_per_step: what the model needs, over all devices; with `peak_flops` of them it gives MFU.
    """

    step: Step
    num_steps: int
    log: RunLog
    progress: Progress | None = None
    checkpoints: Checkpoints | None = None
    checkpoint_every: int = 0
    facts: Mapping[str, Any] = field(default_factory=dict)
    evaluate: Callable[[RunState], Mapping[str, float]] | None = None
    eval_every: int = 0
    learning_rates: Any = None
    guard: NonFiniteGuard | None = None
    preemption: Preemption | None = None
    watchdog: Watchdog | None = None
    profile: StepProfiler | None = None
    spikes: SpikeGuard | None = None
    tell: Callable[[str], None] | None = None
    evaluated_at: int | None = None
    reopen: Callable[[Mapping[str, Any], Mapping[str, Any], int], Any] | None = None
    counts_tokens: bool = True
    flops_per_step: float | None = None
    peak_flops: float | None = None


@dataclass(frozen=True)
class Result:
    """How a run ended: its last state, the step it stands at, its last metrics, and whether that step is saved.

    Args:
        last_saved: the last step that is; None where there is none.
        skipped: how many of its steps were skipped, since something was not finite.
    """

    state: RunState
    step: int
    why: Literal["finished", "preempted", "out of data"]
    metrics: Mapping[str, float]
    saved: bool = False
    last_saved: int | None = None
    skipped: int = 0

    @property
    def mostly_skipped(self) -> bool:
        """Whether it came to its end, and was trained by less than half of its steps."""
        return self.why != "preempted" and 2 * self.skipped > self.step


def fit(loop: Loop, state: RunState, batches: Any) -> Result:
    """Takes a state from its step to `loop.num_steps`, on batches with a `state` that says where they stand."""
    return _Fit(loop, state, batches).run()


@dataclass
class _Pending:
    """A step that was started, and whose metrics are not here yet."""

    number: int
    metrics: Any
    first_row: int


class _Fit:
    def __init__(self, loop: Loop, state: RunState, batches: Any) -> None:
        self.loop, self.state, self.batches = loop, state, batches
        self.number = self.ticks = int(state.step)
        self.pending: deque[_Pending] = deque()
        self.seconds: dict[str, float] = {}
        self.last_seen = time.perf_counter()
        self.last_metrics: dict[str, float] = {}
        self.spiked = False
        self.rollbacks: dict[int, int] = {}

    def run(self) -> Result:
        why: Literal["finished", "preempted", "out of data"] = "finished"
        try:
            if self.number and self.is_evaluation_due():  # the run was stopped right before it
                self.run_evaluation()
            while why == "finished" and self.number < self.loop.num_steps:
                if not self.start_step():
                    why = "out of data"
                    self.catch_up()
                # Asked at every step: several processes agree on a step by asking.
                elif self.is_asked_to_stop():
                    why = "preempted" if self.number < self.loop.num_steps else "finished"
                    self.catch_up()
                else:
                    self.after_step()
                    if self.spiked and self.roll_back():
                        continue
            self.finish(why)
        except BaseException as error:
            self.loop.log.event("error", self.number, f"{type(error).__name__}: {error}")
            raise
        finally:
            if self.loop.profile is not None and (told := self.loop.profile.close()) is not None:
                self.tell("profile", self.number, told)
            self.batches.close()
        last_saved = self.last_saved()
        return Result(
            self.state,
            self.number,
            why,
            self.last_metrics,
            saved=last_saved == self.number,
            last_saved=last_saved,
            skipped=int(self.state.skipped),
        )

    # --- One step ---

    def start_step(self) -> bool:
        """Starts the next step, then fetches the metrics of the one before; False where the data ended."""
        if self.loop.profile is not None:
            told = self.loop.profile.step(self.number + 1, self.pending[-1].metrics if self.pending else None)
            if told is not None:
                self.tell("profile", self.number + 1, told)
        began = time.perf_counter()
        try:
            batch = next(self.batches)
        except StopIteration:
            return False
        self.spend("data", began)
        self.state, metrics = self.loop.step(self.state, batch.arrays)
        self.number += 1
        self.ticks += 1  # never goes back, as the agreement of processes on a step to stop at needs it
        self.pending.append(_Pending(self.number, metrics, batch.first_row))
        while len(self.pending) > 1:
            self.fetch()
        return True

    def catch_up(self) -> None:
        """Fetches the metrics of all steps that were started."""
        while self.pending:
            self.fetch()

    def fetch(self) -> None:
        step = self.pending.popleft()
        metrics = {name: value.item() for name, value in jax.device_get(step.metrics).items() if np.ndim(value) == 0}
        now = time.perf_counter()
        total, self.last_seen = now - self.last_seen, now
        spent, self.seconds = self.seconds, {}
        if self.loop.watchdog is not None:
            self.loop.watchdog.beat(step.number)
        told = self.describe(step.number, metrics, total, spent)
        self.loop.log.metrics(step.number, told)
        self.last_metrics = told
        if self.loop.guard is not None:
            skipped = self.loop.guard.check(metrics, step=step.number, batch_id=f"of rows from {step.first_row} on")
            if skipped is not None:
                self.tell("skipped", step.number, skipped)
        if self.loop.progress is not None:
            self.loop.progress.update(step.number, told)
        if self.loop.spikes is not None and self.loop.spikes.check(metrics["loss"]):
            self.spiked = True

    def describe(self, number: int, metrics: dict[str, float], total: float, spent: dict[str, float]) -> dict[str, Any]:
        """Returns a step's line in the log; `spent` is what else the seconds since the step before it went to."""
        told: dict[str, Any] = {"time": time.time(), **metrics}
        for name in ("bad_leaf", "skipped_in_a_row"):
            told.pop(name, None)
        if self.loop.learning_rates is not None:
            # A skipped step does not count for the schedule.
            taken = max(0, number - 1 - int(metrics.get("skipped", 0)))
            told["learning_rate"] = float(self.loop.learning_rates[taken])
        training = total - spent.get("eval", 0.0)
        if "tokens" in metrics and self.loop.counts_tokens:
            told["tokens_per_second"] = metrics["tokens"] / training
        if self.loop.flops_per_step and self.loop.peak_flops:
            told["mfu"] = self.loop.flops_per_step / training / self.loop.peak_flops
        told["memory_bytes"] = read_memory().of_a_step
        spent["step"] = max(0.0, total - sum(spent.values()))
        told["seconds"] = {name: round(seconds, 6) for name, seconds in spent.items()}
        return told

    # --- Between steps ---

    def is_asked_to_stop(self) -> bool:
        return self.loop.preemption is not None and self.loop.preemption.requested(self.ticks)

    def is_evaluation_due(self) -> bool:
        every = self.loop.eval_every
        due = self.loop.evaluate is not None and bool(every) and self.number % every == 0
        return due and self.loop.evaluated_at != self.number

    def after_step(self) -> None:
        """Evaluates and saves where it is time to."""
        loop, ends = self.loop, self.number == self.loop.num_steps
        saves = bool(loop.checkpoint_every) and self.number % loop.checkpoint_every == 0
        if self.is_evaluation_due() or saves or ends or self.spiked:
            self.catch_up()
        if self.spiked:  # a state that is not one to keep, unless there is nothing to go back to
            return
        if self.is_evaluation_due():
            self.run_evaluation()
        if saves and not ends:
            self.save()

    def run_evaluation(self) -> None:
        assert self.loop.evaluate is not None
        if self.loop.progress is not None:
            self.loop.progress.phase("evaluating")
        if self.loop.watchdog is not None:
            self.loop.watchdog.beat(self.number, allowance=COMPILES)  # the first one compiles
        began = time.perf_counter()
        found = {f"eval/{name}": float(value) for name, value in self.loop.evaluate(self.state).items()}
        self.loop.evaluated_at = self.number
        self.spend("eval", began)
        self.loop.log.metrics(self.number, {"time": time.time(), **found})
        loss = found.get("eval/loss")
        if loss is not None:
            self.tell("eval", self.number, f"step {self.number}: evaluation loss {loss:.4f}", loss=loss)
        self.last_metrics = {**self.last_metrics, **found}

    def save(self) -> None:
        checkpoints = self.loop.checkpoints
        if checkpoints is None:
            return
        began = time.perf_counter()
        # First the log: what comes before a checkpoint is never computed again.
        self.loop.log.flush(durable=True)
        facts = {**self.loop.facts, "data": dict(self.batches.state)}
        if self.loop.spikes is not None:
            facts["spikes"] = self.loop.spikes.state
        checkpoints.save(self.state, step=self.number, layout=self.loop.step.layout, facts=facts)
        self.spend("checkpoint", began)

    def roll_back(self) -> bool:
        """Returns to the last good checkpoint, to go on behind the data used since; False where there is none."""
        checkpoints, reopen = self.loop.checkpoints, self.loop.reopen
        self.spiked = False
        spikes = self.loop.spikes
        assert spikes is not None
        spikes.reset()
        if checkpoints is not None:
            checkpoints.wait()  # one that is being written counts
        has_one = checkpoints is not None and bool(from_first(int(checkpoints.latest() is not None)))
        if checkpoints is None or reopen is None or not has_one:
            self.tell("rollback", self.number, f"the loss rose at step {self.number}, and there is no checkpoint yet")
            self.after_step()
            return False
        restored = checkpoints.restore(self.loop.step.layout)
        again = self.rollbacks[restored.step] = self.rollbacks.get(restored.step, 0) + 1
        if again > MAX_ROLLBACKS:
            raise TrainingError(
                f"the loss rose again after {MAX_ROLLBACKS} rollbacks to step {restored.step}.",
                hint="lower the learning rate, or look at what the data holds there.",
            )
        after = dict(self.batches.state)
        self.batches.close()
        self.batches = reopen(restored.facts["data"], after, restored.step + 1)
        text = f"the loss rose at step {self.number}: back to step {restored.step}, with the data that comes next"
        self.tell("rollback", self.number, "; ".join([text, *restored.notes]), to=restored.step, data=after)
        self.loop.log.rewind(restored.step)
        if restored.facts.get("spikes") is not None:  # as a run has it that is resumed from there
            spikes.state = restored.facts["spikes"]
        self.loop.evaluated_at = restored.step
        self.state, self.number = restored.state, restored.step
        return True

    def finish(self, why: str) -> None:
        """Saves the end, and waits until that is done."""
        if why == "out of data":
            self.tell("finish", self.number, f"the data ended after {self.number} of {self.loop.num_steps} steps")
        evaluates = self.loop.evaluate is not None and bool(self.loop.eval_every) and why != "preempted"
        if evaluates and self.loop.evaluated_at != self.number:
            self.run_evaluation()
        self.save()
        if self.loop.checkpoints is not None:
            self.loop.checkpoints.wait()

    def last_saved(self) -> int | None:
        """Returns the last step up to here that is saved."""
        checkpoints = self.loop.checkpoints
        if checkpoints is None:
            return None
        found = from_first(max((step for step in checkpoints.steps() if step <= self.number), default=-1))
        return None if found < 0 else found

    # --- Telling ---

    def tell(self, kind: str, step: int, text: str, **facts: Any) -> None:
        self.loop.log.event(kind, step, text, **facts)
        if self.loop.tell is not None:
            self.loop.tell(text)
        elif self.loop.progress is not None:
            self.loop.progress.say(text)

    def spend(self, what: str, began: float) -> None:
        self.seconds[what] = self.seconds.get(what, 0.0) + time.perf_counter() - began
