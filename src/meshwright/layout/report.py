"""Layout reports: all problems with a set of rules at once, and warnings about likely mistakes."""

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
from meshwright.mesh.current import AnyMesh, describe_mesh
from meshwright.rules.matching import LeafMatch, RuleMatches, Subject, match_rules
from meshwright.rules.optional_axes import misspelled_axes, unnamed_axes
from meshwright.rules.rule_set import Pattern, Rule, Rules, as_rules, compile_pattern
from meshwright.specs import (
    SpecProblem,
    format_spec,
    padded_shape,
    shard_shape,
    spec_axes,
    spec_problem,
    spread_over,
)
from meshwright.types import PyTree

LARGE_REPLICATED_BYTES = 16 * 2**20

PadPolicy = bool | str | Sequence[str]


@contextlib.contextmanager
def _collector_paused() -> Iterator[None]:
    """Pauses Python's cyclic garbage collector: everything allocated here survives, so collecting wastes time."""
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
    """Matches rules against a tree on a mesh and reports all problems; raises only for malformed rules.

    The arguments are those of `make_layout`, which raises if the report has problems.

    Example:
        >>> import jax, meshwright as mw
        >>> weight = {"weight": jax.ShapeDtypeStruct((6, 4), "float32")}
        >>> print(explain_layout([("weight", P("tp"))], weight, mw.create_abstract_mesh("tp:4")))
        mesh tp=4 (4 devices), 1 leaf, 1 rule, 0 B per device
          rule 0 'weight' -> P('tp'): 1 leaf
        problems:
          1 leaf does not fit the mesh tp=4:
            `weight` (rule 0): dim 0 has size 6; `tp` has 4 devices: 6 % 4 = 2.
          hint: pad to 8, or drop `tp` here.
    """
    given = as_rules(rules)
    rules = given.on(mesh)
    matches = match_rules(rules, tree, params=params)
    may_pad = _pad_test(pad)
    sizes = dict(mesh.shape)
    patterns = [rule.pattern.text for rule in rules.entries]
    leaves, problems = [], []
    # A model has few combinations of spec and shape, so each is checked only once.
    verdicts: dict[Any, tuple[SpecProblem | None, tuple[int, ...], tuple[int, ...]]] = {}
    for match in matches.leaves:
        subject, spec, reason = match.subject, match.spec, match.reason
        if spec is None:
            continue
        axis = None if match.rule is None else rules.entries[match.rule].spread
        if axis is not None and sizes.get(axis, 1) > 1 and axis not in spec_axes(spec):
            finer = spread_over(spec, axis, subject.shape, sizes)
            if finer is None:
                reason = "; ".join(filter(None, (reason, f"{axis} divides no dim")))
            spec = finer or spec
        key = (spec, subject.shape, may_pad(subject.names[-1]))
        if key not in verdicts:
            verdicts[key] = _fit(*key, sizes)
        problem, stored, local = verdicts[key]
        if problem is not None:
            problems.append(LeafProblem(match, problem))
            continue
        pattern = "" if match.rule is None else patterns[match.rule]
        leaves.append(
            LeafLayout(subject.names[0], subject.shape, subject.dtype, spec, match.rule, pattern, reason, stored, local)
        )
    unnamed = [f"optional axis {axis!r} is in no rule" for axis in unnamed_axes(given)]
    misspelled = misspelled_axes(given, mesh)
    return LayoutReport(mesh, tuple(leaves), matches, tuple(problems), tuple(misspelled), tuple(unnamed))


def _pad_test(pad: PadPolicy) -> Callable[[str], bool]:
    if isinstance(pad, bool):
        return lambda name: pad
    patterns = [compile_pattern(text) for text in ([pad] if isinstance(pad, str) else pad)]
    return lambda name: any(pattern.matches(name) for pattern in patterns)


def _fit(
    spec: P, shape: tuple[int, ...], may_pad: bool, sizes: dict[str, int]
) -> tuple[SpecProblem | None, tuple[int, ...], tuple[int, ...]]:
    """Returns the problem of a spec for a shape (or None), the stored shape, and the shape of one device's slice."""
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
    """The findings of `explain_layout`; `ok` says whether `make_layout` would succeed.

    `leaves` are the leaves that fit, in tree order; `num_rule_hits` is the number of leaves that each rule decided.
    `misspelled` and `unnamed` have a line for each optional axis that looks misspelled, or that no rule names.
    """

    mesh: AnyMesh
    leaves: tuple[LeafLayout, ...]
    matches: RuleMatches
    problems: tuple[LeafProblem, ...]
    misspelled: tuple[str, ...] = ()
    unnamed: tuple[str, ...] = ()

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
        """Raises if there are problems, and issues the concerns as a warning at the caller's caller."""
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
        """Returns one line per likely mistake in a layout that works."""
        rows = leaf_rows(self.large_replicated)
        whole = [f"{row[0]} {row[1]} is replicated on every device: {row[5]} each" for row in rows]
        return [*map(str, self.idle), *inside_word_hits(self.matches), *self.misspelled, *whole]

    def notes(self) -> list[str]:
        """Returns the concerns, the leaves that are padded on request, and the optional axes that no rule names."""
        padded = [f"{row[0]} is padded: {row[1]}" for row in leaf_rows(self.padded)]
        said = " ".join(self.misspelled)
        return [*self.concerns(), *padded, *(line for line in self.unnamed if line not in said)]

    def error(self) -> LayoutError | None:
        """Returns an error that lists every problem, or None."""
        if self.ok:
            return None
        parts, hints = [], []
        if unmatched := self.matches.unmatched:
            groups: dict[str, list[Subject]] = {}
            for subject in unmatched:
                groups.setdefault(generalise(subject.names[-1]), []).append(subject)
            parts.append(f"no rule matches {count_leaves(len(unmatched))}:")
            parts += [f"  `{group[0].name}` {group[0].shape}{_and_more(group)}" for group in groups.values()]
            specs = [format_spec(_suggested_spec(group[0].shape, self.mesh)) for group in groups.values()]
            rules = [f'(r"{pattern}$", {spec})' for pattern, spec in zip(groups, specs, strict=True)]
            hints.append("add " + ", ".join(rules))
        if self.problems:
            do = "does" if len(self.problems) == 1 else "do"
            parts.append(f"{count_leaves(len(self.problems))} {do} not fit the mesh {describe_mesh(self.mesh)}:")
            parts += [f"  {line}" for line in self.problem_lines()]
            hints += list(dict.fromkeys(problem.hint for _, problem in self.problems))[:3]
        hint = "; ".join(hint.rstrip(".") for hint in hints)
        return LayoutError("\n".join(parts), hint=hint if hint.endswith("?") else f"{hint}.", report=self)

    def problem_lines(self) -> list[str]:
        """Returns the leaves that do not fit the mesh, with one line for the same leaf of all layers."""
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
            f"{len(self.rules)} {'rule' if len(self.rules) == 1 else 'rules'}, {format_bytes(total)} per device"
        ]
        for index, (rule, hits) in enumerate(zip(self.rules.entries, self.num_rule_hits, strict=True)):
            logical = f"  ({rule.source or f'from {rule.logical}'})" if rule.source or rule.logical else ""
            lines.append(f"  rule {index} {rule}: {count_leaves(hits)}{logical}")
        error, notes = self.error(), self.notes()
        if error is not None:
            lines += ["problems:", *(f"  {line}" for line in str(error).splitlines())]
        if notes:
            lines += ["notes:", *(f"  {line}" for line in notes)]
        if error is None and not notes:
            lines.append("no problems found.")
        return "\n".join(lines)


def _and_more(names: Sequence[Any]) -> str:
    return f" and {len(names) - 1} more like it" if len(names) > 1 else ""


# --- Findings ---


@dataclass(frozen=True)
class IdleRule:
    """A rule that decided no leaf: shadowed by rule `by` on `leaf`, or dead (then `leaf` is the closest path)."""

    index: int
    rule: Rule
    by: int | None
    leaf: str | None

    def __str__(self) -> str:
        rule = f"rule {self.index} `{self.rule.pattern.text}`"
        if self.by is not None:
            return f"{rule} is shadowed: rule {self.by} matches `{self.leaf}` first"
        return f"{rule} matches no leaf" + (f"; the closest path is `{self.leaf}`" if self.leaf else "")


def idle_rules(matches: RuleMatches) -> list[IdleRule]:
    """Returns the rules that decided no leaf, except catch-alls such as `.*`."""
    silent = [
        (index, rule)
        for index, rule in enumerate(matches.rules.entries)
        if not matches.hits[index] and not rule.pattern.matches("")
    ]
    if not silent:
        return []
    idle = []
    named = [(name, leaf) for leaf in matches.leaves for name in leaf.subject.names]
    every_name = "\n".join(name for name, _ in named)  # one fast test rules out most of the patterns
    kinds: dict[str, str] | None = None
    for index, rule in silent:
        literal, search = rule.pattern.literal, rule.pattern.search
        candidates = named if literal in every_name else []
        found = (leaf for name, leaf in candidates if literal in name and search(name))
        first = next(found, None)
        taken = next((leaf for leaf in itertools.chain([first], found) if leaf and leaf.rule is not None), None)
        if taken is not None:
            idle.append(IdleRule(index, rule, taken.rule, taken.subject.name))
        elif first is None:  # a rule may match leaves of one element, although they need none
            kinds = _kinds_of_paths(matches) if kinds is None else kinds
            idle.append(IdleRule(index, rule, None, _closest_path(rule.pattern, kinds)))
    return idle


def inside_word_hits(matches: RuleMatches) -> list[str]:
    """Returns warnings about one- and two-letter rules that matched inside a longer word (`k` in `block/bias`)."""
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
                f"rule {leaf.rule} `{pattern.text}` matches inside a word of `{name}`; "
                rf"use `(^|/){pattern.text}(/|$)` to match a whole name"
            )
    return [found[index] for index in sorted(found)]


def generalise(name: str) -> str:
    """Returns a pattern that matches the same leaf of all layers: numbers become `\\d+`."""
    return re.sub(r"\d+", r"\\d+", re.escape(name).replace(r"\-", "-"))


def _suggested_spec(shape: tuple[int, ...], mesh: AnyMesh) -> P:
    entries: list[str | None] = [None] * len(shape)
    if mesh.size > 1 and len(shape) > 1:
        axis, ways = max(mesh.shape.items(), key=lambda item: item[1])
        fitting = [dim for dim, size in enumerate(shape) if size % ways == 0]
        if fitting:
            entries[max(fitting, key=lambda dim: shape[dim])] = axis
    return P(*entries)


def _kinds_of_paths(matches: RuleMatches) -> dict[str, str]:
    """Returns one path per kind of leaf, because comparing 10,000 paths one by one would take seconds."""
    names = [leaf.subject.names for leaf in matches.leaves]
    without_numbers = re.sub(r"\d+", "0", "\n".join([each[-1] for each in names])).split("\n")
    kinds: dict[str, str] = {}
    for kind, each in zip(without_numbers, names, strict=False):
        kinds.setdefault(kind, each[0])
    return dict(itertools.islice(kinds.items(), 500))


def _closest_path(pattern: Pattern, kinds: dict[str, str]) -> str | None:
    wanted = re.sub(r"[\\^$*+?{}\[\]|()]", "", pattern.text)
    # Like difflib.get_close_matches, but faster: each candidate must beat the best so far.
    matcher = difflib.SequenceMatcher(b=wanted)
    best, closest = 0.4, None  # a less similar path would not help
    for kind, path in kinds.items():
        matcher.set_seq1(kind)
        if matcher.real_quick_ratio() > best and matcher.quick_ratio() > best and (ratio := matcher.ratio()) > best:
            best, closest = ratio, path
    return closest
