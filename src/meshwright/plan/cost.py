"""What a step costs on a machine: memory, time, tokens per second, MFU, dollars. Every figure says what it rests on.

"compiled" was read off the compiled program, "computed" follows from shapes and the table of chips, "assumed" holds a
number that was measured elsewhere, or a guess. The time of a step is that of its matmuls at the rate that chips hold,
of the memory that is read and written between them, and of communication that nothing hides.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from meshwright.chips import Chip
from meshwright.errors import MeshwrightError, MeshwrightWarning, PlacementError
from meshwright.flops import Flops
from meshwright.layout import Layout, make_layout
from meshwright.mesh import create_abstract_mesh
from meshwright.mesh_string import MeshSpec, parse_mesh
from meshwright.parallel.rows import count_rows
from meshwright.plan.compile import Compiled, CompiledCollective
from meshwright.plan.links import Link, axis_links, host_link
from meshwright.plan.memory import Basis, MemoryPlan, in_loop, plan_memory
from meshwright.plan.profile import Profile, profile_job
from meshwright.plan.rates import MATMUL_SHARE, matmul_rate
from meshwright.plan.setup import Setup, batch_of, make_optimizer
from meshwright.plan.stages import Stages, stages_of
from meshwright.plan.target import Target, parse_target
from meshwright.plan.traffic import TENSOR_AXIS, Traffic, step_traffic
from meshwright.plan.verdict import slowest_link, transfer_seconds
from meshwright.train.state import state_layout

# Shares of what is printed that programs reach, beside MATMUL_SHARE. Measured on one H200 (benchmarks/RESULTS.md):
# attention of cuDNN holds 385 of 989 TFLOP/s, copies 4.3 of 4.8 TB/s; rings of tensor parallelism make matmuls 1.3
# times slower. On other chips they are assumed to be the same, but for rings on TPUs, whose compiler says 1.05.
ATTENTION_SHARE, MEMORY_SHARE = 0.39, 0.89
RING_FACTOR = {"gpu": 1.3, "tpu": 1.05}
# Of bytes that could hide, what does, where nothing was compiled. Read off compiled steps of a 7B decoder: rings of
# tensor parallelism nearly all; whole gathers and scatters by chip, as their compilers make them asynchronous or not.
RING_HIDDEN = 0.9
WHOLE_HIDDEN = {"v5p": 0.9, "gpu": 0.9, "v5e": 0.2}
WHOLE_HIDDEN_ELSEWHERE = 0.2
# Over some of a torus's dims a transfer takes longer than the matmul beside it: with libtpu 0.0.42 and everything
# recomputed, 91% were hidden with fsdp:128 over all of 4x4x8, and 79% with dp:16,fsdp:256 over 16x16 of 16x16x16. That
# is one program of each.
PART_HIDDEN = {"v5p": 0.8}
# There, a scatter over all chips of a slice is compiled to an all-reduce, of twice the bytes.
SCATTERS_AS_SUMS = ("v5e", "v6e")
# What is sent to the host's memory and back. Fitted to four steps of one H200 (benchmarks/RESULTS.md): nothing of it
# hides where layers are in a loop, and a third where they are written out. For TPUs it is a guess: their programs start
# and end these copies apart.
HOST_HIDDEN = {"tpu": 0.9, "gpu": 0.0}
HOST_HIDDEN_WRITTEN_OUT = 0.33
# libtpu 0.0.42 died with SIGFPE on a 7B decoder with fsdp:4096, and compiled dp:16,fsdp:256 for the same chips.
CRASHES_FROM = 4096


@dataclass(frozen=True)
class Figure:
    """A number with its unit, and what it rests on."""

    value: float
    unit: str
    basis: Basis
    note: str = ""


@dataclass(frozen=True)
class Sent:
    """What is sent along an axis in a step, and how long that takes; `hidden` is the share beside compute.

    `is_judged`: that share is what the compute beside each transfer hides, as `meshwright.plan.verdict` finds it.
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


@dataclass(frozen=True)
class TimePlan:
    """Seconds of a step: `step` is compute, what is exposed, the bubble of a pipeline, and the optimizer."""

    matmul: Figure
    memory: Figure
    communication: Figure
    exposed: Figure
    optimizer: Figure
    bubble: Figure
    step: Figure


@dataclass(frozen=True)
class Plan:
    """All that is known of a step before it runs; `str(plan)` is a summary.

    Args:
        flops: of the whole step, on all devices.
        time: None for CPUs, of which the table of chips has no figures.
        price: dollars per hour of one device, as given.
    """

    target: Target
    setup: Setup
    rows: int
    memory: MemoryPlan
    flops: Flops
    sent: tuple[Sent, ...]
    time: TimePlan | None
    tokens_per_step: int
    peak_flops: float | None
    price: float | None = None
    notes: tuple[str, ...] = ()
    compiled: Compiled | None = None

    @property
    def tokens_per_second(self) -> float | None:
        return None if self.time is None else self.tokens_per_step / self.time.step.value

    @property
    def mfu(self) -> float | None:
        """The share of all devices' peaks that the model's own operations take."""
        if self.time is None or self.peak_flops is None:
            return None
        return self.flops.model / (self.time.step.value * self.target.num_devices * self.peak_flops)

    @property
    def dollars_per_billion_tokens(self) -> float | None:
        if self.price is None or self.tokens_per_second is None:
            return None
        return self.price * self.target.num_devices / 3600 / self.tokens_per_second * 1e9

    @property
    def hidden_share(self) -> float:
        """The share of all bytes that are sent beside compute; 1 where nothing is sent."""
        total = sum(item.wire_bytes for item in self.sent)
        return sum(item.wire_bytes * item.hidden for item in self.sent) / total if total else 1.0

    def to_json(self) -> dict[str, Any]:
        """Returns it as plain data."""
        memory = {"fits": self.memory.fits, "verdict": self.memory.verdict, **asdict(self.memory)}
        return {
            "target": {"name": self.target.name, "title": self.target.title, "devices": self.target.num_devices},
            "setup": self.setup.to_json(),
            "rows": self.rows,
            "tokens_per_step": self.tokens_per_step,
            "memory": memory,
            "flops": asdict(self.flops) | {"model": self.flops.model},
            "sent": [asdict(item) for item in self.sent],
            "time": None if self.time is None else asdict(self.time),
            "tokens_per_second": self.tokens_per_second,
            "mfu": self.mfu,
            "price": self.price,
            "dollars_per_billion_tokens": self.dollars_per_billion_tokens,
            "notes": list(self.notes),
            "compiled": None if self.compiled is None else self.compiled.to_json(),
        }

    def __str__(self) -> str:
        lines = [f"{self.target.title}, {self.setup}: {self.memory.verdict}"]
        if self.time is not None and self.mfu is not None and self.tokens_per_second is not None:
            lines.append(
                f"{self.time.step.value:.3g} s a step ({self.time.step.basis}), {self.tokens_per_second:,.0f} "
                f"tokens/s, MFU {self.mfu:.1%}, {self.time.exposed.value / self.time.step.value:.1%} of it waiting "
                "for links"
            )
        return "\n".join(lines)


def make_plan(
    job: Any,
    target: str | Target,
    setup: Setup,
    *,
    profile: Profile | None = None,
    compiled: Compiled | None = None,
    price: float | None = None,
) -> Plan:
    """Plans a step: computed, or read off the compiled program where one is given.

    Args:
        profile: what `profile_job` counted, where it is there already.
        compiled: what `compile_step` made of the same setup, for memory and communication.
        price: dollars per hour of one device.

    Example:
        >>> from meshwright.models import Decoder
        >>> from meshwright.train import language_job
        >>> job = language_job(Decoder.named("7b"), batch_size=128, num_tokens=4096)
        >>> plan = make_plan(job, "v5p:4x4x8", Setup(mesh="fsdp:128", remat="full"))
        >>> plan.memory.fits, plan.tokens_per_step, 0.3 < plan.mfu < 0.7
        (True, 524288, True)
    """
    target = parse_target(target)
    if profile is None:
        profile = profile_of(job, target, setup)
    spec = parse_mesh(setup.mesh).resolve(target.num_devices)
    layout, notes = lay_out(job, profile, spec, setup)
    rows = count_rows(batch_of(job, setup.rows), who="plan")
    return assemble(
        profile, layout, target, spec, setup, rows=rows, compiled=compiled, price=price, notes=notes + profile.notes
    )


def profile_of(job: Any, target: Target, setup: Setup) -> Profile:
    """Returns what `profile_job` counts for one setup: its own remat policy, and none to compare it with."""
    return profile_job(
        job,
        precision=setup.precision,
        optimizer=setup.optimizer,
        platform=target.platform,
        remats=tuple(dict.fromkeys(("none", setup.remat))),
    )


def lay_out(job: Any, profile: Profile, spec: MeshSpec, setup: Setup) -> tuple[Layout, tuple[str, ...]]:
    """Returns the layout of the whole state, and what it warns of."""
    mesh = create_abstract_mesh(spec)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", MeshwrightWarning)
        if setup.zero_axis is None:
            layout = make_layout(job.rules, profile.state, mesh)
        else:
            optimizer = make_optimizer(setup.optimizer)
            layout = state_layout(job, optimizer, mesh, zero_axis=setup.zero_axis, precision=profile.precision)
    return layout, tuple(str(warning.message) for warning in caught if warning.category is MeshwrightWarning)


def assemble(
    profile: Profile,
    layout: Layout,
    target: Target,
    spec: MeshSpec,
    setup: Setup,
    *,
    rows: int,
    compiled: Compiled | None = None,
    price: float | None = None,
    notes: tuple[str, ...] = (),
) -> Plan:
    """Puts a plan together from what is known already: arithmetic only."""
    sizes = dict(layout.mesh.shape)
    stages = stages_of(profile, sizes)
    check_rows(sizes, setup, rows, stages)
    if setup.remat not in profile.needs:
        raise MeshwrightError(
            f"what remat={setup.remat!r} keeps on a device was not counted.",
            hint=f"plan one of: {', '.join(profile.needs)}; compile_step compiles any.",
        )
    needs = profile.needs[setup.remat]
    flops = _times(needs.flops, rows)
    if stages.count > 1:
        flops = _with_forward(flops, _times(profile.forward, rows))
    memory = plan_memory(profile, layout, target, setup, rows=rows, compiled=compiled)
    links = axis_links(target, spec)
    traffic = step_traffic(profile, layout, setup, rows=rows)
    ran = compiled if compiled is not None and compiled.does_not_fit is None else None
    if ran is not None:
        sent = _compiled_sent(ran, links)
    else:
        sent = _computed_sent(traffic, links, target, spec)
        if setup.view == "global":
            sent = tuple(replace(item, basis="assumed") for item in sent)
            notes += ("in the global view XLA decides what is sent; assumed is what our own layers would send",)
    if needs.hosted_per_row and target.chip is not None:
        sent += (_host_copies(profile, target.chip, setup, sizes, rows),)
    notes += _known_to_fail(target, sizes)
    dtype = profile.precision.compute.name
    peak = None if target.chip is None else target.chip.peak(dtype)
    time = None
    if target.chip is not None and peak is not None:
        tokens = rows * profile.tokens_per_row
        time = _time(profile, layout, target.chip, flops, sent, peak, ran is not None, tokens=tokens)
    return Plan(
        target=target,
        setup=setup,
        rows=rows,
        memory=memory,
        flops=flops,
        sent=sent,
        time=time,
        tokens_per_step=rows * profile.tokens_per_row,
        peak_flops=peak,
        price=price,
        notes=notes + flops.notes + (() if compiled is None else compiled.notes),
        compiled=compiled,
    )


def check_rows(sizes: Mapping[str, int], setup: Setup, rows: int, stages: Stages) -> None:
    """Raises where rows cannot be split over devices, minibatches, and microbatches of a pipeline."""
    devices = sizes.get("dp", 1) * sizes.get("fsdp", 1)
    ways = devices * setup.num_minibatches * stages.microbatches
    if rows % ways:
        parts = f"{devices} devices and {setup.num_minibatches} minibatches"
        parts += f" of {stages.microbatches} microbatches" if stages.count > 1 else ""
        raise PlacementError(
            f"{rows} rows cannot be split over {parts}.",
            hint=f"use {max(1, rows // ways) * ways} rows, or another number of minibatches.",
        )


def _known_to_fail(target: Target, sizes: Mapping[str, int]) -> tuple[str, ...]:
    """Returns a note where the machine's compiler is known to crash on such a mesh."""
    ways = sizes.get("fsdp", 1)
    if target.platform != "tpu" or ways < CRASHES_FROM:
        return ()
    other = f"dp:{ways // 256},fsdp:256"
    return (f"libtpu 0.0.42 crashes (SIGFPE) on fsdp:{CRASHES_FROM}, so this may not compile; {other} does",)


def _host_copies(profile: Profile, chip: Chip, setup: Setup, sizes: Mapping[str, int], rows: int) -> Sent:
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


def _computed_sent(
    traffic: tuple[Traffic, ...], links: Mapping[str, Link], target: Target, spec: MeshSpec
) -> tuple[Sent, ...]:
    found = []
    whole = WHOLE_HIDDEN.get(target.kind, WHOLE_HIDDEN.get(target.platform, WHOLE_HIDDEN_ELSEWHERE))
    sizes = dict(zip(spec.names, spec.sizes, strict=True))
    for item in traffic:
        axes = [axis for axis in item.axis.split("+") if axis in links]
        link = min((links[axis] for axis in axes), key=lambda link: link.speed, default=None)
        kind, wire_bytes = item.kind, item.wire_bytes
        spans = sizes.get(item.axis) == target.devices_per_slice
        if kind == "reduce-scatter" and target.kind in SCATTERS_AS_SUMS and spans and item.axis != TENSOR_AXIS:
            kind, wire_bytes = "all-reduce", 2 * wire_bytes
        seconds = None if link is None else link.seconds(wire_bytes, item.count)
        name = "not known" if link is None else f"{link.name} ({link.words})"
        hidden = 0.0 if not item.hides else RING_HIDDEN if item.axis == TENSOR_AXIS else whole
        if item.hides and item.axis != TENSOR_AXIS and not spans:
            hidden = PART_HIDDEN.get(target.kind, hidden)
        found.append(Sent(item.axis, kind, item.what, wire_bytes, item.count, name, seconds, hidden, "computed"))
    return tuple(found)


def _compiled_sent(compiled: Compiled, links: Mapping[str, Link]) -> tuple[Sent, ...]:
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


def _time(
    profile: Profile,
    layout: Layout,
    chip: Chip,
    flops: Flops,
    sent: tuple[Sent, ...],
    peak: float,
    is_compiled: bool,
    *,
    tokens: int,
) -> TimePlan:
    sizes = dict(layout.mesh.shape)
    devices = layout.mesh.size
    rate = matmul_rate(chip, profile.precision.compute.name)
    assert rate is not None  # as there is a peak
    ring = RING_FACTOR[chip.platform] if sizes.get("tp", 1) > 1 else 1.0
    plain = (flops.matmul - flops.attention) / devices / rate * ring
    attention = flops.attention / devices / (peak * ATTENTION_SHARE)
    bandwidth = chip.memory_bandwidth * MEMORY_SHARE
    between = flops.moved / devices / bandwidth
    state = sum(leaf.bytes_per_device for leaf in layout.leaves)
    weights = sum(leaf.bytes_per_device for leaf in layout.leaves if leaf.name.startswith("params/"))
    update = (2 * state + 2 * weights) / bandwidth  # all of it read and written, gradients and narrow copies beside
    compute = plain + attention + between
    total = sum(item.seconds or 0.0 for item in sent)
    waiting = sum((item.seconds or 0.0) * (1 - item.hidden) for item in sent)
    # What was judged fits beside compute already; of the rest, no more can hide than there is compute.
    hidden = sum((item.seconds or 0.0) * item.hidden for item in sent if not item.is_judged)
    exposed = waiting + max(0.0, hidden - compute)
    stages = stages_of(profile, sizes)
    bubble, words = 0.0, "no pipeline"
    if stages.count > 1:
        # All stages keep the pace of the last, which has the head too: its product twice, and two for gradients.
        head = 4 * 2 * (profile.vocab_size or 0) * (profile.d_model or 0) * tokens / devices / rate * ring
        slowest = compute + (stages.count - 1) * head + exposed
        bubble = slowest / (1 - stages.idle) - compute - exposed
        words = f"{stages.count - 1} of {stages.ticks} ticks idle, and the last stage has the head as well"
    step = compute + exposed + bubble + update
    basis: Basis = "compiled" if is_compiled else "computed"
    shares = "at the rate measured on one H200" if chip.matmul_flops else f"at {MATMUL_SHARE:.0%} of the peak, assumed"
    return TimePlan(
        matmul=Figure(plain + attention, "s", "assumed", shares),
        memory=Figure(between, "s", "assumed", f"operands and results of matmuls once more, at {MEMORY_SHARE:.0%}"),
        communication=Figure(total, "s", basis, "if nothing of it were hidden"),
        exposed=Figure(exposed, "s", basis if is_compiled else "assumed", "what nothing hides"),
        optimizer=Figure(update, "s", "computed", "the state read and written once"),
        bubble=Figure(bubble, "s", "computed", words),
        step=Figure(step, "s", "assumed", "all of it together"),
    )


def _with_forward(flops: Flops, forward: Flops) -> Flops:
    """Adds a forward pass that is computed again: a pipeline does so with every tick."""
    dtypes = dict.fromkeys([*flops.by_dtype, *forward.by_dtype])
    return Flops(
        flops.total + forward.total,
        flops.matmul + forward.matmul,
        flops.recomputed + forward.matmul,
        {dtype: flops.by_dtype.get(dtype, 0) + forward.by_dtype.get(dtype, 0) for dtype in dtypes},
        flops.attention + forward.attention,
        flops.moved + forward.moved,
        flops.notes,
    )


def _times(flops: Flops, rows: int) -> Flops:
    return Flops(
        flops.total * rows,
        flops.matmul * rows,
        flops.recomputed * rows,
        {dtype: count * rows for dtype, count in flops.by_dtype.items()},
        flops.attention * rows,
        flops.moved * rows,
        flops.notes,
    )
