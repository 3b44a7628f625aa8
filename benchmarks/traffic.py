"""Memory traffic of a compiled program, counted in its text: what each kernel reads and writes.

A kernel reads each operand and writes each result once; slices, gathers and updates in place count their part only.
What stays in a cache on the chip is counted too.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.plan.compiled.hlo import Instruction, Program, array_bytes, parse_program, tuple_parts

_FREE = ("parameter", "get-tuple-element", "bitcast", "tuple", "constant", "while", "after-all", "conditional")
_SLICES = ("dynamic-slice", "gather", "slice")
_UPDATES = {"dynamic-update-slice": 1, "scatter": 2}  # in place; the operand that holds the new values


@dataclass(frozen=True)
class Kernel:
    """One kernel of a program, or a copy.

    Args:
        place: the computation that runs it: the entry, or the body of a loop.
        read, written: bytes of each array.
        is_matmul: whether it multiplies matrices.
    """

    place: str
    name: str
    operation: str
    read: tuple[int, ...]
    written: tuple[int, ...]
    is_matmul: bool = False

    @property
    def moved(self) -> int:
        return sum(self.read) + sum(self.written)


def kernels_of(text: str) -> list[Kernel]:
    """Returns the kernels of a program and of the bodies of its loops, each once."""
    program, found = parse_program(text), list[Kernel]()
    for place, instructions in program.computations.items():
        loops = any(caller.opcode == "while" for _, caller in program.callers(place))
        if place != program.entry and not loops:
            continue
        for one in instructions:
            if one.opcode in _FREE:
                continue
            inside = [other for name in one.called for other in program.computations.get(name, [])]
            matmul = "gemm" in one.name or "matmul" in one.attributes or any(x.opcode == "dot" for x in inside)
            read, written = _read(program, place, one), _written(program, place, one)
            found.append(Kernel(place, one.name, one.op_name, read, written, matmul))
    return found


def loop_kernels(text: str) -> list[Kernel]:
    """Returns the kernels of the loop that moves the most bytes in a pass."""
    kernels = kernels_of(text)
    entry = parse_program(text).entry
    total: dict[str, int] = {}
    for kernel in kernels:
        if kernel.place != entry:
            total[kernel.place] = total.get(kernel.place, 0) + kernel.moved
    largest = max(total, key=lambda place: total[place])
    return [kernel for kernel in kernels if kernel.place == largest]


def _read(program: Program, place: str, one: Instruction) -> tuple[int, ...]:
    sizes = []
    inside = program.computations.get(one.called[0], []) if one.opcode == "fusion" and one.called else []
    parameters = {int(other.operands): other for other in inside if other.opcode == "parameter"}
    for number, name in enumerate(one.inputs):
        operand = program.instruction(place, name)
        size = sum(array_bytes(operand.result)) if operand is not None else 0
        uses = _uses(inside, parameters[number]) if number in parameters else []
        if uses and all(use.opcode in _SLICES and is_first for use, is_first in uses):
            size = min(size, sum(sum(array_bytes(use.result)) for use, _ in uses))
        elif uses and all(use.opcode in _UPDATES and is_first for use, is_first in uses):
            size = 0
        sizes.append(size)
    return tuple(sizes)


def _written(program: Program, place: str, one: Instruction) -> tuple[int, ...]:
    parts = tuple_parts(one.result) if one.result.startswith("(") else [one.result]
    sizes = [sum(array_bytes(part)) for part in parts]
    root = program.root(one.called[0]) if one.opcode == "fusion" and one.called else None
    if root is not None:
        names = root.inputs if root.opcode == "tuple" else (root.name,)
        for number, name in enumerate(names):
            source = _source(program, one.called[0], name)
            if source is not None and source.opcode in _UPDATES and number < len(sizes):
                update = program.instruction(one.called[0], source.inputs[_UPDATES[source.opcode]])
                sizes[number] = sum(array_bytes(update.result)) if update is not None else sizes[number]
    return tuple(sizes)


def _uses(inside: list[Instruction], value: Instruction) -> list[tuple[Instruction, bool]]:
    """Returns the instructions that use a value, and whether it is their first operand."""
    found = list[tuple[Instruction, bool]]()
    for one in inside:
        if value.name in one.inputs:
            is_first = one.inputs.index(value.name) == 0
            found += _uses(inside, one) if one.opcode == "bitcast" else [(one, is_first)]
    return found


def _source(program: Program, computation: str, name: str) -> Instruction | None:
    one = program.instruction(computation, name)
    while one is not None and one.opcode == "bitcast":
        one = program.instruction(computation, one.inputs[0])
    return one
