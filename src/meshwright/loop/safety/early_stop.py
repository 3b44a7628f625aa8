"""Early stopping: ends a run whose evaluation no longer improves, and keeps the checkpoint of its best step."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from meshwright.errors import ConfigError, did_you_mean
from meshwright.loop.callbacks import Callback
from meshwright.loop.settings.config import parse_monitor

if TYPE_CHECKING:
    from meshwright.checkpoint import Checkpoints
    from meshwright.loop.decisions import RunSetup
    from meshwright.loop.fit import Loop, Why
    from meshwright.loop.resume import RunStart


class EarlyStop(Callback):
    """Stops a run after a number of evaluations in a row without a new best value.

    The history of evaluations is part of each checkpoint, so a resumed run stops at the same step. A non-finite value
    is never the best.

    Args:
        patience: number of evaluations without improvement.
        monitor: metric of the evaluation and its better direction, as `NAME:min` or `NAME:max`.
        checkpoints: checkpoints that keep the best step.

    Example:
        >>> stop = EarlyStop(2, "loss:min")
        >>> for step, loss in ((10, 3.0), (20, 2.5), (30, 2.6), (40, 2.7)):
        ...     stop.add(step, loss)
        >>> stop.best, stop.num_worse, stop.is_exhausted
        ((20, 2.5), 2, True)
    """

    def __init__(self, patience: int, monitor: str = "loss:min", *, checkpoints: Checkpoints | None = None) -> None:
        self.patience, self.monitor, self.checkpoints = patience, monitor, checkpoints
        self.name, self.higher_is_better = parse_monitor(monitor)
        self._history: dict[int, float] = {}

    @property
    def best(self) -> tuple[int, float] | None:
        """The step with the best value, and the value; the first one of equal values."""
        known = [(step, value) for step, value in self._history.items() if math.isfinite(value)]
        sign = -1 if self.higher_is_better else 1
        return min(known, key=lambda point: (sign * point[1], point[0]), default=None)

    @property
    def num_worse(self) -> int:
        """Number of evaluations since the best one."""
        best = self.best
        return sum(best is None or step > best[0] for step in self._history)

    @property
    def is_exhausted(self) -> bool:
        """Whether the run should end."""
        return self.num_worse >= self.patience

    @property
    def state(self) -> dict[str, Any]:
        """The history as JSON-compatible data; `restore` takes it."""
        return {"monitor": self.monitor, "history": [[step, value] for step, value in self._history.items()]}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continues from the state of an earlier run, unless it monitored another metric."""
        if state["monitor"] == self.monitor:
            self._history = {int(step): float(value) for step, value in state["history"]}
            self._keep_best()

    def has_evaluated(self, step: int) -> bool:
        """Returns whether the history holds an evaluation at this step."""
        return step in self._history

    def add(self, step: int, value: float) -> None:
        """Adds the value of an evaluation."""
        self._history[step] = float(value)
        self._keep_best()

    def wants_save(self, loop: Loop) -> bool:
        """Returns whether the current step is the best one, so that its checkpoint is worth saving."""
        return self.best is not None and self.best[0] == loop.number

    def on_evaluation(self, loop: Loop, metrics: Mapping[str, Any]) -> None:
        name = f"eval/{self.name}"
        value = metrics.get(name)
        if not isinstance(value, (int, float)):
            found = [known.removeprefix("eval/") for known, item in metrics.items() if isinstance(item, (int, float))]
            what = "is not a number" if name in metrics else "is not a metric of the evaluation"
            hint = did_you_mean(self.name, found) or f"use one of: {', '.join(found)}."
            raise ConfigError(f"--monitor {self.monitor}: {self.name!r} {what}.", hint=hint)
        self.add(loop.number, value)
        loop.best = self.best

    def is_over(self, loop: Loop) -> Why | None:
        loop.best = self.best
        return "stopped early" if self.is_exhausted else None

    def on_rollback(self, loop: Loop) -> None:
        self._history = {step: value for step, value in self._history.items() if step <= loop.number}
        self._keep_best()

    def _keep_best(self) -> None:
        if self.checkpoints is not None and self.best is not None:
            self.checkpoints.keep = dataclasses.replace(self.checkpoints.keep, steps=(self.best[0],))


def make_early_stop(setup: RunSetup, start: RunStart, checkpoints: Checkpoints) -> EarlyStop | None:
    """Returns the callback for --patience, with the history of a resumed run."""
    options = setup.config.run
    if options.patience is None:
        return None
    early = EarlyStop(options.patience, options.monitor, checkpoints=checkpoints)
    if start.evaluations is not None:
        early.restore(start.evaluations)
        if start.evaluations["monitor"] != options.monitor:
            setup.tell(f"--monitor was {start.evaluations['monitor']}; the earlier evaluations do not count")
    return early
