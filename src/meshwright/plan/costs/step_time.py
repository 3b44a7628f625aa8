"""Estimated time per step: matmuls, memory traffic, exposed communication, pipeline bubble and optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from meshwright.hardware.chips import multiplies_fp8
from meshwright.hardware.flops import Flops
from meshwright.layout import Layout, format_bytes
from meshwright.plan.costs import Basis
from meshwright.plan.costs.communication import Sent, param_leaves
from meshwright.plan.costs.fp8.fp8_work import CAST_SHARE, Fp8Work, fp8_work
from meshwright.plan.costs.job_costs import TENSOR_AXIS, JobCosts
from meshwright.plan.costs.muon_work import MuonWork
from meshwright.plan.costs.stages import Stages
from meshwright.plan.costs.step_flops import head_flops
from meshwright.plan.target import Target

# Measured on one H200 (benchmarks/results/decoder_h200.md) and assumed for all chips: copies reach 4.3 of 4.8 TB/s.
# Tensor-parallel rings slow matmuls down 1.3x there, and 1.05x on TPUs according to their compiler.
MEMORY_SHARE = 0.89
RING_FACTOR = {"gpu": 1.3, "tpu": 1.05}
# Seconds that each kernel takes beyond its work. On one H200, generation takes 2 us for each, and with 1.5 us planned
# steps of the 956M decoder fit best (benchmarks/results/plan_h200.md); half of it is assumed for TPUs. A step compiled
# for one H200 has three kernels per matmul.
KERNEL_SECONDS = {"gpu": 1.5e-6, "tpu": 0.75e-6}
KERNELS_PER_MATMUL = 3
# Seconds that a step takes beyond its work. On one H200, a training loop adds 0.6 ms to each step (of 99.9 ms,
# benchmarks/results/loop_overhead.md), and waiting for each step adds 0.5 and 1.2 ms (of 329 and 409 ms,
# benchmarks/results/decoder_h200.md). Assumed for all other chips.
STEP_SECONDS = 0.6e-3


@dataclass(frozen=True)
class Estimate:
    """A number with its unit and basis."""

    value: float
    unit: str
    basis: Basis
    note: str = ""


@dataclass(frozen=True)
class TimePlan:
    """Seconds per step: `step` is the sum of `matmul`, `memory`, `exposed`, `bubble`, `optimizer` and `fixed`.

    Args:
        error: relative error of `step`; see `Rates`.
    """

    matmul: Estimate
    memory: Estimate
    communication: Estimate
    exposed: Estimate
    optimizer: Estimate
    bubble: Estimate
    fixed: Estimate
    step: Estimate
    error: float

    @property
    def band(self) -> tuple[float, float]:
        """The shortest and the longest step within the error."""
        return self.step.value / (1 + self.error), self.step.value * (1 + self.error)


def step_time(
    profile: JobCosts,
    layout: Layout,
    target: Target,
    flops: Flops,
    sent: tuple[Sent, ...],
    stages: Stages,
    *,
    is_compiled: bool,
    tokens: int,
    num_matmuls: int,
    minibatches: int = 1,
    muon: MuonWork | None = None,
) -> TimePlan | None:
    """Returns the time per step by part; None if the peak FLOP/s of the chip are unknown.

    Args:
        num_matmuls: number of matmuls that a device runs in a step.
        minibatches: minibatches of a step.
        muon: the work of Muon's update, if it is the optimizer.
    """
    chip, dtype = target.chip, profile.precision.compute.name
    rate, peak = target.matmul_rate(dtype), None if chip is None else chip.peak(dtype)
    if chip is None or rate is None or peak is None:
        return None
    sizes = dict(layout.mesh.shape)
    devices = layout.mesh.size
    ring = RING_FACTOR[chip.platform] if sizes.get("tp", 1) > 1 else 1.0
    parts = minibatches * stages.microbatches
    narrow = _in_fp8(profile, target, flops, sizes, devices=devices, tokens=tokens, parts=parts)
    plain = (flops.matmul - flops.attention - narrow.flops) / devices / rate * ring
    plain += narrow.flops / devices / (target.matmul_rate("float8") or rate) * ring
    attention = flops.attention / devices / (peak * chip.rates.attention)
    bandwidth = chip.memory_bandwidth * MEMORY_SHARE
    kernels = KERNELS_PER_MATMUL * num_matmuls + narrow.casts
    between = flops.moved / devices / bandwidth + kernels * KERNEL_SECONDS[chip.platform]
    between += narrow.cast_bytes / (chip.memory_bandwidth * CAST_SHARE)
    frozen = [leaf for leaf in param_leaves(layout) if leaf.name.removeprefix("params/") in profile.frozen]
    weights = sum(leaf.bytes_per_device for leaf in param_leaves(layout) if leaf not in frozen)
    state = sum(leaf.bytes_per_device for leaf in layout.leaves) - sum(leaf.bytes_per_device for leaf in frozen)
    update = (2 * state + 2 * weights) / bandwidth  # reads and writes the state, gradients and low-precision weights
    updates: tuple[Basis, str] = ("computed", "one read and write of the state")
    if muon is not None and muon.flops:
        update += muon.seconds(chip, target.matmul_rate("bfloat16") or rate)
        updates = ("assumed", f"{updates[1]}; {muon.flops / 1e12:.3g} TFLOP of muon's iterations")
    compute = plain + attention + between
    total = sum(item.seconds or 0.0 for item in sent)
    waiting = sum((item.seconds or 0.0) * (1 - item.hidden) for item in sent)
    # Judged transfers already fit into the compute; the others can hide no longer than compute lasts.
    hidden = sum((item.seconds or 0.0) * item.hidden for item in sent if not item.is_judged)
    exposed = waiting + max(0.0, hidden - compute)
    bubble, words = 0.0, "no pipeline"
    if stages.count > 1:
        # The last stage sets the pace, as it also runs the head.
        head = head_flops(profile, stages, tokens) / devices / rate * ring
        slowest = compute + (stages.count - 1) * head + exposed
        bubble = slowest / (1 - stages.idle) - compute - exposed
        words = f"{stages.words}; the last stage also runs the head"
    step = compute + exposed + bubble + update + STEP_SECONDS
    basis: Basis = "compiled" if is_compiled else "computed"
    rates = chip.rates
    shares = f"at {rates.share(dtype):.0%} of the peak, attention at {rates.attention:.0%}: {rates.source}"
    passes = (
        f"one extra pass over matmul operands and results, at {MEMORY_SHARE:.0%} of the bandwidth; about {kernels:,} "
        f"kernels, {KERNEL_SECONDS[chip.platform] * 1e6:g} us each"
    )
    if narrow.flops:
        part, share = narrow.flops / (flops.matmul - flops.attention), rates.share("float8")
        shares = f"{shares}; {part:.0%} of the matmuls in fp8, at {share:.0%} of its peak"
        passes = f"{passes}; casts to fp8 move {format_bytes(narrow.cast_bytes)}, at {CAST_SHARE:.0%} of the bandwidth"
    return TimePlan(
        matmul=Estimate(plain + attention, "s", "assumed", shares),
        memory=Estimate(between, "s", "assumed", passes),
        communication=Estimate(total, "s", basis, "if none of it were hidden"),
        exposed=Estimate(exposed, "s", basis if is_compiled else "assumed", "not hidden by compute"),
        optimizer=Estimate(update, "s", *updates),
        bubble=Estimate(bubble, "s", "computed", words),
        fixed=Estimate(STEP_SECONDS, "s", "assumed", "the host's part of a loop, measured on one H200"),
        step=Estimate(step, "s", "assumed", f"sum of the parts, within {chip.rates.error:.0%}"),
        error=chip.rates.error,
    )


def _in_fp8(
    profile: JobCosts, target: Target, flops: Flops, sizes: Mapping[str, int], *, devices: int, tokens: int, parts: int
) -> Fp8Work:
    """Returns what the step multiplies in fp8; nothing on chips that widen fp8 values first."""
    fp8 = profile.precision.fp8
    if fp8 is None or not multiplies_fp8(target.platform, target.chip):
        return Fp8Work()
    tp, ways = sizes.get(TENSOR_AXIS, 1), profile.ways(sizes)
    return fp8_work(profile.fp8_matrices, fp8, flops, tokens=tokens, devices=devices, tp=tp, stages=ways, parts=parts)
