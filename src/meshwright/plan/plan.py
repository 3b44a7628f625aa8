"""Plan of a training step on a machine: memory, time, tokens per second, MFU and price.

Every figure names its basis: "compiled" is read from the compiled program, "computed" follows from shapes and data
sheets, "assumed" uses a rate measured on another machine, or an estimate.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from meshwright.errors import MeshwrightError
from meshwright.hardware.chips import multiplies_fp8
from meshwright.hardware.flops import Flops, utilization
from meshwright.parallel.rows import count_rows
from meshwright.plan.band import band_notes
from meshwright.plan.compiled.compile import Compiled
from meshwright.plan.costs.communication import (
    Sent,
    beside_matmuls,
    compiled_sent,
    computed_sent,
    host_copies,
    step_traffic,
)
from meshwright.plan.costs.job_costs import PIPELINE_AXIS, TENSOR_AXIS, JobCosts
from meshwright.plan.costs.links import axis_links
from meshwright.plan.costs.memory import MemoryPlan, plan_memory
from meshwright.plan.costs.muon_work import MuonWork, muon_work
from meshwright.plan.costs.overlap_limit import overlap_limit
from meshwright.plan.costs.stages import Stages
from meshwright.plan.costs.step_flops import count_device_matmuls, step_flops
from meshwright.plan.costs.step_time import TimePlan, step_time
from meshwright.plan.expected_goodput import ExpectedGoodput
from meshwright.plan.job_on_mesh import Prepared, check_rows, prepare
from meshwright.plan.possible_meshes import known_to_fail
from meshwright.plan.step_setup import Setup, batch_of
from meshwright.plan.target import Target
from meshwright.train.views import ViewChoice


@dataclass(frozen=True)
class Plan:
    """Memory, communication and time of a training step; `str(plan)` is a summary.

    Args:
        flops: FLOPs of the step, over all devices.
        time: None for CPUs, whose speed is unknown.
        view: the view of the step, and the reason for it.
        price: dollars per device-hour.
        state_bytes: bytes of one copy of the state, which a checkpoint holds.
        num_params: number of parameters.
        goodput: expected goodput; None unless it was asked for with a `Reliability`.
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
    view: ViewChoice
    price: float | None = None
    notes: tuple[str, ...] = ()
    compiled: Compiled | None = None
    stages: Stages = field(default_factory=lambda: Stages(1, 1))
    state_bytes: int = 0
    num_params: int = 0
    goodput: ExpectedGoodput | None = None

    @property
    def tokens_per_second(self) -> float | None:
        return None if self.time is None else self.tokens_per_step / self.time.step.value

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilization: FLOP/s that the model needs, as a share of the peak of all devices.

        Recomputation does not count, and causal attention counts as the half that its mask leaves.
        """
        return self._utilization(self.flops.model)

    @property
    def hfu(self) -> float | None:
        """Hardware FLOPs utilization: all matmul FLOP/s that run, as a share of the peak of all devices."""
        return self._utilization(self.flops.matmul)

    def _utilization(self, flops: int) -> float | None:
        if self.time is None or self.peak_flops is None:
            return None
        return utilization(flops, self.time.step.value, self.target.num_devices * self.peak_flops)

    @property
    def tokens_per_second_band(self) -> tuple[float, float] | None:
        """Tokens per second at the ends of `TimePlan.band`, the lower first."""
        if self.time is None:
            return None
        shortest, longest = self.time.band
        return self.tokens_per_step / longest, self.tokens_per_step / shortest

    @property
    def dollars_per_billion_tokens(self) -> float | None:
        if self.price is None or self.tokens_per_second is None:
            return None
        return self.price * self.target.num_devices / 3600 / self.tokens_per_second * 1e9

    @property
    def hidden_share(self) -> float:
        """Share of the sent bytes that overlap with compute; 1 if nothing is sent."""
        total = sum(item.wire_bytes for item in self.sent)
        return sum(item.wire_bytes * item.hidden for item in self.sent) / total if total else 1.0

    def to_json(self) -> dict[str, Any]:
        """Returns the plan as JSON data."""
        memory = {"fits": self.memory.fits, "verdict": self.memory.verdict, **asdict(self.memory)}
        return {
            "target": {"name": self.target.name, "title": self.target.title, "devices": self.target.num_devices},
            "setup": self.setup.to_json(),
            "view": self.view._asdict(),
            "rows": self.rows,
            "tokens_per_step": self.tokens_per_step,
            "memory": memory,
            "flops": asdict(self.flops) | {"model": self.flops.model},
            "sent": [asdict(item) for item in self.sent],
            "time": None if self.time is None else asdict(self.time),
            "tokens_per_second": self.tokens_per_second,
            "tokens_per_second_band": self.tokens_per_second_band,
            "mfu": self.mfu,
            "hfu": self.hfu,
            "price": self.price,
            "dollars_per_billion_tokens": self.dollars_per_billion_tokens,
            "pipeline": asdict(self.stages),
            "state_bytes": self.state_bytes,
            "num_params": self.num_params,
            "goodput": None if self.goodput is None else self.goodput.to_json(),
            "notes": list(self.notes),
            "compiled": None if self.compiled is None else self.compiled.to_json(),
        }

    def __str__(self) -> str:
        lines = [f"{self.target.title}, {self.setup}: {self.memory.verdict}"]
        if self.time is not None and self.mfu is not None and self.tokens_per_second is not None:
            unit = "rows" if self.tokens_per_step == self.rows else "tokens"
            exposed = self.time.exposed.value / self.time.step.value
            lines.append(
                f"{self.time.step.value:.3g} s per step ({self.time.step.basis}, within {self.time.error:.0%}), "
                f"{self.tokens_per_second:,.0f} {unit}/s, MFU {self.mfu:.1%}, {exposed:.1%} exposed communication"
            )
        return "\n".join(lines)


def make_plan(
    job: Any,
    target: str | Target,
    setup: Setup,
    *,
    profile: JobCosts | None = None,
    compiled: Compiled | None = None,
    price: float | None = None,
) -> Plan:
    """Plans a training step.

    Args:
        profile: result of `profile_job`, to reuse (default: profile the job, which takes seconds).
        compiled: result of `compile_step` for the same setup; memory and communication are then read from it instead
            of computed.
        price: dollars per device-hour.

    Example:
        >>> from meshwright.models import Decoder
        >>> from meshwright.train import language_job
        >>> job = language_job(Decoder.named("7b"), batch_size=128, num_tokens=4096)
        >>> plan = make_plan(job, "v5p:4x4x8", Setup(mesh="fsdp:128", remat="full"))
        >>> plan.memory.fits, plan.tokens_per_step, 0.3 < plan.mfu < 0.7
        (True, 524288, True)
    """
    prepared = prepare(job, target, setup, profile=profile)
    rows = count_rows(batch_of(job, setup.rows), who="plan")
    return assemble(prepared, rows=rows, compiled=compiled, price=price)


def assemble(prepared: Prepared, *, rows: int, compiled: Compiled | None = None, price: float | None = None) -> Plan:
    """Calculates a plan for a number of rows, without tracing."""
    profile, layout, target, setup = prepared.profile, prepared.layout, prepared.target, prepared.setup
    spec, view, notes = prepared.spec, prepared.view, prepared.notes
    sizes = dict(layout.mesh.shape)
    stages = profile.stages(sizes, setup)
    check_rows(prepared, rows)
    if setup.remat not in profile.needs:
        raise MeshwrightError(
            f"remat={setup.remat!r} was not profiled.",
            hint=f"use one of {', '.join(profile.needs)}, or pass it to profile_job(remats=...).",
        )
    flops, words = step_flops(profile, stages, setup, sizes, rows=rows)
    notes += words
    links = axis_links(target, spec)
    memory = plan_memory(profile, layout, target, setup, rows=rows, compiled=compiled)
    most, crowded = overlap_limit(memory, target, setup)
    dtype = profile.precision.compute.name
    muon = muon_work(layout, target.platform) if setup.optimizer == "muon" else MuonWork()
    ran = compiled if compiled is not None and compiled.does_not_fit is None else None
    if ran is not None:
        sent = compiled_sent(ran, links)
        is_limited = bool(sent) and ran.hidden_share <= most
    else:
        traffic = step_traffic(profile, layout, setup, rows=rows) + muon.traffic
        sent = computed_sent(traffic, links, target, spec, overlap=setup.overlap)
        rate = target.matmul_rate(dtype)
        if rate is not None:
            sent = beside_matmuls(sent, (flops.matmul - flops.attention) / layout.mesh.size / rate)
        if profile.d_model is None and sent:
            notes += (_assumed_of_custom(sizes),)
        is_limited = any(item.hidden > most for item in sent)
        sent = tuple(replace(item, hidden=min(item.hidden, most)) for item in sent)
        if view.view == "global":
            sent = tuple(replace(item, basis="assumed") for item in sent)
            gathers = ", and gathers of layers stored along pp" if sizes.get(PIPELINE_AXIS, 1) > 1 else ""
            notes += (
                f"XLA decides the communication in the global view; the plan assumes that of the local view{gathers}",
            )
            if target.platform == "tpu" and flops.attention and layout.mesh.size > 1:
                notes += (
                    "in the global view, XLA's attention stores its logits; the plan assumes the fused kernel of the "
                    "local view, which needs less memory and time",
                )
    if crowded and is_limited:
        notes += (crowded,)
    if view.view == "global" and setup.view is None:
        notes = (f"the step runs in the global view: {view.reason}", *notes)
    if profile.needs[setup.remat].hosted_per_row and target.chip is not None:
        sent += (host_copies(profile, target.chip, setup, sizes, rows),)
    tokens = rows * profile.tokens_per_row
    if profile.precision.fp8 is not None:
        notes += fp8_notes(profile, target)
    notes += known_to_fail(target, sizes) + flops.notes + (() if compiled is None else compiled.notes)
    notes += band_notes(target, sizes, profile)
    return Plan(
        target=target,
        setup=setup,
        rows=rows,
        memory=memory,
        flops=flops,
        sent=sent,
        time=step_time(
            profile,
            layout,
            target,
            flops,
            sent,
            stages,
            is_compiled=ran is not None,
            tokens=tokens,
            num_matmuls=count_device_matmuls(profile, stages, setup, ways=profile.ways(sizes)),
            minibatches=setup.num_minibatches,
            muon=muon,
        ),
        tokens_per_step=tokens,
        peak_flops=None if target.chip is None else target.chip.peak(dtype),
        view=view,
        price=price,
        notes=notes,
        compiled=compiled,
        stages=stages,
        state_bytes=sum(leaf.bytes_total for leaf in layout.leaves),
        num_params=profile.num_params,
    )


def _assumed_of_custom(sizes: Mapping[str, int]) -> str:
    """Returns what a plan assumes about the communication of a custom model."""
    axes = [f"{TENSOR_AXIS} sends half of the saved activations"] * (sizes.get(TENSOR_AXIS, 1) > 1)
    axes += [f"stages along {PIPELINE_AXIS} send nothing"] * (sizes.get(PIPELINE_AXIS, 1) > 1)
    more = f", and that {' and '.join(axes)}" if axes else ""
    return f"custom model: it is assumed that no communication hides behind compute{more}; compile to read both"


def fp8_notes(profile: JobCosts, target: Target) -> tuple[str, ...]:
    """Returns notes for a plan in fp8: how its figures differ from the step's, and matrices that are too narrow."""
    fp8 = profile.precision.fp8
    if fp8 is None:
        return ()
    notes: tuple[str, ...]
    known = None if target.chip is None else target.chip.rates.dtypes.get("float8")
    if not multiplies_fp8(target.platform, target.chip):
        wide = f"on {target.kind}, XLA widens fp8 values before it multiplies them"
        notes = ("fp8: computed times and memory are those of bfloat16, and the step takes more: " + wide,)
    elif not profile.fp8_matrices or known is None:
        memory = "" if profile.fp8_needs else " and memory"
        notes = (f"fp8: computed times{memory} are those of bfloat16, which are upper bounds",)
    else:
        notes = (f"fp8: the rate of matmuls is {known.source}",)
    skipped = fp8.skipped(profile.state.params)
    return (*notes, f"fp8: too narrow, so not in fp8: {', '.join(skipped)}") if skipped else notes
