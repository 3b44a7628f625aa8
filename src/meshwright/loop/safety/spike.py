"""Notices a loss that jumps away from where it was, and goes back to an earlier checkpoint."""

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
"""Rollbacks in a row to the same checkpoint after which a run stops."""


class SpikeGuard:
    """Compares each loss with the median of those before it.

    A loss is a spike where it lies above the median by more than `factor` times the usual distance from it (1.48 times
    the median absolute deviation: a standard deviation that outliers do not move), and by more than 2% of the median,
    so that a curve without noise is not all spikes. Spikes do not enter the window. Losses that are not finite are not
    judged and not kept: the step itself skips those.

    Args:
        window: how many losses are remembered; the first of them, up to a quarter of it, are not judged.
        factor: how many usual distances are too many.
        patience: how many spikes in a row make `check` true; one bad batch is often forgotten without help.

    Example:
        >>> guard = SpikeGuard(window=16, factor=6.0)
        >>> [guard.check(loss) for loss in (3.1, 3.0, 3.2, 2.9, 3.0, 2.8, 7.5, 2.9)]
        [False, False, False, False, False, False, True, False]
    """

    def __init__(self, window: int = 64, factor: float = 8.0, *, patience: int = 1) -> None:
        if window < 8 or not factor > 0 or patience < 1:
            raise MeshwrightError(
                f"SpikeGuard(window={window}, factor={factor}, patience={patience}) cannot judge anything.",
                hint="a window of 8 or more, a factor above 0, a patience of 1 or more.",
            )
        self.factor, self.patience = factor, patience
        self._losses: deque[float] = deque(maxlen=window)
        self._in_a_row = 0

    def check(self, loss: float) -> bool:
        """Returns whether the run has left its curve with this loss."""
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
        """Returns the largest loss that is no spike now; infinite while too few are known."""
        if len(self._losses) < max(4, (self._losses.maxlen or 0) // 4):
            return math.inf
        median = statistics.median(self._losses)
        distance = 1.48 * statistics.median(abs(loss - median) for loss in self._losses)
        return median + max(self.factor * distance, 0.02 * abs(median))

    @property
    def state(self) -> dict[str, Any]:
        """What it remembers, as plain data; may be set."""
        return {"losses": list(self._losses), "in_a_row": self._in_a_row}

    @state.setter
    def state(self, state: Mapping[str, Any]) -> None:
        self.reset()
        self._losses.extend(float(loss) for loss in state["losses"])
        self._in_a_row = int(state["in_a_row"])

    def reset(self) -> None:
        """Forgets all losses."""
        self._losses.clear()
        self._in_a_row = 0


class Rollback(Callback):
    """Goes back to the last good checkpoint when the loss jumps, and on with the data behind that used since.

    Args:
        reopen: `reopen(undone, after, first_step)`, batches that go on after the second state of the data. What lies
            between the first and the second is not used again.
    """

    def __init__(
        self,
        spikes: SpikeGuard,
        checkpoints: Checkpoints,
        reopen: Callable[[Mapping[str, Any], Mapping[str, Any], int], Any],
    ) -> None:
        self.spikes, self.checkpoints, self.reopen = spikes, checkpoints, reopen
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
        self.checkpoints.wait()  # one that is being written counts
        if not from_first(int(self.checkpoints.latest() is not None)):
            loop.tell("rollback", loop.number, f"the loss rose at step {loop.number}, and there is no checkpoint yet")
            return False  # a state that is not one to keep, but there is nothing else
        restored = self.checkpoints.restore(loop.step.layout)
        again = self._done[restored.step] = self._done.get(restored.step, 0) + 1
        if again > MAX_ROLLBACKS:
            raise TrainingError(
                f"the loss rose again after {MAX_ROLLBACKS} rollbacks to step {restored.step}.",
                hint="lower the learning rate, or look at what the data holds there.",
            )
        after = dict(loop.batches.state)
        loop.batches.close()
        batches = self.reopen(restored.facts["data"], after, restored.step + 1)
        text = f"the loss rose at step {loop.number}: back to step {restored.step}, with the data that comes next"
        loop.tell("rollback", loop.number, "; ".join([text, *restored.notes]), to=restored.step, data=after)
        loop.log.rewind(restored.step)
        if restored.facts.get("spikes") is not None:  # as a run has it that is resumed from there
            self.spikes.state = restored.facts["spikes"]
        loop.go_back(restored.state, batches)
        return True
