"""What a step sends along each mesh axis, computed from the layout: the bytes of every gather, scatter and sum.

These are the programs of our own layers and of `make_train_step` in the local view. In the global view XLA decides, and
the same figures are what it can reach at best.

Of a pipeline, it is what the last stage sends: the others have no loss, and the first has the embedding instead. Ticks
in which a stage is idle send nothing but what stages pass on, which is zeros then, and sent all the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from meshwright.layout import Layout
from meshwright.layout.leaf import LeafLayout
from meshwright.plan.costs.job_costs import JobCosts
from meshwright.plan.costs.stages import PIPELINE_AXIS, Stages, stages_of
from meshwright.plan.step_setup import Setup
from meshwright.specs import spec_axes

GATHER_AXIS, TENSOR_AXIS = "fsdp", "tp"


@dataclass(frozen=True)
class Traffic:
    """What one purpose sends along one axis in a step, or along several at once: "dp+fsdp".

    Args:
        kind: of the collective, as XLA names it.
        what: what is sent.
        wire_bytes: what each device sends.
        count: how many transfers that is, at least.
        hides: whether there is compute beside it to hide behind.
    """

    axis: str
    kind: str
    what: str
    wire_bytes: float
    count: int
    hides: bool


def step_traffic(profile: JobCosts, layout: Layout, setup: Setup, *, rows: int) -> tuple[Traffic, ...]:
    """Returns all that a step sends; `rows` are those of the whole batch. Size-1 axes send nothing."""
    sizes = dict(layout.mesh.shape)
    found = [*_weights(profile, layout, setup, sizes), *_activations(profile, setup, sizes, rows=rows)]
    return tuple(item for item in found if item.wire_bytes)


def param_leaves(layout: Layout) -> list[LeafLayout]:
    """Returns a state layout's leaves that are parameters."""
    return [leaf for leaf in layout.leaves if leaf.name.startswith("params/")]


def local_size(leaf: LeafLayout) -> int:
    """Returns how many elements of a leaf a device has."""
    return math.prod(leaf.shard_shape)


def _weights(profile: JobCosts, layout: Layout, setup: Setup, sizes: Mapping[str, int]) -> list[Traffic]:
    often = setup.num_minibatches
    rounds = 1 if setup.sync == "once" else often
    sums = often if setup.sync == "every" else 1
    fsdp, stages = sizes.get(GATHER_AXIS, 1), stages_of(profile, sizes)
    data = [axis for axis in layout.mesh.axis_names if axis in ("dp", GATHER_AXIS, PIPELINE_AXIS) and sizes[axis] > 1]
    tensor = sizes.get(TENSOR_AXIS, 1) if profile.d_model is not None else 1
    finer = {leaf.name.rpartition("/params/")[2]: leaf for leaf in layout.leaves if leaf.reason.startswith("ZeRO-1")}
    gathered, scattered = {True: 0.0, False: 0.0}, {True: 0.0, False: 0.0}  # by whether they hide
    summed: dict[str, float] = {}
    counts = [0, 0]
    zero_scattered = zero_gathered = 0.0
    wire = int(profile.precision.reduce.itemsize)
    for leaf in param_leaves(layout):
        name = leaf.name.removeprefix("params/")
        size, width = local_size(leaf), profile.widths[name]
        split = [axis for axis in spec_axes(leaf.spec) if sizes.get(axis, 1) > 1]
        if GATHER_AXIS in split:
            in_layers = name.startswith(profile.layer_prefix)
            layers = profile.num_layers // stages.count if in_layers else 1
            by_layer = profile.by_layer and setup.sync != "once"
            gathers, scatters = _times(stages, name, layers=layers, by_layer=by_layer, profile=profile)
            whole = size * fsdp
            # What is exchanged once has no compute beside it, nor have the ends of a pipeline, in ticks of their own.
            hides = setup.sync != "once" and (in_layers or stages.count == 1)
            gathered[hides] += rounds * gathers / layers * whole * width * (fsdp - 1) / fsdp
            scattered[hides] += rounds * scatters / layers * whole * wire * (fsdp - 1) / fsdp
            # The matrices of a layer travel together.
            counts[0] = max(counts[0], int(rounds * (gathers if by_layer else 1)))
            counts[1] = max(counts[1], int(rounds * (scatters if by_layer else 1)))
        if tensor > 1 and TENSOR_AXIS not in split:
            # In the loss itself: with every minibatch, and every microbatch of a pipeline.
            parts = often * stages.microbatches
            sent = parts * 2 * size * wire * (tensor - 1) / tensor
            summed[TENSOR_AXIS] = summed.get(TENSOR_AXIS, 0.0) + sent
        others = [axis for axis in data if axis not in split]
        if setup.zero_axis is not None and setup.zero_axis in others and name in _zero_names(finer):
            share = (sizes[setup.zero_axis] - 1) / sizes[setup.zero_axis]
            zero_scattered += size * wire * share
            zero_gathered += size * int(leaf.dtype.itemsize) * share
            others.remove(setup.zero_axis)
            size //= sizes[setup.zero_axis]  # other axes sum the slices
        if others:
            # Over all of them at once: fewer bytes than one after the other.
            ways = math.prod(sizes[axis] for axis in others)
            together = "+".join(others)
            summed[together] = summed.get(together, 0.0) + sums * 2 * size * wire * (ways - 1) / ways
    found = []
    for hides in (True, False):
        which = "layers, ahead of their use" if hides else "all layers" if setup.sync == "once" else "the ends"
        found += [
            Traffic(GATHER_AXIS, "all-gather", f"parameters of {which}", gathered[hides], counts[0], hides),
            Traffic(GATHER_AXIS, "reduce-scatter", "gradients of parameters", scattered[hides], counts[1], hides),
        ]
    for axes, sent in summed.items():
        found.append(Traffic(axes, "all-reduce", "sums of gradients", sent, sums, sums > 1))
    if setup.zero_axis is not None:
        found.append(Traffic(setup.zero_axis, "reduce-scatter", "gradients (ZeRO-1)", zero_scattered, 1, False))
        found.append(Traffic(setup.zero_axis, "all-gather", "updated parameters (ZeRO-1)", zero_gathered, 1, False))
    return found


def _times(stages: Stages, name: str, *, layers: int, by_layer: bool, profile: JobCosts) -> tuple[float, float]:
    """Returns how often a device gathers a parameter's layers in a minibatch, and scatters their gradients."""
    in_layers = name.startswith(profile.layer_prefix)
    if stages.count > 1 and by_layer:
        # Each microbatch gathers again: forwards, when its tick is computed again, and, in that, for a layer's
        # gradient. The ends are not in layers, and the last stage has no embedding unless that is its head.
        ends = 0 if name.startswith("embed/") and not profile.tied else 2
        gathers, scatters = (3 * layers, layers) if in_layers else (ends, ends / 2)
        return stages.microbatches * gathers, stages.microbatches * scatters
    if by_layer and layers > 1:
        # Forwards, backwards, and one layer more, gathered ahead. What is not in layers is gathered once and kept.
        return 2 * layers + 1, layers
    return layers, layers


def _zero_names(finer: Mapping[str, LeafLayout]) -> set[str]:
    # opt_state/0/mu/layers/attn/q belongs to params/layers/attn/q
    return {name.split("/", 3)[3] for name in finer if name.count("/") >= 3}


def _activations(profile: JobCosts, setup: Setup, sizes: Mapping[str, int], *, rows: int) -> list[Traffic]:
    tp, stages = sizes.get(TENSOR_AXIS, 1), stages_of(profile, sizes)
    if profile.d_model is None or (tp == 1 and stages.count == 1):
        return []
    data = sizes.get("dp", 1) * sizes.get(GATHER_AXIS, 1)
    width = int(profile.precision.compute.itemsize)
    one = rows / data * profile.tokens_per_row * profile.d_model * width
    layers, found = profile.num_layers / stages.count, []
    piped = stages.count > 1
    parts = setup.num_minibatches * stages.microbatches
    if tp > 1:
        share = (tp - 1) / tp
        # Two blocks a layer, each of which gathers its rows and scatters its sums, forwards and backwards.
        if setup.remat == "full":
            gathers, scatters = 6, 5  # both blocks gather again, and the first scatters
        else:
            gathers, scatters = 4 if profile.saves_gathered else 6, 4  # rows again, for the gradients of weights
        # The embedding and the loss have one of each, and its gradient. In a pipeline every tick is computed again,
        # and the last stage has the loss alone.
        if piped:
            gathers, scatters = gathers + 2, scatters + 2
        ends = {"all-gather": 2, "reduce-scatter": 1 if piped else 2}
        for kind, count in (("all-gather", gathers), ("reduce-scatter", scatters)):
            times = layers * count + ends[kind]
            sent = one * share * times
            found.append(Traffic(TENSOR_AXIS, kind, "rows of activations", sent, int(times) * parts, True))
        if (together := profile.sharing(tp)) > 1:
            # Neighbours gather the head of keys, and that of values, of which each has a part: again in a tick and in a
            # layer that is computed again. Backwards they sum its gradient.
            sent = layers * rows / data * profile.shared_bytes(together)
            for kind, count in (("all-gather", 1 + piped + (setup.remat != "none")), ("reduce-scatter", 1)):
                times = 2 * int(layers) * count * parts
                found.append(Traffic(TENSOR_AXIS, kind, "shared heads", count * sent, times, False))
        # Five float32 of each token from each device: maxima, sums, the target's logit.
        numbers = rows / data * profile.tokens_per_row * 5 * 4 * tp * share * (2 if piped else 1)
        found.append(Traffic(TENSOR_AXIS, "all-gather", "numbers of the loss", numbers, parts, False))
    if piped:
        # A microbatch at every tick, forwards and backwards; rows are split over tp between blocks.
        times = 2 * setup.num_minibatches * stages.ticks
        sent = times * one / parts / tp
        found.append(Traffic(PIPELINE_AXIS, "collective-permute", "activations between stages", sent, times, False))
    return found
