"""Rules -> specs: partition rules matched against the leaves of parameters and training states.

`rule_set` holds the rules, `patterns` makes their regexes safe, `roles` finds what each leaf of a state is,
`matching` decides, and `findings` says what a user should know about the outcome.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from meshwright.errors import LayoutError, RuleError
from meshwright.mesh.build import AnyMesh, current_mesh
from meshwright.rules.findings import suggested_rules, unmatched_message, warn_of_idle_rules
from meshwright.rules.matching import LeafMatch, RuleMatches, match_rules
from meshwright.rules.patterns import compile_pattern
from meshwright.rules.rule_set import Rule, Rules, as_rules, logical_rules
from meshwright.specs import get_names_from_partition_spec, spec_axes, spec_problem
from meshwright.tree import named_tree_map
from meshwright.types import PyTree

__all__ = [
    "LeafMatch",
    "P",
    "Rule",
    "RuleMatches",
    "Rules",
    "as_rules",
    "get_names_from_partition_spec",
    "get_weight_decay_mask",
    "logical_rules",
    "match_partition_rules",
    "match_rules",
]


def match_partition_rules(rules: Any, params: PyTree, *, mesh: AnyMesh | None = None) -> PyTree:
    """Returns the tree with each leaf replaced by the spec of the first rule found in its path.

    Works on parameters, on a `TrainState` and on any optax state: an optimizer's prefixes need no rules of their own.
    Specs are checked against the leaf's rank, and against `mesh` (or the mesh in force) when there is one.

    Example:
        >>> match_partition_rules([("kernel", P("fsdp", "tp")), (".*", P())], {"a": {"kernel": jax.numpy.ones((4, 4))}})
        {'a': {'kernel': P('fsdp', 'tp')}}
    """
    mesh = mesh if mesh is not None else current_mesh()
    rules = as_rules(rules) if mesh is None else as_rules(rules).on(mesh)
    matches = match_rules(rules, params)
    if matches.unmatched:
        raise LayoutError(unmatched_message(matches.unmatched), hint=suggested_rules(matches.unmatched, mesh))
    problems = []
    for leaf in matches.leaves:
        assert leaf.spec is not None
        sizes = dict(mesh.shape) if mesh is not None else dict.fromkeys(spec_axes(leaf.spec), 1)
        problem = spec_problem(leaf.spec, leaf.subject.shape, sizes)
        if problem:
            problems.append((leaf, problem))
    if problems:
        lines = [f"`{leaf.subject.name}` (rule {leaf.rule}): {problem.message}" for leaf, problem in problems]
        raise LayoutError("\n".join(lines), hint=problems[0][1].hint)
    warn_of_idle_rules(matches)
    return jax.tree.unflatten(jax.tree.structure(params), [leaf.spec for leaf in matches.leaves])


def get_weight_decay_mask(exclusions: Sequence[str]) -> Callable[[PyTree], PyTree]:
    """Returns a function from parameters to booleans: False where any exclusion is found in the path.

    Pass it to optax as `mask=`.

    Example:
        >>> get_weight_decay_mask(["bias", "norm"])({"dense": {"kernel": 1.0, "bias": 1.0}})
        {'dense': {'bias': False, 'kernel': True}}
    """
    if isinstance(exclusions, str):
        raise RuleError(f"exclusions must be a list of patterns, not {exclusions!r}.", hint=f"write [{exclusions!r}].")
    patterns = [compile_pattern(text) for text in exclusions]

    def mask(params: PyTree) -> PyTree:
        return named_tree_map(lambda name, _: not any(p.matches(name) for p in patterns), params, sep="/")

    return mask
