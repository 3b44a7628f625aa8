"""What a device sends in a step: by axis, and every collective of the compiled program with a verdict."""

from __future__ import annotations

import math

from meshwright.layout import format_bytes
from meshwright.pages import Markup, Section, duration, fold, join, percent, prose, table
from meshwright.plan.compile import Compiled, CompiledCollective
from meshwright.plan.cost import Plan
from meshwright.plan.summary import hidden_words, short_source

MAX_ROWS = 12


def sending_section(plan: Plan) -> Section:
    """Returns what is sent over which links, and what hides it."""
    if not plan.sent:
        return Section("Communication", prose("Nothing is sent between devices."))
    total = sum(item.wire_bytes for item in plan.sent)
    rows = [
        (
            item.axis,
            item.kind,
            short_source(item.what, 60),
            format_bytes(item.wire_bytes),
            f"{item.count:,}",
            "not known" if item.seconds is None else duration(item.seconds),
            hidden_words(item),
            item.link,
            item.basis,
        )
        for item in plan.sent
    ]
    headings = ("axis", "kind", "what", "bytes", "times", "takes", "hidden", "link", "basis")
    largest = max(plan.sent, key=lambda item: item.wire_bytes)
    grounds = (
        "Bytes, and whether compute lies between start and end, were read off the compiled program."
        if plan.compiled is not None and plan.compiled.does_not_fit is None
        else "Bytes follow from the layout; how much of them is hidden is assumed, as nothing was compiled."
    )
    said = prose(
        f"Each device sends {format_bytes(total)} in a step.",
        f"{percent(plan.hidden_share)} of it is sent while matmuls can run.",
        _too_much(plan),
        f"Most of it, {percent(largest.wire_bytes / total)}, is {largest.kind} over {largest.axis}.",
        grounds,
        "Times are computed from the table of chips, as if every transfer were alone.",
    )
    made = [said, table(headings, rows, right=(3, 4, 5, 6))]
    if plan.compiled is not None and plan.compiled.collectives:
        made.append(_collectives(plan.compiled))
    return Section("Communication", join(made))


def _too_much(plan: Plan) -> str:
    """Returns a sentence where there is less compute than would hide what could be hidden."""
    if plan.time is None:
        return ""
    hideable = math.fsum((item.seconds or 0.0) * item.hidden for item in plan.sent)
    short = hideable - plan.time.matmul.value - plan.time.memory.value
    return f"That takes {duration(short)} longer than all matmuls, so it is not all hidden." if short > 0 else ""


def _collectives(compiled: Compiled) -> Markup:
    groups: dict[tuple[str, ...], list[CompiledCollective]] = {}
    for one in compiled.collectives:
        groups.setdefault((one.kind, "+".join(one.axes), one.verdict, one.source), []).append(one)

    def size(members: list[CompiledCollective]) -> float:
        return sum(c.trips * c.wire_bytes for c in members)

    ordered = sorted(groups.items(), key=lambda item: -size(item[1]))
    rows = [
        (
            kind,
            axes,
            format_bytes(size(members)),
            f"{sum(c.trips for c in members):,}",
            format_bytes(max(c.bytes_moved for c in members)),
            f"{min(c.matmuls_between for c in members):,}",
            verdict,
            short_source(source, 90),
        )
        for (kind, axes, verdict, source), members in ordered
    ]
    headings = ("kind", "axes", "sent", "times", "largest array", "matmuls between", "verdict", "comes from")
    exposed = sum(size(members) for _, members in ordered if not members[0].hidden)
    name = f"All {len(compiled.collectives):,} collectives of the compiled program, {len(rows):,} kinds"
    body = [table(headings, rows[:MAX_ROWS], right=(2, 3, 4, 5), code=(7,))]
    if len(rows) > MAX_ROWS:
        more = table(headings, rows[MAX_ROWS:], right=(2, 3, 4, 5), code=(7,))
        body.append(fold(f"{len(rows) - MAX_ROWS:,} more", more))
    return join([prose(f"Exposed are {format_bytes(exposed)} of it (compiled)."), fold(name, *body, opened=True)])
