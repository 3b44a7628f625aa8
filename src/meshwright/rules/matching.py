"""Rules against leaves: which rule decides each leaf of a tree, and why.

The first rule whose regex is found in a leaf's `/`-joined path wins (`re.search`). Leaves with one element are
replicated without asking any rule. Nothing here touches a device.

Rules are written for parameters. A training state holds the same parameters again, under an optimizer's own prefixes
(`opt_state/0/mu/...`) and sometimes in other shapes (adafactor's rows and columns). `find_subjects` finds, for each
leaf, the parameter path that rules are tried on, so that nobody writes rules for an optimizer.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from meshwright.errors import RuleError, TreeError
from meshwright.rules.rule_set import Rules, as_rules, compile_pattern
from meshwright.tree import NamedLeaf, each_named_leaf, key_to_string, named_tree_map
from meshwright.types import PyTree

Role = Literal["parameter", "statistic", "bookkeeping"]


class Subject(NamedTuple):
    """One leaf, as rules see it; `names` are what rules are tried on, the full path first."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: Any
    role: Role = "parameter"
    param_shape: tuple[int, ...] | None = None
    statistic: str = ""

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def size(self) -> int:
        return math.prod(self.shape)


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
        winner = min([_first_match(tests, name) for name in subject.names])
        if winner == len(tests):
            leaves.append(LeafMatch(subject, None, None, "no rule matches"))
            continue
        hits[winner] += 1
        spec = rules.entries[winner].spec
        reason = ""
        if subject.role == "statistic":
            spec, reason = _statistic_spec(spec, subject)
        leaves.append(LeafMatch(subject, winner, spec, reason))
    return RuleMatches(rules, tuple(leaves), tuple(hits))


def _first_match(tests: Sequence[tuple[str, Callable[[str], Any]]], name: str) -> int:
    """Returns the index of the first rule found in a name; after the last, if there is none."""
    for index, (literal, search) in enumerate(tests):
        if literal in name and search(name):
            return index
    return len(tests)


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


# --- The role of each leaf ---


def find_subjects(tree: PyTree, params: PyTree | None = None) -> list[Subject]:
    """Returns every leaf of a parameter tree, optimizer state or train state with its role, in JAX's order.

    `params` tells the parameters' paths and shapes when the tree does not hold them itself.
    """
    in_state = _field(tree, "params") is not None and _field(tree, "opt_state") is not None
    if not in_state and not _holds_optax_state(tree):  # parameters alone, the common case
        return [Subject((name,), _shape_of(value), _dtype_of(name, value)) for name, _, value in each_named_leaf(tree)]
    params = _field(tree, "params") if params is None and in_state else params
    shapes = {leaf.name: _shape_of(leaf.value) for leaf in each_named_leaf(params)}
    leaves, prefixes = each_named_leaf(tree), _optimizer_prefixes(tree, 0, 0)
    return [_subject(leaf, prefix, shapes, in_state) for leaf, prefix in zip(leaves, prefixes, strict=True)]


def _subject(leaf: NamedLeaf, prefix: int, shapes: dict[str, tuple[int, ...]], in_state: bool) -> Subject:
    name, keys, value = leaf
    shape, dtype = _shape_of(value), _dtype_of(name, value)
    if prefix:
        # Everything up to the innermost optax field is the optimizer's own; the rest is a parameter's path.
        if prefix >= len(keys):
            return Subject((name,), shape, dtype, "bookkeeping")
        inner = "/".join(key_to_string(key) for key in keys[prefix:])
        field = key_to_string(keys[prefix - 1])
        return Subject((name, inner), shape, dtype, "statistic", shapes.get(inner), field)
    top, _, rest = name.partition("/")
    if in_state and top == "params":
        return Subject((name, rest) if rest else (name,), shape, dtype)
    if in_state and top == "opt_state":
        # Not optax's classes: a statistic is recognised by ending in the path of a parameter.
        while rest and rest not in shapes:
            rest = rest.partition("/")[2]
        if rest:
            field = name.removesuffix(rest).rstrip("/").rpartition("/")[2]
            return Subject((name, rest), shape, dtype, "statistic", shapes[rest], field)
    return Subject((name,), shape, dtype, "bookkeeping" if in_state and top in ("step", "rng") else "parameter")


def _optimizer_prefixes(node: Any, depth: int, prefix: int) -> Iterator[int]:
    """Yields, leaf by leaf, how many keys lead to the innermost optax field around it; 0 outside of optax."""
    if _is_optax_state(node):
        for value in node:
            yield from _optimizer_prefixes(value, depth + 1, depth + 1)
        return
    for path, leaf in jax.tree_util.tree_flatten_with_path(node, is_leaf=_is_optax_state)[0]:
        if _is_optax_state(leaf):
            yield from _optimizer_prefixes(leaf, depth + len(path), prefix)
        else:
            yield prefix


def _holds_optax_state(tree: PyTree) -> bool:
    # A tree can hold optax's states only if somebody imported optax.
    if "optax" not in sys.modules:
        return False
    return any(_is_optax_state(node) for node in jax.tree.leaves(tree, is_leaf=_is_optax_state))


def _is_optax_state(node: Any) -> bool:
    cls: Any = type(node)
    return _is_optax_class(cls)


@functools.lru_cache(maxsize=1024)
def _is_optax_class(cls: type) -> bool:
    return issubclass(cls, tuple) and hasattr(cls, "_fields") and cls.__module__.partition(".")[0] == "optax"


def _field(tree: PyTree, name: str) -> Any:
    return tree.get(name) if isinstance(tree, Mapping) else getattr(tree, name, None)


def _shape_of(value: Any) -> tuple[int, ...]:
    shape = getattr(value, "shape", None)
    return np.shape(value) if shape is None else tuple(shape)


def _dtype_of(name: str, value: Any) -> Any:
    if hasattr(value, "dtype"):
        return value.dtype
    if isinstance(value, (bool, int, float, complex)):
        return jax.dtypes.canonicalize_dtype(np.result_type(value))
    raise TreeError(
        f"leaf `{name}` is a {type(value).__name__}, which is neither an array nor a number.",
        hint="mark static fields as such (for example flax.struct.field(pytree_node=False)), or remove them.",
    )


# --- Weight decay ---


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
