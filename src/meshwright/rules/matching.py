"""Matching of rules against the leaves of a tree.

The first rule whose regex is found (`re.search`) in a leaf's `/`-joined path wins. Leaves with one element are
replicated and need no rule. No device is touched.

Rules are written for parameters. An optimizer state repeats the parameters under prefixes such as `opt_state/0/mu`, and
sometimes in other shapes (Adafactor's rows and columns). `find_subjects` maps each leaf back to its parameter's path,
so optimizers need no rules. Leaves of a train state's `model_state` are replicated unless a rule matches them.
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

Role = Literal["parameter", "statistic", "model state", "bookkeeping"]


class Subject(NamedTuple):
    """One leaf and the names that rules are tried on, of which the first is its full path."""

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
    """A leaf with the index of its rule (None: no rule), its spec, and a remark for reports."""

    subject: Subject
    rule: int | None
    spec: P | None
    reason: str


@dataclass(frozen=True)
class RuleMatches:
    """The leaves in tree order with their matches, and the number of leaves that each rule decided."""

    rules: Rules
    leaves: tuple[LeafMatch, ...]
    hits: tuple[int, ...]

    @property
    def unmatched(self) -> list[Subject]:
        return [leaf.subject for leaf in self.leaves if leaf.spec is None]


def match_rules(rules: Any, tree: PyTree, *, params: PyTree | None = None) -> RuleMatches:
    """Matches rules against parameters, an optimizer state or a train state; does not raise if no rule matches.

    If `tree` is an optimizer state alone, pass `params` for the parameters' shapes; without them, statistics whose rank
    differs from their parameter's are replicated.

    Example:
        >>> matches = match_rules([("kernel", P("tp"))], {"kernel": np.ones((8, 4)), "bias": np.ones(4)})
        >>> [(leaf.subject.name, leaf.spec, leaf.reason) for leaf in matches.leaves]
        [('bias', None, 'no rule matches'), ('kernel', P('tp',), '')]
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
            whole = subject.role == "model state"
            leaves.append(
                LeafMatch(subject, None, P() if whole else None, "model state" if whole else "no rule matches")
            )
            continue
        hits[winner] += 1
        spec, reason = rules.entries[winner].spec, rules.entries[winner].source
        if subject.role == "statistic":
            spec, remark = _statistic_spec(spec, subject)
            reason = "; ".join(filter(None, (reason, remark)))
        leaves.append(LeafMatch(subject, winner, spec, reason))
    return RuleMatches(rules, tuple(leaves), tuple(hits))


def _first_match(tests: Sequence[tuple[str, Callable[[str], Any]]], name: str) -> int:
    """Returns the index of the first rule found in a name, or `len(tests)`."""
    for index, (literal, search) in enumerate(tests):
        if literal in name and search(name):
            return index
    return len(tests)


def _statistic_spec(spec: P, subject: Subject) -> tuple[P, str]:
    """Returns the spec of an optimizer's statistic from its parameter's spec and both shapes, and a remark."""
    shape, param_shape = subject.shape, subject.param_shape
    factored = subject.statistic in ("v_row", "v_col")
    if shape == param_shape or (param_shape is None and len(spec) <= len(shape) and not factored):
        return spec, ""
    if param_shape is None:
        return P(), "statistic of another rank; pass params= to shard it"
    entries = [*spec, *([None] * (len(param_shape) - len(spec)))]
    if len(shape) < len(param_shape):
        dims = _dims_kept(shape, param_shape, subject.statistic)
        if dims is not None:
            return P(*(entries[dim] for dim in dims)), f"dims {dims} of the parameter"
        return P(), "statistic of unrelated shape"
    if shape[1:] == param_shape:  # the last values of a parameter, as L-BFGS keeps them
        return P(None, *entries), "several of the parameter's shape"
    same = [dim < len(param_shape) and shape[dim] == param_shape[dim] for dim in range(len(shape))]
    if not any(same):
        return P(), "statistic of unrelated shape"
    return P(*(entries[dim] if kept else None for dim, kept in enumerate(same))), "statistic of another shape"


def _dims_kept(shape: tuple[int, ...], param_shape: tuple[int, ...], statistic: str) -> tuple[int, ...] | None:
    """Returns the parameter's dims that a reduced statistic keeps; with repeated sizes, the first that fit.

    Adafactor factors the two largest dims (of equal ones, the later counts as larger); rows lack the largest and
    columns the second largest.
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

    Pass `params` if the tree does not contain the parameters, whose paths and shapes are needed.
    """
    in_state = _field(tree, "params") is not None and _field(tree, "opt_state") is not None
    if not in_state and (
        "optax" not in sys.modules or not any(map(_is_optax_state, jax.tree.leaves(tree, is_leaf=_is_optax_state)))
    ):
        return [Subject((name,), _shape_of(value), _dtype_of(name, value)) for name, _, value in each_named_leaf(tree)]
    params = _field(tree, "params") if params is None and in_state else params
    shapes = {leaf.name: _shape_of(leaf.value) for leaf in each_named_leaf(params)}
    leaves, prefixes = each_named_leaf(tree), _optimizer_prefixes(tree, 0, 0)
    return [_subject(leaf, prefix, shapes, in_state) for leaf, prefix in zip(leaves, prefixes, strict=True)]


def _subject(leaf: NamedLeaf, prefix: int, shapes: dict[str, tuple[int, ...]], in_state: bool) -> Subject:
    name, keys, value = leaf
    shape, dtype = _shape_of(value), _dtype_of(name, value)
    if prefix:
        # The keys after the innermost optax field are the path of a parameter.
        if prefix >= len(keys):
            return Subject((name,), shape, dtype, "bookkeeping")
        inner = "/".join(key_to_string(key) for key in keys[prefix:])
        field = key_to_string(keys[prefix - 1])
        if inner not in shapes and (found := _ending(inner, shapes)):  # in a state that is not a class of optax's
            field, inner = inner.removesuffix(found).rstrip("/").rpartition("/")[2], found
        return Subject((name, inner), shape, dtype, "statistic", shapes.get(inner), field)
    top, _, rest = name.partition("/")
    if in_state and top == "params":
        return Subject((name, rest) if rest else (name,), shape, dtype)
    # Without optax's classes, a statistic is a leaf whose path ends in the path of a parameter.
    if in_state and top == "opt_state" and (found := _ending(rest, shapes)):
        field = name.removesuffix(found).rstrip("/").rpartition("/")[2]
        return Subject((name, found), shape, dtype, "statistic", shapes[found], field)
    if in_state and top == "ema":
        return Subject((name, rest), shape, dtype, "statistic", shapes.get(rest), "ema")
    if in_state and top == "model_state":
        return Subject((name, rest) if rest else (name,), shape, dtype, "model state")
    return Subject((name,), shape, dtype, "bookkeeping" if in_state and top in ("step", "rng", "fp8") else "parameter")


def _ending(path: str, shapes: dict[str, tuple[int, ...]]) -> str:
    """Returns the longest end of a path that is the path of a parameter, or an empty string."""
    while path and path not in shapes:
        path = path.partition("/")[2]
    return path


def _optimizer_prefixes(node: Any, depth: int, prefix: int) -> Iterator[int]:
    """Yields for each leaf the number of keys up to its innermost optax field; 0 outside of optax states."""
    if _is_optax_state(node):
        for value in node:
            yield from _optimizer_prefixes(value, depth + 1, depth + 1)
        return
    for path, leaf in jax.tree_util.tree_flatten_with_path(node, is_leaf=_is_optax_state)[0]:
        if _is_optax_state(leaf):
            yield from _optimizer_prefixes(leaf, depth + len(path), prefix)
        else:
            yield prefix


def _is_optax_state(node: Any) -> bool:
    cls: Any = type(node)
    return _is_optax_class(cls)


@functools.lru_cache(maxsize=1024)
def _is_optax_class(cls: type) -> bool:
    is_known = cls.__module__.partition(".")[0] == "optax" or cls.__module__.startswith("meshwright.train.optimizer.")
    return issubclass(cls, tuple) and hasattr(cls, "_fields") and is_known


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
        hint="mark static fields, for example with flax.struct.field(pytree_node=False), or remove them.",
    )


# --- Weight decay ---


def get_weight_decay_mask(exclusions: Sequence[str]) -> Callable[[PyTree], PyTree]:
    """Returns a mask for optax (`mask=`): False for each parameter whose path contains one of the exclusions.

    Example:
        >>> get_weight_decay_mask(["bias", "norm"])({"dense": {"kernel": 1.0, "bias": 1.0}})
        {'dense': {'bias': False, 'kernel': True}}
    """
    if isinstance(exclusions, str):
        raise RuleError(f"exclusions must be a list of patterns; got {exclusions!r}.", hint=f"pass [{exclusions!r}].")
    patterns = [compile_pattern(text) for text in exclusions]

    def mask(params: PyTree) -> PyTree:
        return named_tree_map(lambda name, _: not any(p.matches(name) for p in patterns), params, sep="/")

    return mask
