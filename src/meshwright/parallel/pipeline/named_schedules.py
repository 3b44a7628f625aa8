"""The training schedules by name: the order of each device's work, placed at the earliest ticks.

    name               bubble, in ticks      microbatches in memory, on `n` devices
    gpipe, circular    2(n - 1)              all
    1f1b               2(n - 1)              n
    aligned-1f1b       2(n - 1)              2n - 1
    interleaved-1f1b   2(n - 1), shorter     n + (n - 1) / rounds
    zb-h1              n - 1                 n
    zb-v               n - 1, half as long   n

`zb-h1` and `zb-v` are the zero-bubble schedules of Qi et al., 2023 and 2024 ("Zero Bubble Pipeline Parallelism",
"Pipeline Parallelism with Controllable Memory"): weight gradients, which no other device waits for, fill the ticks in
which a device would be idle. In `aligned-1f1b` and `interleaved-1f1b`, the forward passes of all devices share their
ticks, and so do the backward passes, so that no device waits for longer work than its own. In `zb-v`, device `d` of `n`
has the virtual stages `d` and `2n - 1 - d`, so that a microbatch comes back to the first device, which has the loss as
well.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, get_args

import numpy as np

from meshwright.errors import MeshwrightError, did_you_mean
from meshwright.parallel.pipeline.schedule import IDLE, circular_schedule, gpipe_schedule
from meshwright.parallel.pipeline.training_schedule import TrainingSchedule, Work, work_before

ScheduleName = Literal["gpipe", "circular", "1f1b", "aligned-1f1b", "interleaved-1f1b", "zb-h1", "zb-v"]
SCHEDULE_NAMES: tuple[str, ...] = get_args(ScheduleName)

Order = list[tuple[Work, int, int]]
"""The work of one device in its order: kind, virtual stage and microbatch."""


def make_schedule(
    name: ScheduleName, num_stages: int, num_microbatches: int, *, num_rounds: int | None = None
) -> TrainingSchedule:
    """Returns a training schedule by name.

    Args:
        name: "gpipe", "circular", "1f1b", "aligned-1f1b", "interleaved-1f1b", "zb-h1" or "zb-v".
        num_stages: number of devices in the pipeline.
        num_rounds: virtual stages per device, for "circular" and "interleaved-1f1b" (default: 2). "zb-v" has 2, the
            others 1.

    Example:
        >>> print(make_schedule("zb-h1", 2, 3))
        device 0  F0:0 F0:1    . B0:0 W0:0 F0:2 B0:1 W0:1 B0:2 W0:2
        device 1     . F1:0 B1:0 F1:1 B1:1 W1:0 F1:2 B1:2 W1:1 W1:2
        10 ticks, 10.0% idle, at most 2 microbatches in memory
    """
    rounds = check_rounds(name, num_rounds)
    check_count(num_stages, "stages")
    check_count(num_microbatches, "microbatches")
    devices = range(num_stages)
    if name in ("gpipe", "circular"):
        return _mirrored(name, num_stages, rounds, num_microbatches)
    if name in ("aligned-1f1b", "interleaved-1f1b"):
        return _aligned(name, num_stages, rounds, num_microbatches)
    if name == "1f1b":
        orders = [_one_f_one_b(device, num_stages, num_microbatches) for device in devices]
    elif name == "zb-h1":
        orders = [_zero_bubble_h1(device, num_stages, num_microbatches) for device in devices]
    else:
        orders = [_zero_bubble_v(device, num_stages, num_microbatches) for device in devices]
    return place_orders(orders, name=name)


def check_rounds(name: str, num_rounds: int | None) -> int:
    """Returns the number of virtual stages per device of a schedule; raises if it cannot have `num_rounds`."""
    if name not in SCHEDULE_NAMES:
        hint = did_you_mean(str(name), SCHEDULE_NAMES) or f"use one of: {', '.join(SCHEDULE_NAMES)}."
        raise MeshwrightError(f"unknown pipeline schedule {name!r}.", hint=hint)
    if num_rounds is not None:
        check_count(num_rounds, "rounds")
    if name in ("circular", "interleaved-1f1b"):
        return 2 if num_rounds is None else num_rounds
    fixed = 2 if name == "zb-v" else 1
    if num_rounds not in (None, fixed):
        raise MeshwrightError(
            f"schedule {name!r} has {fixed} virtual stage{'s' if fixed > 1 else ''} per device; got {num_rounds}.",
            hint='leave it out, or use "interleaved-1f1b".',
        )
    return fixed


def check_count(value: Any, what: str) -> None:
    """Raises if a number of stages, rounds or microbatches is not a positive integer."""
    if not isinstance(value, (int, np.integer)) or isinstance(value, bool) or value < 1:
        raise MeshwrightError(f"a pipeline schedule cannot have {value!r} {what}.", hint="use 1 or more.")


def place_orders(orders: Sequence[Order], *, name: str = "custom") -> TrainingSchedule:
    """Returns the schedule in which each device does its work in the given order, each piece as early as it can.

    Example:
        >>> F, B = Work.FORWARD, Work.BACKWARD
        >>> print(place_orders([[(F, 0, 0), (B, 0, 0)], [(F, 1, 0), (B, 1, 0)]]))
        device 0  F0:0    .    . B0:0
        device 1     . F1:0 B1:0    .
        4 ticks, 50.0% idle, at most 1 microbatch in memory
    """
    last = max((stage for order in orders for _, stage, _ in order), default=0)
    done: dict[tuple[int, int, int], int] = {}
    waiting = [list(reversed(order)) for order in orders]
    rows: list[list[tuple[int, int, int]]] = []
    while any(waiting):
        ready = [
            bool(left) and all(done.get(key, len(rows)) < len(rows) for key in work_before(*left[-1], last + 1))
            for left in waiting
        ]
        if not any(ready):
            stuck = ", ".join(f"{left[-1][0].letter}{left[-1][1]}:{left[-1][2]}" for left in waiting if left)
            raise MeshwrightError(f"the orders of the devices wait for each other: {stuck} cannot run.")
        row = [left.pop() if now else (IDLE, IDLE, IDLE) for left, now in zip(waiting, ready, strict=True)]
        done.update((cell, len(rows)) for cell in row if cell[0] != IDLE)
        rows.append(row)
    work, stages, microbatches = np.moveaxis(np.array(rows, np.int32), -1, 0)
    return TrainingSchedule(work, stages, microbatches, name)


# --- The order of each device's work ---


def _one_f_one_b(device: int, num_stages: int, num_microbatches: int) -> Order:
    ahead = min(num_stages - device, num_microbatches)
    forward = [(Work.FORWARD, device, part) for part in range(num_microbatches)]
    backward = [(Work.BACKWARD, device, part) for part in range(num_microbatches)]
    return _alternating(forward, backward, ahead=ahead - 1)


def _alternating(forward: Order, backward: Order, *, ahead: int) -> Order:
    """Returns `ahead` forward cells, then forward and backward cells by turns."""
    order, rest = forward[:ahead], forward[ahead:]
    for place, cell in enumerate(backward):
        order = [*order, *rest[place : place + 1], cell]
    return order


def _zero_bubble_h1(device: int, num_stages: int, num_microbatches: int) -> Order:
    """1F1B, but the weight gradients of device `d` come `d` microbatches late, so that backward passes go first."""
    ahead = min(num_stages - device, num_microbatches)
    order = [(Work.FORWARD, device, part) for part in range(ahead)]
    for part in range(num_microbatches):
        order.append((Work.BACKWARD, device, part))
        if part >= device:
            order.append((Work.WEIGHTS, device, part - device))
        if part + ahead < num_microbatches:
            order.append((Work.FORWARD, device, part + ahead))
    late = range(max(num_microbatches - device, 0), num_microbatches)
    return [*order, *((Work.WEIGHTS, device, part) for part in late)]


def _zero_bubble_v(device: int, num_stages: int, num_microbatches: int) -> Order:
    """The order for at least `2 * num_stages - 1` microbatches, without those that there are not."""
    whole, down, up = max(2 * num_stages - 1, num_microbatches), device, 2 * num_stages - 1 - device
    order: Order = []
    counts = {(work, stage): 0 for work in Work for stage in (down, up)}

    def add(stage: int, *works: Work) -> None:
        for work in works:
            order.append((work, stage, counts[work, stage]))
            counts[work, stage] += 1

    forward, backward, weights = Work
    for _ in range(2 * (num_stages - device) - 1):
        add(down, forward)
    for _ in range(device):
        add(up, forward)
        add(down, forward)
    for _ in range(num_stages - device):
        add(up, forward, backward, weights)
    while counts[forward, up] < whole:
        if counts[forward, down] < whole:
            add(down, forward)
        add(down, backward, weights)
        add(up, forward, backward, weights)
    for _ in range(device):
        add(down, backward)
        add(up, backward)
    for _ in range(num_stages - device):
        add(down, backward, weights)
    for stage in (up, down):
        while counts[weights, stage] < whole:
            add(stage, weights)
    return [cell for cell in order if cell[2] < num_microbatches]


def _mirrored(name: str, num_stages: int, num_rounds: int, num_microbatches: int) -> TrainingSchedule:
    """Returns a forward schedule followed by the backward pass that JAX derives from it: the same ticks in reverse."""
    if name == "gpipe":
        table = gpipe_schedule(num_stages, num_microbatches)
    else:
        table = circular_schedule(num_stages, num_rounds, num_microbatches)
    busy = table.stages != IDLE

    def both(there: np.ndarray[Any, Any], back: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return np.concatenate([there, back[::-1]])

    work = both(*(np.where(busy, kind, IDLE) for kind in (Work.FORWARD, Work.BACKWARD)))
    stages, parts = (both(cells, cells) for cells in (table.stages, table.microbatches))
    return TrainingSchedule(work, stages, parts, name)


def _aligned(name: str, num_stages: int, num_rounds: int, num_microbatches: int) -> TrainingSchedule:
    """Returns ticks of forward and of backward passes by turns, each in the order of a circular schedule.

    Backward passes run in the reversed pipeline. They begin when the first microbatch has passed all stages.
    """
    table = circular_schedule(num_stages, num_rounds, num_microbatches)
    reverse = np.where(table.stages == IDLE, IDLE, table.num_virtual_stages - 1 - table.stages)[:, ::-1]
    there = (Work.FORWARD, 0, table.stages, table.microbatches)
    back = (Work.BACKWARD, table.num_virtual_stages - 1, reverse, table.microbatches[:, ::-1])
    rows = []
    for turn in range(table.num_ticks + table.num_virtual_stages - 1):
        for kind, begin, stages, parts in (there, back):
            at = turn - begin
            if 0 <= at < table.num_ticks and (stages[at] != IDLE).any():
                rows.append((np.where(stages[at] == IDLE, IDLE, kind), stages[at], parts[at]))
    work, stages, parts = map(np.stack, zip(*rows, strict=True))
    return TrainingSchedule(work, stages, parts, name)
