"""Page section on communication: bytes per axis, and every collective of the compiled program with a verdict."""

from __future__ import annotations

import math
from collections.abc import Sequence

from meshwright.layout import format_bytes
from meshwright.pages import Markup, Section, duration, fold, join, percent, prose, table
from meshwright.plan.compiled.compile import Compiled
from meshwright.plan.compiled.verdict import CompiledCollective
from meshwright.plan.output.summary import sent_table, short_source
from meshwright.plan.plan import Plan

MAX_ROWS = 12


def sending_section(plan: Plan) -> Section:
    """Returns the section on communication."""
    if not plan.sent:
        return Section("Communication", prose("Devices send nothing to each other."))
    total = sum(item.wire_bytes for item in plan.sent)
    largest = max(plan.sent, key=lambda item: item.wire_bytes)
    grounds = (
        "Bytes and overlapping compute were read from the compiled program."
        if plan.compiled is not None and plan.compiled.does_not_fit is None
        else "Bytes follow from the layout; the hidden share is assumed, because nothing was compiled."
    )
    said = prose(
        f"Each device sends {format_bytes(total)} per step.",
        _overlap(plan),
        f"The largest share, {percent(largest.wire_bytes / total)}, is {largest.kind} over {largest.axis}.",
        grounds,
        "Transfer times are computed from published rates, each as if it ran alone.",
    )
    made = [said, sent_table(plan, width=60).markup()]
    if plan.compiled is not None and plan.compiled.collectives:
        made.append(_collectives(plan.compiled))
    return Section("Communication", join(made))


def _overlap(plan: Plan) -> str:
    """Returns how much overlaps with compute; communication that could may take longer than the compute."""
    share = percent(plan.hidden_share)
    if plan.time is None:
        return f"{share} of it overlaps with compute."
    hideable = math.fsum((item.seconds or 0.0) * item.hidden for item in plan.sent if not item.is_judged)
    short = hideable - plan.time.matmul.value - plan.time.memory.value
    if short <= 0:
        return f"{share} of it overlaps with compute."
    return (
        f"{share} of it could overlap, but takes {duration(short)} longer than the compute, so part of it is exposed."
    )


def _collectives(compiled: Compiled) -> Markup:
    groups: dict[tuple[str, ...], list[CompiledCollective]] = {}
    for one in compiled.collectives:
        served = one.serves or "unknown"
        key = (one.kind, "+".join(one.axes), served, one.state, one.reason, one.line or one.source)
        groups.setdefault(key, []).append(one)

    def size(members: list[CompiledCollective]) -> float:
        return sum(c.trips * c.wire_bytes for c in members)

    ordered = sorted(groups.items(), key=lambda item: -size(item[1]))
    rows = [
        (
            kind,
            axes,
            serves,
            format_bytes(size(members)),
            f"{sum(c.trips for c in members):,}",
            format_bytes(max(c.bytes_moved for c in members)),
            f"{min(c.flops_between for c in members) / 1e9:,.4g}",
            percent(sum(c.trips * c.wire_bytes * c.hidden_share for c in members) / (size(members) or 1)),
            f"{state}: {why}" if why else state,
            short_source(source, 60),
        )
        for (kind, axes, serves, state, why, source), members in ordered
    ]
    exposed = sum(c.trips * c.wire_bytes * (1 - c.hidden_share) for c in compiled.collectives)
    name = f"All {len(compiled.collectives):,} collectives of the compiled program, {len(rows):,} kinds"
    body = [_rows(rows[:MAX_ROWS])]
    if len(rows) > MAX_ROWS:
        body.append(fold(f"{len(rows) - MAX_ROWS:,} more", _rows(rows[MAX_ROWS:])))
    said = [f"{format_bytes(exposed)} of it is exposed (compiled)."]
    if any(c.cycles_between for c in compiled.collectives):
        said.append("Overlapping work other than matmuls counts with the compiler's cycle estimate.")
    return join([prose(*said), fold(name, *body, opened=True)])


def _rows(rows: Sequence[tuple[str, ...]]) -> Markup:
    headings = (
        "kind", "axes", "sends", "bytes", "count", "largest array", "GFLOP between", "hidden", "verdict", "source"
    )  # fmt: skip
    return table(headings, rows, right=(3, 4, 5, 6, 7), code=(9,))
