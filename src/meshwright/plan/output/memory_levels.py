"""Live memory over a step: from the compiled program's schedule, or from the plan's parts if nothing was compiled."""

from __future__ import annotations

from collections.abc import Mapping

from meshwright.layout import format_bytes
from meshwright.pages import Level, Markup, area_chart, percent
from meshwright.plan.output.schedule_picture import ScheduledStep
from meshwright.plan.plan import Plan

REST = "rest"
LAYERS_DRAWN = 24
_GIVES = ("temporaries", "activations", "gradients", "gathered weights")


def memory_chart(plan: Plan, made: ScheduledStep | None) -> Markup:
    """Returns the area chart of a plan's memory; its peak is the plan's."""
    timed = plan.time is not None
    if made is None or not made.levels:
        levels = computed_levels(plan)
        note = (
            "Computed: the sizes are those of the parts above. When each is live is assumed: activations fill in the "
            "forward pass, and the backward pass frees them."
        )
    else:
        levels, note = compiled_levels(plan, made)
    low, high = levels[0].start, levels[-1].end
    # Round numbers of the unit that the peak has.
    unit = max(size for size in (1, 2**10, 2**20, 2**30, 2**40) if size <= max(plan.memory.total, 1.0))
    scale = (1e3 if timed else 100) / ((1.0 if timed else high - low) or 1.0)
    return area_chart(
        "Memory over the step",
        [
            Level(
                (one.start - low) * scale,
                (one.end - low) * scale,
                {name: size / unit for name, size in one.amounts.items()},
            )
            for one in levels
        ],
        unit=plan.memory.basis if made is not None else "computed",
        x_name="time" if timed else "bytes written so far",
        x_unit="ms" if timed else "%",
        capacity=None if plan.memory.capacity is None else plan.memory.capacity / unit,
        capacity_label=f"{plan.target.kind} has",
        show=lambda amount: format_bytes(amount * unit),
        note=note,
    )


def compiled_levels(plan: Plan, made: ScheduledStep) -> tuple[list[Level], str]:
    """Returns the levels of a compiled program, moved so that the peak is the compiler's, and how that was done."""
    highest = max(sum(one.live.values()) for one in made.levels)
    peak = plan.memory.total
    missing = peak - highest
    note = (
        "Compiled: read from the schedule and the sizes of its buffers, which add up to "
        f"{format_bytes(highest)} at the peak; the compiler's own peak is {format_bytes(peak)}."
    )
    if abs(missing) > 0.001 * peak:
        note += (
            f" The difference of {percent(abs(missing) / peak)}, "
            + ("gaps between buffers, code and scratch memory, is drawn as the rest." if missing > 0 else
               "buffers that share memory in ways that the schedule does not show, is taken off the temporaries.")
        )  # fmt: skip
    levels = [Level(one.start, one.end, _moved(one.live, missing)) for one in made.levels]
    return levels, note


def _moved(live: Mapping[str, float], missing: float) -> dict[str, float]:
    amounts = dict(live)
    if missing >= 0:
        return amounts | ({REST: amounts.get(REST, 0.0) + missing} if missing else {})
    for name in (*_GIVES, *amounts):
        taken = min(amounts.get(name, 0.0), -missing)
        if taken > 0:
            amounts[name] -= taken
            missing += taken
    return amounts


def computed_levels(plan: Plan) -> list[Level]:
    """Returns levels made of the parts of a plan; all parts are whole at the start of the backward pass."""
    sizes: dict[str, float] = {}
    for part in plan.memory.parts:
        sizes[part.name] = sizes.get(part.name, 0.0) + part.bytes
    total = sum(sizes.values())
    if plan.memory.total > total:
        sizes[REST] = plan.memory.total - total
    step = plan.time.step.value if plan.time is not None else 1.0
    update = plan.time.optimizer.value if plan.time is not None else 0.05
    flops = plan.flops
    forward = (step - update) * (flops.model / 3) / (flops.model + flops.recomputed or 1.0)
    backward = step - update - forward
    levels = []
    for number in range(LAYERS_DRAWN):
        share = number / LAYERS_DRAWN
        start, end = forward * share, forward * (number + 1) / LAYERS_DRAWN
        levels.append(Level(start, end, _part_of(sizes, activations=share, gradients=0.0, working=0.0)))
    for number in range(LAYERS_DRAWN):
        left = 1 - number / LAYERS_DRAWN
        start, end = (forward + backward * (number + more) / LAYERS_DRAWN for more in (0, 1))
        levels.append(Level(start, end, _part_of(sizes, activations=left, gradients=1.0, working=1.0)))
    if update > 0:
        levels.append(Level(step - update, step, _part_of(sizes, activations=0.0, gradients=1.0, working=0.0)))
    return levels


def _part_of(sizes: Mapping[str, float], *, activations: float, gradients: float, working: float) -> dict[str, float]:
    """Returns the parts at one moment, with these shares of activations, gradients and temporaries."""
    shares = {"activations": activations, "ticks": activations, "gradients": gradients, "temporaries": working}
    shares |= {"gradients of a tick": gradients, "gathered weights": max(working, float(activations > 0))}
    return {name: size * shares.get(name, 1.0) for name, size in sizes.items()}
