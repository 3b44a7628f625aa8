"""Live memory over a step: from the compiled program's schedule, or from the plan's parts if nothing was compiled."""

from __future__ import annotations

from collections.abc import Mapping

from meshwright.layout import format_bytes
from meshwright.pages import Level, Markup, area_chart, duration, percent
from meshwright.plan.output.schedule_picture import ScheduledStep
from meshwright.plan.plan import Plan

REST = "rest"
LAYERS_DRAWN = 24
MAX_CYCLES, FIRST_CYCLES = 8, 3  # of minibatches, drawn one by one: all, or the first of many
# Units of time, and how many of one a step must take to be drawn in it.
_TIMES, _ENOUGH = (("h", 3600.0), ("min", 60.0), ("s", 1.0), ("ms", 1e-3)), 2
_FAR = 0.03  # of the peak; smaller differences between the chart and the bar are not mentioned
_GIVES = ("temporaries", "activations", "gradients", "gathered weights")


def memory_chart(plan: Plan, made: ScheduledStep | None) -> Markup:
    """Returns the area chart of a plan's memory; its peak is the plan's."""
    timed = plan.time is not None
    if made is None or not made.levels:
        levels, note = computed_levels(plan), _computed_words(plan)
    else:
        levels, note = compiled_levels(plan, made)
    low, high = levels[0].start, levels[-1].end
    # Round numbers of the unit that the peak has.
    unit = max(size for size in (1, 2**10, 2**20, 2**30, 2**40) if size <= max(plan.memory.total, 1.0))
    name, length = next((one for one in _TIMES if high - low >= _ENOUGH * one[1]), _TIMES[-1])
    scale = 1 / length if timed else 100 / ((high - low) or 1.0)
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
        x_name="time" if timed else "bytes written so far" if made is not None else "time",
        x_unit=name if timed else "%",
        capacity=None if plan.memory.capacity is None else plan.memory.capacity / unit,
        capacity_label=f"{plan.target.kind} has",
        show=lambda amount: format_bytes(amount * unit),
        show_x=(lambda place: duration(place / scale)) if timed else None,
        note=note,
    )


def _computed_words(plan: Plan) -> str:
    said = "Computed: the sizes are those of the parts above. When each is live is assumed: "
    if plan.stages.is_scheduled:
        return f"{said}the schedule keeps its buffers for all ticks, so memory is flat until the update."
    count = plan.setup.num_minibatches
    said += "activations fill in the forward pass, and the backward pass frees them"
    if count == 1:
        return f"{said}."
    said += f", once for each of {count} minibatches; the sum of their gradients stays."
    if _drawn(count) < count:
        said += f" The first {_drawn(count)} are drawn one by one, and the others as one block at their peak."
    return said


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
    note += (
        " The parts are read from the names in the program. The bar above has the plan's own parts, and what they lack "
        "of the compiler's peak counts as temporaries there."
    )
    levels = [Level(one.start, one.end, _moved(one.live, missing)) for one in made.levels]
    return levels, " ".join([note, *_different(plan, max(levels, key=lambda level: level.total))])


def _different(plan: Plan, peak: Level) -> list[str]:
    """Returns a sentence about the parts whose size at the peak is far from that in the bar."""
    sizes: dict[str, float] = {}
    for part in plan.memory.parts:
        sizes[part.name] = sizes.get(part.name, 0.0) + part.bytes
    far = {name: abs(size - peak.amounts.get(name, 0.0)) for name, size in sizes.items()}
    named = [
        f"{name} {format_bytes(peak.amounts.get(name, 0.0))} and {format_bytes(sizes[name])}"
        for name in sorted(far, key=lambda name: -far[name])
        if far[name] > _FAR * plan.memory.total
    ]
    if not named:
        return []
    # Names do not tell every temporary of the backward pass from a gradient; see `memory_trace`.
    why = (
        " Some temporaries may count as gradients here." if far.get("gradients", 0.0) > _FAR * plan.memory.total else ""
    )
    return [f"So the two differ, here and in the bar: {', '.join(named)}.{why}"]


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
    """Returns levels made of the parts of a plan; all parts are whole at the start of the last backward pass."""
    sizes: dict[str, float] = {}
    for part in plan.memory.parts:
        sizes[part.name] = sizes.get(part.name, 0.0) + part.bytes
    total = sum(sizes.values())
    if plan.memory.total > total:
        sizes[REST] = plan.memory.total - total
    step = plan.time.step.value if plan.time is not None else 1.0
    update = plan.time.optimizer.value if plan.time is not None else 0.05
    if plan.stages.is_scheduled:
        levels = [Level(0.0, step - update, sizes)]
    else:
        levels = _cycles(plan, sizes, step - update)
    if update > 0:
        levels.append(Level(step - update, step, _part_of(sizes, activations=0.0, gradients=1.0, working=0.0)))
    return levels


def _cycles(plan: Plan, sizes: Mapping[str, float], length: float) -> list[Level]:
    """Returns the levels of a forward and backward pass for each minibatch; gradients stay from the first on."""
    count, flops = plan.setup.num_minibatches, plan.flops
    each, drawn = length / count, _drawn(count)
    forward = each * (flops.model / 3) / (flops.model + flops.recomputed or 1.0)
    layers = LAYERS_DRAWN if drawn == 1 else LAYERS_DRAWN // 2
    pipelined = plan.stages.count > 1  # activations are then those of one tick, which every tick needs
    levels = []
    for cycle in range(drawn):
        begin, kept = cycle * each, 1.0 if cycle else 0.0
        for number in range(layers):
            start, end = (begin + forward * (number + more) / layers for more in (0, 1))
            levels.append(Level(start, end, _part_of(sizes, number / layers, kept, 0.0, ticking=pipelined)))
        for number in range(layers):
            start, end = (begin + forward + (each - forward) * (number + more) / layers for more in (0, 1))
            levels.append(Level(start, end, _part_of(sizes, 1 - number / layers, 1.0, 1.0, ticking=pipelined)))
    return [*levels, Level(drawn * each, length, sizes)] if drawn < count else levels


def _drawn(count: int) -> int:
    """Returns how many minibatches are drawn one by one."""
    return count if count <= MAX_CYCLES else FIRST_CYCLES


def _part_of(
    sizes: Mapping[str, float], activations: float, gradients: float, working: float, *, ticking: bool = False
) -> dict[str, float]:
    """Returns the parts at one moment, with these shares of activations, gradients and temporaries."""
    shares = {"activations": 1.0 if ticking else activations, "ticks": activations, "gradients": gradients}
    shares |= {"temporaries": working, "gradients of a tick": working, "gradients of a minibatch": working}
    shares["gathered weights"] = max(working, float(activations > 0))
    return {name: size * shares.get(name, 1.0) for name, size in sizes.items()}
