"""The page about two plans: what each takes, and why they differ."""

from __future__ import annotations

import time
from pathlib import Path

from meshwright.layout import format_bytes
from meshwright.pages import Bar, Markup, Section, duration, join, make_page, stacked_bars, table, tag, write_page
from meshwright.plan.output.compare_section import why_section
from meshwright.plan.output.plan_diff import PlanDiff
from meshwright.plan.output.summary import PART_NAMES, PARTS, Table


def build_diff_page(compared: PlanDiff, path: str | Path) -> Path:
    """Writes the page about a difference and returns where it is; it is one file that needs no network."""
    return write_page(render_diff(compared), path)


def render_diff(compared: PlanDiff) -> str:
    """Returns the page about a difference."""
    sides = (compared.before, compared.after)
    names = [f"{letter}: {plan['setup']['mesh']}" for letter, plan in zip("AB", sides, strict=True)]
    head = [tag("p", "Two plans", class_="eyebrow"), tag("h1", " and ".join(names))]
    head += [tag("p", one.headline) for one in compared.explanations]
    figures = [part for part in compared.summary().parts if isinstance(part, Table)]
    shown = [join([tag("h3", one.title), table(one.headings, one.rows, right=one.right)]) for one in figures]
    sections = [
        why_section(compared),
        Section("Side by side", join(_bars(compared, names))),
        Section("All figures", join(shown) if shown else tag("p", "No figure differs.")),
    ]
    made = time.strftime("%Y-%m-%d", time.gmtime())
    return make_page(
        f"{' and '.join(names)} \u00b7 difference",
        head=join(head),
        sections=sections,
        foot=f"Made by Meshwright on {made}. Nothing was run. This file needs no network.",
    )


def _bars(compared: PlanDiff, names: list[str]) -> list[Markup]:
    """Returns a bar of each plan's memory and, where it is known, of its time."""
    sides = (compared.before, compared.after)
    made = []
    if all(plan["time"] is not None for plan in sides):
        used = [part for part in PARTS if any(plan["time"][part]["value"] > 0 for plan in sides)]
        bars = [
            Bar(name, [max(0.0, plan["time"][part]["value"]) for part in used])
            for name, plan in zip(names, sides, strict=True)
        ]
        parts = [PART_NAMES[part] for part in used]
        made.append(stacked_bars("Time of a step", parts, bars, unit="assumed", show=duration))
    sizes = [{part["name"]: part["bytes"] for part in plan["memory"]["parts"]} for plan in sides]
    # Counters and keys are a few bytes; patterns to tell parts apart are few as well.
    kinds = [kind for kind in dict.fromkeys([*sizes[0], *sizes[1]]) if kind != "bookkeeping"]
    kinds = sorted(kinds, key=lambda kind: -max(side.get(kind, 0.0) for side in sizes))[:MAX_PARTS]
    rows = [Bar(name, [side.get(kind, 0.0) for kind in kinds]) for name, side in zip(names, sizes, strict=True)]
    made.append(stacked_bars("Memory of a device at the peak of a step", kinds, rows, show=format_bytes))
    return made


MAX_PARTS = 6
