"""Pipeline schedules with their backward pass: what each device computes at each tick.

A cell is one piece of work on one microbatch: the forward pass of a virtual stage (F), its backward pass (B), or, if
the schedule splits the backward pass, its input gradients (B) and its weight gradients (W). Devices send their results
at the end of a tick, so every cell runs at least one tick after those it depends on. `named_schedules` makes the
tables, and `training_engine` runs them.
"""

from __future__ import annotations

import enum
import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from meshwright.errors import MeshwrightError
from meshwright.parallel.pipeline.schedule import IDLE, TableSizes


class Work(enum.IntEnum):
    """Kinds of work in a training schedule."""

    FORWARD = 0
    BACKWARD = 1
    """The whole backward pass, or only the input gradients if the schedule has `WEIGHTS` cells."""
    WEIGHTS = 2
    """The weight gradients."""

    @property
    def letter(self) -> str:
        """F, B or W."""
        return "FBW"[self]


class Cell(NamedTuple):
    """The work of one device at one tick."""

    tick: int
    device: int
    work: Work
    stage: int
    """The virtual stage."""
    microbatch: int

    def __str__(self) -> str:
        return f"{self.work.letter}{self.stage}:{self.microbatch}"


@dataclass(frozen=True, eq=False)
class TrainingSchedule(TableSizes):
    """A pipeline schedule with its backward pass, validated on construction.

    Args:
        work: `[ticks, devices]`, the `Work` of a device, or -1 if idle.
        stages: `[ticks, devices]`, its virtual stage, or -1. A virtual stage always runs on the same device.
        microbatches: `[ticks, devices]`, its microbatch, or -1.
        name: the name of the schedule.

    Example:
        >>> from meshwright.parallel import make_schedule
        >>> print(make_schedule("1f1b", 2, 3))
        device 0  F0:0 F0:1    . B0:0 F0:2 B0:1    . B0:2
        device 1     . F1:0 B1:0 F1:1 B1:1 F1:2 B1:2    .
        8 ticks, 25.0% idle, at most 2 microbatches in memory
    """

    work: np.ndarray[Any, Any]
    stages: np.ndarray[Any, Any]
    microbatches: np.ndarray[Any, Any]
    name: str = "custom"

    def __post_init__(self) -> None:
        for field in ("work", "stages", "microbatches"):
            table = np.asarray(getattr(self, field), np.int32)
            table.setflags(write=False)
            object.__setattr__(self, field, table)
        shapes = {table.shape for table in (self.work, self.stages, self.microbatches)}
        if len(shapes) != 1 or self.work.ndim != 2 or not self.work.size:
            raise MeshwrightError(
                "a training schedule needs three tables of ticks x devices; got shapes "
                f"{self.work.shape}, {self.stages.shape} and {self.microbatches.shape}."
            )
        self._check()

    @property
    def splits_backward(self) -> bool:
        """Whether weight gradients have cells of their own."""
        return bool((self.work == Work.WEIGHTS).any())

    @functools.cached_property
    def devices(self) -> tuple[int, ...]:
        """The device of each virtual stage."""
        _, columns = np.nonzero(self.stages != IDLE)
        found = np.zeros(self.num_virtual_stages, np.int64)
        found[self.stages[self.stages != IDLE]] = columns
        return tuple(int(device) for device in found)

    def cells(self) -> Iterator[Cell]:
        """Yields the cells that are not idle, tick by tick."""
        for tick, device in zip(*np.nonzero(self.work != IDLE), strict=True):
            at = int(tick), int(device)
            yield Cell(*at, Work(int(self.work[at])), int(self.stages[at]), int(self.microbatches[at]))

    @functools.cached_property
    def ticks(self) -> np.ndarray[Any, Any]:
        """`[3, virtual stages, microbatches]`, the tick of each piece of work, or -1 if the schedule lacks it."""
        found = np.full((len(Work), self.num_virtual_stages, self.num_microbatches), IDLE)
        for cell in self.cells():
            found[cell.work, cell.stage, cell.microbatch] = cell.tick
        return found

    # --- Costs ---

    @property
    def bubble_fraction(self) -> float:
        """Share of device ticks spent idle.

        Example:
            >>> from meshwright.parallel import make_schedule
            >>> {name: round(make_schedule(name, 4, 8).bubble_fraction, 3) for name in ("1f1b", "zb-h1", "zb-v")}
            {'1f1b': 0.273, 'zb-h1': 0.111, 'zb-v': 0.059}
        """
        return float((self.work == IDLE).mean())

    @functools.cached_property
    def peak_residuals(self) -> tuple[int, ...]:
        """The largest number of (virtual stage, microbatch) pairs in the memory of each device.

        A pair is in memory from its forward pass until its last gradient is computed.
        """
        first, last = self.ticks[Work.FORWARD], self.ticks.max(axis=0)
        change = np.zeros((self.num_ticks + 1, self.num_stages), np.int64)
        columns = np.broadcast_to(np.array(self.devices)[:, None], first.shape)
        np.add.at(change, (first, columns), 1)
        np.add.at(change, (last + 1, columns), -1)
        return tuple(int(count) for count in change.cumsum(axis=0).max(axis=0))

    @property
    def peak_microbatches(self) -> tuple[float, ...]:
        """`peak_residuals` in microbatches that pass all layers of a device.

        Example:
            >>> from meshwright.parallel import make_schedule
            >>> make_schedule("1f1b", 4, 64).peak_microbatches, make_schedule("zb-v", 4, 64).peak_microbatches
            ((4.0, 3.0, 2.0, 1.0), (4.0, 4.0, 4.0, 4.0))
        """
        return tuple(count / self.num_rounds for count in self.peak_residuals)

    def start_times(
        self, *, forward: float = 1.0, backward: float = 2.0, weights: float = 1.0, lockstep: bool = True
    ) -> np.ndarray[Any, Any]:
        """Returns `[ticks + 1, devices]`, when each device starts each tick; the last row is when it finishes.

        Args:
            forward, backward, weights: the time of each piece of work on one virtual stage.
            lockstep: whether a device waits for its neighbors at the end of each tick, as `training_engine` does.
                Otherwise it waits only for the results that it needs.
        """
        seconds = np.array([forward, backward, weights, 0.0])[self.work]  # The index of an idle cell is -1.
        starts = np.zeros((self.num_ticks + 1, self.num_stages))
        ends: dict[tuple[int, int, int], float] = {}
        for tick in range(self.num_ticks):
            for device in range(self.num_stages):
                work, stage, part = (int(t[tick, device]) for t in (self.work, self.stages, self.microbatches))
                if work != IDLE and not lockstep:
                    needed = [ends[key] for key in work_before(work, stage, part, self.num_virtual_stages)]
                    starts[tick, device] = max([starts[tick, device], *needed])
                ends[work, stage, part] = starts[tick, device] + seconds[tick, device]
            done = starts[tick] + seconds[tick]
            starts[tick + 1] = np.max([done, *(done[list(of)] for of in self._neighbors)], axis=0) if lockstep else done
        return starts

    def makespan(
        self, *, forward: float = 1.0, backward: float = 2.0, weights: float = 1.0, lockstep: bool = True
    ) -> float:
        """Returns the time of the schedule; the arguments are those of `start_times`.

        Example:
            >>> from meshwright.parallel import make_schedule
            >>> one, zero = make_schedule("1f1b", 4, 8), make_schedule("zb-h1", 4, 8)
            >>> one.makespan(lockstep=False), one.makespan(), zero.makespan(backward=1)
            (33.0, 40.0, 27.0)
        """
        times = self.start_times(forward=forward, backward=backward, weights=weights, lockstep=lockstep)
        return float(times[-1].max())

    @functools.cached_property
    def _neighbors(self) -> list[tuple[int, ...]]:
        """For each direction of messages, the device that each device receives from, or itself."""
        found: dict[int, list[int]] = {}
        for one, other in itertools.pairwise(self.devices):
            for source, target in ((one, other), (other, one)):
                by = (target - source) % self.num_stages
                if by == 0:
                    continue
                found.setdefault(by, list(range(self.num_stages)))[target] = source
        return [tuple(sources) for sources in found.values()]

    def __str__(self) -> str:
        """Returns one line per device, with the work, virtual stage and microbatch of each tick."""
        rows = [["."] * self.num_ticks for _ in range(self.num_stages)]
        for cell in self.cells():
            rows[cell.device][cell.tick] = str(cell)
        width = max(len(text) for row in rows for text in row)
        lines = [f"device {device}  " + " ".join(f"{text:>{width}}" for text in row) for device, row in enumerate(rows)]
        peak = f"{max(self.peak_microbatches):g} microbatch{'es' if max(self.peak_microbatches) != 1 else ''} in memory"
        return "\n".join([*lines, f"{self.num_ticks} ticks, {self.bubble_fraction:.1%} idle, at most {peak}"])

    # --- Validation ---

    def _check(self) -> None:
        busy = self.work != IDLE
        tables = (self.work, self.stages, self.microbatches)
        whole = all(((table != IDLE) == busy).all() and table.min() >= IDLE for table in tables)
        if not busy.any() or not whole or self.work.max() > max(Work):
            raise MeshwrightError(
                "each cell of a training schedule needs a kind of work (0 to 2), a stage and a microbatch, or -1 in "
                "all three tables."
            )
        if self.num_virtual_stages % self.num_stages:
            raise MeshwrightError(
                f"a schedule of {self.num_virtual_stages} virtual stages on {self.num_stages} devices has an "
                "incomplete round.",
                hint="use a multiple of the number of devices.",
            )
        found: dict[tuple[int, int, int], Cell] = {}
        homes: dict[int, int] = {}
        for cell in self.cells():
            key, where = (cell.work, cell.stage, cell.microbatch), f"tick {cell.tick}, device {cell.device}: {cell}"
            if key in found:
                raise MeshwrightError(f"{where} already ran at tick {found[key].tick}.")
            if homes.setdefault(cell.stage, cell.device) != cell.device:
                raise MeshwrightError(f"{where} is on the wrong device; stage {cell.stage} is on {homes[cell.stage]}.")
            for need in work_before(*key, self.num_virtual_stages):
                before = found.get(need)
                if before is None or before.tick >= cell.tick:
                    name = f"{Work(need[0]).letter}{need[1]}:{need[2]}"
                    raise MeshwrightError(
                        f"{where} needs the result of {name}, which has not run before this tick.",
                        hint="run it at least one tick earlier.",
                    )
            found[key] = cell
        kinds = [Work.FORWARD, Work.BACKWARD, *([Work.WEIGHTS] if self.splits_backward else [])]
        missing = np.argwhere(self.ticks[kinds] == IDLE)
        if len(missing):
            kind, stage, microbatch = missing[0]
            raise MeshwrightError(
                f"the schedule is missing {len(missing)} cells, e.g. {kinds[kind].letter}{stage}:{microbatch}."
            )
        held = np.bincount(self.devices, minlength=self.num_stages)
        if (held != self.num_rounds).any():
            raise MeshwrightError(f"the virtual stages are spread unevenly over the devices: {self.devices}.")
        for stage, (one, other) in enumerate(itertools.pairwise(self.devices)):
            if (other - one) % self.num_stages not in (0, 1, self.num_stages - 1):
                raise MeshwrightError(
                    f"stage {stage} is on device {one} and stage {stage + 1} on device {other}, which are not "
                    "neighbors."
                )


def work_before(work: int, stage: int, microbatch: int, num_virtual_stages: int) -> list[tuple[int, int, int]]:
    """Returns the work that must be done before a piece of work."""
    if work == Work.FORWARD:
        return [(Work.FORWARD, stage - 1, microbatch)] if stage else []
    if work == Work.WEIGHTS:
        return [(Work.BACKWARD, stage, microbatch)]
    after = [(Work.BACKWARD, stage + 1, microbatch)] if stage + 1 < num_virtual_stages else []
    return [(Work.FORWARD, stage, microbatch), *after]
