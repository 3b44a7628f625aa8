"""Pipeline schedules as data: which virtual stage and which microbatch each device works on at each tick.

A pipeline of `num_stages` devices runs `num_stages * num_rounds` virtual stages; virtual stage `s` lives on device
`s % num_stages`. A schedule is a table; what runs it (`engine`) knows no schedule by name. The table holds the forward
pass: the backward pass is its mirror image, which JAX derives. `stage_layers` makes stages of stored layers.
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


@dataclass(frozen=True, eq=False)
class Schedule:
    """A table of work, checked when it is made.

    Args:
        stages: `[ticks, devices]`, the virtual stage a device runs at a tick, -1 where it is idle.
        microbatches: `[ticks, devices]`, the microbatch it runs it on, -1 where it is idle.

    A microbatch reaches virtual stage `s + 1` at the tick after it left stage `s`: devices pass on what they made at
    the end of each tick and keep nothing.
    """

    stages: np.ndarray[Any, Any]
    microbatches: np.ndarray[Any, Any]

    def __post_init__(self) -> None:
        stages, microbatches = (np.asarray(table, np.int32) for table in (self.stages, self.microbatches))
        object.__setattr__(self, "stages", stages)
        object.__setattr__(self, "microbatches", microbatches)
        if stages.ndim != 2 or stages.shape != microbatches.shape or not stages.size:
            raise MeshwrightError(
                f"a schedule is two tables of ticks x devices; got shapes {stages.shape} and {microbatches.shape}."
            )
        self._check()

    @property
    def num_ticks(self) -> int:
        """Steps from the first microbatch's entry to the last one's exit."""
        return int(self.stages.shape[0])

    @property
    def num_stages(self) -> int:
        """Devices in the pipeline."""
        return int(self.stages.shape[1])

    @property
    def num_virtual_stages(self) -> int:
        """Stages that a microbatch passes, over all rounds."""
        return int(self.stages.max()) + 1

    @property
    def num_rounds(self) -> int:
        """How often a microbatch passes each device."""
        return self.num_virtual_stages // self.num_stages

    @property
    def num_microbatches(self) -> int:
        """Parts that the batch is cut into."""
        return int(self.microbatches.max()) + 1

    @property
    def bubble_fraction(self) -> float:
        """The share of device ticks spent idle.

        Example:
            >>> gpipe_schedule(4, 4).bubble_fraction, circular_schedule(4, 3, 4).bubble_fraction
            (0.42857142857142855, 0.2)
        """
        return float((self.stages == IDLE).mean())

    def finished_at(self) -> np.ndarray[Any, Any]:
        """Returns, for each microbatch, the tick at which it leaves the last virtual stage."""
        ticks, devices = np.nonzero(self.stages == self.num_virtual_stages - 1)
        finished = np.empty(self.num_microbatches, np.int64)
        finished[self.microbatches[ticks, devices]] = ticks
        return finished

    def __str__(self) -> str:
        """Returns the table as text: a line per device, `stage:microbatch` per tick."""
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
            raise MeshwrightError("a schedule's cell holds a stage and a microbatch, or -1 in both tables.")
        if self.num_virtual_stages % self.num_stages:
            raise MeshwrightError(
                f"a schedule of {self.num_virtual_stages} virtual stages on {self.num_stages} devices leaves rounds "
                "unfinished.",
                hint="use a multiple of the number of devices.",
            )
        when = np.full((self.num_virtual_stages, self.num_microbatches), IDLE)
        for tick, device in zip(*np.nonzero(busy), strict=True):
            stage, microbatch = int(self.stages[tick, device]), int(self.microbatches[tick, device])
            cell = f"tick {tick}, device {device}: stage {stage} of microbatch {microbatch}"
            if stage % self.num_stages != device:
                raise MeshwrightError(f"{cell} runs on the wrong device; it lives on {stage % self.num_stages}.")
            if when[stage, microbatch] != IDLE:
                raise MeshwrightError(f"{cell} was already run at tick {when[stage, microbatch]}.")
            if stage and when[stage - 1, microbatch] != tick - 1:
                before = when[stage - 1, microbatch]
                ran = f"ran at tick {before}" if before != IDLE else "has not run before"
                raise MeshwrightError(
                    f"{cell} needs what stage {stage - 1} made at tick {tick - 1}, but that {ran}.",
                    hint="a stage must follow the one before it at the very next tick.",
                )
            when[stage, microbatch] = tick
        missing = np.argwhere(when == IDLE)
        if len(missing):
            stage, microbatch = missing[0]
            raise MeshwrightError(
                f"the schedule leaves out {len(missing)} cells, first stage {stage} of microbatch {microbatch}."
            )


def gpipe_schedule(num_stages: int, num_microbatches: int) -> Schedule:
    """Returns the table in which microbatches follow each other through the stages, one tick apart.

    Example:
        >>> print(gpipe_schedule(2, 3))
        device 0  0:0 0:1 0:2   .
        device 1    . 1:0 1:1 1:2
        4 ticks, 25.0% idle
    """
    return circular_schedule(num_stages, 1, num_microbatches)


def circular_schedule(num_stages: int, num_rounds: int, num_microbatches: int) -> Schedule:
    """Returns the table in which every microbatch passes the ring of devices `num_rounds` times.

    With `r` rounds a device holds `r` thin slices of the model instead of one thick one, and idles for `1/r` of the
    time that GPipe's schedule does. Microbatches go round in groups of `num_stages`, so that each returns to the first
    device just when that is free and nothing has to wait in a queue.

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
    # A device's k-th turn, counted from the moment the first microbatch could reach it.
    turn = np.arange(groups * num_rounds * num_stages + num_stages - 1)[:, None] - np.arange(num_stages)
    per_group = num_rounds * num_stages
    microbatch = turn // per_group * num_stages + turn % num_stages
    stage = turn % per_group // num_stages * num_stages + np.arange(num_stages)
    busy = (turn >= 0) & (microbatch < num_microbatches) & (turn < groups * per_group)
    used = np.flatnonzero(busy.any(axis=1))[-1] + 1  # a last group that is not full ends early
    return Schedule(np.where(busy, stage, IDLE)[:used], np.where(busy, microbatch, IDLE)[:used])


# --- Layers as stages ---
#
# Parameters are stored as `[num_layers, ...]` in the order of the layers, whatever the mesh. For one round, `P(axis)`
# gives each device its stage. When microbatches pass the devices several times, device `d` of `n` needs the slices `d`,
# `d + n`, `d + 2n`, ...; as `[num_rounds, num_layers / num_rounds, ...]`, split by `P(None, axis)`, it has just these.
# That is a reshape: it keeps the order of layers, and does not depend on the mesh.
#
# What it costs depends on where it happens. Inside a step whose state is split by `P(axis)`, XLA moves the weights to
# their stages and the gradients back, once per step. A run that wants to save this keeps its state in the second form,
# and calls `unstage_layers` where it writes a checkpoint.


def stage_layers(params: PyTree, *, num_stages: int, num_rounds: int = 1) -> PyTree:
    """Returns stacked layers in the form that a pipeline splits over its axis; checks that they divide.

    For one round that is how they are stored, split by `P(axis)`. For several it is `[num_rounds, layers per round,
    ...]`, split by `P(None, axis)`. Call it in the global view, before `local_map`; see the comment above.

    Example:
        >>> stage_layers({"w": jnp.zeros((12, 5))}, num_stages=2, num_rounds=3)["w"].shape
        (3, 4, 5)
    """
    chunks = num_stages * num_rounds
    for leaf in named_leaves(params):
        layers = np.shape(leaf.value)[0] if np.ndim(leaf.value) else None
        if layers is None:
            raise LayoutError(f"`{leaf.name}` is a scalar: it has no leading dim of layers to split over stages.")
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
    """Returns layers in the form they are stored in, `[num_layers, ...]`: the inverse of `stage_layers`.

    Example:
        >>> unstage_layers({"w": jnp.zeros((3, 4, 5))}, num_rounds=3)["w"].shape
        (12, 5)
    """
    if num_rounds == 1:
        return params
    return jax.tree.map(lambda leaf: jnp.reshape(leaf, (-1, *leaf.shape[2:])), params)


def count_rounds(stage_params: PyTree, rounds: int | None = None) -> int:
    """Returns the leading dim that staged layers share: the rounds. Raises where they differ, or from `rounds`."""
    for leaf in named_leaves(stage_params):
        found = int(np.shape(leaf.value)[0]) if np.ndim(leaf.value) else 0
        rounds = found if rounds is None else rounds
        if found != rounds or not found:
            raise LayoutError(
                f"`{leaf.name}` has shape {np.shape(leaf.value)}; under a circular schedule its leading dim is the "
                f"rounds{f', of which there are {rounds}' if rounds else ''}.",
                hint="stage_layers(params, num_stages=..., num_rounds=...), split by P(None, axis), gives that form.",
            )
    return rounds or 1
