"""Costs that XLA adds to a step in the global view, with their source lines.

XLA logs from C++ if it must replicate an array to change its sharding ("involuntary full rematerialization"), so the
file descriptor of stderr is captured while a step compiles. All-gathers of activations are read from the compiled
program. Neither changes the results.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import jax

from meshwright.layout.leaf import format_bytes
from meshwright.plan.compiled.collectives import Collective, read_schedule
from meshwright.plan.compiled.hlo import parse_program
from meshwright.plan.compiled.origin import SourceLines
from meshwright.train.views import GATHER_AXES
from meshwright.types import PyTree

_REMATERIALIZED = re.compile(
    r"Involuntary full rematerialization\..*?from sharding (\{.*?\}) to (\{.*?\}) (?:efficiently|without).*?"
    r"operation %?\S+ = (\w+\[[\d,]*\]).*?metadata=\{(.*?)\}",
    re.DOTALL,
)
_OWN = re.compile(r"(?:^|/)meshwright/")
_FEW = 1024  # bytes


@dataclass
class Captured:
    """Text that was written to stderr."""

    text: str = field(default="")


@contextlib.contextmanager
def captured_stderr() -> Iterator[Captured]:
    """Captures file descriptor 2, and writes the text back afterwards, except for the warnings read here.

    Example:
        >>> with captured_stderr() as said:
        ...     _ = os.write(2, b"[SPMD] Involuntary full rematerialization.")
        >>> said.text
        '[SPMD] Involuntary full rematerialization.'
    """
    captured = Captured()
    with contextlib.suppress(Exception):
        sys.stderr.flush()
    before = os.dup(2)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        try:
            yield captured
        finally:
            os.dup2(before, 2)
            os.close(before)
            file.seek(0)
            captured.text = file.read().decode(errors="replace")
            rest = "".join(
                line for line in captured.text.splitlines(keepends=True) if "Involuntary full remat" not in line
            )
            if rest:
                os.write(2, rest.encode())


def compile_notes(said: str, text: str, sizes: Mapping[str, int]) -> tuple[str, ...]:
    """Returns the remarks on a compiled program of the global view.

    Args:
        said: what the compiler wrote to stderr.
        text: the compiled program.
        sizes: the sizes of the mesh's axes.
    """
    lines = SourceLines(parse_program(text).header)
    notes = []
    for before, after, shape, metadata in _REMATERIALIZED.findall(said):
        place = lines.find(SimpleNamespace(attributes=metadata))  # type: ignore[arg-type]
        where = f" at {place}" if place is not None else ""
        notes.append(
            f"XLA replicates {shape}{where} to change its sharding from {before} to {after} (involuntary full "
            "rematerialization): add a with_sharding_constraint between them that moves one axis at a time."
        )
    return tuple(dict.fromkeys([*notes, *_gathers(read_schedule(text).collectives, sizes)]))


def _gathers(collectives: Sequence[Collective], sizes: Mapping[str, int]) -> list[str]:
    """Returns a remark per line of the job that makes XLA gather an activation."""
    found: dict[tuple[str, tuple[str, ...]], list[Collective]] = {}
    for one in collectives:
        axes = one.axes(sizes)
        expected = one.serves.startswith("params/") and set(axes) <= {*GATHER_AXES}
        if one.kind == "all-gather" and not expected and one.bytes_moved > _FEW and _is_own(one.line):
            found.setdefault((one.line, axes), []).append(one)
    notes = []
    for (line, axes), group in found.items():
        moved = format_bytes(sum(one.trips * one.bytes_moved for one in group))
        count = sum(one.trips for one in group)
        along = " x ".join(f"`{axis}`" for axis in axes)
        notes.append(
            f"XLA gathers {group[0].serves} along {along} at {line}: {count} all-gather{'s' * (count > 1)}, {moved} "
            "per step. If you did not expect it, constrain the sharding there."
        )
    return notes


def _is_own(line: str) -> bool:
    return bool(line) and not _OWN.search(line)


def compile_with_notes(
    step: Any, batch: PyTree, sizes: Mapping[str, int]
) -> tuple[Callable[..., Any], tuple[str, ...]]:
    """Returns a step as a compiled program, called with the same arguments, and the remarks on it."""
    with captured_stderr() as said:
        compiled = step.lower(batch).compile()

    def run(state: PyTree, batch: PyTree) -> Any:
        # Collectives of two programs in flight can deadlock on simulated devices.
        return jax.block_until_ready(compiled(state, step.place(batch)))

    return run, compile_notes(said.text, compiled.as_text(), sizes)
