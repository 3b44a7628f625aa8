"""What a step in fp8 multiplies in fp8, and the bytes that its casts read and write."""

from __future__ import annotations

import math
from collections.abc import Container
from dataclasses import dataclass
from typing import Any

from meshwright.hardware.flops import Flops
from meshwright.train.fp8_scaling import Fp8
from meshwright.tree import named_leaves

# Measured on one H200: [32768, 2048] is read in 16 bits and written twice in fp8, once transposed, in 0.102 ms: 2.6 of
# 4.8 TB/s (benchmarks/results/fp8_h200.md).
CAST_SHARE = 0.55
# Projections that multiply the same input as another, which is cast once for both.
_SHARES_INPUT = ("k", "v", "up", "o_gate")


@dataclass(frozen=True)
class Fp8Matrices:
    """A stack of matrices that are multiplied in fp8.

    Args:
        count: number of matrices.
        rows, columns: input and output features.
        shares_input: whether another matrix multiplies the same input.
        learns: whether they have gradients.
    """

    count: int
    rows: int
    columns: int
    shares_input: bool
    learns: bool

    @property
    def size(self) -> int:
        return self.count * self.rows * self.columns


@dataclass(frozen=True)
class Fp8Work:
    """FLOPs in fp8 over all devices; bytes that the casts of one device read and write, and their number."""

    flops: int = 0
    cast_bytes: float = 0.0
    casts: int = 0


def fp8_matrices(params: Any, fp8: Fp8 | None, frozen: Container[str]) -> tuple[Fp8Matrices, ...]:
    """Returns the matrices that a step multiplies in fp8, of parameters or their shapes.

    Example:
        >>> import jax
        >>> params = {"up": jax.ShapeDtypeStruct((4, 512, 1024), "float32")}
        >>> fp8_matrices(params, Fp8(), ())[0].size == 4 * 512 * 1024
        True
    """
    found = []
    chosen = () if fp8 is None else fp8.names(params)
    for leaf in named_leaves(params):
        if leaf.name in chosen:
            *stacked, rows, columns = leaf.value.shape
            shares_input = leaf.name.rpartition("/")[2] in _SHARES_INPUT
            found.append(Fp8Matrices(math.prod(stacked), rows, columns, shares_input, leaf.name not in frozen))
    return tuple(found)


def fp8_work(
    matrices: tuple[Fp8Matrices, ...],
    fp8: Fp8,
    flops: Flops,
    *,
    tokens: int,
    devices: int,
    tp: int,
    stages: int,
    parts: int,
) -> Fp8Work:
    """Returns the fp8 part of a step.

    Args:
        tokens: tokens of a step, over all devices.
        devices: all devices; matmuls are split over them.
        tp, stages: devices over which each matrix is split, and the layers.
        parts: minibatches and microbatches of a step. Stages cast the weights for each; others once per step.
    """
    total = sum((6 if each.learns else 4) * each.size for each in matrices) * tokens
    # Recomputation multiplies again, unless a policy saves the products.
    again = min(flops.recomputed, 2 * sum(each.size for each in matrices) * tokens)
    inputs = sum(each.count * each.rows for each in matrices if not each.shares_input) * tokens
    gradients = sum(each.count * each.columns for each in matrices) * tokens
    weights = sum(each.size for each in matrices) * (parts if stages > 1 else 1)
    moved = 4 * ((inputs + gradients) / devices + weights / (tp * stages))  # 16 bits are read, twice 8 written
    if fp8.scaling == "current":  # another pass takes the largest magnitudes
        moved += 2 * (inputs + gradients) / devices
    casts = sum(each.count * (2 if each.shares_input else 3) for each in matrices)
    return Fp8Work(min(total + again, flops.matmul - flops.attention), moved, round(casts * parts / stages))
