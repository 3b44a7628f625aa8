"""The dtypes in which a compiled program really multiplies, and the fp8 matmuls that it does not run in fp8.

XLA falls back to a wider dtype without a message if it does not recognize an fp8 matmul, or merges it with another.
`meshwright.parallel.fp8` names each of its matmuls in the program, so a fallback is found with its parameter.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from meshwright.plan.compiled.hlo import Instruction, Program, parse_program, trip_count
from meshwright.plan.compiled.matmuls import is_matmul
from meshwright.plan.compiled.origin import Origins, last_scope

_SCOPE = re.compile(r"\bfp8\[([^\]]*)\]\[([^\]]*)\]")
_TYPE = re.compile(r"\b([a-z]+\d+[a-z0-9]*)\[")
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_PRECISE = re.compile(r'operand_precision(?:":\["HIGHEST"|=\{highest)', re.IGNORECASE)

ROLES = ("forward", "input gradient", "weight gradient")


@dataclass(frozen=True)
class MatmulUse:
    """Matmuls of a program that serve the same purpose in the same way.

    Args:
        name: path of the parameter, or the scope of the matmul if none is known.
        role: "forward", "input gradient" or "weight gradient" of an fp8 matmul; otherwise "".
        dtypes: dtypes of both operands and of the product, e.g. `("f8e4m3fn", "f8e4m3fn", "bf16")`.
        how: the library call, or the operation.
        runs: number of these matmuls in one step.
        is_precise: whether an fp8 matmul runs without fast accumulation.
    """

    name: str
    role: str
    dtypes: tuple[str, str, str]
    how: str
    runs: int
    is_precise: bool = False

    @property
    def is_fp8(self) -> bool:
        return all(dtype.startswith("f8") for dtype in self.dtypes[:2])

    @property
    def kind(self) -> str:
        """The dtypes, such as `f8e4m3fn*f8e5m2->bf16`."""
        return f"{self.dtypes[0]}*{self.dtypes[1]}->{self.dtypes[2]}"


@dataclass(frozen=True)
class Fp8Check:
    """The matmuls of a program, compared with those that should run in fp8.

    Args:
        uses: all matmuls.
        wanted: paths of the parameters that are multiplied in fp8.
        emulates: whether the program runs on a device without fp8 matmuls, where fp8 values are multiplied in a wider
            dtype.
        frozen: paths of parameters without a gradient.
    """

    uses: tuple[MatmulUse, ...]
    wanted: tuple[str, ...]
    emulates: bool = False
    frozen: frozenset[str] = frozenset()

    @property
    def fallbacks(self) -> tuple[MatmulUse, ...]:
        """The matmuls that should run in fp8 and do not."""
        return tuple(use for use in self.uses if use.role and not use.is_fp8)

    @property
    def missing(self) -> tuple[tuple[str, str], ...]:
        """Parameters and roles of which the program has no matmul, because XLA merged or removed it."""
        found = {(use.name, use.role) for use in self.uses if use.role}

        def is_needed(name: str, role: str) -> bool:
            if role == "input gradient":
                # XLA merges matmuls that share an operand, which these do not. One that is missing although its forward
                # matmul is there has an input that needs no gradient, such as the batch.
                return (name, "forward") not in found
            return role == "forward" or name not in self.frozen

        pairs = [(name, role) for name in self.wanted for role in ROLES if (name, role) not in found]
        return tuple(pair for pair in pairs if is_needed(*pair))

    @property
    def is_fp8(self) -> bool:
        """Whether every matmul that should run in fp8 does."""
        return not self.fallbacks and not self.missing

    def line(self) -> str:
        """Returns one line for a log.

        Example:
            >>> use = MatmulUse("layers/mlp/up", "forward", ("f8e4m3fn", "f8e4m3fn", "bf16"), "dot", 16)
            >>> other = MatmulUse("head", "", ("bf16", "bf16", "f32"), "dot", 3)
            >>> Fp8Check((use, other), ("layers/mlp/up",)).line()
            'fp8: 16 of 16 projection matmuls run in fp8; 3 others: 3 bf16*bf16->f32'
        """
        own = [use for use in self.uses if use.role]
        others = Counter[str]()
        for use in self.uses:
            if not use.role:
                others[use.kind] += use.runs
        total, done = sum(use.runs for use in own), sum(use.runs for use in own if use.is_fp8)
        rest = "; ".join([f"{others.total()} others: {_listed(others)}"] if others else [])
        if self.emulates:
            kinds = Counter[str]()
            for use in own:
                kinds[use.kind] += use.runs
            text = f"fp8 is emulated on this device: {total} projection matmuls of fp8 values run as {_listed(kinds)}"
        else:
            text = f"fp8: {done} of {total} projection matmuls run in fp8"
        return f"{text}; {rest}" if rest else text

    def warnings(self) -> list[str]:
        """Returns a warning for each parameter with a matmul that should run in fp8 and does not."""
        if self.emulates:
            return []
        found: dict[str, list[str]] = {}
        for use in self.fallbacks:
            found.setdefault(use.name, []).append(f"{use.role} runs {use.runs} times as {use.kind} ({use.how})")
        for name, role in self.missing:
            found.setdefault(name, []).append(f"{role} is in no matmul of its own")
        hint = "hint: check its dims (multiples of 16 on each device) and this version of XLA; the result is correct."
        return [f"`{name}` does not run in fp8: {'; '.join(parts)}.\n{hint}" for name, parts in found.items()]


def check_fp8(text: str, wanted: Sequence[str], *, emulates: bool = False, frozen: Collection[str] = ()) -> Fp8Check:
    """Compares the matmuls of a compiled program with those that should run in fp8.

    Args:
        text: `compiled.as_text()`.
        wanted: paths of the parameters, from `Fp8.names`.
        emulates: whether the device has no fp8 matmuls.
        frozen: paths of parameters without a gradient.
    """
    return Fp8Check(tuple(read_matmuls(text)), tuple(wanted), emulates, frozenset(frozen))


def inspect_fp8(
    text: str, wanted: Sequence[str], emulates: bool, frozen: Collection[str] = ()
) -> tuple[str, list[str], list[dict[str, Any]]]:
    """Returns the line, the warnings and the matmuls of `check_fp8`, for `meshwright.loop.run.train`."""
    check = check_fp8(text, wanted, emulates=emulates, frozen=frozen)
    rows = [
        {"name": use.name, "pass": use.role, "dtypes": use.kind, "how": use.how, "runs": use.runs} for use in check.uses
    ]
    return check.line(), check.warnings(), rows


def read_matmuls(text: str) -> list[MatmulUse]:
    """Returns the matmuls of a compiled program, in the order of their first use; loops count with their trips.

    Example:
        >>> program = '''HloModule m
        ...
        ... ENTRY %main (p0: bf16[8,16], p1: bf16[16,8]) -> bf16[8,8] {
        ...   %p0 = bf16[8,16]{1,0} parameter(0), metadata={op_name="x"}
        ...   %p1 = bf16[16,8]{1,0} parameter(1), metadata={op_name="params['w']"}
        ...   ROOT %d = bf16[8,8]{1,0} dot(%p0, %p1), lhs_contracting_dims={1}, rhs_contracting_dims={0}
        ... }'''
        >>> [(use.name, use.kind, use.how, use.runs) for use in read_matmuls(program)]
        [('params/w', 'bf16*bf16->bf16', 'dot', 1)]
    """
    program = parse_program(text)
    origins = Origins(program)
    found: dict[tuple[str, str, tuple[str, str, str], str, bool], int] = {}
    for computation, one, runs in _matmuls(program, program.entry, 1):
        dtypes = (_operand(program, computation, one, 0), _operand(program, computation, one, 1), _dtype(one.result))
        target = _TARGET.search(one.attributes) if one.opcode == "custom-call" else None
        scope = _SCOPE.search(one.op_name)
        name, role = (scope[1], scope[2]) if scope else (_name(origins, computation, one), "")
        how = target[1] if target else one.opcode
        key = (name, role, dtypes, how, _PRECISE.search(one.attributes) is not None)
        found[key] = found.get(key, 0) + runs
    return [MatmulUse(name, role, kinds, how, runs, exact) for (name, role, kinds, how, exact), runs in found.items()]


def _matmuls(program: Program, computation: str, runs: int) -> list[tuple[str, Instruction, int]]:
    found = []
    for one in program.computations.get(computation, []):
        if is_matmul(one):
            found.append((computation, one, runs))
            continue
        often = runs * (trip_count(program, one) if one.opcode == "while" else 1)
        for name in one.called:
            found += _matmuls(program, name, often)
    return found


def _operand(program: Program, computation: str, one: Instruction, place: int) -> str:
    known = program.instruction(computation, one.inputs[place]) if place < len(one.inputs) else None
    return _dtype(known.result) if known is not None else "?"


def _dtype(shape: str) -> str:
    found = _TYPE.search(shape)
    return found[1] if found else "?"


def _name(origins: Origins, computation: str, one: Instruction) -> str:
    arguments = (origins.argument(computation, name) for name in one.inputs[:2])
    return next((name for name in arguments if name.startswith("params")), "") or last_scope(one.op_name)


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))
