"""The whole truth about rules, leaves and a mesh: every problem at once, and what works but deserves a look."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from meshwright.errors import LayoutError
from meshwright.layout.leaf import LeafLayout, count_leaves, format_bytes
from meshwright.layout.text_table import leaf_rows
from meshwright.mesh.build import AnyMesh, describe_mesh
from meshwright.rules import RuleMatches, Rules, as_rules, match_rules
from meshwright.rules.findings import IdleRule, idle_rules, inside_word_hits, suggested_rules, unmatched_message
from meshwright.rules.matching import LeafMatch
from meshwright.rules.patterns import compile_pattern
from meshwright.specs import SpecProblem, padded_shape, shard_shape, spec_problem
from meshwright.types import PyTree

LARGE_REPLICATED_BYTES = 16 * 2**20

PadPolicy = bool | str | Sequence[str]


@dataclass(frozen=True)
class LeafProblem:
    """A leaf whose spec does not fit it on this mesh."""

    match: LeafMatch
    problem: SpecProblem

    @property
    def name(self) -> str:
        return self.match.subject.name

    def __str__(self) -> str:
        return f"`{self.name}` (rule {self.match.rule}): {self.problem.message}"


@dataclass(frozen=True)
class LayoutReport:
    """Everything `make_layout` found. `ok` says whether a layout exists; the rest explains it.

    `leaves` holds the leaves that fit, in tree order; `num_rule_hits` how many leaves each rule decided.
    """

    mesh: AnyMesh
    rules: Rules
    leaves: tuple[LeafLayout, ...]
    num_rule_hits: tuple[int, ...]
    matches: RuleMatches
    problems: tuple[LeafProblem, ...]
    large_replicated: tuple[LeafLayout, ...]

    @property
    def ok(self) -> bool:
        return not self.problems and not self.unmatched

    @property
    def unmatched(self) -> tuple[str, ...]:
        return tuple(subject.name for subject in self.matches.unmatched)

    @cached_property
    def idle(self) -> list[IdleRule]:
        return idle_rules(self.matches)

    @property
    def dead_rules(self) -> list[IdleRule]:
        return [rule for rule in self.idle if rule.by is None]

    @property
    def shadowed_rules(self) -> list[IdleRule]:
        return [rule for rule in self.idle if rule.by is not None]

    @property
    def indivisible(self) -> list[LeafProblem]:
        return [problem for problem in self.problems if problem.problem.kind == "indivisible"]

    @property
    def padded(self) -> list[LeafLayout]:
        return [leaf for leaf in self.leaves if leaf.is_padded]

    def concerns(self) -> list[str]:
        """Returns what works but is probably not what was meant, one line each."""
        lines = [str(rule) for rule in self.idle] + inside_word_hits(self.matches)
        lines += [
            f"{row[0]} {row[1]} is whole on every device: {row[5]} each" for row in leaf_rows(self.large_replicated)
        ]
        return lines

    def notes(self) -> list[str]:
        """Returns the concerns, and what was asked for but changes what is stored."""
        return self.concerns() + [f"{row[0]} is padded: {row[1]}" for row in leaf_rows(self.padded)]

    def error(self) -> LayoutError | None:
        """Returns the error that lists every problem, or None when there is none."""
        if self.ok:
            return None
        parts, hints = [], []
        if self.matches.unmatched:
            parts.append(unmatched_message(self.matches.unmatched))
            hints.append(suggested_rules(self.matches.unmatched, self.mesh))
        if self.problems:
            parts.append(f"{count_leaves(len(self.problems))} not fitting the mesh {describe_mesh(self.mesh)}:")
            parts += [f"  {line}" for line in self.problem_lines()]
            hints += list(dict.fromkeys(problem.problem.hint for problem in self.problems))[:3]
        return LayoutError("\n".join(parts), hint=_joined(hints), report=self)

    def problem_lines(self) -> list[str]:
        """Returns the misfits, siblings of other layers folded together."""
        groups: dict[Any, list[LeafProblem]] = {}
        for problem in self.problems:
            groups.setdefault((problem.match.subject.shape, problem.problem.message, problem.match.rule), []).append(
                problem
            )
        lines = []
        for members in groups.values():
            first = members[0]
            name = f"`{first.name}`" + (f" and {len(members) - 1} like it" if len(members) > 1 else "")
            lines.append(f"{name} (rule {first.match.rule}): {first.problem.message}")
        return lines

    def __str__(self) -> str:
        total = sum(leaf.bytes_per_device for leaf in self.leaves)
        lines = [
            f"mesh {describe_mesh(self.mesh)} ({self.mesh.size} devices), {count_leaves(len(self.matches.leaves))}, "
            f"{len(self.rules)} rules, {format_bytes(total)} per device"
        ]
        for index, (rule, hits) in enumerate(zip(self.rules.entries, self.num_rule_hits, strict=True)):
            logical = f"  (from {rule.logical})" if rule.logical else ""
            lines.append(f"  rule {index} {rule}: {count_leaves(hits)}{logical}")
        error, notes = self.error(), self.notes()
        if error is not None:
            lines += ["problems:", *(f"  {line}" for line in str(error).splitlines())]
        if notes:
            lines += ["worth a look:", *(f"  {line}" for line in notes)]
        if error is None and not notes:
            lines.append("nothing to remark.")
        return "\n".join(lines)


@contextlib.contextmanager
def _collector_paused() -> Iterator[None]:
    """Holds Python's cyclic collector: everything made here survives, so its walks over all of jax find nothing."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@_collector_paused()
def explain_layout(
    rules: Any, tree: PyTree, mesh: AnyMesh, *, pad: PadPolicy = False, params: PyTree | None = None
) -> LayoutReport:
    """Matches rules against a tree on a mesh and reports everything; raises only for rules that cannot be read.

    Args and example: see `make_layout`, which raises when the report has problems.
    """
    rules = as_rules(rules).on(mesh)
    matches = match_rules(rules, tree, params=params)
    may_pad = _pad_test(pad)
    sizes = dict(mesh.shape)
    patterns = [rule.pattern.text for rule in rules.entries]
    leaves, problems = [], []
    # Few combinations of spec and shape occur in a model, and each is decided once: its stored and its local shape.
    verdicts: dict[Any, tuple[SpecProblem | None, tuple[int, ...], tuple[int, ...]]] = {}
    for match in matches.leaves:
        subject, spec = match.subject, match.spec
        if spec is None:
            continue
        key = (spec, subject.shape)
        if key not in verdicts:
            problem = spec_problem(spec, subject.shape, sizes)
            local = subject.shape if problem else shard_shape(spec, subject.shape, sizes)
            verdicts[key] = (problem, subject.shape, local)
        problem, stored, local = verdicts[key]
        if problem is not None and problem.kind == "indivisible" and may_pad(subject.names[-1]):
            stored = padded_shape(spec, subject.shape, sizes)
            problem = spec_problem(spec, stored, sizes)
            local = subject.shape if problem else shard_shape(spec, stored, sizes)
        if problem is not None:
            problems.append(LeafProblem(match, problem))
            continue
        pattern = "" if match.rule is None else patterns[match.rule]
        leaves.append(
            LeafLayout(
                subject.names[0], subject.shape, subject.dtype, spec, match.rule, pattern, match.reason, stored, local
            )
        )
    large = [
        leaf for leaf in leaves if mesh.size > 1 and leaf.is_replicated and leaf.bytes_total >= LARGE_REPLICATED_BYTES
    ]
    return LayoutReport(mesh, rules, tuple(leaves), matches.hits, matches, tuple(problems), tuple(large))


def _joined(hints: Sequence[str]) -> str:
    text = "; ".join(hint.rstrip(".") for hint in hints)
    return text if text.endswith("?") else f"{text}."


def _pad_test(pad: PadPolicy) -> Any:
    if isinstance(pad, bool):
        return lambda name: pad
    patterns = [compile_pattern(text) for text in ([pad] if isinstance(pad, str) else pad)]
    return lambda name: any(pattern.matches(name) for pattern in patterns)
