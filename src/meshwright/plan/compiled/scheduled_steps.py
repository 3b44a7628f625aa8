"""The schedule of a compiled program as work, waits and loops, in the order in which a device runs them."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from meshwright.plan.compiled.hlo import Instruction, Program
from meshwright.plan.compiled.memory_trace import buffer_bytes, is_backward, trace_memory
from meshwright.plan.compiled.origin import last_scope

_SHAPES = re.compile(r"[a-z]\w*\[[\d,]*\](?:\{[^}]*\})?")
_KERNEL = 'custom_call_target="tpu_custom_call"'
OUTSIDE = "optimizer and other work"
MAX_WORKS = 240  # of one loop body or of the program around the loops; shorter ones next to each other are merged


@dataclass(frozen=True)
class WorkStep:
    """Compute between two events of the schedule, by one part of the model.

    Args:
        name: part of the model and pass, e.g. "attention, backward".
        flops: FLOPs of its matmuls.
        cycles: the compiler's cycle estimate (TPUs), or 0.
        moved: bytes that its instructions write.
        live: the most bytes that are live during it, by part.
        stretch: index into `ProgramSchedule.stretches`; -1 if no transfer is in flight.
        kernels: number of kernels, whose FLOPs and cycles the compiler does not know.
        seconds: its time at the chip's matmul rate, from `timed_steps`.
        hides: seconds of each transfer that it hides, by index of the collective, from `timed_steps`.
    """

    name: str
    flops: float = 0.0
    cycles: int = 0
    moved: float = 0.0
    live: Mapping[str, int] = field(default_factory=dict)
    stretch: int = -1
    kernels: int = 0
    seconds: float = 0.0
    hides: Mapping[int, float] = field(default_factory=dict)

    @property
    def live_bytes(self) -> int:
        return sum(self.live.values())


@dataclass(frozen=True)
class Wait:
    """The point at which a device needs the result of a collective, by its index in the schedule."""

    place: int


@dataclass(frozen=True)
class LoopStep:
    """A loop, with one round of its body; `stretch` and `hides` are about transfers that are in flight around it."""

    trips: int
    body: tuple[WorkStep | Wait | LoopStep, ...]
    stretch: int = -1
    hides: Mapping[int, float] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """Time of the work of all rounds."""
        return sum(times * one.seconds for one, times in every_work((self,)))


Step: TypeAlias = WorkStep | Wait | LoopStep
Steps: TypeAlias = tuple[Step, ...]


class Recorder:
    """Builds the steps of a program while a reader walks it."""

    def __init__(self, program: Program, *, has_cycles: bool) -> None:
        self._program, self._has_cycles = program, has_cycles
        self._live = trace_memory(program).live
        self._open: list[list[Step]] = [[]]

    def work(self, computation: str, one: Instruction, *, flops: float, cycles: int, stretch: int) -> None:
        """Adds an instruction, to the last work if it continues it or takes no time."""
        live = self._live.get((computation, one.name), {})
        moved = 0.0 if one.opcode in _FREE else float(self._written(computation, one))
        added = WorkStep(part_of(self._named(one)), flops, cycles, moved, live, stretch, int(_KERNEL in one.attributes))
        here = self._open[-1]
        last = here[-1] if here else None
        takes_time = flops or cycles or added.kernels or (moved and not self._has_cycles)
        if isinstance(last, WorkStep) and (not takes_time or (last.stretch == stretch and last.name == added.name)):
            here[-1] = _together(last, added, last.name)
        else:
            here.append(added)

    def _named(self, one: Instruction) -> str:
        """Returns the name of an operation, or of one inside of it; compilers name not every fusion."""
        inside = (inner.op_name for name in one.called for inner in self._program.computations.get(name, ()))
        return one.op_name or next(filter(None, inside), "")

    def _written(self, computation: str, one: Instruction) -> int:
        """Returns the bytes that an instruction writes; an update in place writes only its slice."""
        whole = _bytes(one.result)
        if "dynamic-update-slice" not in one.opcode + one.name.replace("_", "-"):
            return whole
        operands = (self._program.instruction(computation, name) for name in one.inputs)
        return sum(size for known in operands if known is not None and (size := _bytes(known.result)) < whole)

    def wait(self, place: int) -> None:
        self._open[-1].append(Wait(place))

    def begin(self) -> None:
        self._open.append([])

    def end(self, trips: int, stretch: int) -> None:
        if body := tuple(_fewer(self._open.pop())):
            self._open[-1].append(LoopStep(trips, body, stretch))

    def steps(self) -> Steps:
        return tuple(_fewer(self._open[0]))


_FREE = frozenset(("bitcast", "tuple", "get-tuple-element", "parameter", "constant", "while", "call", "conditional"))


def part_of(op_name: str) -> str:
    """Returns the part of the model that an operation belongs to, and the pass; OUTSIDE for the optimizer.

    Example:
        >>> part_of("jit(step)/shard_map/transpose(jvp())/while/body/closed_call/transpose(jvp(mlp))/dot_general")
        'mlp, backward'
    """
    which = ""
    if "rematted_computation" in op_name:
        which = "recomputed"
    elif is_backward(op_name):
        which = "backward"
    elif "jvp(" in op_name:
        which = "forward"
    tokens = op_name.split("/")
    # The outermost scope is the part of the model; kernels have names of their own inside of it.
    outer = (last_scope("/".join([*tokens[:count], ""])) for count in range(1, len(tokens)))
    scope = "weights" if "params[" in op_name else next(filter(None, outer), "")
    return f"{scope or 'layers'}, {which}" if which else OUTSIDE


def timed_steps(steps: Steps, pieces: Sequence[Mapping[int, float]], *, rate: float, cycle: float) -> Steps:
    """Returns steps with the time of each work, and with the transfers that it hides.

    Args:
        pieces: seconds that each stretch hides of each transfer; see `hidden_pieces`.
        rate: FLOP/s of matmuls.
        cycle: seconds of one estimated cycle.
    """
    timed = tuple(_timed(one, rate, cycle) for one in steps)
    whole: dict[int, list[float]] = {}
    for one in _walk(timed):
        if not isinstance(one, Wait):
            whole.setdefault(one.stretch, []).append(one.seconds)
    return tuple(_hiding(one, pieces, whole) for one in timed)


def _timed(one: Step, rate: float, cycle: float) -> Step:
    if isinstance(one, LoopStep):
        return replace(one, body=tuple(_timed(inner, rate, cycle) for inner in one.body))
    return one if isinstance(one, Wait) else replace(one, seconds=max(one.flops / rate, one.cycles * cycle))


def _hiding(one: Step, pieces: Sequence[Mapping[int, float]], whole: Mapping[int, Sequence[float]]) -> Step:
    if isinstance(one, LoopStep):
        one = replace(one, body=tuple(_hiding(inner, pieces, whole) for inner in one.body))
    if isinstance(one, Wait) or one.stretch < 0:
        return one
    spent = whole[one.stretch]
    share = one.seconds / sum(spent) if sum(spent) else 1 / len(spent)
    hides = {place: share * seconds for place, seconds in pieces[one.stretch].items() if share * seconds > 0}
    return replace(one, hides=hides)


def _walk(steps: Sequence[Step]) -> Iterator[Step]:
    for one in steps:
        yield one
        if isinstance(one, LoopStep):
            yield from _walk(one.body)


def every_work(steps: Sequence[Step], trips: int = 1) -> Iterator[tuple[WorkStep, int]]:
    """Yields every work with the number of times that it runs."""
    for one in steps:
        if isinstance(one, LoopStep):
            yield from every_work(one.body, trips * one.trips)
        elif isinstance(one, WorkStep):
            yield one, trips


def steps_to_json(steps: Sequence[Step]) -> list[Any]:
    """Returns steps as JSON data, without empty fields."""
    found: list[Any] = []
    for one in steps:
        if isinstance(one, Wait):
            found.append({"place": one.place})
            continue
        data = {key: value for key, value in vars(one).items() if value and not (key == "stretch" and value < 0)}
        if isinstance(one, LoopStep):
            data["body"] = steps_to_json(one.body)
        found.append(data | {"hides": {str(place): spent for place, spent in one.hides.items()}})
    return found


def steps_from_json(data: Sequence[Mapping[str, Any]]) -> Steps:
    """Returns the steps that `steps_to_json` made data of."""
    found: list[Step] = []
    for one in data:
        if "place" in one:
            found.append(Wait(one["place"]))
            continue
        changed: dict[str, Any] = {"hides": {int(place): seconds for place, seconds in one["hides"].items()}}
        if "body" in one:
            changed["body"] = steps_from_json(one["body"])
        found.append((LoopStep if "body" in one else WorkStep)(**{**one, **changed}))
    return tuple(found)


def _together(some: WorkStep, more: WorkStep, name: str) -> WorkStep:
    return WorkStep(
        name,
        some.flops + more.flops,
        some.cycles + more.cycles,
        some.moved + more.moved,
        max(some.live, more.live, key=lambda live: sum(live.values())),
        some.stretch,
        some.kernels + more.kernels,
    )


def _fewer(steps: list[Step]) -> list[Step]:
    """Merges neighbors in the same stretch, the shortest first, until at most `MAX_WORKS` are left."""
    while sum(isinstance(one, WorkStep) for one in steps) > MAX_WORKS:
        pairs = [
            (_size(first) + _size(second), place)
            for place, (first, second) in enumerate(itertools.pairwise(steps))
            if isinstance(first, WorkStep) and isinstance(second, WorkStep) and first.stretch == second.stretch
        ]
        if not pairs:
            break
        taken: set[int] = set()
        excess = sum(isinstance(one, WorkStep) for one in steps) - MAX_WORKS
        for _, place in sorted(pairs)[: max(1, excess)]:
            if not {place - 1, place, place + 1} & taken:
                taken.add(place)
        merged: list[Step] = []
        for place, one in enumerate(steps):
            last = merged[-1] if merged else None
            if place - 1 in taken and isinstance(last, WorkStep) and isinstance(one, WorkStep):
                merged[-1] = _together(last, one, max(last, one, key=_size).name)
            else:
                merged.append(one)
        steps = merged
    return steps


def _size(one: WorkStep) -> tuple[float, float, float]:
    return (one.flops, float(one.cycles), one.moved)


def _bytes(shape: str) -> int:
    return sum(buffer_bytes(found) for found in _SHAPES.findall(shape))
