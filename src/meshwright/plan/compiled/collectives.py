"""Collectives of a compiled program: their bytes, and the compute they overlap with.

XLA's HLO text lists instructions in the order in which they run. An asynchronous collective starts and finishes in two
instructions and can overlap with the matmuls between them; a synchronous one is a single instruction that stalls the
device. `meshwright.plan.compiled.verdict` judges how much of it is hidden on a chip.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from meshwright.plan.compiled.hlo import (
    Instruction,
    Program,
    array_bytes,
    group_size,
    parse_program,
    partners,
    trip_count,
    tuple_parts,
)
from meshwright.plan.compiled.matmuls import Matmuls, estimated_cycles, merged_hops
from meshwright.plan.compiled.origin import Origins
from meshwright.plan.compiled.scheduled_steps import Recorder, Steps

COLLECTIVES = (
    "all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute",
    "collective-broadcast"
)  # fmt: skip
_BLOCKS = ("while", "call", "conditional")


@dataclass(frozen=True)
class Collective:
    """One scheduled collective.

    Args:
        bytes_moved: bytes of the gathered, reduced or permuted arrays.
        matmuls_between, flops_between: matmuls between its start and end, and their FLOPs.
        trips: number of times its loop runs it.
        partners: device numbers in the mesh: the first replica group, or all pairs of a permute.
        source: operation that it comes from, with the transformations around it.
        cycles_between: the compiler's cycle estimate of all compute between its start and end (TPUs).
        serves: parameter, gradient or activation that it sends.
        line: file and line that it comes from.
        merged: number of matmuls of its ring that the compiler merged into one, or 0.
    """

    kind: str
    name: str
    bytes_moved: int
    group_size: int
    is_async: bool
    matmuls_between: int
    trips: int = 1
    partners: tuple[tuple[int, ...], ...] = ()
    source: str = ""
    flops_between: float = 0.0
    cycles_between: int = 0
    serves: str = ""
    line: str = ""
    merged: int = 0

    @property
    def hidden(self) -> bool:
        """Whether it overlaps with at least one matmul."""
        return self.is_async and self.matmuls_between > 0

    @property
    def wire_bytes(self) -> float:
        """Bytes that each device sends, with the algorithm that sends the fewest."""
        if self.kind == "collective-permute" and self.partners and all(len(set(pair)) == 1 for pair in self.partners):
            return 0.0  # each device keeps its own
        share = (self.group_size - 1) / self.group_size
        factor = {"all-gather": share, "reduce-scatter": share, "all-to-all": share, "all-reduce": 2 * share}
        return self.bytes_moved * factor.get(self.kind, 1.0)

    def axes(self, sizes: Mapping[str, int]) -> tuple[str, ...]:
        """Returns the mesh axes that it runs along, given the sizes of all axes in order.

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
class Stretch:
    """A stretch of compute during which the same collectives are in flight, as indices into the schedule."""

    in_flight: tuple[int, ...]
    flops: float
    cycles: int


@dataclass(frozen=True)
class ProgramSchedule:
    """The collectives of a program in program order, and its compute.

    Args:
        stretches: compute that overlaps with collectives, in program order.
        matmul_flops, matmul_cycles: totals over the matmuls with a cycle estimate.
        steps: the whole schedule in program order, if it was asked for.
    """

    collectives: tuple[Collective, ...]
    num_matmuls: int
    estimated_cycles: int
    stretches: tuple[Stretch, ...] = ()
    matmul_flops: float = 0.0
    matmul_cycles: int = 0
    steps: Steps = ()

    def count(self, kind: str | None = None) -> int:
        """Returns the number of collectives (of one kind) that run, with loop trips."""
        return sum(c.trips for c in self.collectives if kind in (None, c.kind))

    @property
    def num_hidden(self) -> int:
        """Number of collectives that overlap with a matmul, with loop trips."""
        return sum(c.trips for c in self.collectives if c.hidden)

    @property
    def wire_bytes(self) -> float:
        """Bytes that each device sends in total."""
        return sum(c.trips * c.wire_bytes for c in self.collectives)

    @property
    def hidden_bytes(self) -> float:
        """Bytes that overlap with a matmul."""
        return sum(c.trips * c.wire_bytes for c in self.collectives if c.hidden)

    def along(self, axis: str, sizes: Mapping[str, int]) -> ProgramSchedule:
        """Returns the schedule with only the collectives that run along this axis alone."""
        places = [place for place, c in enumerate(self.collectives) if c.axes(sizes) == (axis,)]
        now = {place: number for number, place in enumerate(places)}
        stretches = [
            replace(one, in_flight=tuple(now[place] for place in one.in_flight if place in now))
            for one in self.stretches
        ]
        return replace(
            self,
            collectives=tuple(self.collectives[place] for place in places),
            stretches=tuple(one for one in stretches if one.in_flight),
        )

    def __str__(self) -> str:
        return f"{self.num_hidden}/{self.count()} hidden, {self.wire_bytes / 2**20:.1f} MiB sent per device"


def read_schedule(text: str, *, with_steps: bool = False) -> ProgramSchedule:
    """Reads the text of a compiled program (`compiled.as_text()`).

    Args:
        with_steps: whether to read the whole schedule too, with its live memory.

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
    program = parse_program(text)
    recorder = Recorder(program, has_cycles="estimated_cycles" in text) if with_steps else None
    reader = _Reader(program, recorder)
    reader.walk(reader.program.entry, 1)
    return ProgramSchedule(
        tuple(reader.collectives),
        reader.num_matmuls,
        reader.cycles,
        tuple(reader.stretches),
        reader.matmul_flops,
        reader.matmul_cycles,
        () if recorder is None else recorder.steps(),
    )


class _Reader:
    """Walks a program in order and tracks the collectives in flight."""

    def __init__(self, program: Program, recorder: Recorder | None = None) -> None:
        self.program, self.recorder = program, recorder
        self.matmuls, self.origins = Matmuls(program), Origins(program)
        self.collectives: list[Collective] = []
        self.stretches: list[Stretch] = []
        self.num_matmuls = self.cycles = self.matmul_cycles = 0
        self.matmul_flops = 0.0

    def walk(self, computation: str, trips: int) -> None:
        flying: dict[int, Instruction] = {}  # by index of the collective, in order of start
        carries: dict[str, int] = {}  # names of values in flight
        sent: dict[str, int] = {}  # hops by the name of their start, and below by the name of their result
        arriving: dict[str, int] = {}
        for one in self.program.computations.get(computation, []):
            cycles = estimated_cycles(one)
            self.cycles += trips * cycles
            consumed = [carries[name] for name in one.inputs if name in carries]
            if consumed and ("-done" in one.opcode or "-done" in one.name):
                for place in consumed:
                    if flying.pop(place, None) is not None and self.recorder is not None:
                        self.recorder.wait(place)
                    if self.collectives[place].kind == "collective-permute":
                        arriving[one.name] = place
                continue
            fused = any("async_collective_fusion" in name for name in one.called)
            if consumed and (one.opcode == "get-tuple-element" or fused or "-update" in one.opcode + one.name):
                carries[one.name] = consumed[0]
            count = self.matmuls.count(one)
            if flying and (count or cycles):
                self._beside(flying, count, self.matmuls.flops(computation, one), cycles)
            found = None if fused else self._collective(computation, one)
            beside = len(self.stretches) - 1 if flying and (count or cycles) else -1
            if self.recorder is not None and found is None and one.opcode not in _BLOCKS:
                flops = self.matmuls.flops(computation, one) if count else 0.0
                self.recorder.work(computation, one, flops=flops, cycles=cycles, stretch=beside)
            if found is not None:
                place = len(self.collectives)
                self.collectives.append(replace(found, trips=trips))
                carries[one.name] = place
                if found.is_async:
                    flying[place] = one
                elif self.recorder is not None:
                    self.recorder.wait(place)
                if found.kind == "collective-permute":
                    sent[one.name] = arriving[one.name] = place
            elif one.opcode == "while":
                often = trip_count(self.program, one)
                if self.recorder is not None:
                    self.recorder.begin()
                for name in one.called:
                    self.walk(name, trips * often)
                if self.recorder is not None:
                    self.recorder.end(often, beside)
            elif one.opcode in ("call", "conditional"):
                for name in one.called:
                    self.walk(name, trips)
            else:
                self.num_matmuls += trips * count
                if count and cycles:
                    self.matmul_cycles += trips * cycles
                    self.matmul_flops += trips * self.matmuls.flops(computation, one)
        if self.recorder is not None:
            for place in flying:
                self.recorder.wait(place)
        merged = merged_hops(self.program, self.matmuls, computation, sent, arriving) if sent else {}
        for place, count in merged.items():
            self.collectives[place] = replace(self.collectives[place], merged=count)

    def _beside(self, flying: Mapping[int, Instruction], count: int, flops: float, cycles: int) -> None:
        for place in flying:
            known = self.collectives[place]
            self.collectives[place] = replace(
                known,
                matmuls_between=known.matmuls_between + count,
                flops_between=known.flops_between + flops,
                cycles_between=known.cycles_between + cycles,
            )
        in_flight = tuple(flying)
        if self.stretches and self.stretches[-1].in_flight == in_flight:
            last = self.stretches.pop()
            flops, cycles = last.flops + flops, last.cycles + cycles
        self.stretches.append(Stretch(in_flight, flops, cycles))

    def _collective(self, computation: str, one: Instruction) -> Collective | None:
        core = one if _kind(one.opcode) else None
        wrapped = one.opcode in ("async-start", "call-start") or (
            one.opcode == "fusion" and "collective-start" in one.name
        )
        if core is None and (wrapped or one.opcode == "fusion"):
            core = self._inside(one)
        if core is None or one.opcode.endswith(("-done", "-update")) or "-done" in one.name.split(".")[0]:
            return None
        starts = wrapped or one.opcode.endswith("-start")
        # A TPU fusion of an all-reduce and a slice sends the same bytes as a reduce-scatter.
        scatters = any("all-reduce-scatter" in name for name in one.called)
        kind = "reduce-scatter" if scatters else _kind(core.opcode)
        origin = self.origins.find(computation, one, core, kind)
        return Collective(
            kind,
            one.name,
            _bytes_moved(core),
            group_size(core.attributes),
            starts and '"is_sync":true' not in one.attributes,
            0,
            partners=partners(core.attributes),
            source=origin.source,
            serves=origin.serves,
            line=origin.line,
        )

    def _inside(self, instruction: Instruction) -> Instruction | None:
        """Returns the collective inside an async wrapper or a fusion, if any."""
        for name in instruction.called:
            for inner in self.program.computations.get(name, []):
                if _kind(inner.opcode):
                    return inner
                deeper = self._inside(inner) if inner.opcode in ("fusion", "call", "async-start") else None
                if deeper is not None:
                    return deeper
        return None


def _kind(opcode: str) -> str:
    base = opcode.removesuffix("-start").removesuffix("-done")
    return base if base in COLLECTIVES else ""


def _bytes_moved(instruction: Instruction) -> int:
    """Returns the bytes of the gathered, reduced or permuted arrays."""
    result = instruction.result
    # An all-reduce-start lists only results, or, since jax 0.11 on GPUs, a tuple of operands before them.
    opens = "((" if instruction.opcode == "all-reduce-start" else "("
    if instruction.opcode.endswith("-start") and result.startswith(opens):
        # Other starts list operands, results and context; the first two may be tuples.
        result = tuple_parts(result)[1]
    total = sum(array_bytes(result))
    if instruction.opcode in ("reduce-scatter", "reduce-scatter-start"):
        return total * group_size(instruction.attributes)
    return total
