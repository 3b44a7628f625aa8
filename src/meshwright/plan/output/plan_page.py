"""Puts the page about a plan together and writes it."""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from meshwright.errors import MeshwrightWarning
from meshwright.layout import Layout, format_bytes
from meshwright.mesh.build import create_abstract_mesh
from meshwright.mesh.string import parse_mesh
from meshwright.pages import (
    Figure,
    Markup,
    badge,
    command,
    compact,
    duration,
    headline,
    join,
    make_page,
    percent,
    prose,
    tag,
    write_page,
)
from meshwright.plan.output.commands import PlannedJob, how_to_run, plan_command, train_command
from meshwright.plan.output.communication_section import sending_section
from meshwright.plan.output.compare_section import compare_section, why_section
from meshwright.plan.output.layout_section import layout_section
from meshwright.plan.output.machine_section import machine_section
from meshwright.plan.output.memory_section import memory_section
from meshwright.plan.output.plan_diff import PlanDiff
from meshwright.plan.output.sources_section import grounds_section
from meshwright.plan.output.summary import setup_words
from meshwright.plan.output.time_section import pipeline_section, time_section
from meshwright.plan.plan import Plan
from meshwright.plan.search import Search
from meshwright.plan.step_setup import make_optimizer
from meshwright.train.state import state_layout


def build_plan_page(
    plan: Plan,
    path: str | Path,
    *,
    job: Any,
    subject: PlannedJob,
    others: Sequence[Plan] = (),
    found: Search | None = None,
    notes: Sequence[str] = (),
    compared: PlanDiff | None = None,
) -> Path:
    """Writes the page about a plan and returns where it is; the page is one file that needs no network.

    Args:
        subject: what is planned, for the title and for commands.
        others: further plans to compare it with, as a search ranked them.
        found: that search, for what it left out.
        notes: to be said beside those of the plan, such as why nothing was compiled.
        compared: its difference from another plan, to be explained.
    """
    text = render_plan(plan, job=job, subject=subject, others=others, found=found, notes=notes, compared=compared)
    return write_page(text, path)


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
    """Returns the page about a plan; `build_plan_page` has the arguments."""
    layout = plan_layout(plan, job)
    sections = [
        memory_section(plan),
        time_section(plan),
        sending_section(plan),
        pipeline_section(plan),
        machine_section(plan),
        layout_section(layout),
        compare_section([plan, *others], subject, found),
        None if compared is None else why_section(compared),
        grounds_section(plan, notes),
    ]
    made = time.strftime("%Y-%m-%d", time.gmtime())
    return make_page(
        f"{subject.name} on {plan.target.name} · plan",
        head=_head(plan, subject, notes),
        sections=[section for section in sections if section is not None],
        foot=f"Made by Meshwright on {made}. Nothing was run on {plan.target.title}. This file needs no network.",
    )


def plan_layout(plan: Plan, job: Any) -> Layout:
    """Returns where the whole state of a plan lies."""
    mesh = create_abstract_mesh(parse_mesh(plan.setup.mesh).resolve(plan.target.num_devices))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", MeshwrightWarning)  # the plan has them as notes
        return state_layout(
            job, make_optimizer(plan.setup.optimizer), mesh, zero_axis=plan.setup.zero_axis, precision=plan.setup.dtypes
        )


def _head(plan: Plan, subject: PlannedJob, notes: Sequence[str]) -> Markup:
    fits = plan.memory.fits
    word, kind = {True: ("fits", "good"), False: ("does not fit", "bad"), None: ("planned", "busy")}[fits]
    verdict = plan.memory.verdict
    said = f"Each device {verdict}" if fits is None else f"It {verdict}"
    how = "".join(f", {text}" for text in setup_words(plan))
    return join(
        [
            tag("p", "Plan", class_="eyebrow"),
            tag("h1", f"{subject.name} on {plan.target.name} ", badge(word, kind=kind)),
            prose(
                f"{plan.target.title} as {plan.setup.mesh}{how}: {plan.rows:,} rows, {plan.tokens_per_step:,} tokens "
                "a step.",
                said,
                _waiting(plan),
            ),
            headline(_figures(plan)),
            *(tag("p", note, class_="note") for note in notes),
            *_how_to_run(plan, subject),
            tag("h3", "Make this plan again"),
            command(plan_command(plan, subject), label="the command that makes this plan"),
        ]
    )


def _how_to_run(plan: Plan, subject: PlannedJob) -> list[Markup]:
    line = train_command(plan, subject)
    if line is None:
        return [tag("p", f"{how_to_run(plan, subject)}.", class_="note")]
    title = "Train it so all the same, on every host" if plan.memory.fits is False else "Train it so, on every host"
    return [tag("h3", title), command(line, label="the command that trains as planned")]


def _waiting(plan: Plan) -> str:
    if plan.time is None:
        return "How long a step takes is not planned: there are no figures for the speed of CPUs."
    share = plan.time.exposed.value / plan.time.step.value
    return f"A step takes about {duration(plan.time.step.value)}, of which {percent(share)} is waiting for links."


def _figures(plan: Plan) -> list[Figure]:
    found = []
    if plan.time is not None:
        found.append(Figure("Step", duration(plan.time.step.value), plan.time.step.basis))
    if plan.tokens_per_second is not None:
        each = compact(plan.tokens_per_second / plan.target.num_devices)
        found.append(Figure("Tokens per second", compact(plan.tokens_per_second), f"{each} per device, assumed"))
    if plan.mfu is not None:
        found.append(Figure("MFU", percent(plan.mfu), "of the chips' peak, assumed"))
    room = "" if plan.memory.capacity is None else f" of {format_bytes(plan.memory.capacity)}"
    found.append(Figure("Memory of a device", format_bytes(plan.memory.total), f"{room} {plan.memory.basis}".strip()))
    if plan.sent:
        total = sum(item.wire_bytes for item in plan.sent)
        found.append(Figure("Sent by a device", format_bytes(total), f"in a step, {plan.sent[0].basis}"))
    if plan.time is not None and plan.time.communication.value:
        hidden = 1 - plan.time.exposed.value / plan.time.communication.value
        found.append(Figure("Of it hidden", percent(hidden), f"of its time, {plan.time.exposed.basis}"))
    cost = plan.dollars_per_billion_tokens
    if cost is not None:
        found.append(Figure("Per billion tokens", f"${cost:,.0f}", f"at ${plan.price:g} a device-hour, assumed"))
    return found
