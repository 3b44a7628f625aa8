"""What a plan rests on: the meaning of its three words, its notes, the chip's figures and the compiler's versions."""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.layout import format_bytes
from meshwright.pages import Markup, Section, duration, fold, join, pairs, prose, table, tag
from meshwright.plan.plan import Plan


def grounds_section(plan: Plan, notes: Sequence[str]) -> Section:
    """Returns where the figures come from."""
    meaning = pairs(
        [
            ("compiled", "read off the program that the machine's own compiler made"),
            ("computed", "follows from shapes, the layout and data sheets"),
            ("assumed", "holds a rate that was measured elsewhere, or an estimate"),
        ]
    )
    made: list[Markup] = [prose("Every figure says one of three words. The time of a step is always assumed."), meaning]
    said = [*notes, *plan.notes]
    if said:
        made += [tag("h3", "Notes"), tag("ul", *(tag("li", note) for note in said))]
    flops = plan.flops
    counted = [
        ("model, a step", f"{flops.model:.4g} FLOP"),
        ("computed again by remat", f"{flops.recomputed:.4g} FLOP"),
        ("attention, of it", f"{flops.attention:.4g} FLOP"),
        ("tokens a step", f"{plan.tokens_per_step:,}"),
    ]
    made += [tag("h3", "Counted on the traced program (computed)"), pairs(counted)]
    if plan.compiled is not None:
        made += [tag("h3", "Compiled"), pairs(_compiled(plan))]
    if plan.target.chip is not None:
        made.append(_chip(plan))
    return Section("What it rests on", join(made), short="Grounds")


def _compiled(plan: Plan) -> list[tuple[str, str]]:
    compiled = plan.compiled
    assert compiled is not None
    found = [
        ("traced in", duration(compiled.trace_s)),
        ("compiled in", duration(compiled.compile_s)),
        ("memory that took here", format_bytes(compiled.peak_rss_bytes)),
        ("matmuls", f"{compiled.num_matmuls:,}"),
        ("collectives", f"{len(compiled.collectives):,}"),
    ]
    return found + list(compiled.versions.items())


def _chip(plan: Plan) -> Markup:
    chip = plan.target.chip
    assert chip is not None
    rows = [
        (f"peak, {dtype}", f"{peak / 1e12:,.0f} TFLOP/s", chip.sources.get(f"peaks.{dtype}", ""))
        for dtype, peak in chip.peaks.items()
    ]
    rows.append(("memory", format_bytes(chip.memory_bytes), chip.sources.get("memory_bytes", "")))
    rows.append(
        ("memory bandwidth", f"{chip.memory_bandwidth / 1e9:,.0f} GB/s", chip.sources.get("memory_bandwidth", ""))
    )
    speed = f"{chip.links.count} x {chip.links.per_direction / 1e9:,.1f} GB/s each way"
    rows.append((f"{chip.links.kind} links", speed, chip.sources.get("links", "")))
    network = "not published" if chip.network is None else f"{chip.network / 1e9:,.1f} GB/s"
    rows.append(("network", network, chip.sources.get("network", "")))
    return fold(f"The figures of {chip.title}", table(("figure", "value", "source"), rows, sortable=False))
