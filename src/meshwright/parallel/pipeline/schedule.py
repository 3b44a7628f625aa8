"""Pipeline schedules as tables: the virtual stage and microbatch that each device runs at each tick.

A pipeline of `num_stages` devices runs `num_stages * num_rounds` virtual stages; virtual stage `s` runs on device
`s % num_stages`. The table describes the forward pass; JAX derives the backward pass, its mirror image. The `engine`
runs any table. `stage_layers` arranges stacked layers as stages.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshwright.errors import LayoutError, MeshwrightError
from meshwright.specs import ceil_div, round_up
from meshwright.tree import named_leaves
from meshwright.types import PyTree

IDLE = -1
# Scopes of what stages send each other; plans name collectives by them.
STAGES_SCOPE, MESSAGES_SCOPE = "between_stages", "messages_between_stages"


class TableSizes:
    """The sizes of a table of `[ticks, devices]`."""

    stages: np.ndarray[Any, Any]
    microbatches: np.ndarray[Any, Any]

    @property
    def num_ticks(self) -> int:
        """Number of ticks."""
        return int(self.stages.shape[0])

    @property
    def num_stages(self) -> int:
        """Number of devices in the pipeline."""
        return int(self.stages.shape[1])

    @property
    def num_virtual_stages(self) -> int:
        """Number of stages that a microbatch passes, over all rounds."""
        return int(self.stages.max()) + 1

    @property
    def num_rounds(self) -> int:
        """Number of virtual stages on each device, which a microbatch passes in turn."""
        return self.num_virtual_stages // self.num_stages

    @property
    def num_microbatches(self) -> int:
        """Number of microbatches."""
        return int(self.microbatches.max()) + 1


@dataclass(frozen=True, eq=False)
class Schedule(TableSizes):
    """A pipeline schedule, validated on construction.

    A microbatch must run virtual stage `s + 1` at the tick after stage `s`, because devices send their result at the
    end of each tick and keep nothing.

    Args:
        stages: `[ticks, devices]`, the virtual stage that a device runs, or -1 if idle.
        microbatches: `[ticks, devices]`, the microbatch that it runs, or -1 if idle.
    """

    stages: np.ndarray[Any, Any]
    microbatches: np.ndarray[Any, Any]

    def __post_init__(self) -> None:
        stages, microbatches = (np.asarray(table, np.int32) for table in (self.stages, self.microbatches))
        object.__setattr__(self, "stages", stages)
        object.__setattr__(self, "microbatches", microbatches)
        if stages.ndim != 2 or stages.shape != microbatches.shape or not stages.size:
            raise MeshwrightError(
                f"a schedule needs two tables of ticks x devices; got shapes {stages.shape} and {microbatches.shape}."
            )
        self._check()

    @property
    def bubble_fraction(self) -> float:
        """Share of device ticks spent idle.

        Example:
            >>> gpipe_schedule(4, 4).bubble_fraction, circular_schedule(4, 3, 4).bubble_fraction
            (0.42857142857142855, 0.2)
        """
        return float((self.stages == IDLE).mean())

    def finished_at(self) -> np.ndarray[Any, Any]:
        """Returns the tick at which each microbatch leaves the last virtual stage."""
        ticks, devices = np.nonzero(self.stages == self.num_virtual_stages - 1)
        finished = np.empty(self.num_microbatches, np.int64)
        finished[self.microbatches[ticks, devices]] = ticks
        return finished

    def __str__(self) -> str:
        """Returns one line per device, with `stage:microbatch` for each tick."""
        cells = [
            [f"{stage}:{microbatch}" if stage != IDLE else "." for stage, microbatch in zip(*row, strict=True)]
            for row in zip(self.stages.T, self.microbatches.T, strict=True)
        ]
        width = max(len(cell) for row in cells for cell in row)
        lines = [
            f"device {device}  " + " ".join(f"{cell:>{width}}" for cell in row) for device, row in enumerate(cells)
        ]
        return "\n".join([*lines, f"{self.num_ticks} ticks, {self.bubble_fraction:.1%} idle"])

    def _check(self) -> None:
        busy = self.stages != IDLE
        if not busy.any() or (busy != (self.microbatches != IDLE)).any() or self.stages[busy].min() < 0:
            raise MeshwrightError("each cell of a schedule needs a stage and a microbatch, or -1 in both tables.")
        if self.num_virtual_stages % self.num_stages:
            raise MeshwrightError(
                f"a schedule of {self.num_virtual_stages} virtual stages on {self.num_stages} devices has an "
                "incomplete round.",
                hint="use a multiple of the number of devices.",
            )
        when = np.full((self.num_virtual_stages, self.num_microbatches), IDLE)
        for tick, device in zip(*np.nonzero(busy), strict=True):
            stage, microbatch = int(self.stages[tick, device]), int(self.microbatches[tick, device])
            cell = f"tick {tick}, device {device}: stage {stage} of microbatch {microbatch}"
            if stage % self.num_stages != device:
                raise MeshwrightError(f"{cell} is on the wrong device; it must run on {stage % self.num_stages}.")
            if when[stage, microbatch] != IDLE:
                raise MeshwrightError(f"{cell} already ran at tick {when[stage, microbatch]}.")
            if stage and when[stage - 1, microbatch] != tick - 1:
                before = when[stage - 1, microbatch]
                ran = f"ran at tick {before}" if before != IDLE else "has not run"
                raise MeshwrightError(
                    f"{cell} needs the result of stage {stage - 1} from tick {tick - 1}, but that stage {ran}.",
                    hint="run each stage one tick after the previous one.",
                )
            when[stage, microbatch] = tick
        missing = np.argwhere(when == IDLE)
        if len(missing):
            stage, microbatch = missing[0]
            raise MeshwrightError(
                f"the schedule is missing {len(missing)} cells, e.g. stage {stage} of microbatch {microbatch}."
            )


def gpipe_schedule(num_stages: int, num_microbatches: int) -> Schedule:
    """Returns a GPipe schedule: microbatches pass through the stages one tick apart.

    Example:
        >>> print(gpipe_schedule(2, 3))
        device 0  0:0 0:1 0:2   .
        device 1    . 1:0 1:1 1:2
        4 ticks, 25.0% idle
    """
    return circular_schedule(num_stages, 1, num_microbatches)


def circular_schedule(num_stages: int, num_rounds: int, num_microbatches: int) -> Schedule:
    """Returns a circular (interleaved) schedule: every microbatch passes all devices `num_rounds` times.

    With `r` rounds, a device holds `r` thin slices of the model instead of one thick one, and its idle time is `1/r` of
    GPipe's. Microbatches circulate in groups of `num_stages`, so each returns to the first device just as it becomes
    free.

    Example:
        >>> print(circular_schedule(2, 2, 2))
        device 0  0:0 0:1 2:0 2:1   .
        device 1    . 1:0 1:1 3:0 3:1
        5 ticks, 20.0% idle
    """
    for name, value in (("stages", num_stages), ("rounds", num_rounds), ("microbatches", num_microbatches)):
        if value < 1:
            raise MeshwrightError(f"a pipeline schedule cannot have {value} {name}.", hint="use 1 or more.")
    groups = ceil_div(num_microbatches, num_stages)
    # Ticks since the first microbatch could reach a device.
    turn = np.arange(groups * num_rounds * num_stages + num_stages - 1)[:, None] - np.arange(num_stages)
    per_group = num_rounds * num_stages
    microbatch = turn // per_group * num_stages + turn % num_stages
    stage = turn % per_group // num_stages * num_stages + np.arange(num_stages)
    busy = (turn >= 0) & (microbatch < num_microbatches) & (turn < groups * per_group)
    used = np.flatnonzero(busy.any(axis=1))[-1] + 1  # A partial last group ends early.
    return Schedule(np.where(busy, stage, IDLE)[:used], np.where(busy, microbatch, IDLE)[:used])


# --- Layers as stages ---


def stage_layers(params: PyTree, *, num_stages: int, num_rounds: int = 1) -> PyTree:
    """Arranges layers stacked as `[num_layers, ...]` for a pipeline. Call it in the global view, before `local_map`.

    With one round, the layers stay as they are; split them by `P(axis)`. With several, they are reshaped to
    `[num_rounds, layers per round, ...]`; split them by `P(None, axis)`, which gives device `d` of `n` the slices `d`,
    `d + n`, `d + 2n`, and so on. The order of the layers stays the same on any mesh.

    If the state is split by `P(axis)`, XLA moves weights to their stages and gradients back in every step. To avoid
    that, keep the state in the staged form and call `unstage_layers` when you write a checkpoint.

    Example:
        >>> stage_layers({"w": jnp.zeros((12, 5))}, num_stages=2, num_rounds=3)["w"].shape
        (3, 4, 5)
    """
    chunks = num_stages * num_rounds
    for leaf in named_leaves(params):
        layers = np.shape(leaf.value)[0] if np.ndim(leaf.value) else None
        if layers is None:
            raise LayoutError(f"`{leaf.name}` is a scalar; it has no layer dim to split over stages.")
        if layers % chunks or not layers:
            rounds = f" x {num_rounds} rounds" if num_rounds > 1 else ""
            near = sorted({max(layers // chunks, 1) * chunks, round_up(layers, chunks)} - {0})
            raise LayoutError(
                f"`{leaf.name}` has {layers} layers; {num_stages} stages{rounds} do not divide them: "
                f"{layers} % {chunks} = {layers % chunks}.",
                hint=f"use {' or '.join(map(str, near))} layers, or another number of stages"
                + (" or rounds." if num_rounds > 1 else "."),
            )
    if num_rounds == 1:
        return params
    return jax.tree.map(lambda leaf: jnp.reshape(leaf, (num_rounds, -1, *leaf.shape[1:])), params)


def unstage_layers(params: PyTree, *, num_rounds: int = 1) -> PyTree:
    """Stacks staged layers as `[num_layers, ...]` again; the inverse of `stage_layers`.

    Example:
        >>> unstage_layers({"w": jnp.zeros((3, 4, 5))}, num_rounds=3)["w"].shape
        (12, 5)
    """
    if num_rounds == 1:
        return params
    return jax.tree.map(lambda leaf: jnp.reshape(leaf, (-1, *leaf.shape[2:])), params)


def count_rounds(stage_params: PyTree, rounds: int | None = None) -> int:
    """Returns the number of rounds, the leading dim of staged layers; raises if they differ from it or `rounds`."""
    for leaf in named_leaves(stage_params):
        found = int(np.shape(leaf.value)[0]) if np.ndim(leaf.value) else 0
        rounds = found if rounds is None else rounds
        if found != rounds or not found:
            raise LayoutError(
                f"`{leaf.name}` has shape {np.shape(leaf.value)}; a circular schedule needs the rounds"
                f"{f' ({rounds})' if rounds else ''} as its leading dim.",
                hint="use stage_layers(params, num_stages=..., num_rounds=...), split by P(None, axis).",
            )
    return rounds or 1
