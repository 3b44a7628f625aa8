"""What each leaf of a training state is: a parameter, an optimizer's statistic of one, or bookkeeping.

Rules are written for parameters. A state holds the same parameters again, under an optimizer's own prefixes
(`opt_state/0/mu/...`) and sometimes in other shapes (adafactor's rows and columns). This module finds, for each
leaf, the parameter path that rules should be tried on, so that nobody writes rules for an optimizer.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

from meshwright.errors import TreeError
from meshwright.tree import each_named_leaf, key_to_string, named_leaves
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
        # Not math.prod over numpy ints: shapes are tuples of Python ints, and this runs for every leaf.
        size = 1
        for dim in self.shape:
            size *= dim
        return size


def find_subjects(tree: PyTree, params: PyTree | None = None) -> list[Subject]:
    """Returns every leaf of a parameter tree, optimizer state or train state with its role, in JAX's order.

    `params` tells the parameters' paths and shapes when the tree does not hold them itself.
    """
    if params is None:
        params = _field(tree, "params") if _is_train_state(tree) else None
    shapes = (
        {leaf.name: _shape_of(leaf.name, leaf.value) for leaf in named_leaves(params)} if params is not None else {}
    )
    in_state = _is_train_state(tree)
    if not in_state and not _holds_optax_state(tree):  # parameters alone, the common case, need no second walk
        return [
            Subject((name,), _shape_of(name, value), _dtype_of(name, value)) for name, _, value in each_named_leaf(tree)
        ]
    leaves = named_leaves(tree)
    prefixes = list(_optimizer_prefixes(tree))
    assert len(prefixes) == len(leaves)
    return [
        _subject(leaf.name, leaf.keys, leaf.value, prefix, shapes, in_state)
        for leaf, prefix in zip(leaves, prefixes, strict=True)
    ]


def _subject(
    name: str,
    keys: tuple[Any, ...],
    value: Any,
    prefix: int,
    shapes: dict[str, tuple[int, ...]],
    in_state: bool,
) -> Subject:
    shape, dtype = _shape_of(name, value), _dtype_of(name, value)
    if prefix:
        # Everything up to the innermost optax field is the optimizer's own; the rest is a parameter's path.
        if prefix >= len(keys):
            return Subject((name,), shape, dtype, "bookkeeping")
        inner = "/".join(key_to_string(key) for key in keys[prefix:])
        field = key_to_string(keys[prefix - 1])
        return Subject((name, inner), shape, dtype, "statistic", shapes.get(inner), field)
    if not in_state:
        return Subject((name,), shape, dtype)
    top, _, rest = name.partition("/")
    if top == "params":
        return Subject((name, rest) if rest else (name,), shape, dtype)
    if top == "opt_state":
        # Not optax's classes: a statistic is recognised by ending in the path of a parameter.
        suffix = next((tail for tail in _tails(name) if tail in shapes), None)
        if suffix is not None:
            field = name.removesuffix(suffix).rstrip("/").rpartition("/")[2]
            return Subject((name, suffix), shape, dtype, "statistic", shapes[suffix], field)
    if top in ("step", "rng"):
        return Subject((name,), shape, dtype, "bookkeeping")
    return Subject((name,), shape, dtype)


def _tails(name: str) -> Iterator[str]:
    while "/" in name:
        name = name.partition("/")[2]
        yield name


def _optimizer_prefixes(tree: PyTree) -> Iterator[int]:
    """Yields, leaf by leaf, how many keys lead to the innermost optax field around it; 0 outside of optax."""

    def visit(node: Any, depth: int, prefix: int) -> Iterator[int]:
        if _is_optax_state(node):
            for value in node:
                yield from visit(value, depth + 1, depth + 1)
            return
        flat, _ = jax.tree_util.tree_flatten_with_path(node, is_leaf=_is_optax_state)
        for path, leaf in flat:
            if _is_optax_state(leaf):
                yield from visit(leaf, depth + len(path), prefix)
            else:
                yield prefix

    yield from visit(tree, 0, 0)


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


def _is_train_state(tree: PyTree) -> bool:
    return all(_field(tree, name) is not None for name in ("params", "opt_state"))


def _field(tree: PyTree, name: str) -> Any:
    if isinstance(tree, Mapping):
        return tree.get(name)
    return getattr(tree, name, None)


def _shape_of(name: str, value: Any) -> tuple[int, ...]:
    shape = getattr(value, "shape", None)
    if type(shape) is tuple:
        return shape
    try:
        return np.shape(value) if shape is None else tuple(shape)
    except ValueError as error:
        raise TreeError(f"leaf `{name}` has no shape: {error}") from None


def _dtype_of(name: str, value: Any) -> Any:
    if hasattr(value, "dtype"):
        return value.dtype
    if isinstance(value, (bool, int, float, complex, np.ndarray)):
        return jax.dtypes.canonicalize_dtype(np.result_type(value))
    raise TreeError(
        f"leaf `{name}` is a {type(value).__name__}, which is neither an array nor a number.",
        hint="mark static fields as such (for example flax.struct.field(pytree_node=False)), or remove them.",
    )
