"""Where the time of a step goes: compute and communication beside each other, and the ticks of a pipeline."""

from __future__ import annotations

from meshwright.pages import Lane, Section, Span, duration, join, prose, table, timeline
from meshwright.parallel.pipeline.schedule import IDLE, gpipe_schedule
from meshwright.plan.costs.communication import Sent
from meshwright.plan.costs.step_time import TimePlan
from meshwright.plan.output.summary import time_table
from meshwright.plan.plan import Plan

MATMUL, MEMORY, OPTIMIZER, HIDDEN, EXPOSED, BUBBLE = range(6)
KEYS = ("matmuls", "memory between them", "optimizer", "sent beside compute", "sent while compute waits", "bubble")
MAX_STAGES = 16
# What a backward pass takes, in forward ones: its tick is computed again first.
BACKWARD = 3
_SMALL = 2e-4  # of a step: too short to be seen


def time_section(plan: Plan) -> Section:
    """Returns a timeline of one step, and a table of what it is made of."""
    if plan.time is None:
        return Section("Time", prose("Time is not planned: the table of chips has no figures for CPUs."))
    time = plan.time
    shown, sent = time_table(plan), time.communication
    rows = (*shown.rows, ("all communication", duration(sent.value), "", sent.basis, sent.note))
    known = table(shown.headings, rows, right=shown.right, sortable=False)
    said = prose(
        f"A step takes about {duration(time.step.value)} ({time.step.basis}).",
        f"Communication would take {duration(sent.value)} by itself; "
        f"{duration(time.exposed.value)} of it is not hidden.",
        "The picture adds things up by kind: it shows how long, not when.",
    )
    picture = timeline("One step on one device", _lanes(plan, time), unit="by kind, assumed", keys=KEYS)
    return Section("Time", join([said, picture, known]))


def _lanes(plan: Plan, time: TimePlan) -> list[Lane]:
    compute = time.matmul.value + time.memory.value
    waits = compute + time.exposed.value
    bubble = waits + time.bubble.value
    spans = [
        Span(0.0, time.matmul.value, "matmuls", MATMUL, time.matmul.note),
        Span(time.matmul.value, compute, "memory", MEMORY, time.memory.note),
        Span(waits, bubble, "bubble", BUBBLE, time.bubble.note),
        Span(bubble, bubble + time.optimizer.value, "optimizer", OPTIMIZER, time.optimizer.note),
    ]
    lanes = [Lane("compute", [span for span in spans if span.end > span.start + 1e-9])]
    by_axis: dict[str, list[Span]] = {}
    known = _drawn(plan, time)
    # What was judged is beside compute whatever other axes send; the rest is taken to go one after the other.
    cursors: dict[str, float] = {}
    for item in known:
        left = (item.seconds or 0.0) * item.hidden
        here = by_axis.setdefault(item.axis, [])
        lane = item.axis if item.is_judged else ""
        cursor = cursors.get(lane, 0.0)
        inside = min(left, max(0.0, compute - cursor))
        if inside:
            here.append(Span(cursor, cursor + inside, item.kind, HIDDEN, f"{item.what}, {item.basis}"))
        if left > inside:  # more than there is compute to hide it
            here.append(Span(cursor + inside, cursor + left, item.kind, EXPOSED, "more than compute can hide"))
        cursors[lane] = cursor + left
    cursor = max(compute, *cursors.values(), 0.0)
    for item in known:
        left = (item.seconds or 0.0) * (1 - item.hidden)
        if left:
            why = f"{item.what}, {item.basis}"
            by_axis[item.axis].append(Span(cursor, cursor + left, item.kind, EXPOSED, why))
            cursor += left
    return [*lanes, *(Lane(f"links of {axis}", spans) for axis, spans in by_axis.items())]


def _drawn(plan: Plan, time: TimePlan) -> list[Sent]:
    """Returns what is sent along axes whose transfers are long enough to be seen."""
    total: dict[str, float] = {}
    for item in plan.sent:
        total[item.axis] = total.get(item.axis, 0.0) + (item.seconds or 0.0)
    return [item for item in plan.sent if item.seconds and total[item.axis] > _SMALL * time.step.value]


def pipeline_section(plan: Plan) -> Section | None:
    """Returns who works on which microbatch when; None without a pipeline."""
    stages = plan.stages.count
    if stages == 1:
        return None
    schedule = gpipe_schedule(stages, plan.stages.microbatches)
    tick = 1.0
    if plan.time is not None:
        whole = (plan.time.step.value - plan.time.optimizer.value) / plan.setup.num_minibatches
        tick = whole / ((1 + BACKWARD) * schedule.num_ticks)
    lanes = []
    forward = schedule.num_ticks * tick
    for stage in range(min(stages, MAX_STAGES)):
        spans = []
        for at in range(schedule.num_ticks):
            part = int(schedule.microbatches[at, stage])
            if part == IDLE:
                continue
            spans.append(Span(at * tick, (at + 1) * tick, str(part), 0, f"forward, microbatch {part}"))
            begin = forward + (schedule.num_ticks - 1 - at) * BACKWARD * tick
            spans.append(Span(begin, begin + BACKWARD * tick, str(part), 1, f"backward, microbatch {part}"))
        lanes.append(Lane(f"stage {stage}", sorted(spans, key=lambda span: span.start)))
    rest = f" The first {MAX_STAGES} of {stages} are drawn." if stages > MAX_STAGES else ""
    often = plan.setup.num_minibatches
    again = f" It runs so {often} times in a step, once for each minibatch." if often > 1 else ""
    said = prose(
        f"{stages} stages work on {schedule.num_microbatches} microbatches; each idles {schedule.bubble_fraction:.1%} "
        f"of the time (computed).{again}{rest}",
        "A backward pass computes its tick again, and is drawn three times as long as a forward one (assumed). Numbers "
        "are microbatches.",
    )
    # Without a time for the step, only the order is known.
    show = duration if plan.time is not None else "{:g} ticks".format
    picture = timeline("The pipeline", lanes, keys=("forward", "backward"), show=show)
    return Section("Pipeline", join([said, picture]))
