"""Collectives of a pipeline's program, as often as one device runs them.

The program of every device has all branches of a tick: idle, forward, backward. Its text lists their collectives for
each tick, though a device runs only one branch, and none while it is idle. What stages send each other lies outside of
the branches: it travels at every tick, and is zeros if the sender was idle.
"""

from __future__ import annotations

from dataclasses import replace

from meshwright.plan.compiled.collectives import Collective, ProgramSchedule

BRANCH = "cond/branch"


def without_idle(schedule: ProgramSchedule, *, busy: int, ticks: int, rounds: int, ends: str) -> ProgramSchedule:
    """Returns a program's schedule with the trips of a device that has the loss.

    Args:
        busy: number of ticks in which a device runs each kind of work.
        ticks: number of ticks of the loop.
        rounds: virtual stages per device; embedding and loss belong to one of them.
        ends: "apart" if another device has the embedding, "tied" if its table is also the head on this one, and
            "together" if this device has both.

    Example:
        >>> gather = Collective("all-gather", "g", 64, 2, False, 0, trips=10, source="while/body/cond/branch_1_fun/ag")
        >>> found = without_idle(ProgramSchedule((gather,), 1, 0), busy=4, ticks=5, rounds=1, ends="apart")
        >>> found.collectives[0].trips
        8
    """

    def share(one: Collective) -> float:
        depth = one.source.count(BRANCH)
        if not depth:
            return 1.0
        found = busy / ticks
        if depth > 1:
            found /= rounds
            if "params[embed" in one.source or "embedding" in one.source:
                found *= {"apart": 0.0, "tied": 0.5, "together": 1.0}[ends]
        return found

    changed = tuple(replace(one, trips=round(one.trips * share(one))) for one in schedule.collectives)
    return replace(schedule, collectives=changed)
