"""HTML pages about a plan, and about the difference between two plans."""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from meshwright.errors import MeshwrightWarning
from meshwright.hardware.chips import Chip
from meshwright.layout import Layout, format_bytes
from meshwright.mesh.build import create_abstract_mesh
from meshwright.mesh.string import parse_mesh
from meshwright.pages import (
    Bar,
    Figure,
    Markup,
    Section,
    badge,
    command,
    compact,
    duration,
    fold,
    headline,
    join,
    make_page,
    pairs,
    percent,
    prose,
    stacked_bars,
    table,
    tag,
    write_page,
)
from meshwright.plan.compiled.compile import Compiled
from meshwright.plan.output.commands import PlannedJob, how_to_run, plan_command, train_command
from meshwright.plan.output.explain import PlanData, band_of
from meshwright.plan.output.plan_diff import PlanDiff
from meshwright.plan.output.schedule_picture import scheduled_step
from meshwright.plan.output.sections.communication_section import sending_section
from meshwright.plan.output.sections.compare_section import compare_section, time_bars, why_section
from meshwright.plan.output.sections.failures_section import failures_section
from meshwright.plan.output.sections.layout_section import layout_section, machine_section
from meshwright.plan.output.sections.memory_section import memory_section
from meshwright.plan.output.sections.time_section import pipeline_section, time_section
from meshwright.plan.output.setup_words import assignments, batch_words
from meshwright.plan.output.summary import PARTS, Table, band_words, proportional_band, title_words, unit_of
from meshwright.plan.plan import Plan
from meshwright.plan.search import Search
from meshwright.plan.step_setup import named_optimizer
from meshwright.train.state import state_layout


def build_plan_page(plan: Plan, path: str | Path, **options: Any) -> Path:
    """Writes the page about a plan to `path` and returns it; `options` are those of `render_plan`.

    Example:
        >>> import tempfile
        >>> from meshwright.models import Decoder
        >>> from meshwright.plan.plan import make_plan
        >>> from meshwright.plan.step_setup import Setup
        >>> from meshwright.train import language_job
        >>> job = language_job(Decoder.named("tiny"), batch_size=8, num_tokens=16)
        >>> plan, subject = make_plan(job, "cpu:8", Setup(mesh="fsdp:8")), PlannedJob(job="train.py:job")
        >>> build_plan_page(plan, f"{tempfile.mkdtemp()}/plan.html", job=job, subject=subject).name
        'plan.html'
    """
    return write_page(render_plan(plan, **options), path)


def render_plan(
    plan: Plan,
    *,
    job: Any,
    subject: PlannedJob,
    others: Sequence[Plan] = (),
    found: Search | None = None,
    notes: Sequence[str] = (),
    compared: PlanDiff | None = None,
) -> str:
    """Returns the page about a plan: a single HTML file that needs no network access.

    Args:
        subject: the planned job, for the title and the commands.
        others: plans to compare it with, in the order of a search.
        found: the search, for its rejected candidates.
        notes: notes to add to those of the plan, such as why nothing was compiled.
        compared: the difference from another plan, to explain on the page.

    Example:
        >>> from meshwright.models import Decoder
        >>> from meshwright.plan.plan import make_plan
        >>> from meshwright.plan.step_setup import Setup
        >>> from meshwright.train import language_job
        >>> job = language_job(Decoder.named("tiny"), batch_size=8, num_tokens=16)
        >>> plan = make_plan(job, "cpu:8", Setup(mesh="fsdp:8"))
        >>> "Peak memory per device" in render_plan(plan, job=job, subject=PlannedJob(job="train.py:job"))
        True
    """
    layout, made = plan_layout(plan, job), scheduled_step(plan)
    sections = [
        memory_section(plan, made),
        time_section(plan, made),
        sending_section(plan),
        pipeline_section(plan),
        failures_section(plan),
        machine_section(plan),
        layout_section(layout),
        compare_section([plan, *others], subject, found),
        None if compared is None else why_section(compared),
        _grounds(plan, notes),
    ]
    today = time.strftime("%Y-%m-%d", time.gmtime())
    return make_page(
        f"{title_words(plan, subject)} · plan",
        head=_head(plan, subject, notes),
        sections=[section for section in sections if section is not None],
        foot=f"Made by Meshwright on {today}. Nothing ran on {plan.target.title}. This file needs no network access.",
    )


def plan_layout(plan: Plan, job: Any) -> Layout:
    """Returns the layout of a plan's state."""
    mesh = create_abstract_mesh(parse_mesh(plan.setup.mesh).resolve(plan.target.num_devices))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", MeshwrightWarning)  # they are notes of the plan already
        setup = plan.setup
        options: Any = {"zero_axis": setup.zero_axis, "precision": setup.dtypes, "pad": setup.pad or False}
        return state_layout(job, named_optimizer(setup.optimizer, job), mesh, **options)


def _head(plan: Plan, subject: PlannedJob, notes: Sequence[str]) -> Markup:
    fits = plan.memory.fits
    word, kind = {True: ("fits", "good"), False: ("does not fit", "bad"), None: ("planned", "busy")}[fits]
    said = f"{'Each device' if fits is None else 'It'} {plan.memory.verdict}"
    return join(
        [
            tag("p", "Plan", class_="eyebrow"),
            tag("h1", f"{title_words(plan, subject)} ", badge(word, kind=kind)),
            prose(
                f"{subject.described}, {_many(plan.num_params)} parameters, on {plan.target.title}: "
                f"{batch_words(plan.rows, plan.tokens_per_step)}.",
                said,
                _waiting(plan),
            ),
            headline(_figures(plan)),
            *(tag("p", note, class_="note") for note in notes),
            *_how_to_run(plan, subject),
            tag("h3", "Reproduce this plan"),
            command(plan_command(plan, subject), label="command that reproduces this plan"),
        ]
    )


def _many(count: int) -> str:
    return (
        f"{count / 1e9:,.1f} billion"
        if count >= 1e9
        else f"{count / 1e6:,.1f} million"
        if count >= 1e6
        else f"{count:,}"
    )


def _how_to_run(plan: Plan, subject: PlannedJob) -> list[Markup]:
    line = train_command(plan, subject)
    if line is None:
        return [tag("p", f"{how_to_run(plan, subject)}.", class_="note")]
    anyway = " anyway" if plan.memory.fits is False else ""
    return [tag("h3", f"Train this plan{anyway} (run on every host)"), command(line, label="command that trains")]


def _waiting(plan: Plan) -> str:
    if plan.time is None:
        return "Step time is not estimated for CPUs."
    share = plan.time.exposed.value / plan.time.step.value
    step = f"{duration(plan.time.step.value)} ({band_words(plan.time)})"
    return f"A step takes about {step}; {percent(share)} of it is exposed communication."


def _figures(plan: Plan) -> list[Figure]:
    found = []
    if plan.time is not None:
        found.append(
            Figure("Step time", duration(plan.time.step.value), f"{band_words(plan.time)}, {plan.time.step.basis}")
        )
    if plan.tokens_per_second is not None:
        each = compact(plan.tokens_per_second / plan.target.num_devices)
        low, high = (compact(rate) for rate in plan.tokens_per_second_band or ())
        said = f"{low} to {high}, {each} per device, assumed"
        found.append(Figure(f"{unit_of(plan).capitalize()} per second", compact(plan.tokens_per_second), said))
    if plan.mfu is not None:
        found.append(
            Figure(
                "MFU", percent(plan.mfu), f"{proportional_band(plan, plan.mfu, percent)} of the chips' peak, assumed"
            )
        )
    room = "" if plan.memory.capacity is None else f" of {format_bytes(plan.memory.capacity)}"
    found.append(Figure("Memory per device", format_bytes(plan.memory.total), f"{room} {plan.memory.basis}".strip()))
    if plan.sent:
        total = sum(item.wire_bytes for item in plan.sent)
        found.append(Figure("Sent per device", format_bytes(total), f"per step, {plan.sent[0].basis}"))
    if plan.time is not None and plan.time.communication.value:
        hidden = 1 - plan.time.exposed.value / plan.time.communication.value
        found.append(Figure("Hidden", percent(hidden), f"of communication time, {plan.time.exposed.basis}"))
    cost = plan.dollars_per_billion_tokens
    if cost is not None:
        between = proportional_band(plan, cost, "${:,.0f}".format)
        said = f"{between}, at ${plan.price:g} per device-hour, assumed"
        found.append(Figure(f"Per billion {unit_of(plan)}", f"${cost:,.0f}", said))
    return found


def _grounds(plan: Plan, notes: Sequence[str]) -> Section:
    meaning = pairs(
        [
            ("compiled", "read from the program that the machine's compiler produced"),
            ("computed", "calculated from shapes, the layout and data sheets"),
            ("assumed", "uses a rate measured on another machine, or an estimate"),
        ]
    )
    made: list[Markup] = [prose("Every figure names its basis. The step time is always assumed."), meaning]
    said = [*notes, *plan.notes]
    if said:
        made += [tag("h3", "Notes"), tag("ul", *(tag("li", note) for note in said))]
    flops = plan.flops
    counted = [
        ("model, per step", f"{flops.model:.4g} FLOP"),
        ("recomputed by remat", f"{flops.recomputed:.4g} FLOP"),
        ("attention only", f"{flops.attention:.4g} FLOP"),
        ("masked by causal attention, not in MFU", f"{flops.masked:.4g} FLOP"),
        *([("HFU: with recomputed and masked FLOPs", percent(plan.hfu))] if plan.hfu is not None else []),
        (f"{unit_of(plan)} per step", f"{plan.tokens_per_step:,}"),
    ]
    made += [tag("h3", "Counted in the traced program (computed)"), pairs(counted)]
    if plan.compiled is not None:
        made += [tag("h3", "Compiled"), pairs(_compiled(plan.compiled))]
        if plan.compiled.matmuls:
            made.append(_matmuls(plan.compiled))
    if plan.target.chip is not None:
        made.append(_chip(plan.target.chip))
    return Section("Basis of the figures", join(made), short="Basis")


def _compiled(compiled: Compiled) -> list[tuple[str, str]]:
    return [
        ("traced in", duration(compiled.trace_s)),
        ("compiled in", duration(compiled.compile_s)),
        ("host memory for compiling", format_bytes(compiled.peak_rss_bytes)),
        ("matmuls", f"{compiled.num_matmuls:,}"),
        ("collectives", f"{len(compiled.collectives):,}"),
        *compiled.versions.items(),
    ]


def _matmuls(compiled: Compiled) -> Markup:
    rows = [(use.name, use.role, f"{use.runs:,}", use.kind, use.how) for use in compiled.matmuls]
    kinds = len({use.kind for use in compiled.matmuls})
    summary = f"All {sum(use.runs for use in compiled.matmuls):,} matmuls of the compiled program, by dtypes ({kinds})"
    return fold(summary, table(["parameter or scope", "role", "runs", "dtypes", "call"], rows))


def _chip(chip: Chip) -> Markup:
    speed = f"{chip.links.count} x {chip.links.per_direction / 1e9:,.1f} GB/s each way"
    network = "not published" if chip.network is None else f"{chip.network / 1e9:,.1f} GB/s"
    figures = [
        *((f"peak, {dtype}", f"{peak / 1e12:,.0f} TFLOP/s", f"peaks.{dtype}") for dtype, peak in chip.peaks.items()),
        ("memory", format_bytes(chip.memory_bytes), "memory_bytes"),
        ("memory bandwidth", f"{chip.memory_bandwidth / 1e9:,.0f} GB/s", "memory_bandwidth"),
        (f"{chip.links.kind} links", speed, "links"),
        ("network", network, "network"),
    ]
    rows = [(name, value, chip.sources.get(source, "")) for name, value, source in figures]
    return fold(f"Data sheet of {chip.title}", table(("figure", "value", "source"), rows, sortable=False))


def build_diff_page(compared: PlanDiff, path: str | Path) -> Path:
    """Writes the page about a difference to `path` and returns it.

    Example:
        >>> import tempfile
        >>> from meshwright.models import Decoder
        >>> from meshwright.plan.output.plan_diff import diff_plans
        >>> from meshwright.plan.plan import make_plan
        >>> from meshwright.plan.step_setup import Setup
        >>> from meshwright.train import language_job
        >>> job = language_job(Decoder.named("tiny"), batch_size=8, num_tokens=16)
        >>> plans = [make_plan(job, "cpu:8", Setup(mesh=mesh)) for mesh in ("dp:8", "fsdp:8")]
        >>> build_diff_page(diff_plans(*plans), f"{tempfile.mkdtemp()}/diff.html").name
        'diff.html'
    """
    return write_page(render_diff(compared), path)


def render_diff(compared: PlanDiff) -> str:
    """Returns the page about a difference: a single HTML file that needs no network access."""
    sides = (compared.before, compared.after)
    names = [f"{letter}: {words}" for letter, words in zip("AB", _told_apart(sides), strict=True)]
    targets = dict.fromkeys(plan["target"]["name"] for plan in sides)
    title = " and ".join(names) + (f" on {next(iter(targets))}" if len(targets) == 1 else "")
    head = [tag("p", "Two plans", class_="eyebrow"), tag("h1", title)]
    head += [tag("p", one.headline) for one in compared.explanations]
    figures = [part for part in compared.summary().parts if isinstance(part, Table)]
    shown = [join([tag("h3", one.title), one.markup()]) for one in figures]
    sections = [
        why_section(compared),
        Section("Side by side", join(_side_by_side(sides, names))),
        Section("All figures", join(shown) if shown else tag("p", "No figure differs.")),
    ]
    made = time.strftime("%Y-%m-%d", time.gmtime())
    return make_page(
        f"{title} \u00b7 difference",
        head=join(head),
        sections=sections,
        foot=f"Made by Meshwright on {made}. Nothing was run. This file needs no network access.",
    )


def _told_apart(plans: Sequence[PlanData]) -> list[str]:
    """Returns the mesh of each plan and the options in which they differ, and their targets if those differ."""
    options = [name for name in plans[0]["setup"] | plans[1]["setup"] if name not in ("mesh", "rows")]
    setups = [plan["setup"] for plan in plans]
    differ = [name for name in options if setups[0].get(name) != setups[1].get(name)]
    shown = [" ".join([one["mesh"], *assignments({n: one[n] for n in differ if n in one})]) for one in setups]
    targets = [plan["target"]["name"] for plan in plans]
    return (
        shown if targets[0] == targets[1] else [f"{one} on {where}" for one, where in zip(shown, targets, strict=True)]
    )


def _side_by_side(plans: Sequence[PlanData], names: Sequence[str]) -> list[Markup]:
    made = []
    if all(plan["time"] is not None for plan in plans):
        times = [{part: plan["time"][part]["value"] for part in PARTS} for plan in plans]
        made.append(time_bars(names, times, [band_of(plan) or "no band" for plan in plans]))
    sizes = [{part["name"]: part["bytes"] for part in plan["memory"]["parts"]} for plan in plans]
    # Bookkeeping is a few bytes.
    kinds = {
        kind: max(side.get(kind, 0.0) for side in sizes) for side in sizes for kind in side if kind != "bookkeeping"
    }
    shown = sorted(kinds, key=lambda kind: -kinds[kind])
    rows = [Bar(name, [side.get(kind, 0.0) for kind in shown]) for name, side in zip(names, sizes, strict=True)]
    return [*made, stacked_bars("Peak memory per device", shown, rows, show=format_bytes)]
