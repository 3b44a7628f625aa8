"""How much of its communication XLA overlaps with compute in the memory of a GPU."""

from __future__ import annotations

import math

from meshwright.layout.leaf import format_bytes
from meshwright.plan.costs.memory import GATHERED_WEIGHTS, MemoryPlan
from meshwright.plan.step_setup import Setup
from meshwright.plan.target import Target

# XLA:GPU's scheduler keeps to 80% of the memory times its slop factor, in percent. Of collectives that would take more
# it hides about a quarter, and none if the program alone takes 7% more. Read from twelve programs of 7B and 70B
# decoders for h200:1x8 and h200:8x8 (benchmarks/results/plan_pages.md).
SLOP_OPTION, SLOP = "xla_gpu_memory_limit_slop_factor", 95
_SCHEDULED_MEMORY, _CROWDED, CROWDED_HIDDEN = 0.8, 1.07, 0.25


def overlap_limit(memory: MemoryPlan, target: Target, setup: Setup) -> tuple[float, str]:
    """Returns the share of communication that can be hidden in a GPU's memory, with a note if it is below 1.

    Gathers that overlap need memory of their own, and XLA gives up overlap rather than exceed its limit.
    """
    if target.platform != "gpu" or not memory.capacity:
        return 1.0, ""
    limit = _SCHEDULED_MEMORY * float(setup.compiler_options.get(SLOP_OPTION, SLOP)) / 100 * memory.capacity
    needed = memory.total
    if setup.sync != "once":  # which gathers before anything that it could overlap with
        needed += math.fsum(part.bytes for part in memory.parts if part.name == GATHERED_WEIGHTS)
    if needed <= limit:
        return 1.0, ""
    note = (
        f"XLA schedules programs for {format_bytes(limit)} of this GPU; with overlap, this one would take about "
        f"{format_bytes(needed)}, so little or no communication is hidden; more minibatches or remat need less memory"
    )
    return CROWDED_HIDDEN if memory.total <= _CROWDED * limit else 0.0, note
