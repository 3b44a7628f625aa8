"""Loss spike detection, and rollback to the last checkpoint."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from meshwright.distributed.agreement import from_first
from meshwright.errors import MeshwrightError, TrainingError
from meshwright.loop.callbacks import Callback, StepRecord

if TYPE_CHECKING:
    from meshwright.checkpoint import Checkpoints
    from meshwright.loop.fit import Loop

MAX_ROLLBACKS = 3
"""Number of rollbacks to the same checkpoint before a run stops."""


class SpikeGuard:
    """Detects loss spikes by comparing each loss with the median of recent losses.

    A loss is a spike if it exceeds the median by more than `factor` robust standard deviations (1.48 times the median
    absolute deviation) and by more than 2% of the median, so that a curve without noise has no spikes. Spikes do not
    enter the window. Non-finite losses are ignored, because the step skips them.

    Args:
        window: number of recent losses to compare with; detection starts once a quarter of it is filled.
        factor: robust standard deviations above the median that make a spike.
        patience: number of spikes in a row before `check` returns True.

    Example:
        >>> guard = SpikeGuard(window=16, factor=6.0)
        >>> [guard.check(loss) for loss in (3.1, 3.0, 3.2, 2.9, 3.0, 2.8, 7.5, 2.9)]
        [False, False, False, False, False, False, True, False]
    """

    def __init__(self, window: int = 64, factor: float = 8.0, *, patience: int = 1) -> None:
        if window < 8 or not factor > 0 or patience < 1:
            raise MeshwrightError(
                f"SpikeGuard(window={window}, factor={factor}, patience={patience}) cannot detect spikes.",
                hint="use window >= 8, factor > 0 and patience >= 1.",
            )
        self.factor, self.patience = factor, patience
        self._losses: deque[float] = deque(maxlen=window)
        self._in_a_row = 0

    def check(self, loss: float) -> bool:
        """Adds a loss, and returns whether it is the `patience`-th spike in a row or a later one."""
        loss = float(loss)
        if not math.isfinite(loss):
            return False
        if loss > self.limit():
            self._in_a_row += 1
            return self._in_a_row >= self.patience
        self._in_a_row = 0
        self._losses.append(loss)
        return False

    def limit(self) -> float:
        """Returns the largest loss that is not a spike; infinite while the window holds too few losses."""
        if len(self._losses) < max(4, (self._losses.maxlen or 0) // 4):
            return math.inf
        median = statistics.median(self._losses)
        distance = 1.48 * statistics.median(abs(loss - median) for loss in self._losses)
        return median + max(self.factor * distance, 0.02 * abs(median))

    @property
    def state(self) -> dict[str, Any]:
        """The recent losses as JSON-compatible data; assign it to restore them."""
        return {"losses": list(self._losses), "in_a_row": self._in_a_row}

    @state.setter
    def state(self, state: Mapping[str, Any]) -> None:
        self.reset()
        self._losses.extend(float(loss) for loss in state["losses"])
        self._in_a_row = int(state["in_a_row"])

    def reset(self) -> None:
        """Clears the window."""
        self._losses.clear()
        self._in_a_row = 0


class Rollback(Callback):
    """Rolls back to the last good checkpoint after a loss spike, and skips the data used since.

    Args:
        reopen: `reopen(undone, after, first_step)` returns batches that continue at position `after` of the data; rows
            between `undone` and `after` are not used again.
        forget: removes the snapshots of the steps that are given up, before the log says that they are.
    """

    def __init__(
        self,
        spikes: SpikeGuard,
        checkpoints: Checkpoints,
        reopen: Callable[[Mapping[str, Any], Mapping[str, Any], int], Any],
        forget: Callable[[], Any] | None = None,
    ) -> None:
        self.spikes, self.checkpoints, self.reopen, self.forget = spikes, checkpoints, reopen, forget
        self._spiked = False
        self._done: dict[int, int] = {}

    def on_metrics(self, loop: Loop, record: StepRecord) -> None:
        if self.spikes.check(record.metrics["loss"]):
            self._spiked = True

    def is_due(self, loop: Loop) -> bool:
        return self._spiked

    def after_step(self, loop: Loop) -> bool:
        if not self._spiked:
            return False
        self._spiked = False
        self.spikes.reset()
        self.checkpoints.wait()  # a checkpoint may be being written
        if not from_first(int(self.checkpoints.latest() is not None)):
            text = f"loss spike at step {loop.number}; cannot roll back: there is no checkpoint yet"
            loop.tell("rollback", loop.number, text)
            return False
        with loop.timed("restart"):
            restored = self.checkpoints.restore(loop.step.layout)
        again = self._done[restored.step] = self._done.get(restored.step, 0) + 1
        if again > MAX_ROLLBACKS:
            raise TrainingError(
                f"the loss spiked again after {MAX_ROLLBACKS} rollbacks to step {restored.step}.",
                hint="lower the learning rate, or inspect the data after that step.",
            )
        if self.forget is not None:
            self.forget()
        after = dict(loop.batches.state)
        loop.batches.close()
        batches = self.reopen(restored.facts["data"], after, restored.step + 1)
        text = f"loss spike at step {loop.number}; rolled back to step {restored.step}, continuing with new data"
        lost = loop.log.lost_after(restored.step)
        loop.tell("rollback", loop.number, "; ".join([text, *restored.notes]), to=restored.step, data=after, lost=lost)
        loop.log.rewind(restored.step)
        if restored.facts.get("spikes") is not None:  # the same state as in a run resumed from this checkpoint
            self.spikes.state = restored.facts["spikes"]
        loop.go_back(restored.state, batches)
        return True
