"""What a step costs on a machine: memory, time, tokens per second, MFU, dollars. Every figure says what it rests on.

"compiled" was read off the compiled program, "computed" follows from shapes and the table of chips, "assumed" holds a
number that was measured elsewhere, or a guess. The time of a step is that of its matmuls at the rate that chips hold,
of the memory that is read and written between them, and of communication that nothing hides.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from meshwright.chips import Chip
from meshwright.errors import MeshwrightError, MeshwrightWarning, PlacementError
from meshwright.flops import Flops
from meshwright.layout import Layout, make_layout
from meshwright.mesh import create_abstract_mesh
from meshwright.mesh_string import MeshSpec, parse_mesh
from meshwright.parallel.rows import count_rows
from meshwright.plan.compile import Compiled
from meshwright.plan.links import Link, axis_links
from meshwright.plan.memory import Basis, MemoryPlan, plan_memory
from meshwright.plan.profile import Profile, profile_job
from meshwright.plan.setup import Setup, batch_of, make_optimizer
from meshwright.plan.target import Target, parse_target
from meshwright.plan.traffic import TENSOR_AXIS, Traffic, step_traffic
from meshwright.train.state import state_layout

# Shares of what is printed that programs reach. Measured on one H200 (benchmarks/RESULTS.md): matmuls hold 682 of 989
# TFLOP/s, attention of cuDNN 385, copies 4.3 of 4.8 TB/s; rings of tensor parallelism make matmuls 1.3 times slower.
# On other chips they are assumed to be the same, but for rings on TPUs, whose compiler says 1.05.
MATMUL_SHARE, ATTENTION_SHARE, MEMORY_SHARE = 0.69, 0.39, 0.89
RING_FACTOR = {"gpu": 1.3, "tpu": 1.05}
# Of bytes that could hide, what does, where nothing was compiled. Read off compiled steps of a 7B decoder: rings of
# tensor parallelism nearly all; whole gathers and scatters by chip, as their compilers make them asynchronous or not.
RING_HIDDEN = 0.9
WHOLE_HIDDEN = {"v5p": 0.9, "gpu": 0.9, "v5e": 0.2}
WHOLE_HIDDEN_ELSEWHERE = 0.2
# There, a scatter over all chips of a slice is compiled to an all-reduce, of twice the bytes.
SCATTERS_AS_SUMS = ("v5e", "v6e")


@dataclass(frozen=True)
class Figure:
    """A number with its unit, and what it rests on."""

    value: float
    unit: str
    basis: Basis
    note: str = ""


@dataclass(frozen=True)
class Sent:
    """What is sent along an axis in a step, and how long that takes; `hidden` is the share beside compute."""

    axis: str
    kind: str
    what: str
    wire_bytes: float
    count: int
    link: str
    seconds: float | None
    hidden: float
    basis: Basis


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
        profile = profile_job(
            job,
            precision=setup.precision,
            optimizer=setup.optimizer,
            platform=target.platform,
            remats=("none",) if setup.remat == "none" else ("none", setup.remat),
        )
    spec = parse_mesh(setup.mesh).resolve(target.num_devices)
    layout, notes = lay_out(job, profile, spec, setup)
    rows = count_rows(batch_of(job, setup.rows), who="plan")
    return assemble(
        profile, layout, target, spec, setup, rows=rows, compiled=compiled, price=price, notes=notes + profile.notes
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
    check_rows(dict(layout.mesh.shape), setup, rows)
    if setup.remat not in profile.needs:
        raise MeshwrightError(
            f"what remat={setup.remat!r} keeps on a device was not counted.",
            hint=f"plan one of: {', '.join(profile.needs)}; compile_step compiles any.",
        )
    needs = profile.needs[setup.remat]
    flops = _times(needs.flops, rows)
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
        if layout.mesh.shape.get("pp", 1) > 1:
            notes += ("what a pipeline sends is counted without its idle ticks",)
    dtype = profile.precision.compute.name
    peak = None if target.chip is None else target.chip.peak(dtype)
    time = None
    if target.chip is not None and peak is not None:
        time = _time(profile, layout, target.chip, setup, flops, sent, peak, spec, ran is not None)
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


def check_rows(sizes: Mapping[str, int], setup: Setup, rows: int) -> None:
    """Raises where rows cannot be split over devices and minibatches."""
    ways = sizes.get("dp", 1) * sizes.get("fsdp", 1) * setup.num_minibatches
    if rows % ways:
        raise PlacementError(
            f"{rows} rows cannot be split over {ways // setup.num_minibatches} devices and {setup.num_minibatches} "
            "minibatches.",
            hint=f"use {max(1, rows // ways) * ways} rows, or another number of minibatches.",
        )


def _computed_sent(
    traffic: tuple[Traffic, ...], links: Mapping[str, Link], target: Target, spec: MeshSpec
) -> tuple[Sent, ...]:
    found = []
    whole = WHOLE_HIDDEN.get(target.kind, WHOLE_HIDDEN.get(target.platform, WHOLE_HIDDEN_ELSEWHERE))
    for item in traffic:
        link = links.get(item.axis)
        kind, wire_bytes = item.kind, item.wire_bytes
        spans = dict(zip(spec.names, spec.sizes, strict=True))[item.axis] == target.devices_per_slice
        if kind == "reduce-scatter" and target.kind in SCATTERS_AS_SUMS and spans and item.axis != TENSOR_AXIS:
            kind, wire_bytes = "all-reduce", 2 * wire_bytes
        seconds = None if link is None else link.seconds(wire_bytes, item.count)
        name = "not known" if link is None else f"{link.name} ({link.words})"
        hidden = 0.0 if not item.hides else RING_HIDDEN if item.axis == TENSOR_AXIS else whole
        found.append(Sent(item.axis, kind, item.what, wire_bytes, item.count, name, seconds, hidden, "computed"))
    return tuple(found)


def _compiled_sent(compiled: Compiled, links: Mapping[str, Link]) -> tuple[Sent, ...]:
    """Adds the collectives of a program up by axis and kind."""
    groups: dict[tuple[tuple[str, ...], str], list[Any]] = {}
    for collective in compiled.collectives:
        groups.setdefault((collective.axes, collective.kind), []).append(collective)
    found = []
    for (axes, kind), members in groups.items():
        total = sum(c.trips * c.wire_bytes for c in members)
        if not total:
            continue
        hidden = sum(c.trips * c.wire_bytes for c in members if c.hidden) / total
        slowest = min((links[axis] for axis in axes if axis in links), key=lambda link: link.speed, default=None)
        count = sum(c.trips for c in members)
        # A hop of a ring that we wrote is a collective of its own.
        hops = 0 if kind == "collective-permute" else count
        seconds = None if slowest is None else slowest.seconds(total, hops)
        name = "not known" if slowest is None else f"{slowest.name} ({slowest.words})"
        found.append(Sent("+".join(axes), kind, members[0].source, total, count, name, seconds, hidden, "compiled"))
    return tuple(sorted(found, key=lambda item: -item.wire_bytes))


def _time(
    profile: Profile,
    layout: Layout,
    chip: Chip,
    setup: Setup,
    flops: Flops,
    sent: tuple[Sent, ...],
    peak: float,
    spec: MeshSpec,
    is_compiled: bool,
) -> TimePlan:
    sizes = dict(layout.mesh.shape)
    devices = layout.mesh.size
    rate = peak * MATMUL_SHARE
    if chip.matmul_flops is not None and profile.precision.compute.name == "bfloat16":
        rate = chip.matmul_flops
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
    exposed = waiting + max(0.0, total - waiting - compute)
    stages = sizes.get("pp", 1)
    parts = setup.num_minibatches * 2 * stages  # microbatches of a pipeline: twice the stages by default
    bubble = (stages - 1) / (parts + stages - 1) if stages > 1 else 0.0
    step = (compute + exposed) / (1 - bubble) + update
    basis: Basis = "compiled" if is_compiled else "computed"
    shares = "at the rate measured on one H200" if chip.matmul_flops else f"at {MATMUL_SHARE:.0%} of the peak, assumed"
    return TimePlan(
        matmul=Figure(plain + attention, "s", "assumed", shares),
        memory=Figure(between, "s", "assumed", f"operands and results of matmuls once more, at {MEMORY_SHARE:.0%}"),
        communication=Figure(total, "s", basis, "if nothing of it were hidden"),
        exposed=Figure(exposed, "s", basis if is_compiled else "assumed", "what nothing hides"),
        optimizer=Figure(update, "s", "computed", "the state read and written once"),
        bubble=Figure((compute + exposed) / (1 - bubble) - compute - exposed, "s", "computed", f"{stages} stages"),
        step=Figure(step, "s", "assumed", "all of it together"),
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
