"""Live bytes at every instruction of a compiled program, by part, from its schedule and the sizes of its buffers.

A buffer lives from the instruction that writes it to the last that reads it. Loops, tuples and in-place updates share
the buffers of their operands, and a donated argument is overwritten by its result. Memory other than the device's main
memory (vector memory, host memory) does not count. The compiler packs buffers into one heap, so its own peak is higher
by fragmentation, or lower if it shares buffers in ways that the text does not show.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from meshwright.plan.compiled.hlo import Instruction, Program, array_dims, tuple_parts
from meshwright.specs import ceil_div

Tree: TypeAlias = "list[Tree] | frozenset[int]"
"""The buffers of a value: one tree per part of a tuple, or the ids of an array's buffers."""

_SHAPE = re.compile(r"^(?P<type>[a-z]\w*)\[(?P<dims>[\d,]*)\](?:\{(?P<order>[\d,]*)(?::(?P<rest>.*))?\})?$")
_TILE = re.compile(r"T\(([\d,]+)\)")
_DONATED = re.compile(r"\{(\d*)\}: \((\d+), \{\}")
_ALIASED = re.compile(r"output_to_operand_aliasing=\{(.*?\))\}")
_SHARES = re.compile(r'"aliasing_operands":\{"lists":\[(.*?)\]\}[,}]')
_PASSES = frozenset(("bitcast", "tuple", "get-tuple-element", "while", "optimization-barrier", "after-all"))
_JOINS = re.compile(r'custom_call_target="(?:ConcatBitcast|AsyncCollectiveStart|Sharding|SPMDFullToShardShape)"')
_ELEMENTWISE = frozenset(
    ("add", "subtract", "multiply", "divide", "negate", "select", "maximum", "minimum", "and", "or")
)
PARTS = ("parameters", "optimizer", "gradients", "gathered weights", "narrow weights", "activations", "temporaries")


@dataclass(frozen=True)
class MemoryTrace:
    """Live bytes by part at each instruction, keyed by computation and instruction name."""

    live: Mapping[tuple[str, str], Mapping[str, int]]

    @property
    def peak(self) -> Mapping[str, int]:
        """The live bytes where their sum is largest."""
        return max(self.live.values(), key=lambda parts: sum(parts.values()), default={})


def trace_memory(program: Program) -> MemoryTrace:
    """Returns the live bytes of a scheduled program.

    Example:
        >>> from meshwright.plan.compiled.hlo import parse_program
        >>> text = '''HloModule m, is_scheduled=true
        ... ENTRY %main (x: f32[256]) -> f32[256] {
        ...   %x = f32[256]{0} parameter(0), metadata={op_name="state.params['w']"}
        ...   %y = f32[256]{0} exponential(%x)
        ...   ROOT %z = f32[256]{0} cosine(%y)
        ... }'''
        >>> trace_memory(parse_program(text)).peak
        {'parameters': 1024, 'temporaries': 2048}
    """
    walker = _Walker(program)
    walker.run()
    return MemoryTrace(walker.live)


@dataclass
class _Buffer:
    size: int
    part: str
    first: int
    shape: str
    source: str
    last: int = -1

    @property
    def is_forward(self) -> bool:
        return not is_backward(self.source)


@dataclass
class _Frame:
    """One run of a computation: its own buffers, and the runs that its loops and calls start, by instruction."""

    computation: str
    mine: set[int] = field(default_factory=set)
    inner: dict[int, list[_Frame]] = field(default_factory=dict)


@dataclass
class _Walker:
    program: Program
    live: dict[tuple[str, str], dict[str, int]] = field(default_factory=dict)
    buffers: list[_Buffer] = field(default_factory=list)
    begin: int = 0
    trained: set[tuple[int, ...]] = field(default_factory=set)
    most: int = 0
    held: tuple[_Buffer, ...] = ()

    def run(self) -> None:
        inside = self.program.computations.get(self.program.entry, [])
        donated = {int(out or 0): int(arg) for out, arg in _DONATED.findall(self.program.header)}
        arguments = {
            int(one.operands): self._new(one, one.result, -1, _argument_part(one.op_name))
            for one in inside
            if one.opcode == "parameter"
        }
        num_arguments = len(self.buffers)
        self.trained = {array_dims(one.shape) for one in self.buffers if one.part == "parameters"}
        kept = {out: arguments[arg] for out, arg in donated.items() if arg in arguments}
        frame, _ = self._assign(self.program.entry, arguments, kept)
        self._sweep(frame, self.buffers[:num_arguments])

    def _assign(self, computation: str, arguments: Mapping[int, Tree], kept: Mapping[int, Tree]) -> tuple[_Frame, Tree]:
        """Finds the buffers of a computation and their lifetimes; its results overwrite `kept`, by index."""
        inside = self.program.computations.get(computation, [])
        frame = _Frame(computation)
        values: dict[str, Tree] = {}
        mine: set[int] = set()
        around, self.begin = self.begin, len(self.buffers)
        for at, one in enumerate(inside):
            operands = [values[name] for name in one.inputs if name in values]
            before = len(self.buffers)
            values[one.name] = self._value(one, at, operands, arguments)
            mine.update(range(before, len(self.buffers)))
            if one.opcode not in _PASSES or one.opcode == "while":
                for place in (place for tree in operands for place in _leaves(tree) if place in mine):
                    self.buffers[place].last = at
            called = [name for name in one.called if name in self.program.computations]
            if one.opcode in ("while", "call", "conditional") and operands and called:
                values[one.name] = self._run(frame, at, one.opcode, called, operands)
        self.begin = around
        root = self.program.root(computation)
        result: Tree = values.get(root.name, frozenset()) if root is not None else frozenset()
        for index, tree in enumerate(result if isinstance(result, list) else [result]):
            for place in (place for place in _leaves(tree) if place in mine):
                self.buffers[place].last = len(inside)
                if index in kept:  # it takes no memory of its own
                    self._name_by_writer(kept[index], self.buffers[place].is_forward)
                    self.buffers[place].size = 0
        for place in mine:
            known = self.buffers[place]
            if known.part != "temporaries":
                continue
            if "jvp(" not in known.source.replace("transpose(jvp(", "") and self._sums_gradients(known):
                known.part = "gradients"
            elif known.is_forward and 0 <= known.last < len(inside) and is_backward(inside[known.last].op_name):
                known.part = "activations"  # the forward pass writes it, and the backward pass reads it
        frame.mine = mine
        return frame, result

    def _run(self, frame: _Frame, at: int, opcode: str, called: Sequence[str], operands: list[Tree]) -> Tree:
        if opcode == "while":  # it updates the values that it carries in place
            carried = operands[0]
            kept = dict(enumerate(carried)) if isinstance(carried, list) else {0: carried}
            frame.inner[at] = [self._assign(called[-1], {0: carried}, kept)[0]]
            return carried
        if opcode == "call":
            runs = [self._assign(name, dict(enumerate(operands)), {}) for name in called]
        else:
            runs = [self._assign(name, {0: operand}, {}) for name, operand in zip(called, operands[1:], strict=False)]
        frame.inner[at] = [inner for inner, _ in runs]
        return runs[0][1] if runs else frozenset()

    def _name_by_writer(self, carried: Tree, is_forward: bool) -> None:
        """Names a buffer that a loop carries by what the loop writes to it."""
        for place in _leaves(carried):
            known = self.buffers[place]
            if known.part == "temporaries":
                known.part = "gradients" if not is_forward or self._sums_gradients(known) else "activations"

    def _sums_gradients(self, known: _Buffer) -> bool:
        """Whether a buffer is in float32 and has the dims of a parameter, or those of one that is gathered."""
        dims = array_dims(known.shape)
        return known.shape.startswith("f32") and any(
            len(dims) == len(other) > 1
            and not any(mine % size for mine, size in zip(dims, other, strict=True))
            and sum(mine != size for mine, size in zip(dims, other, strict=True)) < 2
            for other in self.trained
        )

    def _sweep(self, frame: _Frame, outer: Sequence[_Buffer]) -> None:
        """Records the live bytes at each instruction, beside the buffers of the computations around it."""
        begins: dict[int, list[_Buffer]] = {}
        ends: dict[int, list[_Buffer]] = {}
        for known in (self.buffers[place] for place in sorted(frame.mine) if self.buffers[place].size):
            begins.setdefault(known.first, []).append(known)
            ends.setdefault(max(known.last, known.first), []).append(known)
        alive = {id(known): known for known in outer}
        now: dict[str, int] = {}
        for known in outer:
            now[known.part] = now.get(known.part, 0) + known.size
        for at, one in enumerate(self.program.computations.get(frame.computation, [])):
            for known in begins.get(at, ()):
                now[known.part] = now.get(known.part, 0) + known.size
                alive[id(known)] = known
            self.live[frame.computation, one.name] = {part: size for part, size in now.items() if size > 0}
            if sum(now.values()) > self.most:
                self.most, self.held = sum(now.values()), tuple(alive.values())
            for inner in frame.inner.get(at, ()):
                self._sweep(inner, tuple(alive.values()))
            for known in ends.get(at, ()):
                now[known.part] -= known.size
                del alive[id(known)]

    def _value(self, one: Instruction, at: int, operands: list[Tree], arguments: Mapping[int, Tree]) -> Tree:
        if one.opcode == "parameter":
            return arguments.get(int(one.operands), frozenset()) if one.operands.isdigit() else frozenset()
        if one.opcode == "constant":
            return frozenset()
        if one.opcode == "get-tuple-element":
            tree = operands[0] if operands else frozenset()
            return tree[one.index] if isinstance(tree, list) and one.index < len(tree) else frozenset(_leaves(tree))
        if one.opcode == "tuple":
            return list(operands)
        if one.opcode in _PASSES:
            return operands[0] if operands else frozenset()
        if one.opcode.endswith(("-done", "-update")) or _JOINS.search(one.attributes):
            return self._arrived(one, operands)
        if one.opcode.endswith("-start") and one.result.startswith("("):
            return self._started(one, at, operands)
        return self._new(one, one.result, at, _part(one), self._shared(one, operands, at))

    def _arrived(self, one: Instruction, operands: list[Tree]) -> Tree:
        tree = operands[0] if operands else frozenset()
        if isinstance(tree, list) and len(tree) > 1 and one.opcode.endswith("-done"):
            # The first part of a start holds its operands, or, of a copy, its result.
            found = tree[0] if one.opcode == "copy-done" else tree[1]
            return found if isinstance(found, list) == one.result.startswith("(") else frozenset(_leaves(found))
        return tree if one.result.startswith("(") else frozenset(_leaves(tree))

    def _started(self, one: Instruction, at: int, operands: list[Tree]) -> Tree:
        parts = tuple_parts(one.result)
        if one.opcode == "all-reduce-start":
            return self._new(one, one.result, at, _part(one))
        new = 0 if one.opcode == "copy-start" else 1
        sent: Tree = [*operands]
        tree: list[Tree] = [
            self._new(one, part.strip(), at, _part(one)) if index == new else sent if index == 1 - new else frozenset()
            for index, part in enumerate(parts)
        ]
        return tree

    def _shared(self, one: Instruction, operands: list[Tree], at: int) -> dict[int, Tree]:
        """Returns the operands whose buffers an instruction's results overwrite, by index of the result."""
        if one.opcode == "dynamic-update-slice":
            return {0: operands[0]} if operands else {}
        count = len(one.inputs)
        named = _SHARES.search(one.attributes)
        found: dict[int, Tree] = {}
        if named:
            by_name = list(one.inputs)
            for group in re.findall(r"\[([^\]]*)\]", named[1]):
                places = [int(place) for place in re.findall(r"\d+", group)]
                taken = [place for place in places if place < count]
                for out in (place - count for place in places if place >= count):
                    if taken and len(operands) == len(by_name):
                        found[out] = operands[taken[0]]
            if found:
                return found
        if one.opcode == "fusion":
            return self._updated(one, operands)
        # Matmuls that add to an operand, and kernels that update one.
        aliased = _ALIASED.search(one.attributes) if len(operands) == count else None
        pairs = _DONATED.findall(aliased[1]) if aliased else []
        return {int(out or 0): operands[int(place)] for out, place in pairs if int(place) < count}

    def _updated(self, one: Instruction, operands: list[Tree]) -> dict[int, Tree]:
        """Returns the operands that a fusion updates in place."""
        if len(operands) != len(one.inputs):
            return {}
        found: dict[int, Tree] = {}
        for name in one.called:
            inside = {inner.name: inner for inner in self.program.computations.get(name, [])}
            root = self.program.root(name)
            if root is None:
                continue
            roots = [inside[key] for key in root.inputs if key in inside] if root.opcode == "tuple" else [root]
            for out, inner in enumerate(roots):
                while inner.opcode in ("bitcast", "copy", "dynamic-update-slice") and inner.inputs:
                    source = inside.get(inner.inputs[0])
                    if source is None:
                        break
                    is_update = inner.opcode == "dynamic-update-slice"
                    inner = source
                    if is_update and inner.opcode == "parameter" and int(inner.operands) < len(operands):
                        found[out] = operands[int(inner.operands)]
        return found

    def _new(self, one: Instruction, shape: str, at: int, part: str, shared: Mapping[int, Tree] | None = None) -> Tree:
        if shape.startswith("("):
            parts = tuple_parts(shape)
            return [
                self._new(one, inner.strip(), at, part, {0: shared[index]} if shared and index in shared else None)
                for index, inner in enumerate(parts)
            ]
        if shared and 0 in shared:
            taken = frozenset(_leaves(shared[0]))
            self._name_by_writer(
                frozenset(place for place in taken if place < self.begin), not is_backward(one.op_name)
            )
            return taken
        size = buffer_bytes(shape)
        if not size:
            return frozenset()
        self.buffers.append(_Buffer(size, part, at, shape.partition("{")[0], one.op_name))
        return frozenset((len(self.buffers) - 1,))


def buffer_bytes(shape: str) -> int:
    """Returns the bytes of an array in main memory, padded to its tiles; 0 for other memories.

    Example:
        >>> buffer_bytes("bf16[8,100]{1,0:T(8,128)(2,1)}"), buffer_bytes("f32[8]{0:T(128)S(1)}")
        (2048, 0)
    """
    found = _SHAPE.match(shape)
    if found is None:
        return 0
    rest = found["rest"] or ""
    if re.search(r"S\([1-9]", rest):
        return 0
    digits = re.search(r"\d+", found["type"])
    bits = int(digits[0]) if digits else 8 * (found["type"] == "pred")
    dims = [int(dim) for dim in found["dims"].split(",") if dim]
    order = [int(dim) for dim in (found["order"] or "").split(",") if dim]
    tile = _TILE.search(rest)
    if tile and order:
        for place, length in zip(order, reversed([int(size) for size in tile[1].split(",")]), strict=False):
            dims[place] = ceil_div(dims[place], length) * length
    return ceil_div(math.prod(dims) * bits, 8)


def _leaves(tree: Tree) -> Iterator[int]:
    if isinstance(tree, frozenset):
        yield from sorted(tree)
    else:
        for part in tree:
            yield from _leaves(part)


def _argument_part(name: str) -> str:
    if "params" in name and "opt_state" not in name:
        return "parameters"
    return "optimizer" if "opt_state" in name else "bookkeeping"


def _part(one: Instruction) -> str:
    name = one.op_name
    if "params[" in name:
        if is_backward(name):
            return "gradients"
        return "narrow weights" if one.opcode == "convert" else "gathered weights"
    return "temporaries"


def is_backward(name: str) -> bool:
    """Whether an operation belongs to the backward pass, by its name."""
    return "transpose(" in name
