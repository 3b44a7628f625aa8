"""Page section on a pipeline schedule with its backward pass."""

from __future__ import annotations

from meshwright.pages import Lane, Section, Span, duration, join, plural, prose, timeline
from meshwright.parallel.pipeline.schedule import IDLE
from meshwright.parallel.pipeline.training_schedule import Work
from meshwright.plan.plan import Plan

MAX_STAGES = 16
NUMBERED = "Each block is a microbatch; zoom in or point at it to see its number."
KEYS = ("forward", "backward", "weight gradients")
_NAMES = {Work.FORWARD: "forward", Work.BACKWARD: "backward", Work.WEIGHTS: "weight gradients"}


def schedule_section(plan: Plan) -> Section:
    """Returns a chart of the table that the engine runs, with a lane for each device of the pipeline.

    Example:
        >>> from meshwright.models import Decoder
        >>> from meshwright.plan.plan import make_plan
        >>> from meshwright.plan.step_setup import Setup
        >>> from meshwright.train import language_job
        >>> job = language_job(Decoder.named("tiny", num_layers=4), batch_size=32, num_tokens=16)
        >>> plan = make_plan(job, "cpu:8", Setup(mesh="fsdp:4,pp:2", pipeline="zb-v"))
        >>> "4 microbatches in zb-v" in schedule_section(plan).body
        True
    """
    stages, table = plan.stages, plan.stages.table
    whole = 2.0 + stages.again
    seconds = [1.0, whole - stages.splits, 1.0]
    starts = table.start_times(forward=seconds[0], backward=seconds[1], weights=seconds[2])
    tick = 1.0
    if plan.time is not None:
        spent = plan.time.step.value - plan.time.optimizer.value - plan.time.fixed.value
        tick = spent / plan.setup.num_minibatches / float(starts[-1].max())
    lanes = []
    for device in range(min(stages.count, MAX_STAGES)):
        spans = []
        for at in range(table.num_ticks):
            work = int(table.work[at, device])
            if work == IDLE:
                continue
            begin = float(starts[at, device]) * tick
            part, stage = int(table.microbatches[at, device]), int(table.stages[at, device])
            about = f"{_NAMES[Work(work)]}, microbatch {part}, stage {stage}"
            spans.append(Span(begin, begin + seconds[work] * tick, str(part), work, about))
        lanes.append(Lane(f"device {device}", spans))
    rest = f"The first {MAX_STAGES} of {stages.count} devices are drawn." if stages.count > MAX_STAGES else ""
    each = f" in one of its {stages.rounds} stages" if stages.rounds > 1 else ""
    most = plural(stages.live, "microbatch")
    said = prose(
        f"{stages.count} devices run {plural(table.num_microbatches, 'microbatch')} in {stages.schedule}; each waits "
        f"{stages.idle:.1%} of the time (computed), and holds activations of at most {most}{each}.",
        f"{NUMBERED} A backward pass is assumed to take twice as long as a forward pass, plus one if it "
        "recomputes that; devices wait for their neighbors after each tick.",
        rest,
    )
    show = duration if plan.time is not None else "{:g} forward passes".format
    keys = KEYS if stages.splits else KEYS[:2]
    return Section("Pipeline", join([said, timeline("Pipeline schedule", lanes, keys=keys, show=show)]))
