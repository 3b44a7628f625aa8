"""Page section on the expected goodput, with a curve over the number of chips."""

from __future__ import annotations

import math

from meshwright.pages import Mark, Section, Series, duration, join, line_chart, percent, plural, prose
from meshwright.plan.output.summary import goodput_table
from meshwright.plan.plan import Plan


def failures_section(plan: Plan) -> Section | None:
    """Returns the goodput and its curve over the number of chips; None if it was not planned."""
    found = plan.goodput
    if found is None:
        return None
    counts, shares = found.curve()
    said = prose(
        f"{percent(found.share)} of the time trains, if each chip fails every {found.given.mtbf_hours:,g} hours and a "
        f"checkpoint is saved every {plural(found.interval_steps, 'step')} ({duration(found.interval_s)}).",
        "The curve has the same checkpoint on other numbers of chips, each with its own best interval.",
    )
    curve = line_chart(
        "Goodput over the number of chips",
        [Series("goodput", list(counts), list(shares))],
        unit="share of time, assumed",
        low=max(0, math.floor(10 * min(shares) - 0.5)) / 10,  # from 0 on, a curve near 100% would say nothing
        high=1.0,
        marks=[Mark(found.chips, f"{found.chips:,} chips", low=found.share > 0.5)],
        show=percent,
        x_name="chips",
    )
    return Section("Goodput", join([said, curve, goodput_table(plan, found).markup()]))
