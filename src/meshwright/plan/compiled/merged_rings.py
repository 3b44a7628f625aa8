"""Rings whose matmuls the compiler merged: then their hops have nothing left to hide behind.

XLA for GPUs joins matmuls that share an operand. Of a ring that multiplies each shard as it arrives, that makes one
matmul of all shards at the end, and every hop before it is waited for. Of one that sends sums on, it makes one matmul
at the beginning, whose parts are added between the hops.
"""

from __future__ import annotations

from collections.abc import Mapping

from meshwright.plan.compiled.hlo import Instruction, Program
from meshwright.plan.compiled.matmuls import Matmuls

_PASSES = ("bitcast", "copy", "convert", "get-tuple-element", "reshape", "transpose")


def merged_hops(
    program: Program, matmuls: Matmuls, computation: str, sent: Mapping[str, int], arriving: Mapping[str, int]
) -> dict[int, int]:
    """Returns the hops that a merged matmul is before or behind, and how many matmuls it was made of.

    Args:
        sent: by the name of the instruction that sends, the number of the hop.
        arriving: the same by the name of what arrives.
    """
    arrived = dict(arriving)
    joined: dict[str, tuple[list[int], int]] = {}  # values that were joined: the hops that brought them, and how many
    products: dict[str, tuple[str, int]] = {}  # what is made of a merged matmul, by the matmul
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
            if len(hops) > 1:  # a ring; one alone is sent after a matmul as ever
                found |= dict.fromkeys(hops, count)
        elif made and one.opcode in (*_PASSES, "slice", "fusion", "add"):
            products[one.name] = made[0]
    return found


def _joins(program: Program, instruction: Instruction) -> int:
    """Returns how many values an instruction joins because the compiler, and not the user, wanted it."""
    inside = [instruction]
    if instruction.opcode == "fusion":
        inside = [one for name in instruction.called for one in program.computations.get(name, [])]
    wanted = (one for one in inside if one.opcode == "concatenate" and not one.op_name.endswith("concatenate"))
    return max((len(one.inputs) for one in wanted), default=0)
