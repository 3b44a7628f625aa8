"""Notices a loss that jumps away from where it was, for runs that then go back to an earlier checkpoint."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping
from typing import Any

from meshwright.errors import MeshwrightError


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
