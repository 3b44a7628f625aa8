"""Work and communication of Muon beside the optimizer update of other optimizers.

Matrices of one shape and split form a stack, which one all-to-all spreads over the devices as whole matrices, and one
brings back; `train/optimizer/muon.py` has the exchange and `newton_schulz.py` the iterations that are counted here.

Shapes: m rows, n columns, m <= n.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from meshwright.layout import Layout
from meshwright.layout.leaf import LeafLayout
from meshwright.plan.costs.communication import Traffic, param_leaves
from meshwright.plan.costs.job_costs import JobCosts
from meshwright.plan.target import Target
from meshwright.specs import dim_axes, round_up
from meshwright.train.optimizer.muon import orthogonalized_names
from meshwright.train.optimizer.newton_schulz import DION_COEFFICIENTS, WIDE

ITERATIONS = len(DION_COEFFICIENTS)
# Time of a symmetric product relative to a whole matmul, by chip with a kernel for them: measured on one H200 at 2048
# rows (benchmarks/results/muon.md), assumed for H100s. The kernel takes multiples of these rows and columns.
SYMMETRIC_SHARE = {"h100": 0.67, "h200": 0.67}
_TILE, _DEPTH = 128, 64
_WHAT = "matrices for Muon"


@dataclass(frozen=True)
class MuonWork:
    """What Muon adds to a step.

    Args:
        flops: matmul FLOPs of a device, as many as take the same time at the rate of matmuls.
    """

    flops: float = 0.0
    traffic: tuple[Traffic, ...] = ()


def muon_work(profile: JobCosts, layout: Layout, target: Target) -> MuonWork:
    """Returns what orthogonalizing the matrices of a state adds to a step."""
    names = set(orthogonalized_names(profile.state.opt_state))
    sizes = {axis: size for axis, size in layout.mesh.shape.items() if size > 1}
    width = 4 if target.platform == "cpu" else 2
    stacks: dict[tuple[tuple[int, int], _Axes, _Axes, _Axes], int] = {}
    for leaf in param_leaves(layout):
        if leaf.name.removeprefix("params/") in names:
            stack, count = _stack_of(leaf, sizes)
            stacks[stack] = stacks.get(stack, 0) + count
    flops, sent = 0.0, dict[tuple[_Axes, str], list[float]]()
    for ((m, n), lead, rows, columns), count in stacks.items():
        copies = tuple(axis for axis in sizes if axis not in (*lead, *rows, *columns))
        parts = _ways((*rows, *columns), sizes)
        ways = parts * _ways(copies, sizes)
        whole = round_up(count // _ways(lead, sizes), ways)
        flops += whole / ways * iteration_flops(m, n, target)
        block = width * whole / ways * m * n  # each device's share of the stack, before and after the exchange
        for axes in filter(None, (rows, columns)):
            share = 1 - 1 / _ways(axes, sizes)
            found = sent.setdefault((axes, "all-to-all"), [0.0, 0])
            found[0] += 2 * block * share
            found[1] += 2
        if copies:
            found = sent.setdefault((copies, "all-gather"), [0.0, 0])
            found[0] += block * (_ways(copies, sizes) - 1)
            found[1] += 1
    traffic = (Traffic("+".join(axes), kind, _WHAT, size, int(n), False) for (axes, kind), (size, n) in sent.items())
    return MuonWork(flops, tuple(traffic))


def iteration_flops(m: int, n: int, target: Target) -> float:
    """Returns the FLOPs of Muon's iterations on one matrix; those of symmetric products count by their time.

    Example:
        >>> from meshwright.plan.target import parse_target
        >>> iteration_flops(64, 64, parse_target("v5p:2x2x1")) == 4 * (2 + 2 + 2) * 64**3
        True
    """
    fits = m % _TILE == 0 and n % _DEPTH == 0
    half = SYMMETRIC_SHARE.get(target.kind, 1.0) if fits else 1.0
    if target.platform == "gpu" and n >= WIDE * m:  # the Gram matrix iterates, and multiplies the matrix once
        return half * (2 * m * m * n + (4 * ITERATIONS - 3) * 2 * m**3) + 2 * m * m * n
    return ITERATIONS * (half * (2 * m * m * n + 2 * m**3) + 2 * m * m * n)


_Axes = tuple[str, ...]


def _stack_of(leaf: LeafLayout, sizes: Mapping[str, int]) -> tuple[tuple[tuple[int, int], _Axes, _Axes, _Axes], int]:
    """Returns the shape of a leaf's matrices and the axes that split them, and how many it has."""
    entries = [dim_axes(entry) for entry in (*leaf.spec, *[None] * (len(leaf.shape) - len(leaf.spec)))]
    split = [tuple(axis for axis in axes if axis in sizes) for axes in entries]
    *lead, rows, columns = split
    m, n = leaf.shape[-2:]
    if m > n or (m == n and rows > columns):
        m, n, rows, columns = n, m, columns, rows
    return ((m, n), tuple(axis for axes in lead for axis in axes), rows, columns), math.prod(leaf.shape[:-2])


def _ways(axes: Sequence[str], sizes: Mapping[str, int]) -> int:
    return math.prod(sizes[axis] for axis in axes)
