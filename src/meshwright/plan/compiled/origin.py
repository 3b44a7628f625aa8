"""Origin of a collective: the parameter, gradient or activation that it sends, and its source line.

Gathers in `meshwright.parallel.fsdp` run under a scope that names the leaf, which the program's metadata keeps, also in
the backward pass. In other programs the sent value is traced back through fusions and loops to a program argument.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass, field

from meshwright.parallel.pipeline.schedule import MESSAGES_SCOPE, STAGES_SCOPE
from meshwright.plan.compiled.hlo import Instruction, Program, array_bytes

# Operations that pass a value on: unchanged, cast, rearranged, sliced, or from another device.
_PASSES = frozenset((
    "convert", "copy", "bitcast", "bitcast-convert", "reshape", "transpose", "slice", "dynamic-slice", "pad",
    "copy-start", "copy-done", "reverse", "all-gather", "all-gather-start", "all-gather-done", "collective-permute",
    "collective-permute-start", "collective-permute-done", "async-done", "call-done", "reduce-precision",
    "slice-start", "slice-done"
))  # fmt: skip
_JOINS = re.compile(r'custom_call_target="(?:ConcatBitcast|AsyncCollectiveStart)"')
_CALLS = ("fusion", "call", "async-start", "call-start")
_REDUCES = ("all-reduce", "reduce-scatter", "all-to-all")
_SCOPE = re.compile(r"\bparams\[([^\]:]*)\]")
_PLAIN = frozenset((
    "shard_map", "while", "body", "cond", "closed_call", "checkpoint", "rematted_computation", "remat", "scan",
    "pjit", "core_call", "custom_vjp_call", "custom_jvp_call", "custom_vjp", "custom_jvp", "jvp", "transpose",
    "vmap"
))  # fmt: skip
_TOKEN = re.compile(r"\['([^']*)'\]|\[([^\]]*)\]|([^.\[\]]+)")
_FEW = 1024  # bytes
# Functions of a train step that sum over devices outside the loss and its gradient.
_SUMS = {"leaf_square_sums": "the gradient norm", "over_devices": "loss and metrics"}
_MAX_STEPS = 400
# Patterns for the tables of files, functions and stack frames in the header of a program.
_FIELDS = re.compile(r"(\w+)=(\d+)")
_FRAME = re.compile(r"\bstack_frame_id=(\d+)")
_FILE, _LINE = re.compile(r'\bsource_file="([^"]*)"'), re.compile(r"\bsource_line=(\d+)")
_HOME = re.compile(r"^(?:/home/[^/]+|/Users/[^/]+|/root)/")
# The caller of a Meshwright collective is more useful than a line inside it.
_OURS = re.compile(r"/meshwright/(?:parallel|mesh)/")
_MAX_DEPTH = 64


@dataclass(frozen=True)
class SourceLine:
    """A source line and its function; `str(place)` omits local folders."""

    file: str
    function: str
    line: str

    def __str__(self) -> str:
        return f"{short_path(self.file)}:{self.line}"


@dataclass
class SourceLines:
    """Source lines of a program, from the tables in its `header`."""

    header: str

    def find(self, instruction: Instruction) -> SourceLine | None:
        """Returns the source line of an instruction: the innermost call outside Meshwright's collectives."""
        frame = _FRAME.search(instruction.attributes)
        if frame:
            calls = self._calls(int(frame[1]))
            outside = [place for place in calls if not _OURS.search(place.file)]
            return next(iter(outside or calls), None)
        file, line = _FILE.search(instruction.attributes), _LINE.search(instruction.attributes)
        return SourceLine(file[1], "", line[1]) if file and line else None

    def _calls(self, number: int) -> list[SourceLine]:
        """Returns the call stack of a frame, the innermost call first."""
        frames, places = self._tables.get("StackFrames", {}), self._tables.get("FileLocations", {})
        files, functions = self._tables.get("FileNames", {}), self._tables.get("FunctionNames", {})
        # The first frame has no parent. If it seems to be its own, parent ids are one too high.
        shift = 1 if _numbers(frames.get(1, "")).get("parent_frame_id") == 1 else 0
        found: list[SourceLine] = []
        while number in frames and len(found) < _MAX_DEPTH:
            frame = _numbers(frames[number])
            place = _numbers(places.get(frame.get("file_location_id", 0), ""))
            file = files.get(place.get("file_name_id", 0), "").strip('"')
            function = functions.get(place.get("function_name_id", 0), "").strip('"')
            if not file:
                break
            short = ".".join(function.replace("<locals>.", "").split(".")[-2:])
            found.append(SourceLine(file, short, str(place.get("line", 0))))
            number = frame.get("parent_frame_id", 0) - shift
        return found

    @functools.cached_property
    def _tables(self) -> dict[str, dict[int, str]]:
        tables: dict[str, dict[int, str]] = {}
        table: dict[int, str] = {}
        for line in self.header.splitlines():
            if re.fullmatch(r"[A-Z]\w+", line):
                table = tables.setdefault(line, {})
            elif line[0].isdigit():
                number, _, rest = line.partition(" ")
                table[int(number)] = rest
        return tables


@dataclass(frozen=True)
class Origin:
    """The origin of a collective.

    Args:
        source: operation that it comes from, with the transformations around it.
        serves: data that it sends: `params/layers/wq`, its gradient, an activation.
        line: file and line, without local folders.
    """

    source: str
    serves: str
    line: str


@dataclass
class Origins:
    """Finds the origins of a program's collectives."""

    program: Program

    @functools.cached_property
    def lines(self) -> SourceLines:
        return SourceLines(self.program.header)

    def find(self, computation: str, instruction: Instruction, core: Instruction, kind: str) -> Origin:
        """Returns the origin of a collective; `core` is the collective inside `instruction`, if that wraps it."""
        # A reduction's computation keeps metadata that the collective itself may lose.
        inside = [one for name in core.called for one in self.program.computations.get(name, []) if one.op_name]
        made_of = [instruction, core, *inside]
        source = next((one.op_name for one in made_of if one.op_name), "")
        place = next((place for place in map(self.lines.find, made_of) if place is not None), None)
        serves = self._serves(computation, instruction, core, kind, source, place.function if place else "")
        return Origin(source, serves, str(place) if place else "")

    def _serves(
        self, computation: str, instruction: Instruction, core: Instruction, kind: str, source: str, function: str
    ) -> str:
        named = _leaves(source) or _leaves(*self._neighbours(computation, instruction))
        if not named:
            arguments = (self.argument(computation, name) for name in instruction.inputs)
            named = list(dict.fromkeys(filter(None, arguments)))
        if named:
            of = f"{named[0]} and {len(named) - 1} more" if len(named) > 1 else named[0]
            return f"gradient of {of}" if kind in _REDUCES else of
        where = last_scope(source) or function
        few = sum(array_bytes(core.result)) <= _FEW
        if kind in _REDUCES and "jvp(" not in source and (sums := _SUMS.get(function.rpartition(".")[2])):
            # The compiler combines it with gradients of parameters that are not split.
            return f"a few numbers: {sums}" if few else f"gradients, and {sums}"
        if where == STAGES_SCOPE:
            return f"{'gradients' if 'transpose(' in source else 'activations'} between stages"
        if where == MESSAGES_SCOPE:
            return "activations and gradients between stages"
        if kind in _REDUCES and function.rpartition(".")[2] == "accumulate":
            return "gradients, added up over minibatches"
        if kind in _REDUCES and "transpose(" in source:
            what = "a gradient"
        elif few:
            what = "a few numbers"
        else:
            what = "an activation"
        return f"{what} of {where}" if where else what

    def _neighbours(self, computation: str, instruction: Instruction) -> list[str]:
        """Returns the operations that produce and use the sent value: casts of a gradient have its scope too."""
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

    def argument(self, computation: str, name: str) -> str:
        """Traces a value back to an argument of the program and returns its name, or ""."""
        walk = _Walk(self.program, computation, name)
        for _ in range(_MAX_STEPS):
            one = self.program.instruction(walk.computation, walk.name)
            if one is None:
                return ""
            if one.opcode == "parameter" and walk.computation == self.program.entry:
                return argument_name(one.op_name)
            if one.opcode not in _HANDLERS or not _HANDLERS[one.opcode](walk, one):
                return ""
        return ""


@dataclass
class _Walk:
    """State of tracing a value back; each method takes one step, and returns False if it cannot.

    Args:
        path: indices into nested tuples, the outermost first.
        calls: calls entered on the way, each with its computation.
    """

    program: Program
    computation: str
    name: str
    path: tuple[int, ...] = ()
    calls: list[tuple[str, Instruction]] = field(default_factory=list)

    def to_caller(self, one: Instruction) -> bool:
        callers = [self.calls.pop()] if self.calls else self.program.callers(self.computation)
        if not callers:
            return False
        self.computation, caller = callers[0]
        place = int(one.operands) if caller.opcode in _CALLS else 0
        if caller.opcode not in (*_CALLS, "while") or place >= len(caller.inputs):
            return False
        self.name = caller.inputs[place]
        return True

    def into_call(self, one: Instruction) -> bool:
        root = self.program.root(one.called[0]) if one.called else None
        if root is None:
            return False
        self.calls.append((self.computation, one))
        self.computation, self.name = one.called[0], root.name
        return True

    def to_tuple(self, one: Instruction) -> bool:
        self.path, self.name = (one.index, *self.path), one.inputs[0]
        return True

    def to_part(self, one: Instruction) -> bool:
        if not self.path or self.path[0] >= len(one.inputs):
            return False
        self.name, self.path = one.inputs[self.path[0]], self.path[1:]
        return True

    def into_loop(self, one: Instruction) -> bool:
        """Enters the body, or skips the loop if its body passes the value through."""
        if not self.path:
            return False
        index, self.name = self.path[0], one.inputs[0]
        body = re.search(r"\bbody=%?([\w.\-]+)", one.attributes)
        root = self.program.root(body[1]) if body else None
        if body and root is not None and root.opcode == "tuple" and index < len(root.inputs):
            last = self.program.instruction(body[1], root.inputs[index])
            if last is None or last.opcode != "get-tuple-element" or last.index != index:
                self.computation, self.name = body[1], root.name
        return True

    def through_barrier(self, one: Instruction) -> bool:
        if len(one.inputs) > 1:  # its result is a tuple
            place, self.path = (self.path or (0,))[0], self.path[1:]
            self.name = one.inputs[place]
        else:
            self.name = one.inputs[0]
        return True

    def to_operand(self, one: Instruction) -> bool:
        if not one.inputs:
            return False
        self.name, self.path = one.inputs[0], ()
        return True

    def through_library(self, one: Instruction) -> bool:
        return _JOINS.search(one.attributes) is not None and self.to_operand(one)


_HANDLERS: dict[str, Callable[[_Walk, Instruction], bool]] = {
    "parameter": _Walk.to_caller,
    "get-tuple-element": _Walk.to_tuple,
    "tuple": _Walk.to_part,
    "while": _Walk.into_loop,
    "optimization-barrier": _Walk.through_barrier,
    "custom-call": _Walk.through_library,
    **dict.fromkeys(_CALLS, _Walk.into_call),
    **dict.fromkeys(_PASSES, _Walk.to_operand),
}


def _leaves(*sources: str) -> list[str]:
    names = [name for source in sources for one in unmerged(source) for name in _SCOPE.findall(one)]
    return [f"params/{name}" for name in dict.fromkeys(names)]


def unmerged(source: str) -> list[str]:
    """Returns the names of the operations that a compiler merged into one, which it writes as `path/(one:other)`.

    Example:
        >>> unmerged("jit(step)/jvp(params[layers/(attn/k])/all_gather:mlp/gate])/all_gather)")
        ['jit(step)/jvp(params[layers/attn/k])/all_gather', 'jit(step)/jvp(params[layers/mlp/gate])/all_gather']
    """
    path, is_merged, ends = source.partition("/(")
    if not is_merged:
        return [source]
    # A group may contain another one, whose parts then continue the path of the part before it.
    return [name for end in ends.removesuffix(")").split(":") for name in unmerged(f"{path}/{end.removeprefix('(')}")]


def argument_name(name: str) -> str:
    """Returns the name of an argument as a tree path.

    Example:
        >>> argument_name("state.params['layers']['wq']"), argument_name("x")
        ('params/layers/wq', 'x')
    """
    parts = ["".join(found) for found in _TOKEN.findall(name)]
    return "/".join(parts[1:] if parts[:1] == ["state"] and len(parts) > 1 else parts)


def last_scope(source: str) -> str:
    """Returns the innermost user-given scope of an operation's name.

    The name of a fused operation ends with its parts in parentheses: `path/(a:b)`.

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


def short_path(path: str) -> str:
    """Returns a path without local folders: from the package on, or its last two parts.

    Example:
        >>> short_path("/home/me/lib/python3.11/site-packages/flax/linen/linear.py"), short_path("/home/me/train.py")
        ('flax/linen/linear.py', 'train.py')
    """
    for mark in ("/site-packages/", "/dist-packages/", "/src/"):
        if mark in path:
            return path.rpartition(mark)[2]
    return "/".join(_HOME.sub("", path).strip("/").split("/")[-2:])


def _numbers(text: str) -> dict[str, int]:
    return {name: int(value) for name, value in _FIELDS.findall(text)}
