"""Bytes each device sends per step, by mesh axis: computed from the layout, or summed over compiled collectives.

The computed bytes are those of Meshwright layers and `make_train_step` in the local view. In the global view XLA
decides, and they are a lower bound.

For a pipeline they are the bytes of the last stage, which has the loss. Idle ticks send only the activations between
stages, which are zeros then.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from meshwright.hardware.chips import Chip
from meshwright.layout import Layout
from meshwright.layout.leaf import LeafLayout
from meshwright.mesh.string import MeshSpec
from meshwright.plan.compiled.compile import Compiled
from meshwright.plan.compiled.verdict import CompiledCollective
from meshwright.plan.costs import Basis
from meshwright.plan.costs.job_costs import GATHER_AXIS, LAYERS, PIPELINE_AXIS, TENSOR_AXIS, JobCosts
from meshwright.plan.costs.links import Link, host_link, slowest_link
from meshwright.plan.costs.stages import Stages
from meshwright.plan.costs.tensor_rings import share_in_rings
from meshwright.plan.step_setup import Setup
from meshwright.plan.target import Target
from meshwright.specs import spec_axes

# Hidden share of the bytes that could overlap, if nothing was compiled; read from compiled steps of a 7B decoder.
# Tensor-parallel rings hide nearly all; other gathers and scatters depend on whether the compiler makes them async.
RING_HIDDEN = 0.9
WHOLE_HIDDEN = {"v5p": 0.9, "v6e": 0.9, "gpu": 0.9, "v5e": 0.2, "v4": 0.0, "tpu7x": 0.9}
WHOLE_HIDDEN_ELSEWHERE = 0.2
# Over part of a torus a transfer outlasts its matmul: with libtpu 0.0.42 and full remat, 91% was hidden with fsdp:128
# over all of 4x4x8, but 79% with dp:16,fsdp:256 over 16x16 of 16x16x16 (one program each).
PART_HIDDEN = {"v5p": 0.8}
# A reduce-scatter over a whole slice may compile to an all-reduce, which sends twice the bytes, on these chips; without
# overlap options, on all TPUs but HIDES_UNASKED. `sums_whole_slices` says on which tori.
SCATTERS_AS_SUMS = ("v5e",)
HIDES_UNASKED = ("tpu7x",)
# Hops of a ring whose ends are not neighbors are synchronous here: seen with libtpu 0.0.42 for tp:4 and tp:8, but not
# tp:16, on v5e:16x16; assumed for v6e.
OPEN_RINGS_WAIT = ("v5e", "v6e")
# Hidden share of copies to host memory and back. GPUs: fitted to four steps on one H200
# (benchmarks/results/plan_h200.md), none with layers in a loop, a third with unrolled layers. TPUs: a guess, since
# their copies are asynchronous.
HOST_HIDDEN = {"tpu": 0.9, "gpu": 0.0}
HOST_HIDDEN_WRITTEN_OUT = 0.33
# Of a custom model, share of the saved activations that tp is assumed to send: a transformer layer saves 34 bytes per
# feature and token, and sends 16 (four all-reduces in 16 bits).
CUSTOM_SENT = 0.5


@dataclass(frozen=True)
class Traffic:
    """Communication of one purpose per step, along one axis or several at once ("dp+fsdp").

    Args:
        kind: collective, by its XLA name.
        what: description of the data.
        wire_bytes: bytes that each device sends.
        count: minimum number of transfers.
        hides: whether there is compute to overlap with.
        in_rings: share of the transfers that are rings of permutes between matmuls; the others are whole collectives.
    """

    axis: str
    kind: str
    what: str
    wire_bytes: float
    count: int
    hides: bool
    in_rings: float = 0.0


def step_traffic(profile: JobCosts, layout: Layout, setup: Setup, *, rows: int) -> tuple[Traffic, ...]:
    """Returns the communication of a step, for a global batch of `rows`; axes of size 1 send nothing."""
    sizes = dict(layout.mesh.shape)
    found = [*_weights(profile, layout, setup, sizes), *_activations(profile, setup, sizes, rows=rows)]
    return tuple(item for item in found if item.wire_bytes)


def param_leaves(layout: Layout) -> list[LeafLayout]:
    """Returns the parameter leaves of a state layout."""
    return [leaf for leaf in layout.leaves if leaf.name.startswith("params/")]


def local_size(leaf: LeafLayout) -> int:
    """Returns the number of elements in a leaf's shard."""
    return math.prod(leaf.shard_shape)


def stored_ways(leaf: LeafLayout, stages: Stages, sizes: Mapping[str, int]) -> int:
    """Returns the number of devices of a pipeline that store slices of a parameter which they use whole, or 1."""
    is_stored = stages.count > 1 and not leaf.name.startswith(f"params/{LAYERS}")
    return sizes[PIPELINE_AXIS] if is_stored and PIPELINE_AXIS in spec_axes(leaf.spec) else 1


def _weights(profile: JobCosts, layout: Layout, setup: Setup, sizes: Mapping[str, int]) -> list[Traffic]:
    often = setup.num_minibatches
    rounds = 1 if setup.sync == "once" else often
    # libtpu sums the gradients of minibatches first and sends them once, also with "every".
    sums = often if setup.sync == "every" and profile.platform != "tpu" else 1
    fsdp, stages = sizes.get(GATHER_AXIS, 1), profile.stages(sizes, setup)
    summing = ("dp", GATHER_AXIS, *((PIPELINE_AXIS,) if profile.ways(sizes) > 1 else ()))
    data = [axis for axis in layout.mesh.axis_names if axis in summing and sizes[axis] > 1]
    tensor = sizes.get(TENSOR_AXIS, 1) if profile.d_model is not None else 1
    finer = [leaf.name.rpartition("/params/")[2] for leaf in layout.leaves if leaf.reason.startswith("ZeRO-1")]
    # opt_state/0/mu/layers/attn/q belongs to params/layers/attn/q
    zeros = {name.split("/", 3)[3] for name in finer if name.count("/") >= 3}
    gathered, scattered = {True: 0.0, False: 0.0}, {True: 0.0, False: 0.0}  # by whether they hide
    summed: dict[str, float] = {}
    counts = [0, 0]
    zero_scattered = zero_gathered = moved = unstaged = stored_gathered = stored_scattered = 0.0
    wire = int(profile.precision.reduce.itemsize)
    for leaf in param_leaves(layout):
        name = leaf.name.removeprefix("params/")
        size, width, learns = local_size(leaf), profile.widths[name], name not in profile.frozen
        split = [axis for axis in spec_axes(leaf.spec) if sizes.get(axis, 1) > 1]
        if stages.moves and name.startswith(LAYERS):
            # Layers go to the devices of their virtual stages, and their gradients back, in the same dtype; gathered
            # ones if "once" gathers them before the loss.
            once = setup.sync == "once" and GATHER_AXIS in split
            own = int(leaf.dtype.itemsize) if GATHER_AXIS in split and not once else width
            moved += (
                often * stages.moved_layers * size * (fsdp if once else 1) / stages.stored_layers * own * (1 + learns)
            )
        if PIPELINE_AXIS in split and profile.ways(sizes) == 1:
            # Without stages, all devices along pp need all layers, in the forward pass and in the backward pass. The
            # others are gathered once.
            times = 1 if profile.d_model is not None and not name.startswith(LAYERS) else 2
            whole = size * (fsdp if GATHER_AXIS in split else 1)
            unstaged += times * often * whole * width * (sizes[PIPELINE_AXIS] - 1)
        along = stored_ways(leaf, stages, sizes)
        stored_gathered += size * (along - 1) * width
        stored_scattered += learns * size * (along - 1) * wire
        if GATHER_AXIS in split:
            in_layers = name.startswith(LAYERS)
            by_layer = profile.by_layer and setup.sync != "once"
            stored = stages.stored_layers if in_layers else 1  # along the leading dim
            layers = stages.computed_layers if in_layers and by_layer else stored
            gathers, scatters = _times(stages, name, layers=layers, by_layer=by_layer, profile=profile)
            whole = size * fsdp * along
            # No compute overlaps with a single exchange per step, or with embedding and head of a pipeline. How much
            # does if the parameters are not gathered layer by layer is not known: compilers hid 0% to 72% of it.
            hides = by_layer and (in_layers or stages.count == 1)
            gathered[hides] += rounds * gathers / stored * whole * width * (fsdp - 1) / fsdp
            scattered[hides] += learns * rounds * scatters / stored * whole * wire * (fsdp - 1) / fsdp
            # The matrices of a layer travel together.
            counts[0] = max(counts[0], int(rounds * (gathers if by_layer else 1)))
            counts[1] = max(counts[1], learns * int(rounds * (scatters if by_layer else 1)))
        if not learns:
            continue
        if tensor > 1 and TENSOR_AXIS not in split:
            # The loss sums these gradients itself, for every minibatch and every microbatch of a pipeline.
            parts = often * stages.microbatches
            sent = parts * 2 * size * along * wire * (tensor - 1) / tensor
            summed[TENSOR_AXIS] = summed.get(TENSOR_AXIS, 0.0) + sent
        others = [axis for axis in data if axis not in split]
        if setup.zero_axis is not None and setup.zero_axis in others and name in zeros:
            share = (sizes[setup.zero_axis] - 1) / sizes[setup.zero_axis]
            zero_scattered += size * wire * share
            zero_gathered += size * int(leaf.dtype.itemsize) * share
            others.remove(setup.zero_axis)
            size //= sizes[setup.zero_axis]  # other axes sum the slices
        if others:
            # One all-reduce over all axes sends fewer bytes than one per axis.
            ways = math.prod(sizes[axis] for axis in others)
            together = "+".join(others)
            times = 1 if along > 1 else sums
            summed[together] = summed.get(together, 0.0) + times * 2 * size * wire * (ways - 1) / ways
    found = []
    for hides in (True, False):
        which = "of layers, prefetched" if hides else "outside layers"
        if setup.sync == "once" or not profile.by_layer:
            which = "of all layers" if profile.by_layer else "of the whole model"
        found += [
            Traffic(GATHER_AXIS, "all-gather", f"parameters {which}", gathered[hides], counts[0], hides),
            Traffic(GATHER_AXIS, "reduce-scatter", "gradients of parameters", scattered[hides], counts[1], hides),
        ]
    for axes, sent in summed.items():
        found.append(Traffic(axes, "all-reduce", "gradients", sent, sums, sums > 1))
    count = 2 * often * stages.moves
    found.append(Traffic(PIPELINE_AXIS, "collective-permute", "layers to their stages", moved, count, False))
    found.append(Traffic(PIPELINE_AXIS, "all-gather", "parameters stored along pp", unstaged, 2 * often, False))
    # Of what a pipeline only stores along its axis, slices travel once per step: embedding and head.
    count = 1 if profile.tied else 2
    found += [
        Traffic(PIPELINE_AXIS, "all-gather", "embedding and head", stored_gathered, count, False),
        Traffic(PIPELINE_AXIS, "reduce-scatter", "gradients of embedding and head", stored_scattered, count, False),
    ]
    if setup.zero_axis is not None:
        found.append(Traffic(setup.zero_axis, "reduce-scatter", "gradients (ZeRO-1)", zero_scattered, 1, False))
        found.append(Traffic(setup.zero_axis, "all-gather", "updated parameters (ZeRO-1)", zero_gathered, 1, False))
    return found


def _times(stages: Stages, name: str, *, layers: int, by_layer: bool, profile: JobCosts) -> tuple[float, float]:
    """Returns the number of gathers of a parameter's layers per minibatch, and of scatters of their gradients."""
    in_layers = name.startswith(LAYERS)
    if stages.count > 1 and by_layer:
        # Each microbatch gathers in the forward pass, when its tick is recomputed, and for a layer's gradient. The
        # last stage has the head, and the embedding only if they are tied.
        ends: float = 0 if name.startswith("embed/") and not profile.tied else 2
        if stages.is_scheduled:
            # The loss and its gradient share a gather. In a V, the first device has the embedding as well.
            embeds = name.startswith("embed/") and stages.schedule == "zb-v"
            # libtpu gathers once for the recomputation of a stage of one layer and for its gradient, but twice if the
            # stage loops over layers (six programs for v5p).
            is_merged = profile.platform == "tpu" and stages.computed_layers == stages.rounds
            again = 2 + (stages.again and not is_merged)
            gathers, scatters = (again * layers, layers) if in_layers else (ends / 2 + embeds * (again - 1), ends / 2)
            return stages.microbatches * gathers, stages.microbatches * max(scatters, float(embeds))
        gathers, scatters = (3 * layers, layers) if in_layers else (ends, ends / 2)
        return stages.microbatches * gathers, stages.microbatches * scatters
    if by_layer and layers > 1:
        # Forward, backward if any, and one layer prefetched; parameters outside layers are gathered once and kept.
        return (2 if profile.learns_layers else 1) * layers + 1, layers
    return layers, layers


def _activations(profile: JobCosts, setup: Setup, sizes: Mapping[str, int], *, rows: int) -> list[Traffic]:
    tp, stages = sizes.get(TENSOR_AXIS, 1), profile.stages(sizes, setup)
    data = sizes.get("dp", 1) * sizes.get(GATHER_AXIS, 1)
    if profile.d_model is None and tp > 1:
        sent = CUSTOM_SENT * profile.needs["none"].kept_per_row * rows / data * (tp - 1) / tp
        return [Traffic(TENSOR_AXIS, "all-reduce", "activations", sent, 4 * setup.num_minibatches, False)]
    if profile.d_model is None or (tp == 1 and stages.count == 1):
        return []
    width = int(profile.precision.compute.itemsize)
    one = rows / data * profile.tokens_per_row * profile.d_model * width
    layers, found = stages.computed_layers, []
    piped = stages.count > 1
    parts = setup.num_minibatches * stages.microbatches
    if tp > 1:
        share = (tp - 1) / tp
        # Each of the two blocks of a layer has one gather and one scatter, forward and backward.
        if setup.remat == "full" and not stages.is_scheduled:
            # Recomputation gathers in both blocks, and scatters in the first. Weight gradients use what it gathered,
            # but not on TPUs, whose rings keep their gathers apart.
            gathers, scatters, regathers = 6, 5, False
            if profile.platform == "tpu" and not profile.saves_gathered:
                gathers = 8
        else:
            gathers, scatters = 4 if profile.saves_gathered else 6, 4  # weight gradients gather the rows again
            regathers = not profile.saves_gathered
        # Embedding and loss have one each. A pipeline recomputes every tick, and its last stage has only the loss.
        if piped and stages.again:
            gathers, scatters = gathers + 2, scatters + 2
        ends = {"all-gather": 2, "reduce-scatter": 1 if piped else 2}
        if stages.is_scheduled:  # the loss's rows once; in a V, the first device has the embedding as well
            embeds = stages.schedule == "zb-v"
            ends = {"all-gather": 1 + embeds, "reduce-scatter": 1 + embeds * (1 + stages.again)}
        if not profile.learns_layers and not piped:  # the backward pass ends at the final norm
            gathers, scatters, ends["all-gather"] = 2, 2, 1
        for kind, count in (("all-gather", gathers), ("reduce-scatter", scatters)):
            times = layers * count + ends[kind]
            sent = one * share * times
            rings = share_in_rings(profile, kind, count, tp, regathers=regathers)
            found.append(Traffic(TENSOR_AXIS, kind, "activations", sent, int(times) * parts, True, rings))
        if (together := profile.sharing(tp)) > 1:
            # Neighbors gather the key and value heads they share, again if a tick or a layer is recomputed, and sum
            # their gradients in the backward pass.
            sent = layers * rows / data * profile.shared_bytes(together)
            again = (piped and stages.again) + (setup.remat != "none" and not (stages.is_scheduled and stages.again))
            for kind, count in (("all-gather", 1 + again), ("reduce-scatter", 1)):
                times = 2 * layers * count * parts
                found.append(Traffic(TENSOR_AXIS, kind, "shared key/value heads", count * sent, times, False))
        # Each device sends five float32 per token: maxima, sums, the logit of the target.
        numbers = (
            rows / data * profile.tokens_per_row * 5 * 4 * tp * share * (2 if piped and not stages.is_scheduled else 1)
        )
        found.append(Traffic(TENSOR_AXIS, "all-gather", "loss statistics", numbers, parts, False))
    if piped:
        # One microbatch per tick, forward and backward; tp splits its rows between blocks.
        times = setup.num_minibatches * stages.messages
        sent = times * one / parts / tp
        found.append(Traffic(PIPELINE_AXIS, "collective-permute", "activations between stages", sent, times, False))
    return found


@dataclass(frozen=True)
class Sent:
    """Communication along an axis per step, and its time; `hidden` is the share that overlaps with compute.

    `is_judged`: whether `plan.compiled.verdict` measured that share against the compute beside each transfer.
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
    """Returns the computed communication, with the hidden share assumed by chip.

    Without `overlap`, most TPU compilers overlap only rings with matmuls.
    """
    found = []
    whole = WHOLE_HIDDEN.get(target.kind, WHOLE_HIDDEN.get(target.platform, WHOLE_HIDDEN_ELSEWHERE))
    sizes = dict(zip(spec.names, spec.sizes, strict=True))
    unasked = target.platform == "tpu" and target.kind not in HIDES_UNASKED and not overlap
    as_sum = target.kind in SCATTERS_AS_SUMS or unasked
    for item in traffic:
        link = slowest_link(item.axis.split("+"), links)
        kind, wire_bytes = item.kind, item.wire_bytes
        spans = sizes.get(item.axis) == target.devices_per_slice
        if item.axis == TENSOR_AXIS:
            waits = target.kind in OPEN_RINGS_WAIT and link is not None and not link.is_closed
            hidden = RING_HIDDEN
        else:
            waits, hidden = unasked, whole if spans else PART_HIDDEN.get(target.kind, whole)
            if kind == "reduce-scatter" and as_sum and spans and sums_whole_slices(target):
                kind, wire_bytes = "all-reduce", 2 * wire_bytes
        if waits or not item.hides or target.platform == "cpu":  # CPUs have only synchronous collectives
            hidden = 0.0
        seconds = None if link is None else link.seconds_in_rings(kind, wire_bytes, item.count, item.in_rings)
        name = "unknown" if link is None else str(link)
        found.append(Sent(item.axis, kind, item.what, wire_bytes, item.count, name, seconds, hidden, "computed"))
    return tuple(found)


def sums_whole_slices(target: Target) -> bool:
    """Returns whether scatters over a whole slice compile to all-reduces on a torus, unless an option keeps them.

    Read from one scatter compiled for each of 16 tori (benchmarks/results/plan_layouts.md): 2D tori that are square,
    from 4x4 on, and all 3D tori.

    Example:
        >>> from meshwright.plan.target import parse_target
        >>> [sums_whole_slices(parse_target(f"v5e:{torus}")) for torus in ("2x4", "4x4", "8x16")]
        [False, True, False]
    """
    sizes = [size for size in target.shape if size > 1]
    return len(sizes) == 3 or (len(sizes) == 2 and sizes[0] == sizes[1] >= 4)


def beside_matmuls(sent: tuple[Sent, ...], seconds: float) -> tuple[Sent, ...]:
    """Limits the hidden time of tensor-parallel rings to `seconds`, the time of their matmuls.

    A hop overlaps with only one matmul, and many small hops take longer than theirs.
    """
    hidden = sum((item.seconds or 0.0) * item.hidden for item in sent if item.axis == TENSOR_AXIS)
    if hidden <= seconds:
        return sent
    return tuple(replace(i, hidden=i.hidden * seconds / hidden) if i.axis == TENSOR_AXIS else i for i in sent)


def compiled_sent(compiled: Compiled, links: Mapping[str, Link]) -> tuple[Sent, ...]:
    """Sums the collectives of a program by axis and kind."""
    groups: dict[tuple[tuple[str, ...], str], list[CompiledCollective]] = {}
    for collective in compiled.collectives:
        groups.setdefault((collective.axes, collective.kind), []).append(collective)
    found = []
    for (axes, kind), members in groups.items():
        total = sum(c.trips * c.wire_bytes for c in members)
        if not total:
            continue
        count = sum(c.trips for c in members)
        link = slowest_link(axes, links, is_ring=kind == "collective-permute")
        seconds = None if link is None else math.fsum(c.trips * link.seconds(kind, c.wire_bytes) for c in members)
        is_judged = all(c.share is not None and c.transfer_s is not None for c in members if c.wire_bytes)
        # Weight by time if known, as small transfers take longer than their bytes suggest.
        parts = [(c.trips * ((c.transfer_s or 0.0) if is_judged else c.wire_bytes), c.hidden_share) for c in members]
        hidden = sum(part * share for part, share in parts) / sum(part for part, _ in parts)
        words = ("unknown" if link is None else str(link), seconds, hidden)
        found.append(Sent("+".join(axes), kind, _served(members), total, count, *words, "compiled", is_judged))
    return tuple(sorted(found, key=lambda item: -item.wire_bytes))


def _served(members: Sequence[CompiledCollective]) -> str:
    """Names the data of the collectives by the largest of them."""
    sent: dict[str, float] = {}
    for one in members:
        name = one.serves or one.source
        sent[name] = sent.get(name, 0.0) + one.trips * one.wire_bytes
    largest = max(sent, key=lambda name: sent[name])
    return largest if len(sent) == 1 else f"{largest}, and others"


def host_copies(profile: JobCosts, chip: Chip, setup: Setup, sizes: Mapping[str, int], rows: int) -> Sent:
    """Returns the copies of offloaded activations to the host and back."""
    here = rows / (sizes.get("dp", 1) * sizes.get("fsdp", 1))
    split = sizes.get(TENSOR_AXIS, 1) * profile.ways(sizes)
    out = profile.needs[setup.remat].hosted_per_row * here / split
    link = host_link(chip)
    count = 2 * profile.num_layers * setup.num_minibatches
    seconds = link.seconds("copy", 2 * out)
    hidden = HOST_HIDDEN_WRITTEN_OUT if not profile.in_loop(setup, sizes) else HOST_HIDDEN[chip.platform]
    return Sent("host", "copy", "offloaded activations", 2 * out, count, str(link), seconds, hidden, "assumed")
