"""Number and FLOPs of the matmuls in a compiled program.

Matmuls appear as dots, as convolutions (TPUs, where a batched dot is a dilated convolution) and as library calls
(GPUs), also inside fusions, loops and other called computations.

XLA for GPUs merges matmuls that share an operand. A ring that multiplies each shard as it arrives then becomes one
matmul after all hops, and a ring that passes on partial sums becomes one matmul before all hops; in both, the hops
overlap with nothing. `merged_hops` finds such rings.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from meshwright.plan.compiled.hlo import Instruction, Program, array_dims, trip_count

_LIBRARY = re.compile(r'custom_call_target="[^"]*(?:gemm|matmul|cublas|dot)[^"]*"', re.IGNORECASE)
# `meshwright.parallel.kernels.matmul_kernel`, which writes its product into a larger array.
_WRITES = re.compile(r'custom_call_target="mosaic_gpu[^"]*".*op_name="[^"]*/write_product/')
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_NO_ESTIMATE = 2**62
_WINDOW = re.compile(r"\bwindow=\{([^}]*)\}")
# Operations that pass a value through.
_PASSES = ("bitcast", "copy", "convert", "get-tuple-element", "reshape", "transpose")
_LABELS = re.compile(r"\bdim_labels=(\w+)_(\w+)->(\w+)")


@dataclass
class Matmuls:
    """Counts the matmuls of a program, memoized by computation."""

    program: Program
    _known: dict[str, tuple[int, float]] = field(default_factory=dict)

    def count(self, instruction: Instruction) -> int:
        """Returns the number of matmuls in an instruction and all that it calls; a loop body counts once."""
        if is_matmul(instruction):
            return 1
        return sum(self._inside(name)[0] for name in instruction.called)

    def flops(self, computation: str, instruction: Instruction) -> float:
        """Returns the FLOPs of those matmuls; a loop body counts with its trips."""
        if is_matmul(instruction):
            return self._of_one(computation, instruction)
        often = trip_count(self.program, instruction) if instruction.opcode == "while" else 1
        return often * sum(self._inside(name)[1] for name in instruction.called)

    def _inside(self, computation: str) -> tuple[int, float]:
        if computation not in self._known:
            self._known[computation] = (0, 0.0)  # ends recursion
            inside = self.program.computations.get(computation, [])
            flops = math.fsum(self.flops(computation, one) for one in inside)
            self._known[computation] = sum(self.count(one) for one in inside), flops
        return self._known[computation]

    def _of_one(self, computation: str, instruction: Instruction) -> float:
        shapes = []
        for name in instruction.inputs[:2]:
            known = self.program.instruction(computation, name)
            shapes.append(array_dims(known.result) if known is not None else ())
        if len(shapes) < 2:
            return 0.0
        left, right = shapes
        out = array_dims(instruction.result)
        if _WRITES.search(instruction.attributes):
            return 2.0 * left[0] * math.prod(right)
        if instruction.opcode == "convolution":
            return _convolution(instruction.attributes, left, right, out)
        contracted = _numbers(r"\blhs_contracting_dims=\{([\d,]*)\}", instruction.attributes)
        if contracted is None:  # library calls keep them in their backend config
            contracted = _numbers(r'"lhs_contracting_dimensions":\[([^\]]*)\]', instruction.attributes)
        if contracted is None:
            contracted = (len(left) - 1,)
        return 2.0 * math.prod(out) * math.prod(left[dim] for dim in contracted if dim < len(left))


def estimated_cycles(instruction: Instruction) -> int:
    """Returns the compiler's cycle estimate of an instruction (TPUs), or 0."""
    found = _CYCLES.search(instruction.attributes)
    return int(found[1]) if found and int(found[1]) < _NO_ESTIMATE else 0


def merged_hops(
    program: Program, matmuls: Matmuls, computation: str, sent: Mapping[str, int], arriving: Mapping[str, int]
) -> dict[int, int]:
    """Returns the hops that precede or follow a merged matmul, with the number of matmuls merged into it.

    Args:
        sent: index of each hop by the name of its start.
        arriving: index of each hop by the name of its result.
    """
    arrived = dict(arriving)
    joined: dict[str, tuple[list[int], int]] = {}  # concatenated values: the hops they came from, and their number
    products: dict[str, tuple[str, int]] = {}  # values derived from a merged matmul
    fed: dict[str, list[int]] = {}
    found: dict[int, int] = {}
    for one in program.computations.get(computation, []):
        brought = [arrived[name] for name in one.inputs if name in arrived]
        parts = [joined[name] for name in one.inputs if name in joined]
        made = [products[name] for name in one.inputs if name in products]
        count = _joins(program, one)
        if count:
            parts.append((brought, count))
            joined[one.name] = parts[-1]
        elif brought and one.opcode in _PASSES:
            arrived[one.name] = brought[0]
        elif parts and one.opcode in _PASSES:
            joined[one.name] = parts[0]
        if matmuls.count(one):
            for hops, count in parts:
                found |= dict.fromkeys(hops, count)
                products[one.name] = (one.name, count)
        elif one.name in sent and made:
            matmul, count = made[0]
            hops = fed.setdefault(matmul, [])
            hops.append(sent[one.name])
            if len(hops) > 1:  # a single hop after a matmul is not a ring
                found |= dict.fromkeys(hops, count)
        elif made and one.opcode in (*_PASSES, "slice", "fusion", "add"):
            products[one.name] = made[0]
    return found


def is_matmul(instruction: Instruction) -> bool:
    """Returns whether an instruction is a matmul, as an operation or a library call."""
    if instruction.opcode in ("dot", "convolution", "scaled-dot"):
        return True
    known = _LIBRARY.search(instruction.attributes) or _WRITES.search(instruction.attributes)
    return instruction.opcode == "custom-call" and known is not None


def _numbers(pattern: str, text: str) -> tuple[int, ...] | None:
    found = re.search(pattern, text)
    return tuple(int(number) for number in re.findall(r"\d+", found[1])) if found else None


def _convolution(attributes: str, left: tuple[int, ...], right: tuple[int, ...], out: tuple[int, ...]) -> float:
    labels = _LABELS.search(attributes)
    if labels is None or len(labels[1]) != len(left) or len(labels[2]) != len(right):
        return 0.0
    window = _WINDOW.search(attributes)
    sizes = dict(part.split("=") for part in window[1].split() if "=" in part) if window else {}
    rows, features = left[labels[1].index("b")], right[labels[2].index("o")]
    groups = re.search(r"\bbatch_group_count=(\d+)", attributes)
    total = 2.0 * rows / (int(groups[1]) if groups else 1) * features * right[labels[2].index("i")]
    spatial = [letter for letter in labels[1] if letter.isdigit()]
    for place, letter in enumerate(spatial):
        stride, dilated, holes = (
            int(sizes[name].split("x")[place]) if name in sizes else 1
            for name in ("stride", "rhs_dilate", "lhs_dilate")
        )
        before = int((sizes["pad"].split("x")[place].split("_"))[0]) if "pad" in sizes else 0
        extents = (left[labels[1].index(letter)], right[labels[2].index(letter)], out[labels[3].index(letter)])
        total *= _pairs(*extents, stride, dilated, holes, before)
    return total


@functools.lru_cache(maxsize=1024)
def _pairs(size: int, window: int, out: int, stride: int, dilated: int, holes: int, before: int) -> int:
    """Returns the number of window positions over all outputs that are not padding or holes."""
    if window == 1 and stride == 1 and holes == 1 and before == 0:
        return min(out, size)
    places = np.arange(out)[:, None] * stride + np.arange(window)[None, :] * dilated - before
    return int(((places >= 0) & (places % holes == 0) & (places // holes < size)).sum())


def _joins(program: Program, instruction: Instruction) -> int:
    """Returns the number of values in a concatenation that the compiler inserted, or 0."""
    inside = [instruction]
    if instruction.opcode == "fusion":
        inside = [one for name in instruction.called for one in program.computations.get(name, [])]
    wanted = (one for one in inside if one.opcode == "concatenate" and not one.op_name.endswith("concatenate"))
    return max((len(one.inputs) for one in wanted), default=0)
