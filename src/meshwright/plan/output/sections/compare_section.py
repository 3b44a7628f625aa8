"""Page sections that compare plans: the best of a search with their commands, and the causes of a difference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from meshwright.layout import format_bytes
from meshwright.pages import (
    Bar,
    Markup,
    Point,
    Section,
    command,
    duration,
    fold,
    join,
    plural,
    prose,
    scatter_chart,
    stacked_bars,
    table,
    tag,
)
from meshwright.plan.output.commands import PlannedJob, how_to_run, train_command
from meshwright.plan.output.explain import signed
from meshwright.plan.output.plan_diff import PlanDiff
from meshwright.plan.output.summary import PART_NAMES, PARTS, band_words, ranking_table, rejected_table
from meshwright.plan.plan import Plan
from meshwright.plan.search import Search

MAX_PLANS = 10
_NOTHING = 1e-9  # seconds; rounding errors are smaller


def compare_section(plans: Sequence[Plan], subject: PlannedJob, found: Search | None) -> Section | None:
    """Returns time bars and a table; None if there is only one plan and no search."""
    timed = [plan for plan in plans if plan.time is not None][:MAX_PLANS]
    if found is None and len(timed) < 2:
        return None
    made: list[Markup] = []
    if found is not None:
        made.append(
            prose(
                f"The search considered {plural(found.considered, 'candidate')} in {duration(found.seconds)}; "
                f"{len(found.ranked):,} fit.",
                _shown(len(timed)),
                _compiled(sum(plan.compiled is not None for plan in timed), len(timed)),
            )
        )
    if found is not None and found.ranked:
        made.append(candidates_chart(found, timed))
    if timed:
        times = [{part: getattr(plan.time, part).value for part in PARTS} for plan in timed]
        names = [f"{place}. {plan.setup.mesh}" for place, plan in enumerate(timed, 1)]
        bands = [band_words(plan.time) for plan in timed if plan.time is not None]
        made += [time_bars(names, times, bands), ranking_table(timed).markup()]
        made.append(tag("h3", "Commands"))
        for label, plan in zip(names, timed, strict=True):
            line = train_command(plan, subject)
            how = prose(how_to_run(plan, subject)) if line is None else command(line, label=label)
            made.append(fold(label, how, opened=plan is timed[0]))
    if found is not None and found.rejected:
        made += [tag("h3", "Rejected candidates"), rejected_table(found).markup()]
    return Section("Other plans", join(made))


def _shown(count: int) -> str:
    return "" if not count else "The best one is shown." if count == 1 else f"The best {count} are shown."


def _compiled(count: int, shown: int) -> str:
    """Returns a sentence on what the chart compares, if some of the shown plans were compiled."""
    if not count:
        return ""
    which = f"{count} of them {'was' if count == 1 else 'were'}"
    if count == shown:
        which = "It was" if shown == 1 else "They were"
    return f"{which} compiled; the chart has the computed figures of all others, which compiling may change as well."


def candidates_chart(found: Search, shown: Sequence[Plan] = ()) -> Markup:
    """Returns the candidates of a search by computed memory and step time, and the plans that the page shows."""
    every = [(plan, True) for plan in found.ranked]
    every += [(one.plan, False) for one in found.rejected if one.plan is not None]
    points = [
        Point(plan.memory.total / 2**30, plan.time.step.value, f"{plan.setup} ({band_words(plan.time)})", fits)
        for plan, fits in every
        if plan.time is not None
    ]
    chosen = [
        Point(plan.memory.total / 2**30, plan.time.step.value, f"{place}. {plan.setup} ({band_words(plan.time)})")
        for place, plan in enumerate(shown, 1)
        if plan.time is not None
    ]
    compiled = any(plan.compiled is not None for plan in shown)
    capacity = found.target.memory_bytes
    return scatter_chart(
        "Candidates",
        points,
        x_name="memory per device",
        x_unit="GiB",
        y_name="step time",
        limit=None if capacity is None else capacity / 2**30,
        limit_label=f"{found.target.kind} has",
        unit="computed",
        chosen=chosen,
        chosen_name=f"{'this plan' if len(chosen) == 1 else 'the plans below'}{', compiled' if compiled else ''}",
        show=duration,
        show_x=lambda gib: format_bytes(gib * 2**30),
    )


def why_section(compared: PlanDiff) -> Section:
    """Returns the causes of the difference between two plans, the largest first."""
    named = [f"{letter}: {title}" for letter, title in zip("AB", compared.titles, strict=True)]
    made: list[Markup] = [tag("p", line) for line in named]
    for one in compared.explanations:
        rows = [(signed(cause.more, cause.unit), cause.what, cause.why) for cause in one.causes]
        made += [tag("h3", one.about.capitalize()), prose(one.headline)]
        made.append(table(("B - A", "cause", "why"), rows, right=(0,), sortable=False) if rows else join([]))
    return Section("Why they differ", join(made))


def time_bars(names: Sequence[str], times: Sequence[Mapping[str, float]], bands: Sequence[str]) -> Markup:
    """Returns a bar with its band for each plan's step time, without parts that are 0 in all of them."""
    parts = [part for part in PARTS if any(time[part] > _NOTHING for time in times)]
    bars = [
        Bar(name, [max(0.0, time[part]) for part in parts], band and f"({band})")
        for name, time, band in zip(names, times, bands, strict=True)
    ]
    return stacked_bars("Time per step", [PART_NAMES[part] for part in parts], bars, unit="assumed", show=duration)
