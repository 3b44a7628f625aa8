"""What a step sends along each mesh axis, computed from the layout: the bytes of every gather, scatter and sum.

These are the programs of our own layers and of `make_train_step` in the local view. In the global view XLA decides, and
the same figures are what it can reach at best.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from meshwright.layout import Layout
from meshwright.layout.leaf import LeafLayout
from meshwright.plan.profile import Profile
from meshwright.plan.setup import Setup
from meshwright.specs import spec_axes

GATHER_AXIS, TENSOR_AXIS, PIPELINE_AXIS = "fsdp", "tp", "pp"


@dataclass(frozen=True)
class Traffic:
    """What one purpose sends along one axis in a step.

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


def step_traffic(profile: Profile, layout: Layout, setup: Setup, *, rows: int) -> tuple[Traffic, ...]:
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


def _weights(profile: Profile, layout: Layout, setup: Setup, sizes: Mapping[str, int]) -> list[Traffic]:
    often = setup.num_minibatches
    rounds = 1 if setup.sync == "once" else often
    sums = often if setup.sync == "every" else 1
    fsdp = sizes.get(GATHER_AXIS, 1)
    data = [axis for axis in ("dp", GATHER_AXIS) if sizes.get(axis, 1) > 1]
    tensor = [TENSOR_AXIS] if sizes.get(TENSOR_AXIS, 1) > 1 and profile.d_model is not None else []
    finer = {leaf.name.rpartition("/params/")[2]: leaf for leaf in layout.leaves if leaf.reason.startswith("ZeRO-1")}
    gathered = scattered = 0.0
    summed: dict[str, float] = {}
    counts = [0, 0]
    zero_scattered = zero_gathered = 0.0
    wire = int(profile.precision.reduce.itemsize)
    for leaf in param_leaves(layout):
        size, width = local_size(leaf), profile.widths[leaf.name.removeprefix("params/")]
        split = [axis for axis in spec_axes(leaf.spec) if sizes.get(axis, 1) > 1]
        if GATHER_AXIS in split:
            layers = profile.num_layers if leaf.name.startswith(f"params/{profile.layer_prefix}") else 1
            by_layer = profile.by_layer and layers > 1 and setup.sync != "once"
            whole = size * fsdp
            # Forwards, backwards, and one layer more, gathered ahead. What is not in layers is gathered once and kept.
            times = (2 * layers + 1) / layers if by_layer else 1
            gathered += rounds * times * whole * width * (fsdp - 1) / fsdp
            scattered += rounds * whole * wire * (fsdp - 1) / fsdp
            # The matrices of a layer travel together.
            counts[0] = max(counts[0], rounds * (2 * layers + 1 if by_layer else 1))
            counts[1] = max(counts[1], rounds * (layers if by_layer else 1))
        for axis in (*data, *tensor):
            if axis in split:
                continue
            share = (sizes[axis] - 1) / sizes[axis]
            if axis == setup.zero_axis and leaf.name.removeprefix("params/") in _zero_names(finer):
                zero_scattered += size * wire * share
                zero_gathered += size * int(leaf.dtype.itemsize) * share
            else:
                summed[axis] = summed.get(axis, 0.0) + sums * 2 * size * wire * share
    found = [
        Traffic(GATHER_AXIS, "all-gather", "parameters of layers, ahead of their use", gathered, counts[0], True),
        Traffic(GATHER_AXIS, "reduce-scatter", "gradients of parameters", scattered, counts[1], True),
    ]
    for axis, sent in summed.items():
        found.append(Traffic(axis, "all-reduce", "sums of gradients", sent, sums, sums > 1))
    if setup.zero_axis is not None:
        found.append(Traffic(setup.zero_axis, "reduce-scatter", "gradients (ZeRO-1)", zero_scattered, 1, False))
        found.append(Traffic(setup.zero_axis, "all-gather", "updated parameters (ZeRO-1)", zero_gathered, 1, False))
    return found


def _zero_names(finer: Mapping[str, LeafLayout]) -> set[str]:
    # opt_state/0/mu/layers/attn/q belongs to params/layers/attn/q
    return {name.split("/", 3)[3] for name in finer if name.count("/") >= 3}


def _activations(profile: Profile, setup: Setup, sizes: Mapping[str, int], *, rows: int) -> list[Traffic]:
    tp, pp = sizes.get(TENSOR_AXIS, 1), sizes.get(PIPELINE_AXIS, 1)
    if profile.d_model is None or (tp == 1 and pp == 1):
        return []
    data = sizes.get("dp", 1) * sizes.get(GATHER_AXIS, 1)
    width = int(profile.precision.compute.itemsize)
    one = rows / data * profile.tokens_per_row * profile.d_model * width
    layers, found = profile.num_layers / pp, []
    if tp > 1:
        share = (tp - 1) / tp
        # Two blocks a layer, each of which gathers its rows and scatters its sums, forwards and backwards.
        if setup.remat == "full":
            gathers, scatters = 6, 5  # both blocks gather again, and the first scatters
        else:
            gathers, scatters = 4 if profile.saves_gathered else 6, 4  # rows again, for the gradients of weights
        for kind, count in (("all-gather", gathers), ("reduce-scatter", scatters)):
            times = layers * count + 2 / pp  # the embedding and the loss have one of each, and its gradient
            found.append(Traffic(TENSOR_AXIS, kind, "rows of activations", one * share * times, int(times), True))
        # Five float32 of each token from each device: maxima, sums, the target's logit.
        numbers = rows / data * profile.tokens_per_row * 5 * 4 * tp * share / pp
        found.append(Traffic(TENSOR_AXIS, "all-gather", "numbers of the loss", numbers, 1, False))
    if pp > 1:
        split = tp if tp > 1 else 1
        found.append(
            Traffic(PIPELINE_AXIS, "collective-permute", "activations between stages", 2 * one / split, 2, False)
        )
    return found
