"""Rules against leaves: who won where, and why.

The first rule whose regex is found in a leaf's `/`-joined path wins (`re.search`). Leaves with one element are
replicated without asking any rule. Nothing here touches a device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from jax.sharding import PartitionSpec as P

from meshwright.rules.roles import Subject, find_subjects
from meshwright.rules.rule_set import Rules, as_rules
from meshwright.types import PyTree


class LeafMatch(NamedTuple):
    """Which rule decided a leaf (None: none did), the spec it gets, and why in a few words."""

    subject: Subject
    rule: int | None
    spec: P | None
    reason: str


@dataclass(frozen=True)
class RuleMatches:
    """The outcome of matching: one entry per leaf in tree order, and per rule the number of leaves it decided."""

    rules: Rules
    leaves: tuple[LeafMatch, ...]
    hits: tuple[int, ...]

    @property
    def unmatched(self) -> list[Subject]:
        return [leaf.subject for leaf in self.leaves if leaf.spec is None]


def match_rules(rules: Any, tree: PyTree, *, params: PyTree | None = None) -> RuleMatches:
    """Matches rules against every leaf of parameters, an optimizer state or a train state; never raises for a miss.

    `params` gives the parameters' shapes when `tree` is an optimizer state alone; without it, statistics whose
    rank differs from their parameter's are replicated.
    """
    rules = as_rules(rules)
    tests = [(rule.pattern.literal, rule.pattern.search) for rule in rules.entries]
    hits = [0] * len(tests)
    leaves = []
    for subject in find_subjects(tree, params):
        if subject.size <= 1:
            leaves.append(LeafMatch(subject, None, P(), "one element" if subject.size else "empty"))
            continue
        if subject.role == "bookkeeping":
            leaves.append(LeafMatch(subject, None, P(), "bookkeeping, not a parameter"))
            continue
        winner = first_match(tests, subject.names)
        if winner is None:
            leaves.append(LeafMatch(subject, None, None, "no rule matches"))
            continue
        hits[winner] += 1
        spec = rules.entries[winner].spec
        reason = ""
        if subject.role == "statistic":
            spec, reason = _statistic_spec(spec, subject)
        leaves.append(LeafMatch(subject, winner, spec, reason))
    return RuleMatches(rules, tuple(leaves), tuple(hits))


def first_match(tests: Sequence[tuple[str, Callable[[str], Any]]], names: tuple[str, ...]) -> int | None:
    """Returns the index of the first rule found in any of a leaf's names."""
    if len(names) == 1:
        name = names[0]
        for index, (literal, search) in enumerate(tests):
            if literal in name and search(name):
                return index
        return None
    for index, (literal, search) in enumerate(tests):
        for name in names:
            if literal in name and search(name):
                return index
    return None


def _statistic_spec(spec: P, subject: Subject) -> tuple[P, str]:
    """Returns the spec of an optimizer's statistic from its parameter's, by the statistic's own shape."""
    shape, param_shape = subject.shape, subject.param_shape
    factored = subject.statistic in ("v_row", "v_col")
    if shape == param_shape or (param_shape is None and len(spec) <= len(shape) and not factored):
        return spec, ""
    if param_shape is None:
        return P(), "statistic of another rank; pass params= to split it"
    entries = [*spec, *([None] * (len(param_shape) - len(spec)))]
    if len(shape) < len(param_shape):
        dims = _dims_kept(shape, param_shape, subject.statistic)
        if dims is not None:
            return P(*(entries[dim] for dim in dims)), f"dims {dims} of the parameter"
        return P(), "statistic of unrelated shape"
    same = [dim < len(param_shape) and shape[dim] == param_shape[dim] for dim in range(len(shape))]
    if not any(same):
        return P(), "statistic of unrelated shape"
    return P(*(entries[dim] if kept else None for dim, kept in enumerate(same))), "statistic of another shape"


def _dims_kept(shape: tuple[int, ...], param_shape: tuple[int, ...], statistic: str) -> tuple[int, ...] | None:
    """Returns which dims of the parameter remain in a reduced statistic: where sizes repeat, the first that fit.

    Adafactor factors the two largest dims, the later one counting as larger between equals; rows lack the largest and
    columns the other.
    """
    if statistic in ("v_row", "v_col") and len(shape) == len(param_shape) - 1:
        other, largest = sorted(range(len(param_shape)), key=lambda dim: param_shape[dim])[-2:]
        dropped = largest if statistic == "v_row" else other
        factors = tuple(dim for dim in range(len(param_shape)) if dim != dropped)
        if tuple(param_shape[dim] for dim in factors) == shape:
            return factors
    kept: list[int] = []
    for dim, size in enumerate(param_shape):
        if len(kept) < len(shape) and size == shape[len(kept)]:
            kept.append(dim)
    return tuple(kept) if len(kept) == len(shape) else None
