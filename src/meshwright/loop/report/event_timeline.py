"""The events of a run as a timeline and a list, and its text samples."""

from __future__ import annotations

import math
import time as clock
from typing import Any

from meshwright.loop.report.run_record import RunRecord, event_time, step_of
from meshwright.pages import (
    Lane,
    Markup,
    Moment,
    Section,
    Shape,
    Span,
    duration,
    fold,
    join,
    prose,
    quote,
    side_by_side,
    table,
)
from meshwright.pages import timeline as draw_timeline

MAX_ROWS = 200
TROUBLE = ("checkpoint_failed", "skipped", "rollback", "preempted", "hang", "error")
_WORDS = {
    "start": ("start", "starts"),
    "resume": ("restart", "restarts"),
    "checkpoint": ("checkpoint", "checkpoints"),
    "checkpoint_failed": ("failed checkpoint", "failed checkpoints"),
    "skipped": ("skipped step", "skipped steps"),
    "rollback": ("rollback", "rollbacks"),
    "preempted": ("stop request", "stop requests"),
    "hang": ("hang", "hangs"),
    "error": ("error", "errors"),
    "profile": ("profile", "profiles"),
}


def events_section(run: RunRecord) -> Section:
    """Returns the section on events: a summary, a timeline and a list."""
    if not run.events:
        return Section("Events", prose("No events were recorded."))
    counted = {kind: len(run.happened(kind)) for kind in _WORDS}
    said = [f"{count:,} {_WORDS[kind][count > 1]}" for kind, count in counted.items() if count and kind != "start"]
    # A restart may have followed a kill, which leaves no event.
    calm = not any(counted[kind] for kind in (*TROUBLE, "resume")) and run.happened("finish")
    sentence = f"There {'was' if said[0].startswith('1 ') else 'were'} {', '.join(said)}." if said else ""
    return Section("Events", join([prose(sentence, "Nothing went wrong." if calm else ""), _timeline(run), _list(run)]))


def _timeline(run: RunRecord) -> Markup:
    beginnings = [event for event in run.happened("start", "resume") if math.isfinite(event_time(event))]
    times = sorted(
        [event_time(event) for event in run.events if math.isfinite(event_time(event))]
        + [value for _, value in run.steps.known("time")]
    )
    spans = []
    for number, event in enumerate(beginnings):
        begin = event_time(event)
        until = event_time(beginnings[number + 1]) if number + 1 < len(beginnings) else math.inf
        # A killed run leaves no event, so its span ends at the last recorded time.
        end = max((at for at in times if begin <= at < until), default=begin)
        label = "running" if len(beginnings) == 1 else f"part {number + 1}"
        spans.append(Span(begin, end, label, detail=str(event.get("text", ""))))
    lanes = [Lane("running", spans=spans)] if spans else []
    groups: list[tuple[str, tuple[str, ...], Shape, int]] = [
        ("checkpoints", ("checkpoint",), "diamond", 2),
        ("evaluations and samples", ("eval", "sample"), "circle", 4),
        ("problems", TROUBLE, "cross", 1),
    ]
    for name, kinds, shape, tone in groups:
        moments = []
        for event in run.happened(*kinds):
            word, step = _WORDS.get(event["kind"], (event["kind"],))[0], step_of(event)
            if math.isfinite(event_time(event)):
                label = word if step is None else f"{word} at step {step:,}"
                moments.append(Moment(event_time(event), label, shape, tone))
        if moments:
            name = name if len(moments) <= 400 else f"{name} (400 of {len(moments):,})"
            lanes.append(Lane(name, moments=moments[-400:]))
    return draw_timeline("Timeline", lanes, unit="since the first start")


def _list(run: RunRecord) -> Markup:
    first = next((at for event in run.events if math.isfinite(at := event_time(event))), math.nan)
    shown = _chosen(run.events)
    rows = []
    for event in shown:
        at = event_time(event)
        after = "" if not math.isfinite(at) else duration(max(0.0, at - first))
        step, said = step_of(event), str(event.get("text", ""))
        said = f"{len(said):,} characters" if event["kind"] == "sample" else said
        rows.append([after, "" if step is None else f"{step:,}", event["kind"].replace("_", " "), said])
    started = ""
    if math.isfinite(first):
        started = f"Times are relative to {clock.strftime('%Y-%m-%d %H:%M:%S', clock.gmtime(first))} UTC."
    left_out = len(run.events) - len(shown)
    more = f"{left_out:,} events are not shown; events.jsonl has all of them." if left_out else ""
    listing = table(["time", "step", "event", ""], rows, right=(0, 1))
    name = f"All {len(run.events):,} events" if not left_out else f"{len(shown):,} of {len(run.events):,} events"
    return fold(name, prose(started, more), listing, opened=len(run.events) <= 16)


def _chosen(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns at most `MAX_ROWS` events, preferring problems, starts and ends, then the most recent."""
    if len(events) <= MAX_ROWS:
        return events
    special = [i for i, event in enumerate(events) if event["kind"] in (*TROUBLE, "start", "resume", "finish")]
    special = special[:50] + special[50:][-50:]
    usual = [i for i, event in enumerate(events) if event["kind"] not in (*TROUBLE, "start", "resume", "finish")]
    return [events[i] for i in sorted([*special, *usual[-(MAX_ROWS - len(special)) :]])]


def samples_section(run: RunRecord) -> Section | None:
    """Returns the first and last text samples, side by side, or None if there are none."""
    samples = run.happened("sample")
    if not samples:
        return None
    before, after = samples[0], samples[-1]
    pictures = [_sample(before)] if before is after else [_sample(before), _sample(after)]
    between = samples[1:-1]
    given = "the prompt is underlined, and " if any(_prompt(sample) for sample in samples) else ""
    sentence = f"Text that the model generated; {given}dots replace unprintable characters."
    more = fold(f"{len(between):,} in between", *(_sample(event) for event in between[-20:])) if between else None
    return Section("Samples", join([prose(sentence), side_by_side(*pictures), more]))


def _prompt(event: dict[str, Any]) -> str:
    return str(event.get("prompt") or "")


def _sample(event: dict[str, Any]) -> Markup:
    step = step_of(event)
    if step is None:
        label = "Sample"
    else:
        label = "Before training" if step == 0 else f"After {step:,} {'step' if step == 1 else 'steps'}"
    return quote(label, prompt=_prompt(event), body=str(event.get("text") or ""))
