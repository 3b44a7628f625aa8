"""Sentences and headline figures of a report: loss, speed, time and outcome."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from meshwright.layout import format_bytes
from meshwright.loop.report.run_record import RunRecord, event_time
from meshwright.pages import Figure, compact, duration, number, percent

PARTS = ("step", "data", "checkpoint", "eval", "compile", "other")
_ENDINGS = ("finish", "preempted", "error")
_BEGINNINGS = ("start", "resume")


@dataclass(frozen=True)
class RunEnding:
    """The status of a run: a short label, its color (`kind`) and a sentence."""

    word: str
    kind: str
    sentence: str


def ending(run: RunRecord, *, now: float) -> RunEnding:
    """Returns whether a run is finished, stopped or still running, judging by its folder."""
    at = run.steps.steps[-1] if run.steps.steps else None
    where = "before its first step" if at is None else f"at step {at:,}"
    last = next((event for event in reversed(run.events) if event["kind"] in (*_ENDINGS, *_BEGINNINGS)), None)
    stepped = max((value for _, value in run.steps.known("time")[-1:]), default=-math.inf)
    # An event before the last step was not the end: a run also logs errors that it survives.
    kind = "" if last is None or event_time(last) < stepped else last["kind"]
    if kind == "finish":
        is_early = (last or {}).get("why") == "stopped early"
        return RunEnding(*(("stopped early", "good", _sentence(last)) if is_early else ("finished", "good", "")))
    if kind == "preempted":
        return RunEnding(f"stopped {where}", "warn", f"The run stopped {where} on request and can be resumed.")
    if kind == "error":
        return RunEnding(f"failed {where}", "bad", f"The run failed {where}: {(last or {}).get('text', '')}")
    written = run.last_time
    quiet = math.inf if written is None else now - written
    usual = _median(run.step_seconds[-100:])
    if quiet < max(120.0, 20 * usual if math.isfinite(usual) else 0.0):
        step = "before the first step" if at is None else f"step {at:,}"
        return RunEnding(f"running, {step}", "busy", "The run was in progress when this page was built.")
    since = "" if math.isinf(quiet) else f": its last output was {duration(quiet)} before this page was built"
    return RunEnding(f"stopped {where}", "warn", f"The run stopped {where} for an unknown reason{since}.")


def _sentence(event: Mapping[str, Any] | None) -> str:
    text = str((event or {}).get("text", "")).removesuffix(".")
    return f"{text[:1].upper()}{text[1:]}." if text else ""


def figures(run: RunRecord) -> list[Figure]:
    """Returns the headline figures."""
    found = []
    losses, evals = run.steps.known("loss"), run.evals.known("eval/loss")
    if losses:
        found.append(Figure("Final loss", number(losses[-1][1]), f"step {losses[-1][0]:,}, training"))
    if evals:
        step, best = min(evals, key=lambda point: point[1])
        later = f"; {number(evals[-1][1])} at the end" if step != evals[-1][0] else ", the last evaluation"
        found.append(Figure("Best held-out loss", number(best), f"step {step:,}{later}"))
    elif losses:
        step, best = min(losses, key=lambda point: point[1])
        found.append(Figure("Best loss", number(best), f"step {step:,}, training"))
    unit, speeds = speeds_of(run)
    if speeds:
        devices = num_devices(run)
        each = f"{compact(_median(speeds) / devices)} per device" if devices else "median over steps"
        found.append(Figure(f"{unit.capitalize()} per second", compact(_median(speeds)), each))
    used = [value for _, value in run.steps.known("mfu")]
    if used:
        found.append(Figure("MFU", percent(_median(used)), "median over steps"))
    tokens = total_tokens(run)
    if tokens:
        found.append(Figure("Tokens", compact(tokens), f"in {len(run.steps.steps):,} steps"))
    time = total_seconds(run)
    if time:
        wall = wall_seconds(run)
        # Wall time includes pauses between restarts.
        remark = f"{duration(wall)} wall time" if wall and wall > 1.05 * time + 5 else "all steps"
        found.append(Figure("Time", duration(time), remark))
    return found


def loss_sentences(run: RunRecord) -> list[str]:
    """Returns sentences on the change of the loss."""
    losses, evals = run.steps.known("loss"), run.evals.known("eval/loss")
    if not losses:
        return ["No loss is recorded yet."]
    (_, first), (_, last) = losses[0], losses[-1]
    count = len(run.steps.steps)
    in_steps = f"in {count:,} steps" if count > 1 else "in one step"
    tokens = total_tokens(run)
    seen = f" over {compact(tokens)} tokens" if tokens else ""
    change = f"{'fell' if last < first else 'rose'} from {number(first)} to" if last != first else "stayed at"
    said = [f"Loss {change} {number(last)} {in_steps}{seen}."]
    if evals:
        step, best = min(evals, key=lambda point: point[1])
        final_step, final = evals[-1]
        at = "its lowest value" if step == final_step else f"after a low of {number(best)} at step {step:,}"
        said.append(f"Held-out loss was {number(final)} at step {final_step:,}, {at}.")
    return said


def fall_sentences(run: RunRecord) -> list[str]:
    """Returns details on the loss: when it was halfway down, evaluations, and gaps in its curve."""
    losses, evals = run.steps.known("loss"), run.evals.known("eval/loss")
    said = []
    if len(losses) > 8 and losses[-1][1] < losses[0][1]:
        middle = (losses[0][1] + losses[-1][1]) / 2
        step = next(step for step, loss in losses if loss <= middle)
        said.append(f"The loss was halfway down by step {step:,}.")
    if evals:
        times = "once" if len(evals) == 1 else f"{len(evals):,} times"
        said.append(f"The model was evaluated {times} on held-out data.")
    elif losses:
        said.append("The model was not evaluated on held-out data.")
    odd = len(run.steps.steps) - len(losses)
    if odd:
        said.append(f"{odd:,} {'step has' if odd == 1 else 'steps have'} a non-finite loss, shown as gaps.")
    return said


def speeds_of(run: RunRecord) -> tuple[str, list[float]]:
    """Returns the unit of the throughput, "tokens" or "rows", and its value at each step."""
    unit = "tokens" if run.steps.known("tokens_per_second") or not run.steps.known("rows_per_second") else "rows"
    return unit, [value for _, value in run.steps.known(f"{unit}_per_second")]


def speed_sentences(run: RunRecord) -> list[str]:
    """Returns sentences on step time, throughput, MFU and memory."""
    totals = run.step_seconds
    known = sorted(total for total in totals if math.isfinite(total))
    said = []
    if known:
        low, high = known[len(known) // 20], known[-1 - len(known) // 20]
        usual = f"; 90% between {duration(low)} and {duration(high)}" if len(known) >= 20 else ""
        said.append(f"A step took {duration(_median(known))} (median{usual}).")
    unit, speeds = speeds_of(run)
    devices = num_devices(run)
    if speeds and devices:
        kind = str(run.facts.get("device_kind") or "").strip()
        on = f"{devices:,} devices" if devices > 1 else "one device"
        said.append(f"That is {compact(_median(speeds))} {unit} per second on {on}{f' ({kind})' if kind else ''}.")
    if len(totals) > 1 and totals[0] > 4 * _median(known):
        said.append(f"The first step took {duration(totals[0])}, including compilation.")
    used = [value for _, value in run.steps.known("mfu")]
    if used:
        said.append(f"The median MFU was {percent(_median(used))}.")
    elif run.steps.steps and run.facts and not run.facts.get("peak_flops"):
        said.append("MFU is unknown, because the peak FLOP/s of this kind of device is unknown.")
    memory = [value for _, value in run.steps.known("memory_bytes")]
    if memory:
        said.append(f"Peak memory was {format_bytes(max(memory))}.")
    return said


def time_sentences(run: RunRecord) -> list[str]:
    """Returns a sentence on where the time went."""
    totals = part_seconds(run)
    whole = sum(totals.values())
    if not whole:
        return ["Times were not recorded."]
    shares = sorted(totals.items(), key=lambda item: -item[1])
    words = {
        "step": "the steps themselves",
        "data": "waiting for data",
        "checkpoint": "checkpoints",
        "eval": "evaluation",
        "compile": "compilation",
        "other": "everything else",
    }
    named = [
        f"{percent(value / whole)} {'went into' if i == 0 else 'into'} {words.get(part, part)}"
        for i, (part, value) in enumerate(shares)
        if i == 0 or value > 0.0005 * whole
    ]
    listed = f"{', '.join(named[:-1])} and {named[-1]}" if len(named) > 1 else named[0]
    return [f"Of {duration(whole)}, {listed}."]


def part_seconds(run: RunRecord) -> dict[str, float]:
    """Returns the total seconds of each part of the steps; known parts first."""
    found = {
        name.removeprefix("seconds/"): column
        for name, column in run.steps.values.items()
        if name.startswith("seconds/")
    }
    order = [part for part in PARTS if part in found] + [part for part in found if part not in PARTS]
    return {part: math.fsum(value for value in found[part] if math.isfinite(value)) for part in order}


def total_seconds(run: RunRecord) -> float:
    """Returns the total seconds of all steps."""
    return sum(part_seconds(run).values())


def total_tokens(run: RunRecord) -> float:
    """Returns the total number of tokens in all steps."""
    return math.fsum(value for _, value in run.steps.known("tokens"))


def wall_seconds(run: RunRecord) -> float | None:
    """Returns the seconds from the first start to the last write, or None if unknown."""
    times = [time for event in run.events if math.isfinite(time := event_time(event))]
    times += [value for _, value in run.steps.known("time")[:1]]
    if not times or run.last_time is None:
        return None
    return run.last_time - min(times)


def num_devices(run: RunRecord) -> int:
    """Returns the number of devices, or 0 if unknown."""
    mesh = run.facts.get("mesh")
    return len(run.facts.get("devices") or []) or (math.prod(mesh.values()) if mesh else 0)


def _median(values: Sequence[float]) -> float:
    known = [value for value in values if math.isfinite(value)]
    return statistics.median(known) if known else math.nan
