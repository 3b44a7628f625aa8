"""What a device sends in a step, by axis: from arithmetic, or added up from the collectives of a compiled program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from meshwright.hardware.chips import Chip
from meshwright.mesh.string import MeshSpec
from meshwright.plan.compiled.compile import Compiled, CompiledCollective
from meshwright.plan.compiled.verdict import slowest_link, transfer_seconds
from meshwright.plan.costs.communication import TENSOR_AXIS, Traffic
from meshwright.plan.costs.job_costs import JobCosts
from meshwright.plan.costs.links import Link, host_link
from meshwright.plan.costs.memory import Basis, in_loop
from meshwright.plan.step_setup import Setup
from meshwright.plan.target import Target

# Of bytes that could hide, what does, where nothing was compiled. Read off compiled steps of a 7B decoder: rings of
# tensor parallelism nearly all; whole gathers and scatters by chip, as their compilers make them asynchronous or not.
RING_HIDDEN = 0.9
WHOLE_HIDDEN = {"v5p": 0.9, "v6e": 0.9, "gpu": 0.9, "v5e": 0.2, "v4": 0.0, "tpu7x": 0.9}
WHOLE_HIDDEN_ELSEWHERE = 0.2
# Over some of a torus's dims a transfer takes longer than the matmul beside it: with libtpu 0.0.42 and everything
# recomputed, 91% were hidden with fsdp:128 over all of 4x4x8, and 79% with dp:16,fsdp:256 over 16x16 of 16x16x16. That
# is one program of each.
PART_HIDDEN = {"v5p": 0.8}
# There, a scatter over all chips of a slice is compiled to an all-reduce, of twice the bytes; on every TPU, where its
# compiler is not asked for better, but one.
SCATTERS_AS_SUMS = ("v5e",)
HIDES_UNASKED = ("tpu7x",)
# There, hops of a ring whose ends are no neighbours are synchronous: seen with libtpu 0.0.42 for tp:4 and tp:8 on a
# v5e:16x16, where those of tp:16 are not. v6e is assumed to be alike.
OPEN_RINGS_WAIT = ("v5e", "v6e")
# What is sent to the host's memory and back. Fitted to four steps of one H200 (benchmarks/RESULTS.md): nothing of it
# hides where layers are in a loop, and a third where they are written out. For TPUs it is a guess: their programs start
# and end these copies apart.
HOST_HIDDEN = {"tpu": 0.9, "gpu": 0.0}
HOST_HIDDEN_WRITTEN_OUT = 0.33


@dataclass(frozen=True)
class Sent:
    """What is sent along an axis in a step, and how long that takes; `hidden` is the share beside compute.

    `is_judged`: that share is what the compute beside each transfer hides, as `plan.compiled.verdict` finds it.
    """

    axis: str
    kind: str
    what: str
    wire_bytes: float
    count: int
    link: str
    seconds: float | None
    hidden: float
    basis: Basis
    is_judged: bool = False


def computed_sent(
    traffic: tuple[Traffic, ...], links: Mapping[str, Link], target: Target, spec: MeshSpec, *, overlap: bool = True
) -> tuple[Sent, ...]:
    """Returns what our layers send by the layout; how much of it hides is assumed by chip.

    Without `overlap` most TPUs' compilers are not asked for collectives beside matmuls, and have none but rings.
    """
    found = []
    whole = WHOLE_HIDDEN.get(target.kind, WHOLE_HIDDEN.get(target.platform, WHOLE_HIDDEN_ELSEWHERE))
    sizes = dict(zip(spec.names, spec.sizes, strict=True))
    for item in traffic:
        axes = [axis for axis in item.axis.split("+") if axis in links]
        link = min((links[axis] for axis in axes), key=lambda link: link.speed, default=None)
        kind, wire_bytes = item.kind, item.wire_bytes
        spans = sizes.get(item.axis) == target.devices_per_slice
        unasked = target.platform == "tpu" and target.kind not in HIDES_UNASKED and not overlap
        as_sum = target.kind in SCATTERS_AS_SUMS or unasked
        if kind == "reduce-scatter" and as_sum and spans and item.axis != TENSOR_AXIS:
            kind, wire_bytes = "all-reduce", 2 * wire_bytes
        seconds = None if link is None else link.seconds(wire_bytes, item.count)
        name = "not known" if link is None else f"{link.name} ({link.words})"
        hidden = 0.0 if not item.hides else RING_HIDDEN if item.axis == TENSOR_AXIS else whole
        if item.hides and item.axis != TENSOR_AXIS and not spans:
            hidden = PART_HIDDEN.get(target.kind, hidden)
        if target.platform == "cpu":  # whose collectives are all synchronous
            hidden = 0.0
        if unasked and item.axis != TENSOR_AXIS:
            hidden = 0.0
        if item.axis == TENSOR_AXIS and target.kind in OPEN_RINGS_WAIT and link is not None and not link.is_closed:
            hidden = 0.0
        found.append(Sent(item.axis, kind, item.what, wire_bytes, item.count, name, seconds, hidden, "computed"))
    return tuple(found)


def beside_matmuls(sent: tuple[Sent, ...], seconds: float) -> tuple[Sent, ...]:
    """Returns what is sent with no more of the rings hidden than their matmuls, which take `seconds`, can hide.

    A hop of tensor parallelism goes on beside one product and no longer: many small hops take longer than theirs.
    """
    hidden = sum((item.seconds or 0.0) * item.hidden for item in sent if item.axis == TENSOR_AXIS)
    if hidden <= seconds:
        return sent
    return tuple(
        replace(item, hidden=item.hidden * seconds / hidden) if item.axis == TENSOR_AXIS else item for item in sent
    )


def compiled_sent(compiled: Compiled, links: Mapping[str, Link]) -> tuple[Sent, ...]:
    """Adds the collectives of a program up by axis and kind."""
    groups: dict[tuple[tuple[str, ...], str], list[CompiledCollective]] = {}
    for collective in compiled.collectives:
        groups.setdefault((collective.axes, collective.kind), []).append(collective)
    found = []
    for (axes, kind), members in groups.items():
        total = sum(c.trips * c.wire_bytes for c in members)
        if not total:
            continue
        count = sum(c.trips for c in members)
        link = slowest_link(axes, links)
        name = "not known" if link is None else f"{link.name} ({link.words})"
        seconds = transfer_seconds(kind, total, count, axes, links)
        is_judged = all(c.share is not None and c.transfer_s is not None for c in members if c.wire_bytes)
        # By time where it is known: small transfers take longer than their bytes say.
        parts = [(c.trips * ((c.transfer_s or 0.0) if is_judged else c.wire_bytes), c.hidden_share) for c in members]
        hidden = sum(part * share for part, share in parts) / sum(part for part, _ in parts)
        what = _served(members)
        found.append(Sent("+".join(axes), kind, what, total, count, name, seconds, hidden, "compiled", is_judged))
    return tuple(sorted(found, key=lambda item: -item.wire_bytes))


def _served(members: Sequence[CompiledCollective]) -> str:
    """Returns what collectives serve: that which sends most by name."""
    sent: dict[str, float] = {}
    for one in members:
        name = one.serves or one.source
        sent[name] = sent.get(name, 0.0) + one.trips * one.wire_bytes
    largest = max(sent, key=lambda name: sent[name])
    return largest if len(sent) == 1 else f"{largest}, and others"


def host_copies(profile: JobCosts, chip: Chip, setup: Setup, sizes: Mapping[str, int], rows: int) -> Sent:
    """Returns what offloaded activations send to the host and back."""
    here = rows / (sizes.get("dp", 1) * sizes.get("fsdp", 1))
    split = sizes.get(TENSOR_AXIS, 1) * sizes.get("pp", 1)
    out = profile.needs[setup.remat].hosted_per_row * here / split
    link = host_link(chip)
    count = 2 * profile.num_layers * setup.num_minibatches
    seconds = link.seconds(2 * out, 0)
    words = f"{link.name} ({link.words})"
    hidden = HOST_HIDDEN_WRITTEN_OUT if not in_loop(profile, setup, sizes) else HOST_HIDDEN[chip.platform]
    return Sent("host", "copy", "activations that wait there", 2 * out, count, words, seconds, hidden, "assumed")
