"""What a collective of a compiled program serves: a parameter, its gradient, an activation; and the line it comes from.

Two ways lead there. Our own gathers run under a scope that names the leaf (`meshwright.parallel.fsdp`), and scopes
are kept in the metadata of a program, also of its backward pass. In anyone's program, the value that is sent is
followed back through what does not change it, out of fusions and loops, to the argument of the program that it was.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

from meshwright.plan.compiled.hlo import Instruction, Program, array_bytes
from meshwright.plan.compiled.source_lines import SourceLines

# What hands a value on: as it is, in another dtype or layout, a part of it, or from another device.
_PASSES = frozenset((
    "convert", "copy", "bitcast", "bitcast-convert", "reshape", "transpose", "slice", "dynamic-slice", "pad",
    "copy-start", "copy-done", "reverse", "all-gather", "all-gather-start", "all-gather-done", "collective-permute",
    "collective-permute-start", "collective-permute-done", "async-done", "call-done", "reduce-precision",
    "slice-start", "slice-done"
))  # fmt: skip
_JOINS = re.compile(r'custom_call_target="(?:ConcatBitcast|AsyncCollectiveStart)"')
_CALLS = ("fusion", "call", "async-start", "call-start")
_REDUCES = ("all-reduce", "reduce-scatter", "all-to-all")
_SCOPE = re.compile(r"\bparams\[([^\]]*)\]")
_PLAIN = frozenset((
    "shard_map", "while", "body", "cond", "closed_call", "checkpoint", "rematted_computation", "remat", "scan",
    "pjit", "core_call", "custom_vjp_call", "custom_jvp_call", "custom_vjp", "custom_jvp", "jvp", "transpose",
    "vmap"
))  # fmt: skip
_TOKEN = re.compile(r"\['([^']*)'\]|\[([^\]]*)\]|([^.\[\]]+)")
_FEW = 1024  # bytes
_MAX_STEPS = 400


@dataclass(frozen=True)
class Origin:
    """Where a collective comes from.

    Args:
        source: the operation of the program, with the transformations around it.
        serves: what it sends, in words: `params/layers/wq`, its gradient, an activation.
        line: file and line, without the folders of the machine.
    """

    source: str
    serves: str
    line: str


@dataclass
class Origins:
    """Answers for one program; what was read once is kept."""

    program: Program

    @functools.cached_property
    def lines(self) -> SourceLines:
        return SourceLines(self.program.header)

    def find(self, computation: str, instruction: Instruction, core: Instruction, kind: str) -> Origin:
        """Returns where a collective comes from; `core` is the collective itself where `instruction` wraps it."""
        made_of = [instruction, core, *self._adds(core)]
        source = next((one.op_name for one in made_of if one.op_name), "")
        place = next((place for place in map(self.lines.find, made_of) if place is not None), None)
        serves = self._serves(computation, instruction, core, kind, source, place.function if place else "")
        return Origin(source, serves, str(place) if place else "")

    def _serves(
        self,
        computation: str,
        instruction: Instruction,
        core: Instruction,
        kind: str,
        source: str,
        function: str,
    ) -> str:
        named = _leaves(source) or _leaves(*self._neighbours(computation, instruction))
        if not named:
            followed = (self._follow(computation, name) for name in instruction.inputs)
            arguments = [
                argument_name(one.op_name) for one in followed if one is not None and one.opcode == "parameter"
            ]
            named = list(dict.fromkeys(filter(None, arguments)))
        if named:
            of = f"{named[0]} and {len(named) - 1} more" if len(named) > 1 else named[0]
            return f"gradient of {of}" if kind in _REDUCES else of
        where = last_scope(source) or function
        if kind in _REDUCES and "transpose(" in source:
            what = "a gradient"
        elif sum(array_bytes(core.result)) <= _FEW:
            what = "a few numbers"
        else:
            what = "an activation"
        return f"{what} of {where}" if where else what

    def _adds(self, core: Instruction) -> list[Instruction]:
        """Returns the computation that a sum adds with: its metadata is kept where that of the collective is lost."""
        return [one for name in core.called for one in self.program.computations.get(name, []) if one.op_name]

    def _neighbours(self, computation: str, instruction: Instruction) -> list[str]:
        """Returns the operations that make and use what is sent: casts of a gradient have its scope as well."""
        if instruction.op_name:
            return []
        makers = (self.program.instruction(computation, name) for name in instruction.inputs)
        found = [one.op_name for one in makers if one is not None]
        reached = {instruction.name}
        for one in self.program.computations.get(computation, []):
            if reached.intersection(one.inputs):
                found.append(one.op_name)
                if one.opcode in ("get-tuple-element", "bitcast", "dynamic-slice"):
                    reached.add(one.name)
        return found

    def _follow(self, computation: str, name: str) -> Instruction | None:
        """Returns the instruction that made a value: an argument of the whole program, or the last that changed it."""
        path: tuple[int, ...] = ()
        inside: list[tuple[str, Instruction]] = []
        for _ in range(_MAX_STEPS):
            one = self.program.instruction(computation, name)
            if one is None:
                return None
            if one.opcode == "parameter":
                if computation == self.program.entry:
                    return one
                callers = self.program.callers(computation)
                if not inside and not callers:
                    return None
                computation, caller = inside.pop() if inside else callers[0]
                place = int(one.operands) if caller.opcode in _CALLS else 0
                if caller.opcode not in (*_CALLS, "while") or place >= len(caller.inputs):
                    return None
                name = caller.inputs[place]
            elif one.opcode == "get-tuple-element":
                path, name = (one.index, *path), one.inputs[0]
            elif one.opcode == "tuple" and path and path[0] < len(one.inputs):
                name, path = one.inputs[path[0]], path[1:]
            elif one.opcode == "while" and path:
                computation, name = self._out_of_loop(computation, one, path[0])
            elif one.opcode == "optimization-barrier":
                # Of several operands it makes a tuple.
                place = path[0] if len(one.inputs) > 1 and path else 0
                name, path = one.inputs[place], path[1:] if len(one.inputs) > 1 else path
            elif one.opcode in _CALLS and one.called:
                root = self.program.root(one.called[0])
                if root is None:
                    return one
                inside.append((computation, one))
                computation, name = one.called[0], root.name
            elif (one.opcode in _PASSES or _JOINS.search(one.attributes)) and one.inputs:
                name, path = one.inputs[0], ()
            else:
                return one
        return None

    def _out_of_loop(self, computation: str, loop: Instruction, index: int) -> tuple[str, str]:
        """Returns where a value that a loop returns comes from: from before it, where every turn hands it on."""
        body = re.search(r"\bbody=%?([\w.\-]+)", loop.attributes)
        root = self.program.root(body[1]) if body else None
        if body and root is not None and root.opcode == "tuple" and index < len(root.inputs):
            last = self.program.instruction(body[1], root.inputs[index])
            if last is None or last.opcode != "get-tuple-element" or last.index != index:
                return body[1], root.name
        return computation, loop.inputs[0]


def _leaves(*sources: str) -> list[str]:
    return [f"params/{name}" for name in dict.fromkeys(name for source in sources for name in _SCOPE.findall(source))]


def argument_name(name: str) -> str:
    """Returns the name of an argument as paths of our trees are written.

    Example:
        >>> argument_name("state.params['layers']['wq']"), argument_name("x")
        ('params/layers/wq', 'x')
    """
    parts = ["".join(found) for found in _TOKEN.findall(name)]
    return "/".join(parts[1:] if parts[:1] == ["state"] and len(parts) > 1 else parts)


def last_scope(source: str) -> str:
    """Returns the last scope of an operation's name that a person gave it.

    Where several operations were made one, theirs stand in brackets at the end: `path/(a:b)`.

    Example:
        >>> last_scope("jit(step)/shard_map/transpose(jvp(mlp))/while/body/ppermute")
        'mlp'
    """
    kept = ""
    for token in source.partition("/(")[0].split("/")[: None if "/(" in source else -1]:
        if re.match(r"p?jit\(", token):
            continue
        inner = re.sub(r"[\w<>.]+\(|[()]", "", token)
        if inner and inner not in _PLAIN:
            kept = inner
    return kept
