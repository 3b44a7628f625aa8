"""The pipeline of a plan: its ticks, idle time and microbatches in memory, from the table that the engine runs.

The unit of time is the forward pass of a microbatch through the layers of one device. A backward pass takes two, one
for the gradients of its inputs and one for those of its weights, and one more if it starts again from the input of its
stage.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

from meshwright.parallel.pipeline.named_schedules import make_schedule
from meshwright.parallel.pipeline.slots import assign_slots
from meshwright.parallel.pipeline.stage_moves import make_moves
from meshwright.parallel.pipeline.training_schedule import TrainingSchedule
from meshwright.specs import ceil_div

SETTLED = 4
"""From this many microbatches per stage on, figures are extrapolated."""


@dataclass(frozen=True)
class Stages:
    """The pipeline of one minibatch; 1 stage means no pipeline.

    Args:
        count: number of devices in the pipeline.
        microbatches: number of microbatches per minibatch.
        schedule: name of the schedule; the backward pass of "gpipe" is derived by JAX, from recomputed ticks.
        rounds: virtual stages per device.
        again: whether backward passes start again from the inputs of their stages.
        num_layers: number of layers on all devices; None if the stages divide them.

    Example:
        >>> two = Stages(2, 4)
        >>> two.ticks, two.idle, Stages(1, 1).idle
        (5, 0.2, 0.0)
        >>> {name: round(Stages(4, 8, name, again=False).idle, 3) for name in ("gpipe", "1f1b", "zb-h1")}
        {'gpipe': 0.273, '1f1b': 0.4, 'zb-h1': 0.111}
        >>> uneven = Stages(2, 4, "zb-v", rounds=2, num_layers=6)  # stages of 2, 2, 1 and 1 layers
        >>> uneven.stored_layers, uneven.computed_layers, round(uneven.extra, 3)
        (3, 4, 1.333)
    """

    count: int
    microbatches: int
    schedule: str = "gpipe"
    rounds: int = 1
    again: bool = True
    num_layers: int | None = None

    @property
    def is_scheduled(self) -> bool:
        """Whether the backward pass is in the table."""
        return self.count > 1 and self.schedule != "gpipe"

    @property
    def table(self) -> TrainingSchedule:
        """The schedule that runs."""
        return _table(self.schedule, self.count, self.microbatches, self.rounds)

    @property
    def ticks(self) -> int:
        """Ticks of one forward pass of "gpipe", or all ticks of another schedule."""
        if not self.is_scheduled:
            return self.microbatches + self.count - 1
        return round(self._grown(lambda count: _table(self.schedule, self.count, count, self.rounds).num_ticks))

    @property
    def idle(self) -> float:
        """Share of the time that each device is idle or waits for its neighbors; exactly 0 without a pipeline."""
        if not self.is_scheduled:
            return (self.count - 1) / self.ticks
        span = self._grown(lambda count: _span(self.schedule, self.count, count, self.rounds, self.again))
        return 1 - self.microbatches * self.rounds * (3.0 + self.again) / span

    @property
    def _settled(self) -> int:
        """The number of microbatches, or a smaller one from which on each more takes the same."""
        return min(self.microbatches, SETTLED * self.count + self.microbatches % self.count)

    def _grown(self, of: Callable[[int], float]) -> float:
        """Returns a figure that grows evenly from `_settled` microbatches on; large tables would take minutes."""
        few, less = self._settled, self._settled - self.count
        if few == self.microbatches:
            return of(few)
        return of(few) + (of(few) - of(less)) / self.count * (self.microbatches - few)

    @property
    def live(self) -> int:
        """The most microbatches in one virtual stage each that a device holds activations of."""
        if not self.is_scheduled:
            return self.microbatches
        return round(
            self._grown(lambda parts: max(_table(self.schedule, self.count, parts, self.rounds).peak_residuals))
        )

    @property
    def slots(self) -> tuple[int, int]:
        """Number of arrays that a device keeps for others, and of places for what backward passes need."""

        def count(of: int) -> int:
            return round(
                self._grown(lambda parts: _slots(self.schedule, self.count, parts, self.rounds, self.again)[of])
            )

        return count(0), count(1)

    @property
    def messages(self) -> int:
        """Number of arrays that a device sends to its neighbors, also while it is idle, when they are zeros."""
        if not self.is_scheduled:
            return 2 * self.ticks
        return self.ticks * _directions(self.schedule, self.count, self.rounds)

    @property
    def stored_layers(self) -> int:
        """Number of layers that a device stores; the last ones may store fewer."""
        return ceil_div(self._layers, self.count)

    @property
    def computed_layers(self) -> int:
        """Number of layers that a device computes for a microbatch: its stages all have as many as the longest one.

        What a shorter stage computes beyond its layers is ignored.
        """
        return self.rounds * ceil_div(self._layers, self.count * self.rounds)

    @property
    def extra(self) -> float:
        """Layers that all devices compute, relative to those that there are; 1 if the stages have the same length."""
        return self.count * self.computed_layers / self._layers

    @property
    def moves(self) -> int:
        """Number of exchanges that bring layers from their devices in the stored order to those of their stages."""
        return self._moves[0]

    @property
    def moved_layers(self) -> int:
        """Number of layers that a device sends in these exchanges."""
        return math.prod(self._moves)

    @property
    def _layers(self) -> int:
        return self.count * self.rounds if self.num_layers is None else self.num_layers

    @property
    def _moves(self) -> tuple[int, int]:
        return _moves(self.schedule, self.count, self.rounds, self._layers) if self.count > 1 else (0, 1)

    @property
    def splits(self) -> bool:
        """Whether weight gradients have ticks of their own."""
        return self.is_scheduled and _table(self.schedule, self.count, self._settled, self.rounds).splits_backward

    @property
    def words(self) -> str:
        """The idle time in words."""
        if not self.is_scheduled:
            return f"{self.count - 1} of {self.ticks} ticks idle"
        return f"{self.schedule}, {self.microbatches} microbatches: devices wait {self.idle:.1%} of {self.ticks} ticks"


@functools.lru_cache(maxsize=512)
def _table(name: str, count: int, microbatches: int, rounds: int) -> TrainingSchedule:
    return make_schedule(name, count, microbatches, num_rounds=rounds)  # type: ignore[arg-type]


@functools.lru_cache(maxsize=2048)
def _span(name: str, count: int, microbatches: int, rounds: int, again: bool) -> float:
    table = _table(name, count, microbatches, rounds)
    return table.makespan(forward=1.0, backward=2.0 + again - table.splits_backward, weights=1.0)


@functools.lru_cache(maxsize=2048)
def _slots(name: str, count: int, microbatches: int, rounds: int, again: bool) -> tuple[int, int]:
    found = assign_slots(_table(name, count, microbatches, rounds), saves=not again)
    return found.num_inbox + 1, max(found.num_stored, 1)


@functools.lru_cache(maxsize=2048)
def _moves(name: str, count: int, rounds: int, num_layers: int) -> tuple[int, int]:
    """Returns the number of exchanges, and of the layers in each."""
    found = make_moves(_table(name, count, count, rounds).devices, count, num_layers)
    return sum(any(move.source != move.target for move in moves) for moves in found.rounds), found.size


@functools.lru_cache(maxsize=2048)
def _directions(name: str, count: int, rounds: int) -> int:
    devices = _table(name, count, count, rounds).devices
    return len({place for one, other in itertools.pairwise(devices) for place in _both(other - one, count)})


def _both(by: int, count: int) -> tuple[int, ...]:
    """Returns the directions of a stage's result and of its gradient, without those to the same device."""
    return () if by % count == 0 else (by % count, -by % count)
