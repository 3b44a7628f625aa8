"""Peak memory per device by part: exact for the state, computed or compiled for the rest."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from meshwright.hardware.chips import multiplies_fp8
from meshwright.layout import Layout
from meshwright.layout.leaf import format_bytes
from meshwright.plan.compiled.compile import Compiled
from meshwright.plan.costs import Basis
from meshwright.plan.costs.communication import local_size, param_leaves, stored_ways
from meshwright.plan.costs.fp8.fp8_copies import FP8_COPIES, cast_once, fp8_copies, kept_for_backward
from meshwright.plan.costs.job_costs import GATHER_AXIS, LAYERS, PIPELINE_AXIS, JobCosts
from meshwright.plan.costs.saved_activations import added, fewer
from meshwright.plan.costs.stages import Stages
from meshwright.plan.step_setup import Setup
from meshwright.plan.target import Target
from meshwright.specs import spec_axes

NEW_GRADIENTS = "gradients of a minibatch"
GATHERED_WEIGHTS = "gathered weights"
"""Name of the part of memory that a scheduler which overlaps gathers needs again."""

# Limit on the logits of one chunk of the loss, and bytes per logit, including a float32 copy where it is stored.
_LOSS_BYTES, _LOGIT_BYTES = 1.2 * 2**30, {"gpu": 8, "tpu": 4, "cpu": 8}
# Recomputed activations of a layer and their gradients, relative to its activations; fitted to compiled programs.
_LAYER_FACTOR = {"gpu": 1.35, "tpu": 1.0, "cpu": 1.6}
# Of a gathered feature of a row and its partial sum in float32: `gather_matmul_grad` of `parallel.overlap.forms`.
_ROW_BYTES = 2 + 4
# Copies of the layers that a pipeline moves to the devices of their stages: programs for h200:1x4, v5p:2x2x1 and cpu:4.
_STAGE_COPIES = {"gpu": 1, "tpu": 0, "cpu": 2}


@dataclass(frozen=True)
class Part:
    """One part of the memory.

    Args:
        split: bytes by kind of layer, the largest first; empty if unknown.
    """

    name: str
    bytes: float
    basis: Basis
    note: str = ""
    split: Mapping[str, float] = field(default_factory=dict)

    @property
    def words(self) -> str:
        """Its name and size, and its largest kind of layer."""
        kind = max(self.split, key=lambda kind: self.split[kind], default="")
        most = f" ({format_bytes(self.split[kind])} from {kind})" if kind else ""
        return f"{self.name} with {format_bytes(self.bytes)}{most}"

    def without(self, taken: float, note: str, *, basis: Basis | None = None) -> Part:
        """Returns the part without `taken` bytes, taken evenly from all kinds of layer."""
        share = 1 - taken / self.bytes if self.bytes else 0.0
        split = {kind: size * share for kind, size in self.split.items()}
        return Part(self.name, self.bytes - taken, basis or self.basis, f"{self.note}; {note}", split)


@dataclass(frozen=True)
class MemoryPlan:
    """Peak memory per device in a step.

    Args:
        parts: parts of the peak, the longest-lived first.
        total: the peak; if compiled, the compiler's, and the last part is the remainder.
        capacity: memory that a program can use; None for CPUs.
        refused: error of a compiler that found the program too large.
    """

    parts: tuple[Part, ...]
    total: float
    basis: Basis
    capacity: int | None
    refused: str | None = None

    @property
    def fits(self) -> bool | None:
        """Whether it fits; None if the capacity is unknown."""
        if self.refused is not None:
            return False
        return None if self.capacity is None else self.total <= self.capacity

    @property
    def verdict(self) -> str:
        """One sentence on whether it fits."""
        if self.refused is not None:
            return f"does not fit: {self.refused.splitlines()[0]}"
        if self.capacity is None:
            return f"needs {format_bytes(self.total)} per device ({self.basis})."
        share = self.total / self.capacity
        largest = max(self.parts, key=lambda part: part.bytes)
        if self.total <= self.capacity:
            free = format_bytes(self.capacity - self.total)
            return f"fits: {format_bytes(self.total)} of {format_bytes(self.capacity)} ({share:.0%}), {free} free."
        over = format_bytes(self.total - self.capacity)
        return (
            f"does not fit: {format_bytes(self.total)} of {format_bytes(self.capacity)}, {over} too much; "
            f"the largest part is {largest.words}."
        )


def plan_memory(
    profile: JobCosts, layout: Layout, target: Target, setup: Setup, *, rows: int, compiled: Compiled | None = None
) -> MemoryPlan:
    """Returns the peak memory per device, for a global batch of `rows`."""
    sizes = dict(layout.mesh.shape)
    if multiplies_fp8(target.platform, target.chip):
        profile = profile.in_fp8()
    parts = [*_state_parts(layout), *_weight_parts(profile, layout, setup, sizes)]
    copies = fp8_copies(profile, layout, target, setup)
    parts.append(Part(FP8_COPIES, copies, "computed", "cast once, held from the first minibatch to the last"))
    parts.append(_stage_layers(profile, layout, setup, target))
    # The compilers of TPUs reuse the memory of gathered layers for the loss.
    reused = _gathered(profile, layout, setup, sizes)[0] if target.platform == "tpu" else 0.0
    name = "gradients" if setup.num_minibatches == 1 else NEW_GRADIENTS
    in_turn = 0.0 if profile.in_loop(setup, sizes) else math.fsum(part.bytes for part in parts if part.name == name)
    sliced = _sliced(profile, layout, setup, sizes) if in_turn and target.platform == "gpu" else 0.0
    parts += _activation_parts(profile, setup, sizes, rows, target, reused, in_turn, sliced)
    parts = _in_turn([part for part in parts if part.bytes], in_turn, sliced)
    total = sum(part.bytes for part in parts)
    if compiled is None:
        return MemoryPlan(tuple(parts), total, "computed", target.memory_bytes)
    if compiled.does_not_fit is not None:
        return MemoryPlan(tuple(parts), total, "computed", target.memory_bytes, compiled.does_not_fit)
    kept = [part for part in parts if part.name != "temporaries"]
    rest = compiled.peak_bytes - sum(part.bytes for part in kept)
    if rest >= 0:
        kept.append(Part("temporaries", rest, "compiled", "rest of the compiler's peak"))
    else:
        kept = _shrunk(kept, -rest)
    return MemoryPlan(tuple(kept), compiled.peak_bytes, "compiled", target.memory_bytes)


def _state_parts(layout: Layout) -> list[Part]:
    names = {"params": "parameters", "opt_state": "optimizer"}
    found: dict[str, float] = {}
    for leaf in layout.leaves:
        name = names.get(leaf.name.partition("/")[0], "bookkeeping")
        found[name] = found.get(name, 0) + leaf.bytes_per_device
    return [Part(name, size, "computed", "exact, from the layout") for name, size in found.items()]


def gradient_bytes(profile: JobCosts, layout: Layout, setup: Setup) -> float:
    """Returns the bytes of the gradients that a device holds until the optimizer update; frozen parameters have none.

    Minibatches are accumulated in the accumulation dtype. Scattered gradients arrive in the reduction dtype; others,
    and those scattered once per step, are in the compute dtype.
    """
    sizes, total = dict(layout.mesh.shape), 0.0
    stages = profile.stages(sizes, setup)
    for leaf in param_leaves(layout):
        name = leaf.name.removeprefix("params/")
        if name in profile.frozen:
            continue
        width = profile.widths[name]
        gathered = GATHER_AXIS in spec_axes(leaf.spec) and sizes.get(GATHER_AXIS, 1) > 1
        if stages.is_scheduled:
            width = max(width, 4)  # the sums over microbatches
        elif setup.num_minibatches > 1:
            width = int(profile.precision.accumulate.itemsize)
        elif gathered and setup.sync != "once":
            width = max(width, int(profile.precision.reduce.itemsize))
        whole: float = local_size(leaf) * stored_ways(leaf, stages, sizes)
        if stages.is_scheduled and name.startswith(LAYERS):  # summed in the order of the stages
            whole *= stages.computed_layers / stages.stored_layers
        if setup.sync == "once" and gathered:
            whole *= sizes[GATHER_AXIS]
        total += whole * width
    return total


def _weight_parts(profile: JobCosts, layout: Layout, setup: Setup, sizes: Mapping[str, int]) -> list[Part]:
    layers, ends, copies = _gathered(profile, layout, setup, sizes)
    grads = Part("gradients", gradient_bytes(profile, layout, setup), "computed", "held until the optimizer update")
    note = "two layers, and all weights outside layers" if profile.by_layer else "all weights, from their first use on"
    if profile.ways(sizes) < sizes.get(PIPELINE_AXIS, 1):
        note = "all layers stored along pp, and all weights outside layers"
    elif setup.sync == "once":
        note = "all weights, from the first minibatch to the last"
    elif profile.stages(sizes, setup).count > 1:
        note = "one layer of the stage, and all weights outside layers"
    gathered = Part(GATHERED_WEIGHTS, layers + ends, "computed", note)
    new = _new_gradients(profile, layout, setup, sizes)
    narrow = Part("narrow weights", copies, "computed", "copies in the compute dtype")
    if profile.merged:
        # Of a loop over stacked layers, XLA holds all merged matrices and all their gradients; otherwise the gradient
        # of a matrix takes its place.
        held = {leaf.name.removeprefix("params/"): leaf for leaf in param_leaves(layout)}
        times = {name: 2 if len(held[name].shape) > 2 else 1 for name in profile.merged}
        size = math.fsum(times[name] * local_size(held[name]) * width for name, width in profile.merged.items())
        merged = Part("merged matrices", size, "assumed", "of the base and its adapters, or their gradients")
        return [grads, merged, gathered, narrow]
    return [grads, new, gathered, narrow]


def _gathered(profile: JobCosts, layout: Layout, setup: Setup, sizes: Mapping[str, int]) -> tuple[float, float, float]:
    """Returns the bytes of gathered layers, of other gathered weights, and of weights copied in the compute dtype."""
    fsdp, stages = sizes.get(GATHER_AXIS, 1), profile.stages(sizes, setup)
    copies = layers = ends = 0.0
    narrow, kept = cast_once(profile, layout, setup), kept_for_backward(profile, layout, setup)
    for leaf in param_leaves(layout):
        name = leaf.name.removeprefix("params/")
        width = 1 if name in narrow else profile.widths[name]
        splits, along = fsdp > 1 and GATHER_AXIS in spec_axes(leaf.spec), stored_ways(leaf, stages, sizes)
        if along > 1:
            # Gathered along pp once, and from that along fsdp for each microbatch. libtpu holds the narrow form.
            held = splits and setup.sync != "once" and profile.platform != "tpu"
            copies += local_size(leaf) * along * int(leaf.dtype.itemsize) * held
            ends += local_size(leaf) * along * (fsdp if splits else 1) * width
        elif PIPELINE_AXIS in spec_axes(leaf.spec) and profile.ways(sizes) == 1 < sizes[PIPELINE_AXIS]:
            # Without stages, every device gathers all layers.
            whole = local_size(leaf) * sizes[PIPELINE_AXIS]
            ends += whole * (fsdp if splits else 1) * width
        elif not splits:
            width = 1 if name in kept else width
            copies += local_size(leaf) * width if name not in narrow and width != int(leaf.dtype.itemsize) else 0
        elif leaf.name.startswith(f"params/{LAYERS}") and profile.by_layer and setup.sync != "once":
            layers += local_size(leaf) * fsdp * width / stages.stored_layers
        else:
            ends += local_size(leaf) * fsdp * width
    many = 2 if stages.count == 1 else 1
    return many * layers, ends, copies


def _sliced(profile: JobCosts, layout: Layout, setup: Setup, sizes: Mapping[str, int]) -> float:
    """Returns the bytes of gathered layers that XLA:GPU cuts into one array per layer, freed as gradients come.

    With several minibatches, the loop over these needs them again.
    """
    if setup.sync != "once" or setup.num_minibatches > 1 or profile.stages(sizes, setup).count > 1:
        return 0.0
    return _gathered(profile, layout, replace(setup, sync="hybrid"), sizes)[0] / 2 * profile.num_layers


def _stage_layers(profile: JobCosts, layout: Layout, setup: Setup, target: Target) -> Part:
    """Returns the copy of a device's layers that it computes, if they are not those that it stores."""
    stages = profile.stages(dict(layout.mesh.shape), setup)
    copies = _STAGE_COPIES[target.platform] if stages.moves else 1
    if target.platform == "tpu" or setup.sync == "once" or not (stages.moves or stages.extra > 1):
        copies = 0  # with "once", they take the place of the gathered ones
    held = [leaf for leaf in param_leaves(layout) if leaf.name.startswith(f"params/{LAYERS}")]
    one = math.fsum(local_size(leaf) * profile.widths[leaf.name.removeprefix("params/")] for leaf in held)
    size = copies * one * stages.computed_layers / stages.stored_layers
    return Part("layers of the stages", size, "assumed", "moved from the devices that store them, with empty places")


def _new_gradients(profile: JobCosts, layout: Layout, setup: Setup, sizes: Mapping[str, int]) -> Part:
    """Returns the gradients of the current minibatch or pipeline tick, which are added to the sums."""
    stages = profile.stages(sizes, setup)
    own = gradient_bytes(profile, layout, replace(setup, num_minibatches=1))
    if stages.count == 1:
        size = own if setup.num_minibatches > 1 else 0.0
        return Part(NEW_GRADIENTS, size, "computed", "as they arrive, then added to the sums")
    if stages.is_scheduled:
        return Part("gradients of a tick", own / stages.rounds, "assumed", "of one stage, added to the sums in place")
    return Part("gradients of a tick", 2 * own, "assumed", "one tick and a copy, fitted to CPU programs")


def _activation_parts(
    profile: JobCosts,
    setup: Setup,
    sizes: Mapping[str, int],
    rows: int,
    target: Target,
    reused: float,
    in_turn: float,
    sliced: float,
) -> list[Part]:
    tp, stages = sizes.get("tp", 1), profile.stages(sizes, setup)
    pp = profile.ways(sizes)
    parts = tp * pp / stages.extra
    here = rows / (sizes.get("dp", 1) * sizes.get(GATHER_AXIS, 1)) / setup.num_minibatches / stages.microbatches
    needs = profile.saved[setup.remat]
    split = "" if tp == pp == 1 else ", split over tp" if pp == 1 else ", for one microbatch in one stage"
    if pp > stages.count:
        split = ", of one stage"
    looped = profile.in_loop(setup, sizes)
    most = profile.saved.get("none", needs)
    kinds, all_kinds = (n.looped if looped else n.kept for n in (needs, most))
    # Beside what a recomputed layer casts to fp8 are the operands of its casts, so it counts in the compute dtype.
    wide = profile.needs[setup.remat]
    widest = profile.needs.get("none", wide)
    wide_kinds, widest_kinds = (n.looped if looped else n.kept for n in (wide, widest))
    if not looped and needs.hosted:
        # Measured on one H200: with unrolled layers, offloading does not lower the peak.
        kinds, wide_kinds = added(kinds, needs.hosted), added(wide_kinds, wide.hosted)
        split += "; unrolled layers load offloaded activations back early"
    each, wide_each, whole = (math.fsum(sizes.values()) for sizes in (kinds, wide_kinds, widest_kinds))
    kept = added(
        {kind: here * size / parts for kind, size in kinds.items()},
        {kind: size / tp for kind, size in needs.fixed.items()},
    )
    # Devices that share a key/value head each hold all of it.
    shared = here * profile.shared_bytes(profile.sharing(tp))
    if shared and setup.remat == "none":
        kept = added(kept, {"attention": shared * stages.computed_layers})
    layers = max(profile.num_layers, pp)  # of a custom model, there is at least one in each stage
    layer = here * whole / layers / tp + shared
    again = _LAYER_FACTOR[target.platform] * (layer - here * wide_each / layers / tp)
    if target.platform == "gpu" and tp > 1:
        # Backward passes of column-parallel matmuls gather all rows, and sum products of all rows before the scatter.
        again += _ROW_BYTES * here * profile.tokens_per_row * (profile.d_model or 0)
    if target.platform == "cpu":
        again = max(again, layer)  # on CPUs, gradients do not reuse the memory of activations
    logits = here * profile.tokens_per_row * (profile.vocab_size or 0) / tp * _LOGIT_BYTES[target.platform]
    head = 4 * (profile.vocab_size or 0) * (profile.d_model or 0) / tp  # its gradient, accumulated in float32
    head *= profile.learns_head
    working = max(min(_LOSS_BYTES, logits) + head - reused, again)
    if stages.is_scheduled:
        loss = min(_LOSS_BYTES, logits) + head
        return _scheduled_parts(profile, setup, stages, kinds, all_kinds, rows=here, split=parts, tp=tp, loss=loss)
    saved = math.fsum(kept.values())
    if in_turn and stages.count == 1:
        # If gradients outgrow what they replace, the peak is at the last layer of the backward pass, after the loss.
        last = in_turn + here * each / layers / tp + again
        working = max(saved + sliced + working, last) - max(saved + sliced, in_turn)
    note = "logits of one chunk and the head's gradient, or one recomputed layer"
    return [
        Part("activations", saved, "computed", f"saved for the backward pass{split}", fewer(kept)),
        _ticks_part(profile, stages, here / tp),
        Part("temporaries", working, "assumed", note),
    ]


def _scheduled_parts(
    profile: JobCosts,
    setup: Setup,
    stages: Stages,
    kinds: Mapping[str, float],
    all_kinds: Mapping[str, float],
    *,
    rows: float,
    split: float,
    tp: int,
    loss: float,
) -> list[Part]:
    """Returns the activations of a schedule with its backward pass; `kinds` are saved per row, `all_kinds` made.

    A device has an inbox for what other stages send, and a store for what backward passes need: everything that the
    forward pass saved or, if stages start again from their inputs, what weight gradients need after input gradients.
    Both grow with the number of stages, not with the number of microbatches.
    """
    inbox, stored = stages.slots
    one = rows * profile.tokens_per_row * (profile.d_model or 0) * int(profile.precision.compute.itemsize) / tp
    saved = {kind: rows * size / split / stages.rounds for kind, size in kinds.items()}
    made = {kind: rows * size / split / stages.rounds for kind, size in all_kinds.items()}
    # Weight gradients need the inputs of matmuls, which are saved, and the gradients of their outputs.
    later = {kind: rows * size / split / stages.rounds for kind, size in all_kinds.items()} if stages.splits else {}
    slots = added({} if stages.again else saved, later)
    kept = {kind: stored * size for kind, size in slots.items()}
    now = math.fsum((made if stages.again else saved).values()) + math.fsum(later.values())
    words = "split backward passes" if stages.splits else "backward passes"
    each = f" in one of {stages.rounds} stages of a device" if stages.rounds > 1 else ""
    note = f"for {words} of at most {stored} microbatches{each}"
    return [
        Part("activations", math.fsum(kept.values()), "computed", note, fewer(kept)),
        Part("ticks", inbox * one, "computed", f"{inbox} inputs and gradients of stages, {format_bytes(one)} each"),
        Part("temporaries", now + loss, "assumed", "one tick, and the logits of one chunk and the head's gradient"),
    ]


def _ticks_part(profile: JobCosts, stages: Stages, rows: float) -> Part:
    """Returns the inputs of all ticks, which a pipeline saves to recompute the ticks."""
    if stages.count == 1:
        return Part("ticks", 0.0, "computed")
    one = rows * profile.tokens_per_row * (profile.d_model or 0) * int(profile.precision.compute.itemsize)
    note = f"inputs of {stages.ticks} pipeline ticks, {format_bytes(one)} each"
    return Part("ticks", stages.ticks * one, "computed", note)


def _in_turn(parts: list[Part], gradients: float, sliced: float) -> list[Part]:
    """Subtracts gradients from what unrolled layers free as theirs come: activations, and `sliced` bytes of weights.

    A loop over layers allocates the gradients of all layers at its start.
    """
    frees, left, found = {"activations": math.inf, GATHERED_WEIGHTS: sliced}, gradients, {}
    for part in sorted((part for part in parts if part.name in frees), key=lambda part: part.name):
        took = min(left, frees[part.name], part.bytes)
        left -= took
        note = f"{format_bytes(took)} more before the backward pass, reused by gradients"
        found[part.name] = part.without(took, note) if took else part
    return [found.get(part.name, part) for part in parts]


def _shrunk(parts: list[Part], by: float) -> list[Part]:
    """Takes the bytes that a compiler saved from the parts whose lifetimes may not overlap, activations first."""
    left, made = by, []
    spared = (
        "merged matrices",
        "gradients of a tick",
        NEW_GRADIENTS,
        "layers of the stages",
        "activations",
        "gradients",
        GATHERED_WEIGHTS,
        "ticks",
    )
    for part in sorted(parts, key=lambda part: (*spared, part.name).index(part.name)):
        takes = min(left, part.bytes) if part.name in spared else 0.0
        left -= takes
        if takes:
            note = f"{format_bytes(takes)} less than computed, to match the compiler's peak, which names no parts"
            part = part.without(takes, note, basis="assumed")
        made.append(part)
    order = [part.name for part in parts]
    return sorted(made, key=lambda part: order.index(part.name))
