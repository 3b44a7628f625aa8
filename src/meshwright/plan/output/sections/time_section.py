"""Page sections on the time of a step: compute and communication, and the schedule of a pipeline."""

from __future__ import annotations

from meshwright.pages import Lane, Markup, Section, Span, duration, join, plural, prose, table, timeline
from meshwright.pages.colors import FILLS
from meshwright.parallel.pipeline.schedule import IDLE, gpipe_schedule
from meshwright.plan.costs.communication import Sent
from meshwright.plan.costs.step_time import TimePlan
from meshwright.plan.output.schedule_picture import KINDS, ScheduledStep, lanes, words
from meshwright.plan.output.sections.schedule_section import NUMBERED, schedule_section
from meshwright.plan.output.summary import band_words, time_table
from meshwright.plan.plan import Plan

KEYS = {kind: FILLS[kind] for kind in KINDS}
MATMUL, MEMORY, OPTIMIZER, WAITING, HIDDEN, EXPOSED, BUBBLE, BETWEEN = KEYS.values()
MAX_STAGES = 16
BACKWARD = 3  # time of a backward tick in forward ticks: it recomputes its forward pass first
_SMALL = 2e-4  # of a step; shorter transfers would be invisible


def time_section(plan: Plan, made: ScheduledStep | None = None) -> Section:
    """Returns a timeline of one step, as scheduled or by kind, and a table of its parts."""
    if plan.time is None:
        return Section("Time", prose("Step time is not estimated for CPUs."))
    time = plan.time
    shown, sent = time_table(plan), time.communication
    rows = (*shown.rows, ("all communication", duration(sent.value), "", sent.basis, sent.note))
    known = table(shown.headings, rows, right=shown.right, sortable=False)
    said = prose(
        f"A step takes about {duration(time.step.value)} ({time.step.basis}), within {time.error:.0%}: expect "
        f"{band_words(time)}.",
        f"Communication alone would take {duration(sent.value)}; {duration(time.exposed.value)} of it is exposed.",
    )
    return Section("Time", join([said, _picture(plan, time, made), known]))


def _picture(plan: Plan, time: TimePlan, made: ScheduledStep | None) -> Markup:
    title = "One step on one device"
    if made is None:
        why = "nothing was compiled"
        if plan.compiled is not None and plan.stages.is_scheduled:
            why = "a compiled pipeline has the branches of all stages"
        why = f"Computed, because {why}. It adds up time by kind: how long each takes, not when it runs."
        drawn = _lanes(plan, time)
        used = {span.tone for lane in drawn for span in lane.spans}
        keys = {kind: fill for kind, fill in KEYS.items() if fill in used}
        return timeline(title, drawn, unit="computed, by kind; assumed times", keys=keys, note=why)
    keys = {kind: fill for kind, fill in KEYS.items() if made.total(kind) > 0}
    said = [
        "The compiled program in the order of its schedule, with the plan's times.",
        "A transfer is drawn on its link from its start on; compute waits for its exposed part.",
        *words(made),
    ]
    return timeline(title, lanes(made), unit="compiled schedule, assumed times", keys=keys, note=" ".join(said))


def _lanes(plan: Plan, time: TimePlan) -> list[Lane]:
    compute = time.matmul.value + time.memory.value
    waits = compute + time.exposed.value
    bubble = waits + time.bubble.value
    update = bubble + time.optimizer.value
    spans = [
        Span(0.0, time.matmul.value, "matmuls", MATMUL, time.matmul.note),
        Span(time.matmul.value, compute, "memory", MEMORY, time.memory.note),
        Span(compute, waits, "waits", WAITING, "for exposed communication"),
        Span(waits, bubble, "bubble", BUBBLE, time.bubble.note),
        Span(bubble, update, "optimizer", OPTIMIZER, time.optimizer.note),
        Span(update, update + time.fixed.value, "between steps", BETWEEN, time.fixed.note),
    ]
    found = [Lane("compute", [span for span in spans if span.end > span.start + 1e-9])]
    by_axis: dict[str, list[Span]] = {}
    known = _drawn(plan, time)
    # Judged transfers overlap with compute whatever other axes send; the others are drawn one after another.
    cursors: dict[str, float] = {}
    for item in known:
        left = (item.seconds or 0.0) * item.hidden
        here = by_axis.setdefault(item.axis, [])
        lane = item.axis if item.is_judged else ""
        cursor = cursors.get(lane, 0.0)
        inside = min(left, max(0.0, compute - cursor))
        if inside:
            here.append(Span(cursor, cursor + inside, item.kind, HIDDEN, f"{item.what}, {item.basis}"))
        if left > inside:
            here.append(Span(cursor + inside, cursor + left, item.kind, EXPOSED, "exceeds the compute"))
        cursors[lane] = cursor + left
    cursor = max(compute, *cursors.values(), 0.0)
    for item in known:
        left = (item.seconds or 0.0) * (1 - item.hidden)
        if left:
            why = f"{item.what}, {item.basis}"
            by_axis[item.axis].append(Span(cursor, cursor + left, item.kind, EXPOSED, why))
            cursor += left
    return [*found, *(Lane(f"links of {axis}", spans) for axis, spans in by_axis.items())]


def _drawn(plan: Plan, time: TimePlan) -> list[Sent]:
    """Returns the communication along axes whose transfers are long enough to be visible."""
    total: dict[str, float] = {}
    for item in plan.sent:
        total[item.axis] = total.get(item.axis, 0.0) + (item.seconds or 0.0)
    return [item for item in plan.sent if item.seconds and total[item.axis] > _SMALL * time.step.value]


def pipeline_section(plan: Plan) -> Section | None:
    """Returns a chart of the pipeline schedule; None without a pipeline."""
    stages = plan.stages.count
    if stages == 1:
        return None
    if plan.stages.is_scheduled:
        return schedule_section(plan)
    schedule = gpipe_schedule(stages, plan.stages.microbatches)
    tick = 1.0
    if plan.time is not None:
        whole = (plan.time.step.value - plan.time.optimizer.value - plan.time.fixed.value) / plan.setup.num_minibatches
        tick = whole / ((1 + BACKWARD) * schedule.num_ticks)
    rows = []
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
        rows.append(Lane(f"stage {stage}", sorted(spans, key=lambda span: span.start)))
    rest = f" The first {MAX_STAGES} of {stages} are drawn." if stages > MAX_STAGES else ""
    often = plan.setup.num_minibatches
    again = f" This repeats {often} times per step, once per minibatch." if often > 1 else ""
    said = prose(
        f"{stages} stages process {plural(schedule.num_microbatches, 'microbatch')}; each is idle "
        f"{schedule.bubble_fraction:.1%} of the time (computed).{again}{rest}",
        f"{NUMBERED} A backward tick recomputes its forward pass, so it is drawn three times as long as "
        "a forward tick (assumed).",
    )
    # Without a step time, only the order is known.
    show = duration if plan.time is not None else "{:g} ticks".format
    picture = timeline("Pipeline schedule", rows, keys=("forward", "backward"), show=show)
    return Section("Pipeline", join([said, picture]))
