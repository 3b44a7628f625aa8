"""The work of Muon's update beside one pass over the state: iterations on matrices, and their exchange."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax

from meshwright.hardware.chips import Chip, is_hopper_kind
from meshwright.layout import Layout
from meshwright.plan.costs.communication import Traffic
from meshwright.specs import round_up
from meshwright.train.optimizer.muon import orthogonalized_names
from meshwright.train.optimizer.newton_schulz import DION_COEFFICIENTS
from meshwright.train.optimizer.orthogonalize import Split, same_stack
from meshwright.train.state import gradient_specs
from meshwright.tree import NamedLeaf, named_leaves

# On one H200, the iterations of a 956M decoder take 32.2 ms of its step: 1.09 of the peak, as products of whole
# matrices (benchmarks/results/muon.md), because kernels compute half of each symmetric product.
HOPPER_SHARE = 1.09
_PREFIX = "params/"


@dataclass(frozen=True)
class MuonWork:
    """FLOPs of the iterations on one device, and the communication of the update."""

    flops: int = 0
    traffic: tuple[Traffic, ...] = ()

    def seconds(self, chip: Chip, rate: float) -> float:
        """Returns the time of the iterations, if plain matmuls in 16 bits reach `rate` FLOP/s."""
        if any(map(is_hopper_kind, chip.device_kinds)):
            rate = (chip.peak() or rate) * HOPPER_SHARE
        return self.flops / rate


def muon_work(layout: Layout, platform: str) -> MuonWork:
    """Returns the work of a state layout's Muon; nothing for other optimizers.

    Example:
        >>> import meshwright as mw
        >>> job = mw.Job(init=lambda key: {"up": jax.numpy.zeros((4, 64, 128))}, rules=[("up", mw.P(None, "fsdp"))])
        >>> optimizer = mw.train.muon(1e-3, is_matrix=lambda name, leaf: True)
        >>> layout = mw.state_layout(job, optimizer, mw.create_abstract_mesh("fsdp:4"))
        >>> work = muon_work(layout, "tpu")
        >>> sent = 2 * 64 * 128 * 2 * 3 / 4  # one matrix per device, in bfloat16, in and out
        >>> work.traffic[0].kind, work.traffic[0].wire_bytes == sent
        ('all-to-all', True)
    """
    chosen = frozenset(orthogonalized_names(layout.abstract.opt_state))
    if not chosen:
        return MuonWork()
    mesh = getattr(layout.mesh, "abstract_mesh", layout.mesh)
    specs = {leaf.name: leaf.value for leaf in named_leaves(gradient_specs(layout))}
    leaves = [
        NamedLeaf(name, (), jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
        for leaf in layout.leaves
        if (name := leaf.name.removeprefix(_PREFIX)) in chosen and leaf.name.startswith(_PREFIX)
    ]
    width, flops, sent = 4 if platform == "cpu" else 2, 0, dict[tuple[str, str], list[float]]()
    for members in same_stack(leaves, specs, mesh):
        found, moved = _of_stack(members, dict(mesh.shape), width)
        flops += found
        for key, size in moved.items():
            sent.setdefault(key, []).append(size)
    # Each way has one transfer per stack.
    both = {"all-to-all": 2, "all-gather": 1}
    traffic = [
        Traffic(axes, kind, "matrices of muon", both[kind] * sum(sizes), both[kind] * len(sizes), False)
        for (axes, kind), sizes in sent.items()
    ]
    return MuonWork(flops, tuple(traffic))


def _of_stack(
    members: list[tuple[NamedLeaf, Split]], sizes: Mapping[str, int], width: int
) -> tuple[int, dict[tuple[str, str], float]]:
    """Returns the FLOPs of a stack on one device, and the bytes that it sends in one direction, by axes and kind."""
    split = members[0][1]

    def ways(axes: Any) -> int:
        return math.prod(sizes[axis] for axis in axes)

    used = {*split.lead_axes, *split.rows, *split.columns}
    copies = tuple(axis for axis, size in sizes.items() if size > 1 and axis not in used)
    short, long = sorted(members[0][0].value.shape[-2:])
    here = sum(math.prod(leaf.value.shape[:-2]) // ways(one.lead_axes) for leaf, one in members)
    parts = ways(split.rows) * ways(split.columns)
    each = round_up(here, parts * ways(copies)) // (parts * ways(copies))
    whole, moved = each * short * long * width, dict[tuple[str, str], float]()
    for axes in filter(None, (split.rows, split.columns)):
        moved["+".join(axes), "all-to-all"] = whole * (1 - 1 / ways(axes))
    if copies:
        moved["+".join(copies), "all-gather"] = whole * (ways(copies) - 1)
    iterations = len(DION_COEFFICIENTS)
    return each * iterations * (4 * short * short * long + 2 * short**3), moved
