"""Reads a compiled, scheduled program: its collectives, their bytes, and which of them hide behind matmuls.

The text form of XLA's HLO lists instructions in the order they will run. A collective that starts and finishes in
two instructions with a matmul between them is hidden behind that matmul; one that is a single instruction stalls
the device until it is through.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
_BITS = {
    "pred": 8,
    "s4": 4,
    "u4": 4,
    "s2": 2,
    "u2": 2,
    "bf16": 16,
    "f16": 16,
    "f32": 32,
    "f64": 64,
    "c64": 64,
    "c128": 128,
}
_COMPUTATION = re.compile(r"^(?P<entry>ENTRY )?%?(?P<name>[\w.\-]+) .*\{\s*$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?(?P<name>[\w.\-]+) = (?P<rest>.*)$")
_ARRAY = re.compile(r"\b(?P<type>[a-z]\w*)\[(?P<dims>[\d,]*)\]")
_CALLED = re.compile(r"\b(?:calls|body|to_apply|branch_computations)=\{?(?P<names>%?[\w.\-]+(?:, ?%?[\w.\-]+)*)\}?")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_MATMUL_CALL = re.compile(r'custom_call_target="[^"]*(?:gemm|matmul|cublas|dot)[^"]*"', re.IGNORECASE)
_NO_ESTIMATE = 2**62


@dataclass(frozen=True)
class Instruction:
    """One line of a computation."""

    name: str
    opcode: str
    result: str
    operands: str
    attributes: str

    @property
    def called(self) -> list[str]:
        return [
            name.strip().lstrip("%")
            for match in _CALLED.finditer(self.attributes)
            for name in match["names"].split(",")
        ]


@dataclass(frozen=True)
class Collective:
    """One collective as it was scheduled; `trips` counts how often its loop runs it."""

    kind: str
    name: str
    bytes_moved: int
    group_size: int
    is_async: bool
    matmuls_between: int
    trips: int = 1
    partners: tuple[tuple[int, ...], ...] = ()
    """Devices that talk to each other, by their number in the mesh: the first group, or all pairs of a permute."""
    source: str = ""
    """The operation of the program it came from, with the transformations around it."""

    @property
    def hidden(self) -> bool:
        """Whether it runs beside at least one matmul."""
        return self.is_async and self.matmuls_between > 0

    @property
    def wire_bytes(self) -> float:
        """Bytes each device sends, with the algorithm that sends the fewest."""
        share = (self.group_size - 1) / self.group_size
        factor = {"all-gather": share, "reduce-scatter": share, "all-to-all": share, "all-reduce": 2 * share}
        return self.bytes_moved * factor.get(self.kind, 1.0)

    def axes(self, sizes: Mapping[str, int]) -> tuple[str, ...]:
        """Returns the axes of a mesh (their sizes, in its order) along which its devices lie.

        Example:
            >>> Collective("all-gather", "g", 64, 2, False, 0, partners=((0, 2),)).axes({"fsdp": 4, "tp": 2})
            ('fsdp',)
        """
        found = [False] * len(sizes)
        for group in self.partners:
            places = np.unravel_index(np.array(group), tuple(sizes.values()))
            found = [known or len(set(place.tolist())) > 1 for known, place in zip(found, places, strict=True)]
        return tuple(axis for axis, differs in zip(sizes, found, strict=True) if differs)


@dataclass(frozen=True)
class Schedule:
    """The collectives of a program in the order of its text, and the compiler's estimate of its compute."""

    collectives: tuple[Collective, ...]
    num_matmuls: int
    estimated_cycles: int

    def count(self, kind: str | None = None) -> int:
        """Returns how many collectives (of one kind) run, loops counted with their trips."""
        return sum(c.trips for c in self.collectives if kind in (None, c.kind))

    @property
    def num_hidden(self) -> int:
        """How many collectives run beside a matmul, loops counted with their trips."""
        return sum(c.trips for c in self.collectives if c.hidden)

    @property
    def wire_bytes(self) -> float:
        """Bytes each device sends in all."""
        return sum(c.trips * c.wire_bytes for c in self.collectives)

    @property
    def hidden_bytes(self) -> float:
        """Those of them that are sent beside a matmul."""
        return sum(c.trips * c.wire_bytes for c in self.collectives if c.hidden)

    def along(self, axis: str, sizes: Mapping[str, int]) -> Schedule:
        """Returns the schedule with only those collectives that run along an axis of a mesh, and along no other."""
        kept = tuple(c for c in self.collectives if c.axes(sizes) == (axis,))
        return replace(self, collectives=kept)

    def __str__(self) -> str:
        return f"{self.num_hidden}/{self.count()} hidden, {self.wire_bytes / 2**20:.1f} MiB sent per device"


@dataclass
class _Module:
    computations: dict[str, list[Instruction]] = field(default_factory=dict)
    entry: str = ""

    def __post_init__(self) -> None:
        self._matmuls: dict[str, int] = {}

    def num_matmuls(self, instruction: Instruction) -> int:
        """Counts matmuls in an instruction and all it calls; a loop counts its body once."""
        if instruction.opcode in ("dot", "convolution", "scaled-dot"):
            return 1
        if instruction.opcode == "custom-call" and _MATMUL_CALL.search(instruction.attributes):
            return 1
        return sum(self.matmuls_in(name) for name in instruction.called)

    def matmuls_in(self, computation: str) -> int:
        if computation not in self._matmuls:
            self._matmuls[computation] = 0  # recursion ends here
            found = sum(self.num_matmuls(i) for i in self.computations.get(computation, []))
            self._matmuls[computation] = found
        return self._matmuls[computation]

    def collective_in(self, instruction: Instruction) -> Instruction | None:
        """Returns the collective an async wrapper or a fusion runs, if any."""
        for name in instruction.called:
            for inner in self.computations.get(name, []):
                if _kind(inner.opcode):
                    return inner
                deeper = self.collective_in(inner) if inner.opcode in ("fusion", "call", "async-start") else None
                if deeper is not None:
                    return deeper
        return None


def read_schedule(text: str) -> Schedule:
    """Reads the text of a compiled program (`compiled.as_text()`).

    Example:
        >>> import jax, jax.numpy as jnp, meshwright as mw
        >>> from jax.sharding import PartitionSpec as P
        >>> total = jax.shard_map(
        ...     lambda x: jax.lax.psum(x, "dp"), mesh=mw.create_mesh("dp:8"), in_specs=P("dp"), out_specs=P()
        ... )
        >>> compiled = jax.jit(total).lower(jnp.ones((8, 4))).compile()
        >>> read_schedule(compiled.as_text()).count("all-reduce")
        1
    """
    module = _parse(text)
    collectives: list[Collective] = []
    totals = [0, 0]

    def walk(computation: str, trips: int) -> None:
        instructions = module.computations.get(computation, [])
        for index, instruction in enumerate(instructions):
            cycles = _CYCLES.search(instruction.attributes)
            if cycles and int(cycles[1]) < _NO_ESTIMATE:
                totals[1] += trips * int(cycles[1])
            found = _collective(module, instructions, index)
            if found is not None:
                collectives.append(replace(found, trips=trips))
            elif instruction.opcode == "while":
                for name in instruction.called:
                    walk(name, trips * _trip_count(module, instruction))
            elif instruction.opcode in ("call", "conditional"):
                for name in instruction.called:
                    walk(name, trips)
            else:
                totals[0] += trips * module.num_matmuls(instruction)

    walk(module.entry, 1)
    return Schedule(tuple(collectives), totals[0], totals[1])


def _collective(module: _Module, instructions: list[Instruction], index: int) -> Collective | None:
    instruction = instructions[index]
    kind = _kind(instruction.opcode)
    core = instruction if kind else None
    wrapped = instruction.opcode in ("async-start", "call-start") or (
        instruction.opcode == "fusion" and "collective-start" in instruction.name
    )
    if any("async_collective_fusion" in name for name in instruction.called):
        return None  # a matmul with steps of a collective inside, whose start and end are instructions of their own
    if core is None and (wrapped or instruction.opcode == "fusion"):
        core = module.collective_in(instruction)
    if core is None or instruction.opcode.endswith(("-done", "-update")) or "-done" in instruction.name.split(".")[0]:
        return None
    starts = wrapped or instruction.opcode.endswith("-start")
    between = 0
    if starts:
        between = _matmuls_until_done(module, instructions, index)
    # A TPU's reduce-scatter may be a fusion of an all-reduce and the cut: it sends what a reduce-scatter does.
    scatters = any("all-reduce-scatter" in name for name in instruction.called)
    source = re.search(r'op_name="([^"]*)"', instruction.attributes) or re.search(r'op_name="([^"]*)"', core.attributes)
    return Collective(
        "reduce-scatter" if scatters else _kind(core.opcode),
        instruction.name,
        _bytes_moved(core),
        _group_size(core.attributes),
        starts,
        between,
        partners=_partners(core.attributes),
        source=source[1] if source else "",
    )


def _trip_count(module: _Module, loop: Instruction) -> int:
    """Returns how often a loop runs: as the compiler notes it, or the bound that its counter is compared with."""
    noted = _TRIPS.search(loop.attributes)
    if noted:
        return int(noted[1])
    condition = re.search(r"\bcondition=%?([\w.\-]+)", loop.attributes)
    instructions = module.computations.get(condition[1], []) if condition else []
    constants = {i.name: i.operands for i in instructions if i.opcode == "constant" and i.operands.isdigit()}
    compares = [i for i in instructions if i.opcode == "compare" and "direction=LT" in i.attributes]
    bounds = [
        int(constants[name]) for i in compares for name in re.findall(r"%([\w.\-]+)", i.operands) if name in constants
    ]
    return bounds[0] if len(bounds) == 1 else 1


def _matmuls_until_done(module: _Module, instructions: list[Instruction], index: int) -> int:
    # The start's value is consumed by its done, directly or through updates.
    names = {instructions[index].name}
    total = 0
    for later in instructions[index + 1 :]:
        consumes = any(re.search(rf"%{re.escape(name)}(?![\w.\-])", later.operands) for name in names)
        if consumes and ("-done" in later.opcode or "-done" in later.name):
            return total
        fused = any("async_collective_fusion" in name for name in later.called)
        if consumes and (later.opcode == "get-tuple-element" or fused or "-update" in later.opcode + later.name):
            names.add(later.name)
        total += module.num_matmuls(later)
    return total


def _kind(opcode: str) -> str:
    base = opcode.removesuffix("-start").removesuffix("-done")
    return base if base in COLLECTIVES else ""


def _bytes_moved(instruction: Instruction) -> int:
    """Returns the bytes of the larger side of a collective: the gathered, reduced or permuted arrays."""
    result = instruction.result
    if instruction.opcode.endswith("-start") and instruction.opcode != "all-reduce-start" and result.startswith("("):
        # A start's result lists operands, results, and words for its own use; each of the first two may be several.
        result = _top_level(result)[1]
    total = sum(_array_bytes(result))
    if instruction.opcode in ("reduce-scatter", "reduce-scatter-start"):
        return total * _group_size(instruction.attributes)
    return total


def _top_level(result: str) -> list[str]:
    parts, depth = [""], 0
    for letter in result[1:-1]:
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


def _array_bytes(shape: str) -> Iterator[int]:
    for match in _ARRAY.finditer(shape):
        kind = match["type"]
        bits = _BITS.get(kind) or int((re.findall(r"\d+", kind) or ["0"])[0])
        elements = math.prod(int(dim) for dim in match["dims"].split(",") if dim)
        yield -(-elements * bits // 8)


def _group_size(attributes: str) -> int:
    """Returns how many devices take part: those of a group, or the pairs of a permute."""
    partners = _partners(attributes)
    if "source_target_pairs=" in attributes:
        return max(2, len(partners))
    return len(partners[0]) if partners else 1


def _partners(attributes: str) -> tuple[tuple[int, ...], ...]:
    """Returns the first group, from list, iota and mesh forms of replica groups, or all pairs of a permute."""
    iota = re.search(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", attributes)
    if iota:
        return (_group_of_iota(int(iota[2]), _numbers(iota[3]), _numbers(iota[4] or "")),)
    listed = re.search(r"replica_groups=\{\{([\d,]+)\}", attributes)
    if listed:
        return (_numbers(listed[1]),)
    mesh = re.search(r"replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}", attributes)
    if mesh:
        sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", mesh[1])}
        wanted = [name for name in re.findall(r"'([^']+)'", mesh[2]) if name in sizes]
        places = np.arange(math.prod(sizes.values())).reshape(tuple(sizes.values()))
        group = places[tuple(slice(None) if name in wanted else 0 for name in sizes)].reshape(-1)
        order = re.search(r"device_ids=\(([\d,]+)\)", attributes)
        return (tuple(_numbers(order[1])[place] for place in group) if order else tuple(group.tolist()),)
    pairs = re.search(r"source_target_pairs=\{(.*?)\}\}", attributes)
    return tuple(_numbers(pair) for pair in re.findall(r"\{([\d,]+)", pairs[1] + "}")) if pairs else ()


def _group_of_iota(size: int, dims: tuple[int, ...], order: tuple[int, ...]) -> tuple[int, ...]:
    places = np.arange(math.prod(dims)).reshape(dims)
    flat = (places.transpose(order) if order else places).reshape(-1)
    return tuple(flat[:size].tolist())


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(",") if number)


def _parse(text: str) -> _Module:
    module = _Module()
    current: list[Instruction] | None = None
    for line in text.splitlines():
        if line and not line[0].isspace():
            header = _COMPUTATION.match(line)
            current = None
            if header and "->" in line:
                current = module.computations.setdefault(header["name"], [])
                if header["entry"]:
                    module.entry = header["name"]
            continue
        found = _INSTRUCTION.match(line) if current is not None else None
        if found is not None and current is not None:
            current.append(_instruction(found["name"], found["rest"]))
    return module


def _instruction(name: str, rest: str) -> Instruction:
    end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.index(" ")
    result, rest = rest[:end], rest[end:].lstrip()
    opcode = rest.partition("(")[0]
    close = _closing(rest, len(opcode))
    return Instruction(name, opcode.strip(), result, rest[len(opcode) + 1 : close], rest[close + 1 :])


def _closing(text: str, start: int) -> int:
    depth = 0
    for index in range(start, len(text)):
        if text[index] == "(":
            depth += 1
        elif text[index] == ")":
            depth -= 1
            if depth == 0:
                return index
    return len(text) - 1
