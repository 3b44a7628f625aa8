"""Every problem of rules, leaves and a mesh at once, and what works but deserves a look.

`explain_layout` decides; `LayoutReport` says it. Below it: rules that did nothing, leaves that no rule matches, and
letters matched by accident.
"""

from __future__ import annotations

import contextlib
import difflib
import gc
import itertools
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from jax.sharding import PartitionSpec as P

from meshwright.errors import LayoutError, MeshwrightWarning
from meshwright.layout.leaf import LeafLayout, count_leaves, format_bytes, leaf_rows
from meshwright.mesh.build import AnyMesh, describe_mesh
from meshwright.rules.matching import LeafMatch, RuleMatches, Subject, match_rules
from meshwright.rules.rule_set import Pattern, Rule, Rules, as_rules, compile_pattern
from meshwright.specs import SpecProblem, format_spec, padded_shape, shard_shape, spec_problem
from meshwright.types import PyTree

LARGE_REPLICATED_BYTES = 16 * 2**20

PadPolicy = bool | str | Sequence[str]


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
        key = (spec, subject.shape, may_pad(subject.names[-1]))
        if key not in verdicts:
            verdicts[key] = _fit(*key, sizes)
        problem, stored, local = verdicts[key]
        if problem is not None:
            problems.append(LeafProblem(match, problem))
            continue
        pattern = "" if match.rule is None else patterns[match.rule]
        leaves.append(
            LeafLayout(
                subject.names[0], subject.shape, subject.dtype, spec, match.rule, pattern, match.reason, stored, local
            )
        )
    return LayoutReport(mesh, tuple(leaves), matches, tuple(problems))


def _pad_test(pad: PadPolicy) -> Callable[[str], bool]:
    if isinstance(pad, bool):
        return lambda name: pad
    patterns = [compile_pattern(text) for text in ([pad] if isinstance(pad, str) else pad)]
    return lambda name: any(pattern.matches(name) for pattern in patterns)


def _fit(
    spec: P, shape: tuple[int, ...], may_pad: bool, sizes: dict[str, int]
) -> tuple[SpecProblem | None, tuple[int, ...], tuple[int, ...]]:
    """Returns what is wrong with a spec for a shape, the shape as stored, and that of one device's slice."""
    problem, stored = spec_problem(spec, shape, sizes), shape
    if problem is not None and problem.kind == "indivisible" and may_pad:
        stored = padded_shape(spec, shape, sizes)
        problem = spec_problem(spec, stored, sizes)
    return problem, stored, shape if problem else shard_shape(spec, stored, sizes)


class LeafProblem(NamedTuple):
    """A leaf whose spec does not fit it on this mesh."""

    match: LeafMatch
    problem: SpecProblem

    @property
    def name(self) -> str:
        return self.match.subject.name


@dataclass(frozen=True)
class LayoutReport:
    """Everything `make_layout` found. `ok` says whether a layout exists; the rest explains it.

    `leaves` holds the leaves that fit, in tree order; `num_rule_hits` how many leaves each rule decided.
    """

    mesh: AnyMesh
    leaves: tuple[LeafLayout, ...]
    matches: RuleMatches
    problems: tuple[LeafProblem, ...]

    @property
    def rules(self) -> Rules:
        return self.matches.rules

    @property
    def num_rule_hits(self) -> tuple[int, ...]:
        return self.matches.hits

    @property
    def ok(self) -> bool:
        return not self.problems and not self.unmatched

    def settle(self) -> None:
        """Raises the error if there are problems, and warns of concerns where the caller was called."""
        error = self.error()
        if error is not None:
            raise error
        concerns = self.concerns()
        if concerns:
            warnings.warn("layout:\n  " + "\n  ".join(concerns), MeshwrightWarning, stacklevel=3)

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

    @property
    def large_replicated(self) -> list[LeafLayout]:
        if self.mesh.size == 1:
            return []
        return [leaf for leaf in self.leaves if leaf.is_replicated and leaf.bytes_total >= LARGE_REPLICATED_BYTES]

    def concerns(self) -> list[str]:
        """Returns what works but is probably not what was meant, one line each."""
        rows = leaf_rows(self.large_replicated)
        whole = [f"{row[0]} {row[1]} is whole on every device: {row[5]} each" for row in rows]
        return [str(rule) for rule in self.idle] + inside_word_hits(self.matches) + whole

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
            hints += list(dict.fromkeys(problem.hint for _, problem in self.problems))[:3]
        hint = "; ".join(hint.rstrip(".") for hint in hints)
        return LayoutError("\n".join(parts), hint=hint if hint.endswith("?") else f"{hint}.", report=self)

    def problem_lines(self) -> list[str]:
        """Returns the misfits, siblings of other layers folded together."""
        groups: dict[Any, list[str]] = {}
        for match, problem in self.problems:
            groups.setdefault((match.subject.shape, problem.message, match.rule), []).append(match.subject.name)
        return [
            f"`{names[0]}`{_and_more(names)} (rule {rule}): {message}" for (_, message, rule), names in groups.items()
        ]

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


def _and_more(names: Sequence[Any]) -> str:
    return f" and {len(names) - 1} like it" if len(names) > 1 else ""


# --- What is worth telling about a match ---


@dataclass(frozen=True)
class IdleRule:
    """A rule that decided no leaf: shadowed by rule `by` on `leaf`, or dead, with the closest path if any."""

    index: int
    rule: Rule
    by: int | None
    leaf: str | None

    def __str__(self) -> str:
        if self.by is not None:
            return f"rule {self.index} `{self.rule.pattern.text}` is shadowed: rule {self.by} took `{self.leaf}` first"
        closest = f"; the closest path is `{self.leaf}`" if self.leaf else ""
        return f"rule {self.index} `{self.rule.pattern.text}` matches no leaf{closest}"


def idle_rules(matches: RuleMatches) -> list[IdleRule]:
    """Returns the rules that decided nothing, apart from catch-alls, which are there for just that."""
    silent = [
        (index, rule)
        for index, rule in enumerate(matches.rules.entries)
        if not matches.hits[index] and not rule.pattern.matches("")
    ]
    if not silent:
        return []
    idle = []
    named = [(name, leaf) for leaf in matches.leaves for name in leaf.subject.names]
    every_name = "\n".join(name for name, _ in named)  # one quick look tells of most rules that they match nowhere
    kinds: dict[str, str] | None = None
    for index, rule in silent:
        literal, search = rule.pattern.literal, rule.pattern.search
        candidates = named if literal in every_name else []
        found = (leaf for name, leaf in candidates if literal in name and search(name))
        first = next(found, None)
        taken = next((leaf for leaf in itertools.chain([first], found) if leaf and leaf.rule is not None), None)
        if taken is not None:
            idle.append(IdleRule(index, rule, taken.rule, taken.subject.name))
        elif first is None:  # else it names leaves of one element, which need no rule but may have one
            kinds = _kinds_of_paths(matches) if kinds is None else kinds
            idle.append(IdleRule(index, rule, None, _closest_path(rule.pattern, kinds)))
    return idle


def inside_word_hits(matches: RuleMatches) -> list[str]:
    """Returns warnings for one- and two-letter rules that matched within a longer word (`k` in `block/bias`)."""
    found: dict[int, str] = {}
    for leaf in matches.leaves:
        if leaf.rule is None or leaf.rule in found:
            continue
        pattern, name = matches.rules.entries[leaf.rule].pattern, leaf.subject.names[-1]
        if len(pattern.text) > 3:
            continue
        found_at = pattern.search(name)
        start, end = found_at.span() if found_at else (0, 0)
        if not 1 <= end - start <= 2:
            continue
        before, after = name[start - 1 : start], name[end : end + 1]
        if name[start].isalpha() and (before.isalpha() or after.isalpha()):
            found[leaf.rule] = (
                f"rule {leaf.rule} `{pattern.text}` took `{name}` by a letter inside a word; "
                rf"write `(^|/){pattern.text}(/|$)` to match a whole name"
            )
    return [found[index] for index in sorted(found)]


def generalise(name: str) -> str:
    """Returns a pattern for a leaf and its siblings in other layers: numbers become `\\d+`."""
    return re.sub(r"\d+", r"\\d+", re.escape(name).replace(r"\-", "-"))


def unmatched_message(unmatched: Sequence[Subject]) -> str:
    """Returns the text that lists all leaves no rule matches, siblings of other layers folded together."""
    groups: dict[str, list[Subject]] = {}
    for subject in unmatched:
        groups.setdefault(generalise(subject.names[-1]), []).append(subject)
    lines = [f"  `{members[0].name}` {members[0].shape}{_and_more(members)}" for members in groups.values()]
    return f"no rule matches {len(unmatched)} of the leaves:\n" + "\n".join(lines)


def suggested_rules(unmatched: Sequence[Subject], mesh: AnyMesh) -> str:
    """Returns rules that could be pasted to cover the unmatched leaves."""
    suggestions: dict[str, str] = {}
    for subject in unmatched:
        pattern = f"{generalise(subject.names[-1])}$"
        suggestions.setdefault(pattern, f'(r"{pattern}", {format_spec(_suggested_spec(subject.shape, mesh))})')
    return "add " + ", ".join(suggestions.values())


def _suggested_spec(shape: tuple[int, ...], mesh: AnyMesh) -> P:
    entries: list[str | None] = [None] * len(shape)
    if mesh.size > 1 and len(shape) > 1:
        axis, ways = max(mesh.shape.items(), key=lambda item: item[1])
        fitting = [dim for dim, size in enumerate(shape) if size % ways == 0]
        if fitting:
            entries[max(fitting, key=lambda dim: shape[dim])] = axis
    return P(*entries)


def _kinds_of_paths(matches: RuleMatches) -> dict[str, str]:
    """Returns one representative per kind of leaf: comparing 10,000 paths one by one would take seconds."""
    names = [leaf.subject.names for leaf in matches.leaves]
    without_numbers = re.sub(r"\d+", "0", "\n".join([each[-1] for each in names])).split("\n")
    kinds: dict[str, str] = {}
    for kind, each in zip(without_numbers, names, strict=False):
        kinds.setdefault(kind, each[0])
    return dict(itertools.islice(kinds.items(), 500))


def _closest_path(pattern: Pattern, kinds: dict[str, str]) -> str | None:
    wanted = re.sub(r"[\\^$*+?{}\[\]|()]", "", pattern.text)
    # Like difflib.get_close_matches, but each candidate must beat the best so far, which most fail cheaply.
    matcher = difflib.SequenceMatcher(b=wanted)
    best, closest = 0.4, None  # less alike than this, a path explains nothing
    for kind, path in kinds.items():
        matcher.set_seq1(kind)
        if matcher.real_quick_ratio() > best and matcher.quick_ratio() > best and (ratio := matcher.ratio()) > best:
            best, closest = ratio, path
    return closest
