"""Output of a model before and after training, once each: text samples, or predictions of a job."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any


class BeforeAfter(ABC):
    """Shows the output of a model before and after training."""

    sampled_at: int | None = None

    def begin(self, state: Any, sampled_at: int | None) -> None:
        """Shows the output of an untrained model; `sampled_at` is a step whose output is already in the log."""
        self.sampled_at = sampled_at
        if int(state.step) == 0:
            self.show(state, "before")

    def end(self, state: Any) -> None:
        """Shows the output of the trained model, unless it is already in the log."""
        if int(state.step) != self.sampled_at:
            self.show(state, "after")

    @abstractmethod
    def show(self, state: Any, when: str) -> None:
        """Shows and logs the output; `when` is "before" or "after"."""
