"""Parser for the text of a compiled program (XLA HLO), whose instructions are listed in the order they run."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from meshwright.specs import ceil_div

_COMPUTATION = re.compile(r"^(?P<entry>ENTRY )?%?(?P<name>[\w.\-]+) .*\{\s*$")
# A result is an array, whose layout has no spaces, or a tuple, which never contains `) word(`.
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([a-z][\w\-]*)\(")
_END = re.compile(r'^\}(?:, execution_thread="[^"]*")?\s*$')
_NAME = re.compile(r"%([\w.\-]+)")
_ARRAY = re.compile(r"\b(?P<type>[a-z]\w*)\[(?P<dims>[\d,]*)\]")
_CALLED = re.compile(
    r"\b(?:calls|body|to_apply|branch_computations|true_computation|false_computation)="
    r"\{?(?P<names>%?[\w.\-]+(?:, ?%?[\w.\-]+)*)\}?"
)
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_INDEX = re.compile(r"\bindex=(\d+)")


@dataclass(frozen=True)
class Instruction:
    """One line of a computation."""

    name: str
    opcode: str
    result: str
    operands: str
    attributes: str
    is_root: bool = False

    @functools.cached_property
    def called(self) -> list[str]:
        """Names of the computations that it runs: fusions, loops, calls, branches."""
        return [
            name.strip().lstrip("%")
            for match in _CALLED.finditer(self.attributes)
            for name in match["names"].split(",")
        ]

    @functools.cached_property
    def inputs(self) -> tuple[str, ...]:
        """Names of its operands."""
        return tuple(_NAME.findall(self.operands))

    @property
    def op_name(self) -> str:
        """The user's operation that it comes from, from its metadata."""
        found = _OP_NAME.search(self.attributes)
        return found[1].replace("\\'", "'") if found else ""

    @property
    def index(self) -> int:
        """Index of a get-tuple-element, or 0."""
        found = _INDEX.search(self.attributes)
        return int(found[1]) if found else 0


@dataclass
class Program:
    """The computations of a program by name, its entry computation, and the text before them."""

    computations: dict[str, list[Instruction]] = field(default_factory=dict)
    entry: str = ""
    header: str = ""

    def instruction(self, computation: str, name: str) -> Instruction | None:
        """Returns an instruction of a computation by name."""
        return self._names.get(computation, {}).get(name)

    def root(self, computation: str) -> Instruction | None:
        """Returns the root instruction of a computation."""
        instructions = self.computations.get(computation, [])
        return next((one for one in reversed(instructions) if one.is_root), instructions[-1] if instructions else None)

    def callers(self, computation: str) -> list[tuple[str, Instruction]]:
        """Returns the instructions that call a computation, each with its own computation."""
        return self._callers.get(computation, [])

    @functools.cached_property
    def _names(self) -> dict[str, dict[str, Instruction]]:
        return {name: {one.name: one for one in inside} for name, inside in self.computations.items()}

    @functools.cached_property
    def _callers(self) -> dict[str, list[tuple[str, Instruction]]]:
        found: dict[str, list[tuple[str, Instruction]]] = {}
        for name, instructions in self.computations.items():
            for one in instructions:
                for called in one.called:
                    found.setdefault(called, []).append((name, one))
        return found


def parse_program(text: str) -> Program:
    """Parses the text of a compiled program (`compiled.as_text()`)."""
    program = Program()
    current: list[Instruction] | None = None
    header: list[str] = []
    pending = ""

    def finish() -> None:
        nonlocal pending
        one = _instruction(pending) if current is not None and pending else None
        if current is not None and one is not None:
            current.append(one)
        pending = ""

    for line in text.splitlines():
        if current is not None and not _END.match(line):
            # Attributes of custom calls may contain line breaks, also before a closing brace.
            if _INSTRUCTION.match(line):
                finish()
                pending = line
            else:
                pending += f" {line}"
            continue
        finish()
        current = None
        found = _COMPUTATION.match(line) if line.endswith("{") and "->" in line else None
        if found:
            current = program.computations.setdefault(found["name"], [])
            if found["entry"]:
                program.entry = found["name"]
        elif line and not line[0].isspace() and not program.computations:
            header.append(line)
    finish()
    program.header = "\n".join(header)
    return program


def trip_count(program: Program, loop: Instruction) -> int:
    """Returns the trip count of a loop: the compiler's annotation, or the bound of its counter."""
    noted = _TRIPS.search(loop.attributes)
    if noted:
        return int(noted[1])
    condition = re.search(r"\bcondition=%?([\w.\-]+)", loop.attributes)
    instructions = program.computations.get(condition[1], []) if condition else []
    constants = {one.name: one.operands for one in instructions if one.opcode == "constant" and one.operands.isdigit()}
    compares = [one for one in instructions if one.opcode == "compare" and "direction=LT" in one.attributes]
    bounds = [int(constants[name]) for one in compares for name in one.inputs if name in constants]
    return bounds[0] if len(bounds) == 1 else 1


def array_dims(shape: str) -> tuple[int, ...]:
    """Returns the dims of an array, or of the first array of a tuple.

    Example:
        >>> array_dims("bf16[8,16]{1,0:T(8,128)(2,1)}")
        (8, 16)
    """
    found = _ARRAY.search(shape)
    return tuple(int(dim) for dim in found["dims"].split(",") if dim) if found else ()


def array_bytes(shape: str) -> Iterator[int]:
    """Yields the bytes of every array in a shape."""
    for match in _ARRAY.finditer(shape):
        digits = re.search(r"\d+", match["type"])  # f32, bf16, u4, f8e4m3fn; a token has none
        bits = int(digits[0]) if digits else 8 * (match["type"] == "pred")
        elements = math.prod(int(dim) for dim in match["dims"].split(",") if dim)
        yield ceil_div(elements * bits, 8)


def tuple_parts(shape: str) -> list[str]:
    """Splits the shape of a tuple, whose parts may be tuples."""
    parts, depth = [""], 0
    for letter in shape[1:-1]:
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


def group_size(attributes: str) -> int:
    """Returns the number of devices in a replica group, or of pairs of a permute."""
    found = partners(attributes)
    if "source_target_pairs=" in attributes:
        return max(2, len(found))
    return len(found[0]) if found else 1


def partners(attributes: str) -> tuple[tuple[int, ...], ...]:
    """Returns the first replica group, in list, iota or mesh form, or all pairs of a permute.

    Example:
        >>> partners("replica_groups=[2,4]<=[4,2]T(1,0)")
        ((0, 2, 4, 6),)
        >>> partners("replica_groups=mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'a'}")
        ((0, 1),)
    """
    iota = re.search(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", attributes)
    if iota:
        return (tuple(_iota(iota[3], iota[4])[: int(iota[2])].tolist()),)
    listed = re.search(r"replica_groups=\{\{([\d,]+)\}", attributes)
    if listed:
        return (_numbers(listed[1]),)
    mesh = re.search(r"replica_groups=mesh\[([^\]]*)\]([^{]*)\{([^}]*)\}", attributes)
    if mesh:
        return (_mesh_group(mesh[1], mesh[2], mesh[3]),)
    pairs = re.search(r"source_target_pairs=\{(.*?)\}\}", attributes)
    return tuple(_numbers(pair) for pair in re.findall(r"\{([\d,]+)", pairs[1] + "}")) if pairs else ()


def _mesh_group(mesh: str, order: str, axes: str) -> tuple[int, ...]:
    """Returns the first group along axes of a mesh, or parts of them: 'a':(2)4 is a factor of 4 after a factor of 2."""
    found = re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", axes)
    dims: list[int] = []
    group: list[slice | int] = []
    for name, text in re.findall(r"'([^']+)'=(\d+)", mesh):
        done = 1  # the product of the factors so far
        for before, size in sorted((int(before or 1), int(size or text)) for one, before, size in found if one == name):
            dims += [before // done, size]
            group += [0, slice(None)]
            done = before * size
        dims.append(int(text) // done)
        group.append(0)
    places = np.arange(math.prod(dims)).reshape(dims)[tuple(group)].reshape(-1)
    iota = re.search(r"device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\)", order)
    listed = re.search(r"device_ids=\(([\d,]+)\)", order)
    if iota:
        places = _iota(iota[1], iota[2])[places]
    elif listed:
        places = np.array(_numbers(listed[1]), int)[places]
    return tuple(places.tolist())


def _iota(dims: str, permutation: str | None) -> np.ndarray[Any, Any]:
    sizes = _numbers(dims)
    places = np.arange(math.prod(sizes)).reshape(sizes)
    return places.transpose(_numbers(permutation or "") or tuple(range(len(sizes)))).reshape(-1)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(",") if number)


def _instruction(line: str) -> Instruction | None:
    found = _INSTRUCTION.match(line)
    if found is None:
        return None
    begin = found.end()
    close = line.find(")", begin)
    if "(" in line[begin:close]:
        close = _closing(line, begin)
    return Instruction(found[2], found[4], found[3], line[begin:close], line[close + 1 :], bool(found[1]))


def _closing(text: str, begin: int) -> int:
    depth = 1
    for index in range(begin, len(text)):
        if text[index] == "(":
            depth += 1
        elif text[index] == ")":
            depth -= 1
            if depth == 0:
                return index
    return len(text) - 1
