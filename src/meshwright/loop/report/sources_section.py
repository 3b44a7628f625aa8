"""The sources of a mixture in a report: weights, tokens, epochs, training and held-out loss of each."""

from __future__ import annotations

import math
from collections.abc import Mapping

from meshwright.loop.report.run_record import RunRecord
from meshwright.pages import Section, Series, compact, join, line_chart, percent, prose, thin
from meshwright.pages.blocks import table

_TOKENS = "tokens/"
_LAST = 20  # steps: those of a small source have few tokens


def sources_of(run: RunRecord) -> list[str]:
    """Returns the names of the sources that a run trained on, also of dropped ones."""
    counted = [name.removeprefix(_TOKENS) for name in run.steps.values if name.startswith(_TOKENS)]
    return sorted({*counted, *run.facts.get("mixture", {})}) if counted else []


def names_by_source(run: RunRecord) -> set[str]:
    """Returns the metrics by source that this section shows."""
    return {name for source in sources_of(run) for name in (f"{_TOKENS}{source}", f"loss/{source}")}


def sources_section(run: RunRecord) -> Section | None:
    """Returns the section on the sources of a mixture, or None for one source."""
    sources = sources_of(run)
    if not sources:
        return None
    facts = run.facts.get("mixture") or {}
    tokens = {source: sum(count for _, count in run.steps.known(f"{_TOKENS}{source}")) for source in sources}
    total = sum(tokens.values()) or math.nan
    rows = []
    for source in sources:
        fact = facts.get(source) if isinstance(facts.get(source), Mapping) else None
        losses = run.evals.known(f"eval/loss/{source}")
        trained = [loss for _, loss in run.steps.known(f"loss/{source}")][-_LAST:]
        rows.append(
            [
                source,
                percent(fact["weight"]) if fact else "dropped",
                compact(tokens[source]),
                percent(tokens[source] / total),
                f"{tokens[source] / fact['tokens']:.2f}" if fact and fact.get("tokens") else "",
                f"{math.fsum(trained) / len(trained):.4f}" if trained else "",
                f"{losses[-1][1]:.4f}" if losses else "",
            ]
        )
    headings = ["source", "weight", "tokens", "of all tokens", "epochs", "loss", "held-out loss"]
    series = [
        Series(source, *thin(run.evals.steps, run.evals[f"eval/loss/{source}"]), style="dots", tone=number % 4)
        for number, source in enumerate(sources)
        if run.evals.known(f"eval/loss/{source}")
    ]
    held_out = line_chart("Held-out loss by source", series, height=220) if series else None
    series = [
        Series(source, *thin(run.steps.steps, run.steps[f"loss/{source}"]), tone=number % 4)
        for number, source in enumerate(sources)
        if run.steps.known(f"loss/{source}")
    ]
    training = line_chart("Training loss by source", series, height=220) if series else None
    said = prose(
        "Weights are those of the last start. Tokens count the targets of the training steps. "
        f"The loss is the mean of the last {_LAST} steps."
    )
    body = [said, table(headings, rows, right=(1, 2, 3, 4, 5, 6), code=(0,)), training, held_out]
    return Section("Sources", join(body))
