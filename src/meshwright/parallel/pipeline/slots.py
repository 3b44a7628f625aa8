"""Places in memory for what a training schedule keeps between ticks; their number does not grow with microbatches.

A device has an inbox for the arrays that other stages send it: the inputs of its stages, which it keeps until their
backward passes, and the gradients of their outputs. It also has a store for what a forward pass saves for the backward
pass, or the input gradients for the weight gradients. Each entry gets the first slot that is free while it is needed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from meshwright.parallel.pipeline.schedule import IDLE
from meshwright.parallel.pipeline.training_schedule import TrainingSchedule, Work

Table = np.ndarray[Any, Any]


@dataclass(frozen=True, eq=False)
class Slots:
    """The slot of each cell of a schedule, as `[ticks, devices]`, or -1.

    Args:
        inputs: the inbox slot with the stage's input.
        gradients: the inbox slot with the gradient of the stage's output.
        stored: the slot of the store that the cell writes or reads.
        arrivals: for each direction of messages, `(target - source) % devices`, the inbox slot of the message that
            arrives at the end of the tick.
        num_inbox, num_stored: number of slots.
    """

    inputs: Table
    gradients: Table
    stored: Table
    arrivals: dict[int, Table]
    num_inbox: int
    num_stored: int


def assign_slots(schedule: TrainingSchedule, *, saves: bool) -> Slots:
    """Assigns slots to the messages of a schedule, and to what its cells store.

    Args:
        saves: whether forward passes store values for the backward passes; otherwise a backward pass starts again from
            the stage's input, and only input gradients store values, for the weight gradients.
    """
    ticks, devices, last = schedule.ticks, schedule.devices, schedule.num_virtual_stages - 1
    shape = schedule.work.shape
    inbox: list[list[tuple[int, int, tuple[str, int, int]]]] = [[] for _ in range(schedule.num_stages)]
    stores: list[list[tuple[int, int, tuple[str, int, int]]]] = [[] for _ in range(schedule.num_stages)]
    for stage, device in enumerate(devices):
        for part in range(schedule.num_microbatches):
            forward, backward, weights = (int(tick) for tick in ticks[:, stage, part])
            if stage:
                until = forward if saves else backward
                inbox[device].append((int(ticks[Work.FORWARD, stage - 1, part]) + 1, until, ("input", stage, part)))
            # The last stage gets the gradient of its output from its own forward pass, which computes the loss.
            source = forward if stage == last else int(ticks[Work.BACKWARD, stage + 1, part])
            inbox[device].append((source + 1, backward, ("gradient", stage, part)))
            if saves or weights != IDLE:
                stores[device].append((forward if saves else backward, max(backward, weights), ("", stage, part)))
    inbox_slots, num_inbox = _first_fit(inbox)
    store_slots, num_stored = _first_fit(stores)
    inputs, gradients, stored = (np.full(shape, IDLE, np.int32) for _ in range(3))
    arrivals: dict[int, Table] = {}

    def arrive(tick: int, source: int, target: int, slot: int) -> None:
        by = (target - source) % schedule.num_stages
        arrivals.setdefault(by, np.full(shape, IDLE, np.int32))[tick, target] = slot

    for cell in schedule.cells():
        at, key, device = (cell.tick, cell.device), (cell.stage, cell.microbatch), cell.device
        inputs[at] = inbox_slots.get(("input", *key), IDLE)
        stored[at] = store_slots.get(("", *key), IDLE)
        if cell.work == Work.BACKWARD:
            gradients[at] = inbox_slots["gradient", *key]
            if cell.stage:
                target = ("gradient", cell.stage - 1, cell.microbatch)
                arrive(cell.tick, device, devices[cell.stage - 1], inbox_slots[target])
        elif cell.work == Work.FORWARD:
            after = min(cell.stage + 1, last)
            kind = "gradient" if cell.stage == last else "input"
            arrive(cell.tick, device, devices[after], inbox_slots[kind, after, cell.microbatch])
    return Slots(inputs, gradients, stored, arrivals, num_inbox, num_stored)


def _first_fit(
    entries: list[list[tuple[int, int, tuple[str, int, int]]]],
) -> tuple[dict[tuple[str, int, int], int], int]:
    """Returns the slot of each entry, given as its first tick, last tick and key for each device."""
    found: dict[tuple[str, int, int], int] = {}
    most = 0
    for own in entries:
        busy_until: list[int] = []
        for first, last, key in sorted(own):
            free = [slot for slot, until in enumerate(busy_until) if until < first]
            if not free:
                free = [len(busy_until)]
                busy_until.append(0)
            found[key] = free[0]
            busy_until[free[0]] = last
        most = max(most, len(busy_until))
    return found, most
