"""The charts of a report: loss, speed and time."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from meshwright.loop.report.run_record import RunRecord, step_of
from meshwright.loop.report.sources_section import names_by_source
from meshwright.loop.report.story import fall_sentences, part_seconds, speed_sentences, speeds_of, time_sentences
from meshwright.pages import (
    Bar,
    Mark,
    Markup,
    Section,
    Series,
    compact,
    duration,
    heat_map,
    join,
    line_chart,
    percent,
    prose,
    side_by_side,
    smooth,
    stacked_bars,
    stacked_columns,
    tag,
    thin,
)
from meshwright.pages.blocks import fold
from meshwright.specs import ceil_div

MAX_COLUMNS, MAX_TICKS, MAX_CHARTS = 60, 400, 8
MAX_POINTS = 2000  # of a curve: about two per pixel
# Metrics with a chart elsewhere, or not worth one.
_TAKEN = [
    "loss", "time", "tokens", "tokens_per_second", "rows_per_second", "grad_norm", "learning_rate", "mfu",
    "memory_bytes", "skipped", "goodput",
]  # fmt: skip


def loss_section(run: RunRecord) -> Section:
    """Returns the section on loss, learning rate and gradient norm."""
    losses = run.steps["loss"]
    roof = _roof(losses)
    series, smoothed = _with_mean(run, "loss", roof=roof)
    if run.evals.known("eval/loss"):
        series.append(Series("held-out", *thin(run.evals.steps, run.evals["eval/loss"]), style="dots", tone=1))
    chart = line_chart("Loss", series, unit=smoothed, height=320, high=roof, marks=_restarts(run))
    rate = _small("Learning rate", run, "learning_rate", low=0.0)
    known = [norm for _, norm in run.steps.known("grad_norm") if norm > 0]
    norms = _small("Gradient norm", run, "grad_norm", log=bool(known) and max(known) > 30 * min(known))
    drawn = None
    if len(run.steps.steps) > MAX_POINTS:
        count = f"{len(run.steps.steps):,} steps"
        said = f"Curves show about {MAX_POINTS:,} of {count}, including all highs and lows."
        drawn = tag("p", said, class_="note")
    body = [prose(*fall_sentences(run)), chart, drawn, side_by_side(rate, norms)]
    return Section("Loss", join(body))


def speed_section(run: RunRecord) -> Section:
    """Returns the section on throughput, MFU and memory, with restarts and checkpoints marked."""
    saves = [
        Mark(at, "checkpoint", tall=False) for event in run.happened("checkpoint") if (at := step_of(event)) is not None
    ]
    saves = saves if len(saves) <= MAX_TICKS else []  # more ticks would merge into a line
    marks = [*_restarts(run), *saves]
    things, _ = speeds_of(run)
    series, smoothed = _with_mean(run, f"{things}_per_second")
    unit = ", ".join(
        filter(None, [f"{things} per second", smoothed, "ticks at the bottom: checkpoints" if saves else ""])
    )
    chart = line_chart("Throughput", series, unit=unit, height=220, low=0.0, marks=marks, show=compact)
    more = []
    if run.steps.known("mfu"):
        more.append(_small("MFU", run, "mfu", low=0.0, show=percent))
    if run.steps.known("memory_bytes"):
        steps, counts = thin(run.steps.steps, run.steps["memory_bytes"])
        memory = Series("memory", steps, [count / 2**30 for count in counts])
        more.append(line_chart("Memory per device", [memory], unit="GiB", height=130, low=0.0))
    return Section("Speed", join([prose(*speed_sentences(run)), chart, side_by_side(*more) if more else None]))


def time_spent_section(run: RunRecord) -> Section:
    """Returns the section on where the time went, in total and per step."""
    totals = part_seconds(run)
    parts = list(totals)
    total = stacked_bars("All steps", parts, [Bar("", list(totals.values()))], show=duration)
    # Compiling takes as long as many steps, so that beside it the others would be flat.
    usual = [part for part in parts if part != "compile"]
    columns = _columns(run, usual)
    heights = [sum(values) for _, _, values in columns]
    over_time = stacked_columns(
        "Per step", usual, columns, unit="mean over the steps in a column" + ", without compiling" * (usual != parts),
        high=_roof(heights, factor=3.0), show=duration,
    )  # fmt: skip
    body = [prose(*time_sentences(run))] + ([total, over_time] if sum(totals.values()) else [])
    return Section("Time of the steps", join(body), short="Steps")


def _with_mean(run: RunRecord, name: str, *, roof: float | None = None) -> tuple[list[Series], str]:
    """Returns the raw curve and, if there are enough steps, a smoothed one; and a note on the smoothing."""
    steps, values = run.steps.steps, run.steps[name]
    if len(steps) < 30:
        return [Series("training", *thin(steps, values))], ""
    window = 2 * max(2, round(len(steps) / 80)) + 1
    # Leave spikes out, which would raise the mean of all steps around them.
    usual = values if roof is None else [value if value <= roof else math.nan for value in values]
    curves = [
        Series("each step", *thin(steps, values), style="faint"),
        Series("smoothed", *thin(steps, smooth(usual, window=window))),
    ]
    return curves, f"smoothed over {window} steps" + ("" if roof is None else ", ignoring values above the chart")


def _columns(run: RunRecord, parts: Sequence[str]) -> list[tuple[float, float, list[float]]]:
    """Groups consecutive steps into columns: first step, last step, and the mean seconds of each part."""
    steps = run.steps.steps
    size = max(1, ceil_div(len(steps), MAX_COLUMNS))
    found = []
    for start in range(0, len(steps), size):
        means = []
        for part in parts:
            values = [value for value in run.steps[f"seconds/{part}"][start : start + size] if math.isfinite(value)]
            means.append(max(0.0, statistics.fmean(values)) if values else 0.0)
        found.append((steps[start] - 0.5, steps[min(start + size, len(steps)) - 1] + 0.5, means))
    return found


def _restarts(run: RunRecord) -> list[Mark]:
    names = {"resume": "resumed", "rollback": "rolled back"}
    return [Mark(at, names[event["kind"]]) for event in run.happened(*names) if (at := step_of(event)) is not None]


def _small(title: str, run: RunRecord, name: str, **options: object) -> Markup:
    xs, ys = thin(run.steps.steps, run.steps[name])
    return line_chart(title, [Series(title.lower(), xs, ys)], height=130, **options)  # type: ignore[arg-type]


def metrics_section(run: RunRecord) -> Section | None:
    """Returns charts of all other metrics, such as accuracy, and heat maps of those that are matrices."""
    charts = []
    names = [name for name in run.steps.values if not name.startswith("seconds/")]
    names += [name.removeprefix("eval/") for name in run.evals.values if name.startswith("eval/")]
    names = [name for name in dict.fromkeys(names) if name not in (*_TAKEN, *names_by_source(run))]
    for name in names:
        series = [Series("training", *thin(run.steps.steps, run.steps[name]), style="faint")]
        series.append(Series("held-out", *thin(run.evals.steps, run.evals[f"eval/{name}"]), style="dots", tone=1))
        charts.append(line_chart(name, series, height=130))
    maps = [
        heat_map(name, rows, unit=f"step {step:,}", show=compact) for name, (step, rows) in sorted(run.arrays.items())
    ]
    if not charts and not maps:
        return None
    more = charts[MAX_CHARTS:]
    folded = fold(f"{len(more)} more: {', '.join(names[MAX_CHARTS:])}", side_by_side(*more)) if more else None
    drawn = side_by_side(*charts[:MAX_CHARTS]) if charts else None
    return Section("Metrics", join([drawn, folded, side_by_side(*maps) if maps else None]))


def _roof(values: Sequence[float], *, factor: float = 2.0) -> float | None:
    """Returns an upper limit for a chart, so that a few spikes do not flatten the rest; None without spikes."""
    known = sorted(value for value in values if math.isfinite(value))
    if len(known) < 20:
        return None
    usual = known[-1 - len(known) // 50]  # the 98th percentile
    return 1.1 * usual if known[-1] > factor * usual > 0 else None
