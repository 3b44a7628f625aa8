"""What is worth telling about a match: rules that did nothing, leaves nobody wanted, letters matched by accident."""

from __future__ import annotations

import difflib
import itertools
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

from jax.sharding import PartitionSpec as P

from meshwright.errors import MeshwrightWarning
from meshwright.mesh.build import AnyMesh
from meshwright.rules.matching import RuleMatches
from meshwright.rules.patterns import Pattern
from meshwright.rules.roles import Subject
from meshwright.rules.rule_set import Rule
from meshwright.specs import format_spec


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
        taken = first
        if first is not None and first.rule is None:
            taken = next((leaf for leaf in found if leaf.rule is not None), None)
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
        part = pattern.matched_part(name)
        if part is None or not 1 <= part[1] - part[0] <= 2:
            continue
        before, after = name[part[0] - 1 : part[0]], name[part[1] : part[1] + 1]
        if name[part[0]].isalpha() and (before.isalpha() or after.isalpha()):
            found[leaf.rule] = (
                f"rule {leaf.rule} `{pattern.text}` took `{name}` by a letter inside a word; "
                rf"write `(^|/){pattern.text}(/|$)` to match a whole name"
            )
    return [found[index] for index in sorted(found)]


def warn_of_idle_rules(matches: RuleMatches) -> None:
    """Warns once of every rule that did nothing or probably did something else than meant."""
    lines = [str(rule) for rule in idle_rules(matches)] + inside_word_hits(matches)
    if lines:
        warnings.warn("partition rules:\n  " + "\n  ".join(lines), MeshwrightWarning, stacklevel=3)


def generalise(name: str) -> str:
    """Returns a pattern for a leaf and its siblings in other layers: numbers become `\\d+`."""
    return re.sub(r"\d+", r"\\d+", re.escape(name).replace(r"\-", "-"))


def unmatched_message(unmatched: Sequence[Subject]) -> str:
    """Returns the text that lists all leaves no rule matches, siblings of other layers folded together."""
    groups: dict[str, list[Subject]] = {}
    for subject in unmatched:
        groups.setdefault(generalise(subject.names[-1]), []).append(subject)
    lines = []
    for members in groups.values():
        more = f" and {len(members) - 1} like it" if len(members) > 1 else ""
        lines.append(f"  `{members[0].name}` {members[0].shape}{more}")
    return f"no rule matches {len(unmatched)} of the leaves:\n" + "\n".join(lines)


def suggested_rules(unmatched: Sequence[Subject], mesh: AnyMesh | None) -> str:
    """Returns rules that could be pasted to cover the unmatched leaves."""
    suggestions: dict[str, str] = {}
    for subject in unmatched:
        pattern = f"{generalise(subject.names[-1])}$"
        suggestions.setdefault(pattern, f'(r"{pattern}", {format_spec(_suggested_spec(subject.shape, mesh))})')
    return "add " + ", ".join(suggestions.values())


def _suggested_spec(shape: tuple[int, ...], mesh: AnyMesh | None) -> P:
    entries: list[str | None] = [None] * len(shape)
    if mesh is not None and len(shape) > 1:
        axis, ways = max(mesh.shape.items(), key=lambda item: item[1])
        fitting = [dim for dim, size in enumerate(shape) if size % ways == 0]
        if ways > 1 and fitting:
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
