"""Plans and searches as text: sentences and tables, plain or drawn by rich."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from meshwright.layout.leaf import format_bytes, rich_table, text_table
from meshwright.pages import Markup, compact, duration, percent, plural, table
from meshwright.plan.costs.step_time import TimePlan
from meshwright.plan.expected_goodput import STORAGE_MOST, STORAGE_PER_HOST, ExpectedGoodput
from meshwright.plan.output.commands import PlannedJob, how_to_run, train_command
from meshwright.plan.output.setup_words import assignments, batch_words, counted, option_words
from meshwright.plan.plan import Plan
from meshwright.plan.search import Rejected, Search

ASSUMED_STORAGE = f"{format_bytes(STORAGE_PER_HOST)}/s per host, at most {format_bytes(STORAGE_MOST)}/s"
_HARDLY = 1e-6  # a share of time that trains, below which training has no price
PARTS = ("matmul", "memory", "exposed", "bubble", "optimizer", "fixed")
PART_NAMES = {
    "matmul": "matmuls",
    "memory": "memory traffic",
    "exposed": "exposed communication",
    "bubble": "pipeline bubble",
    "optimizer": "optimizer",
    "fixed": "between steps",
}


@dataclass(frozen=True)
class Table:
    """A titled table; `right` lists the right-aligned columns."""

    title: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    right: tuple[int, ...] = ()

    def aligned(self) -> list[tuple[str, ...]]:
        """Returns the rows with right-aligned cells padded."""
        widths = [max(len(row[i]) for row in (self.headings, *self.rows)) for i in range(len(self.headings))]
        return [
            tuple(cell.rjust(widths[i]) if i in self.right else cell for i, cell in enumerate(row)) for row in self.rows
        ]

    def markup(self) -> Markup:
        """Returns the table for a page, without its title."""
        return table(self.headings, self.rows, right=self.right)


@dataclass(frozen=True)
class Summary:
    """A sequence of sentences and tables, printable with and without rich."""

    parts: tuple[str | Table, ...]

    def __str__(self) -> str:
        return "\n\n".join(
            part if isinstance(part, str) else f"{part.title}\n{text_table(part.headings, part.aligned())}"
            for part in self.parts
        )

    def __rich__(self) -> Any:
        from rich.console import Group
        from rich.text import Text

        drawn: list[Any] = []
        for part in self.parts:
            if isinstance(part, str):
                drawn += [Text(part), Text()]
            else:
                drawn.append(rich_table(part.headings, part.aligned(), title=part.title, caption=""))
        return Group(*drawn)


def plan_summary(plan: Plan, subject: PlannedJob) -> Summary:
    """Returns the text that `meshwright plan` prints."""
    head = [
        f"{subject.described} on {plan.target.title}",
        ", ".join([plan.setup.mesh, batch_words(plan.rows, plan.tokens_per_step), *option_words(_setup(plan))]),
        plan.memory.verdict,
        _speed(plan),
    ]
    parts: list[str | Table] = ["\n".join(head), memory_table(plan), sent_table(plan)]
    if plan.time is not None:
        parts.append(time_table(plan))
    if plan.goodput is not None:
        parts.append(goodput_table(plan, plan.goodput))
    parts.append("compiled: read from the compiled program; computed: from shapes and data sheets; assumed: estimated")
    if plan.notes:
        parts.append("\n".join(f"note: {note}" for note in plan.notes))
    parts.append(how_to_run(plan, subject))
    return Summary(tuple(part for part in parts if isinstance(part, str) or part.rows))


def title_words(plan: Plan, subject: PlannedJob) -> str:
    """Returns one line about a plan: model and size, mesh, options that differ from the defaults, and target."""
    how = ", ".join([plan.setup.mesh, *option_words(_setup(plan))])
    return f"{subject.titled(plan.num_params)} as {how} on {plan.target.name}"


def _setup(plan: Plan) -> dict[str, Any]:
    """Returns the options of a setup that differ from the defaults, and a chosen global view."""
    return plan.setup.to_json() | ({"view": "global"} if plan.view.view == "global" else {})


def unit_of(plan: Plan) -> str:
    """Returns what a step trains on: "tokens", or "rows" for a job without tokens."""
    return counted(plan.rows, plan.tokens_per_step)


def _speed(plan: Plan) -> str:
    if plan.time is None or plan.tokens_per_second is None:
        return "step time is not estimated for CPUs"
    mfu = "" if plan.mfu is None else f", MFU {percent(plan.mfu)}"
    cost = plan.dollars_per_billion_tokens
    money = "" if cost is None else f", ${cost:,.0f} per billion {unit_of(plan)}"
    if plan.goodput is not None:
        money += f", goodput {percent(plan.goodput.share)} with failures"
    step = f"{duration(plan.time.step.value)} per step ({band_words(plan.time)})"
    return f"{step}, {compact(plan.tokens_per_second)} {unit_of(plan)}/s{mfu}{money} ({plan.time.step.basis})"


def band_words(time: TimePlan) -> str:
    """Returns the band of a step time in words.

    >>> from meshwright.plan.costs.step_time import Estimate
    >>> second = Estimate(1.0, "s", "assumed")
    >>> band_words(TimePlan(*[second] * 8, error=0.25))
    '800 ms to 1.25 s'
    """
    shortest, longest = time.band
    return f"{duration(shortest)} to {duration(longest)}"


def proportional_band(plan: Plan, value: float, show: Callable[[float], str]) -> str:
    """Returns the band of a figure that is proportional to the step time or to its inverse, in words."""
    error = 0.0 if plan.time is None else plan.time.error
    return f"{show(value / (1 + error))} to {show(value * (1 + error))}"


def memory_table(plan: Plan) -> Table:
    """Returns the peak memory per device, by part."""
    memory = plan.memory
    rows: list[tuple[str, ...]] = []
    for part in memory.parts:
        rows.append((part.name, format_bytes(part.bytes), percent(part.bytes / memory.total), part.basis, part.note))
        rows += (
            (f"  from {kind}", format_bytes(size), percent(size / memory.total), part.basis, "")
            for kind, size in part.split.items()
        )
    rows.append(("total", format_bytes(memory.total), "", memory.basis, ""))
    if memory.capacity is not None:
        rows.append(("capacity", format_bytes(memory.capacity), "", "", f"{plan.target.kind}, from its data sheet"))
    return Table("Memory per device", ("part", "bytes", "share", "basis", "note"), tuple(rows), (1, 2))


def sent_table(plan: Plan, *, width: int = 48) -> Table:
    """Returns the communication table; `width` limits the column that names the data."""
    rows = tuple(
        (
            item.axis,
            item.kind,
            short_source(item.what, width),
            format_bytes(item.wire_bytes),
            f"{item.count:,}",
            "unknown" if item.seconds is None else duration(item.seconds),
            percent(item.hidden) + (" assumed" if item.hidden and item.basis != "compiled" else ""),
            item.link,
            item.basis,
        )
        for item in plan.sent
    )
    headings = ("axis", "kind", "data", "bytes", "count", "time", "hidden", "link", "basis")
    return Table("Communication per device and step", headings, rows, (3, 4, 5, 6))


def time_table(plan: Plan) -> Table:
    """Returns the time per step, by part."""
    assert plan.time is not None
    step = plan.time.step
    figures = [(PART_NAMES[name], getattr(plan.time, name)) for name in PARTS]
    rows = [
        (name, duration(figure.value), percent(figure.value / step.value), figure.basis, figure.note)
        for name, figure in figures
        if figure.value > 1e-9
    ]
    note = f"{band_words(plan.time)}: {step.note}"
    rows.append(("step", duration(step.value), "", step.basis, note))
    return Table("Time per step", ("part", "time", "share", "basis", "note"), tuple(rows), (1, 2))


def goodput_table(plan: Plan, found: ExpectedGoodput) -> Table:
    """Returns the expected goodput and how it comes about."""
    failures, given = found.failures(), found.given
    shares = failures.shares(found.interval_s)
    storage = f"{format_bytes(found.storage(found.chips))}/s"
    assumed = "" if given.storage_rate is not None else f", assumed: {ASSUMED_STORAGE}"
    rows = [
        ("goodput", percent(found.share), "share of the time that trains"),
        ("lost work", percent(shares["lost work"]), "trained again after a failure"),
        ("saves", percent(shares["saves"]), "if training waits for them"),
        ("restarts", percent(shares["restarts"]), f"{duration(given.restart_s)} each, and loading the checkpoint"),
        ("failure every", duration(1 / failures.rate), f"{found.chips:,} chips, {given.mtbf_hours:,g} hours each"),
        ("checkpoint", format_bytes(found.state_bytes), f"{duration(failures.save)} at {storage}{assumed}"),
        ("save every", plural(found.interval_steps, "step"), f"{duration(found.interval_s)}, the best interval"),
        ("Young-Daly", duration(failures.young_daly), "the same to first order"),
    ]
    if plan.tokens_per_second is not None:
        rate = plan.tokens_per_second * found.share
        band = proportional_band(plan, rate, "{:,.0f}".format)
        rows.append((f"{unit_of(plan)}/s", f"{rate:,.0f}", f"with failures, {band}"))
    if plan.dollars_per_billion_tokens is not None:
        note = f"per billion {unit_of(plan)}, with failures"
        if found.share > _HARDLY:
            cost = plan.dollars_per_billion_tokens / found.share
            rows.append(("price", f"${cost:,.0f}", f"{note}, {proportional_band(plan, cost, '${:,.0f}'.format)}"))
        else:
            rows.append(("price", "unlimited", note))
    return Table("Goodput (assumed)", ("figure", "value", "note"), tuple(rows), (1,))


def search_summary(
    found: Search, best: Sequence[Plan], subject: PlannedJob, *, failed: Sequence[Rejected] = (), top: int = 5
) -> Summary:
    """Returns the text that `meshwright plan search` prints: the best plans, their commands, and rejections."""
    batch = f"{plural(found.rows, 'row')} per step"
    if found.profile.has_tokens:
        tokens = found.rows * found.tokens_per_row
        batch = f"{plural(found.rows, 'row')} of {found.tokens_per_row:,} tokens, {tokens:,} tokens per step"
    head = (
        f"{subject.described} on {found.target.title}\n"
        f"{batch}\n"
        f"{plural(found.considered, 'candidate')} in {duration(found.seconds)}; {len(found.ranked):,} fit"
    )
    parts: list[str | Table] = [head]
    if best:
        parts.append(ranking_table(best[:top]))
        commands = [train_command(plan, subject) or how_to_run(plan, subject) for plan in best[:top]]
        parts.append("\n".join(f"{place}. {line}" for place, line in enumerate(commands, 1)))
    if found.nearest is not None:
        parts.append(str(found.nearest))
    parts.append(rejected_table(found))
    if failed:
        lines = [f"dropped: {item.setup}: {item.reason}: {item.detail.splitlines()[0]}" for item in failed]
        parts.append("\n".join(lines))
    return Summary(tuple(part for part in parts if isinstance(part, str) or part.rows))


def ranking_table(plans: Sequence[Plan]) -> Table:
    """Returns one row per plan."""
    planned = any(plan.goodput is not None for plan in plans)
    rate = f"{unit_of(plans[0])}/s" if plans else "tokens/s"
    headings = ["", "mesh", "setup", "step", "band", "MFU", rate, "memory", "sent", "exposed", "memory and links"]
    headings += ["goodput"] if planned else []
    rows = []
    for place, plan in enumerate(plans, 1):
        assert plan.time is not None
        rows.append(
            (
                str(place),
                plan.setup.mesh,
                " ".join(assignments(_setup(plan))) or "-",
                duration(plan.time.step.value),
                band_words(plan.time),
                "-" if plan.mfu is None else percent(plan.mfu),
                "-" if plan.tokens_per_second is None else compact(plan.tokens_per_second),
                format_bytes(plan.memory.total),
                format_bytes(sum(item.wire_bytes for item in plan.sent)),
                percent(plan.time.exposed.value / plan.time.step.value),
                plan.memory.basis,
                *((percent(plan.goodput.share),) if plan.goodput is not None else ()),
            )
        )
    right = (3, 4, 5, 6, 7, 8, 9, *((11,) if planned else ()))
    return Table("Best plans (times assumed)", tuple(headings), tuple(rows), right)


def rejected_table(found: Search) -> Table:
    """Returns the number of rejected candidates by reason, with an example of each."""
    rows = []
    for reason, count in found.reasons().most_common():
        example = next(item for item in found.rejected if item.reason == reason)
        rows.append((f"{count:,}", reason, f"{example.setup.mesh}: {example.detail}"))
    return Table("Rejected candidates", ("count", "reason", "example"), tuple(rows), (0,))


def short_source(what: str, limit: int = 48) -> str:
    """Shortens a long operation name to its last path components.

    >>> short_source("jit(step)/" + "while/body/" * 5 + "all_gather", 24)
    '…/while/body/all_gather'
    """
    if len(what) <= limit:
        return what
    kept = what[-(limit - 1) :]
    return f"…/{kept.partition('/')[2]}" if "/" in kept else f"…{kept}"
