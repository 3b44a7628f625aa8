"""Page section on memory: a bar against the chip's capacity, a verdict, and the basis of every part."""

from __future__ import annotations

import math

from meshwright.layout import format_bytes
from meshwright.pages import Bar, Markup, Section, fold, join, prose, stacked_bars, table, tag
from meshwright.pages.colors import NUM_FILLS
from meshwright.plan.costs.memory import Part
from meshwright.plan.output.memory_levels import memory_chart
from meshwright.plan.output.schedule_picture import ScheduledStep
from meshwright.plan.plan import Plan


def memory_section(plan: Plan, made: ScheduledStep | None = None) -> Section:
    """Returns the section on memory, over the scheduled step if there is one."""
    memory = plan.memory
    names, values = _bar_parts(memory.parts)
    bar = stacked_bars(
        "Peak memory per device",
        names,
        [Bar(f"{plan.setup.mesh} ({memory.basis})", values)],
        capacity=memory.capacity,
        capacity_label=f"{plan.target.kind} has",
        show=format_bytes,
    )
    rows = [(part.name, part.basis, part.note) for part in memory.parts]
    known = table(("part", "basis", "note"), rows, sortable=False)
    named = tag("h3", "Where the figures come from")
    return Section(
        "Memory",
        join([prose(*_verdict(plan)), bar, memory_chart(plan, made), *_splits(plan), named, known, _own(plan)]),
    )


def _splits(plan: Plan) -> list[Markup]:
    made = []
    for part in plan.memory.parts:
        if len(part.split) > 1:
            names, values = _bar_parts(tuple(Part(kind, size, part.basis) for kind, size in part.split.items()))
            title = f"{part.name.capitalize()} by part of the model"
            made.append(stacked_bars(title, names, [Bar(plan.setup.mesh, values)], unit=part.basis, show=format_bytes))
    return made


def _verdict(plan: Plan) -> list[str]:
    memory = plan.memory
    said = [f"{'Each device' if memory.fits is None else 'It'} {memory.verdict}"]
    largest = max(memory.parts, key=lambda part: part.bytes)
    if memory.fits is not False:
        said.append(f"The largest part is {largest.words}.")
    state = sum(part.bytes for part in memory.parts if part.name in ("parameters", "optimizer", "bookkeeping"))
    said.append(f"The state takes {format_bytes(state)} (exact, from the layout).")
    if memory.fits is False:
        saves = "more remat, more minibatches, fewer rows or a larger tp axis"
        remedy = saves if largest.name in ("activations", "temporaries") else "a larger fsdp axis, or ZeRO-1 over dp,"
        said.append(f"Use {remedy} to reduce it.")
    return said


def _bar_parts(parts: tuple[Part, ...]) -> tuple[list[str], list[float]]:
    """Returns names and sizes for a bar: one part per available fill, the rest as one.

    Bookkeeping (counters and keys) is a few bytes, so it is added to the optimizer state.
    """
    sizes: dict[str, float] = {}
    for part in sorted(parts, key=lambda part: part.name == "bookkeeping"):
        name = "optimizer" if part.name == "bookkeeping" and "optimizer" in sizes else part.name
        sizes[name] = sizes.get(name, 0.0) + part.bytes
    if len(sizes) <= NUM_FILLS:
        return [*sizes], [*sizes.values()]
    visible = sorted(sizes, key=lambda name: -sizes[name])[: NUM_FILLS - 1]
    shown = {name: size for name, size in sizes.items() if name in visible}
    rest = math.fsum(size for name, size in sizes.items() if name not in visible)
    return [*shown, "rest"], [*shown.values(), rest]


def _own(plan: Plan) -> Markup | None:
    if plan.compiled is None or not plan.compiled.memory:
        return None
    rows = [(name.replace("_", " "), format_bytes(size)) for name, size in plan.compiled.memory.items()]
    rows.append(("peak", format_bytes(plan.compiled.peak_bytes)))
    return fold("Memory analysis of the compiler", table(("part", "bytes"), rows, right=(1,), sortable=False))
