"""The scheduled program as a timeline: what a device computes, and what its links carry, in the order of the program.

Times are those of the plan: the compute of the schedule is scaled to the plan's, and every transfer has the hidden and
the exposed time that the plan counts. A transfer is drawn on its link from its start on, as soon as the link is free;
what compute does not hide comes last, while the device waits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from meshwright.pages import Lane, Span, duration
from meshwright.pages.colors import FILLS
from meshwright.plan.compiled.compile import Compiled
from meshwright.plan.compiled.scheduled_steps import OUTSIDE, LoopStep, Step, Wait, WorkStep, every_work
from meshwright.plan.plan import Plan

ROUNDS = 2  # of each loop, drawn one by one
WAITING, HIDDEN, EXPOSED = "waits for communication", "hidden communication", "exposed communication"
BUBBLE, BETWEEN = "pipeline bubble", "between steps"
KINDS = ("matmuls", "memory traffic", "optimizer", WAITING, HIDDEN, EXPOSED, BUBBLE, BETWEEN)
_FINEST = 1 / 5000  # of the step
_MANY = 2500  # bars
_ATTENTION_BACKWARD = 2.5  # time of attention's backward pass, in forward passes
_NEARLY_ALL = 0.95  # of the matmuls of a loop


@dataclass(frozen=True)
class StepBar:
    """A stretch of time on a lane, `kind` as in `KINDS`."""

    lane: str
    start: float
    seconds: float
    kind: str
    label: str
    detail: str = ""


@dataclass(frozen=True)
class StepLevel:
    """Live bytes by part from `start` to `end`, at most."""

    start: float
    end: float
    live: Mapping[str, float]


@dataclass
class ScheduledStep:
    """One step as it is scheduled.

    Args:
        bars: compute and transfers.
        levels: live memory.
        seconds: length of the step.
        late: seconds of hidden transfers that the plan's compute is too short for.
        loops: trip counts of the loops of which only the first rounds are drawn one by one.
    """

    bars: list[StepBar] = field(default_factory=list)
    levels: list[StepLevel] = field(default_factory=list)
    seconds: float = 0.0
    late: float = 0.0
    loops: list[int] = field(default_factory=list)

    def total(self, kind: str) -> float:
        """Returns the seconds of all bars of a kind."""
        return sum(bar.seconds for bar in self.bars if bar.kind == kind)


def scheduled_step(plan: Plan) -> ScheduledStep | None:
    """Returns the scheduled step of a compiled plan; None without one, or if its stages take different branches.

    Without a known chip, lengths are bytes written instead of seconds, and there are no transfers.
    """
    compiled = plan.compiled
    if compiled is None or not compiled.steps or plan.stages.is_scheduled:
        return None
    found = _Drawing(compiled, _lengths(plan, compiled), plan)
    found.run(compiled.steps, 0.0)
    found.finish()
    return found.made


def lanes(made: ScheduledStep) -> list[Lane]:
    """Returns the lanes of a timeline, compute first; neighbors that are too short to see are one bar."""
    least = made.seconds * _FINEST
    found = _merged(made, least)
    while sum(map(len, found.values())) > _MANY and least < 0.01 * made.seconds:
        least *= 2
        found = _merged(made, least)
    return [Lane(name, spans) for name, spans in found.items() if spans]


def _merged(made: ScheduledStep, least: float) -> dict[str, list[Span]]:
    """Returns the bars of each lane; those shorter than `least` join their neighbors of the same kind."""
    found: dict[str, list[Span]] = {"compute": []}
    for bar in made.bars:
        spans = found.setdefault(bar.lane, [])
        last = spans[-1] if spans else None
        tone = FILLS[bar.kind]
        if last is not None and last.tone == tone and bar.seconds < least and bar.start - last.end < least:
            label = last.label if last.label == bar.label else f"{last.label.removesuffix(' …')} …"
            spans[-1] = Span(last.start, last.end + bar.seconds, label, tone, last.detail)
        else:
            detail = bar.kind if not bar.detail else f"{bar.kind}; {bar.detail}"
            spans.append(Span(bar.start, bar.start + bar.seconds, bar.label, tone, detail))
    return found


def words(made: ScheduledStep) -> list[str]:
    """Returns sentences about the picture."""
    said = []
    if made.loops:
        counts = ", ".join(f"{count:,}" for count in dict.fromkeys(made.loops))
        said.append(
            f"Of each loop ({counts} rounds), the first {ROUNDS} rounds are drawn one by one, and the others as one "
            "block."
        )
    if made.late > 1e-3 * made.seconds:
        said.append(
            f"The compiler expects more compute than the plan; {duration(made.late)} of transfers that count as hidden "
            "do not fit beside the plan's compute and lengthen the picture."
        )
    return said


def _lengths(plan: Plan, compiled: Compiled) -> dict[int, float]:
    """Returns the seconds of each work, by its identity; they add up to the plan's compute."""
    works = list(every_work(compiled.steps))
    if plan.time is None or plan.target.chip is None:
        return {id(work): work.moved for work, _ in works}
    chip, time = plan.target.chip, plan.time
    peak = plan.peak_flops or 0.0
    compute = time.matmul.value + time.memory.value + time.optimizer.value
    kernels = plan.flops.attention / plan.target.num_devices / (peak * chip.rates.attention) if peak else 0.0
    weights = {id(work): _kernel_weight(work) for work, _ in works}
    of_kernels = _shares(works, weights)
    if not of_kernels:
        kernels = 0.0
    if any(work.cycles for work, _ in works):
        rest = _shares(works, {id(work): work.seconds for work, _ in works})
        return {id(work): kernels * of_kernels.get(id(work), 0.0) + (compute - kernels) * rest.get(id(work), 0.0)
                for work, _ in works}  # fmt: skip
    # Without cycle estimates, matmuls go by their FLOPs, and other work by the bytes that it writes.
    matmul = _shares(works, {id(work): work.flops for work, _ in works})
    other = _shares(works, {id(work): 0.0 if work.flops else work.moved for work, _ in works})
    between = time.memory.value + time.optimizer.value
    return {
        id(work): kernels * of_kernels.get(id(work), 0.0)
        + (time.matmul.value - kernels) * matmul.get(id(work), 0.0)
        + between * other.get(id(work), 0.0)
        for work, _ in works
    }


def _kernel_weight(work: WorkStep) -> float:
    """Returns the relative time of the attention kernels of a work."""
    part, _, which = work.name.partition(", ")
    each = _ATTENTION_BACKWARD / 2 if which == "backward" else 1.0  # two kernels run backward
    if work.kernels:
        return each * work.kernels
    return 1e-12 * work.moved * each if part == "attention" and not work.flops else 0.0


def _shares(works: Sequence[tuple[WorkStep, int]], weights: Mapping[int, float]) -> dict[int, float]:
    total = sum(weights[id(work)] * times for work, times in works)
    return {id(work): weights[id(work)] / total for work, _ in works} if total else {}


def _pass_of(bars: Sequence[StepBar]) -> str:
    """Returns ", forward" or ", backward" if nearly all matmuls of a loop belong to that pass.

    >>> bars = [
    ...     StepBar("compute", 0, 1, "matmuls", "mlp, recomputed"),
    ...     StepBar("compute", 1, 2, "matmuls", "mlp, backward"),
    ... ]
    >>> _pass_of(bars), _pass_of(bars[:1]), _pass_of([StepBar("compute", 0, 1, "matmuls", "mlp, forward"), *bars])
    (', backward', ', backward', '')
    """
    sums = {"forward": 0.0, "backward": 0.0}
    for bar in bars:
        if bar.kind == KINDS[0]:
            sums["forward" if bar.label.endswith(", forward") else "backward"] += bar.seconds
    which = max(sums, key=lambda name: sums[name])
    return f", {which}" if sums[which] > _NEARLY_ALL * sum(sums.values()) > 0 else ""


class _Drawing:
    def __init__(self, compiled: Compiled, lengths: Mapping[int, float], plan: Plan) -> None:
        self.compiled, self.lengths, self.plan = compiled, lengths, plan
        self.made = ScheduledStep()
        self.free: dict[str, float] = {}  # when each link is free
        self.arrives: dict[int, float] = {}  # when the hidden part of a transfer is over
        names = {item.axis: item.link.partition(" (")[0] for item in plan.sent}
        self.lanes = [
            " ".join(filter(None, ("+".join(one.axes) or "all", f"({names.get('+'.join(one.axes), 'links')})")))
            for one in compiled.collectives
        ]
        self.timed = plan.time is not None

    def run(self, steps: Sequence[Step], at: float) -> float:
        """Draws steps from `at` on, and returns when they end."""
        for one in steps:
            if isinstance(one, WorkStep):
                at = self._work(one, at)
            elif isinstance(one, Wait):
                at = self._wait(one.place, at)
            else:
                self._send(one.hides, at)
                at = self._loop(one, at)
        return at

    def _work(self, one: WorkStep, at: float) -> float:
        seconds = self.lengths[id(one)]
        end = at + seconds
        if seconds > 0 and self.timed:
            is_matmul = one.flops or one.kernels
            kind = "matmuls" if is_matmul else "optimizer" if one.name == OUTSIDE else "memory traffic"
            detail = f"{one.flops / 1e9:,.4g} GFLOP" if one.flops else ""
            self.made.bars.append(StepBar("compute", at, seconds, kind, one.name, detail))
        self.made.levels.append(StepLevel(at, end, one.live))
        self._send(one.hides, at)
        return end

    def _send(self, hides: Mapping[int, float], at: float) -> None:
        for place, seconds in hides.items():
            lane = self.lanes[place]
            start = max(at, self.free.get(lane, 0.0))
            self._transfer(place, start, seconds, HIDDEN)
            self.arrives[place] = start + seconds

    def _wait(self, place: int, at: float) -> float:
        if not self.timed:
            return at
        one = self.compiled.collectives[place]
        late = max(0.0, self.arrives.pop(place, at) - at)
        exposed = (one.transfer_s or 0.0) * (1 - one.hidden_share)
        self.made.late += late
        if late + exposed > 0:
            self.made.bars.append(StepBar("compute", at, late + exposed, WAITING, "waits", f"for {one.kind}"))
        if exposed > 0:
            self._transfer(place, at + late, exposed, EXPOSED)
        return at + late + exposed

    def _transfer(self, place: int, start: float, seconds: float, kind: str) -> None:
        one = self.compiled.collectives[place]
        self.free[self.lanes[place]] = start + seconds
        detail = one.serves or one.source.rpartition("/")[2]
        self.made.bars.append(StepBar(self.lanes[place], start, seconds, kind, one.kind, detail))

    def _loop(self, loop: LoopStep, at: float) -> float:
        drawn = loop.trips if loop.trips <= ROUNDS + 1 else ROUNDS
        begin = at
        for _ in range(drawn):
            begin, first, level, late = at, len(self.made.bars), len(self.made.levels), self.made.late
            at = self.run(loop.body, at)
        left = loop.trips - drawn
        if not left or at <= begin:
            return at
        self.made.loops.append(loop.trips)
        rounds = f"{left:,} more rounds{_pass_of(self.made.bars[first:])}"
        # The last round stands for those that are left.
        length = left * (at - begin)
        sums: dict[tuple[str, str], float] = {}
        for bar in self.made.bars[first:]:
            sums[bar.lane, bar.kind] = sums.get((bar.lane, bar.kind), 0.0) + left * bar.seconds
        # Devices wait for exposed transfers one after another, after the compute of the block.
        waits = at + length - sum(seconds for (_, kind), seconds in sums.items() if kind == EXPOSED)
        cursors: dict[str, float] = {}
        for (lane, kind), seconds in sorted(sums.items(), key=lambda item: KINDS.index(item[0][1])):
            start = cursors.get(lane, at)
            if kind == EXPOSED:
                start = max(start, waits)
                waits = start + seconds
            self.made.bars.append(StepBar(lane, start, seconds, kind, rounds, f"{kind}, added up"))
            cursors[lane] = start + seconds
        most = max(self.made.levels[level:], key=lambda one: sum(one.live.values()), default=None)
        if most is not None:
            self.made.levels.append(StepLevel(at, at + length, most.live))
        self.made.late += left * (self.made.late - late)
        for lane in cursors:
            self.free[lane] = max(self.free.get(lane, 0.0), cursors[lane])
        return at + length

    def finish(self) -> None:
        """Adds what the plan counts beside the program: copies to the host, and the pipeline's bubble."""
        made, time = self.made, self.plan.time
        ends = [bar.start + bar.seconds for bar in made.bars] + [level.end for level in made.levels]
        at = max(ends, default=0.0)
        if time is not None:
            for item in self.plan.sent:
                if item.basis != "compiled" and item.seconds:
                    lane = f"{item.axis} ({item.link.partition(' (')[0]})"
                    said = f"{item.what}; {item.basis}"
                    if item.hidden:
                        made.bars.append(StepBar(lane, 0.0, item.seconds * item.hidden, HIDDEN, item.kind, said))
                    if item.hidden < 1:
                        exposed = item.seconds * (1 - item.hidden)
                        made.bars.append(StepBar(lane, at, exposed, EXPOSED, item.kind, said))
                        made.bars.append(StepBar("compute", at, exposed, WAITING, "waits", f"for {item.kind}"))
                        at += exposed
            if time.bubble.value > 0:
                made.bars.append(StepBar("compute", at, time.bubble.value, BUBBLE, "bubble", time.bubble.note))
                at += time.bubble.value
            if time.fixed.value > 0:
                made.bars.append(StepBar("compute", at, time.fixed.value, BETWEEN, BETWEEN, time.fixed.note))
                at += time.fixed.value
        made.seconds = at
