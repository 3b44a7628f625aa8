"""Names of pytree leaves: the `/`-joined paths that rules, layouts, checkpoints and error messages use."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax

from meshwright.errors import TreeError
from meshwright.types import PyTree

IsLeaf = Callable[[Any], bool] | None


def key_to_string(key: Any) -> str:
    """Returns the name of one key of a key path, for any kind of container."""
    # All of JAX's key classes have one of these, and so do most key classes of other packages.
    for attribute in ("key", "name", "idx"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


def tree_path_to_string(path: Sequence[Any], sep: str | None = None) -> str | tuple[str, ...]:
    """Returns a key path as a tuple of names, or as one string if `sep` is given.

    Example:
        >>> import jax
        >>> [(path, _)] = jax.tree.leaves_with_path({"block": [1.0]})
        >>> tree_path_to_string(path), tree_path_to_string(path, sep="/")
        (('block', '0'), 'block/0')
    """
    names = tuple(key_to_string(key) for key in path)
    return names if sep is None else sep.join(names)


def flatten_tree(xs: PyTree, is_leaf: IsLeaf = None, sep: str | None = None) -> dict[Any, Any]:
    """Returns a dict from leaf name to leaf, in JAX's order; raises if two leaves have the same name.

    Example:
        >>> flatten_tree({"a": {"b": 1, "c": (2, 3)}}, sep="/")
        {'a/b': 1, 'a/c/0': 2, 'a/c/1': 3}
    """
    flat: dict[Any, Any] = {}
    paths: dict[Any, Any] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(xs, is_leaf=is_leaf)[0]:
        name = tree_path_to_string(path, sep)
        if name in flat:
            raise _collision(name, paths[name], path)
        flat[name], paths[name] = leaf, path
    return flat


def _collision(name: object, first: Sequence[Any], second: Sequence[Any]) -> TreeError:
    return TreeError(
        f"two leaves are both named {name!r}: {jax.tree_util.keystr(tuple(first))} and "
        f"{jax.tree_util.keystr(tuple(second))}.",
        hint="rename one of the keys, or use another separator (sep=None makes each name a tuple).",
    )


def named_tree_map(
    f: Callable[..., Any], tree: PyTree, *rest: PyTree, is_leaf: IsLeaf = None, sep: str | None = None
) -> PyTree:
    """Maps `f(name, leaf, *other_leaves)` over one or more trees of the same structure.

    Example:
        >>> named_tree_map(lambda name, x: f"{name}={x}", {"a": {"b": 1}}, sep="/")
        {'a': {'b': 'a/b=1'}}
    """
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf, *others: f(tree_path_to_string(path, sep), leaf, *others), tree, *rest, is_leaf=is_leaf
    )


def tree_apply(fns: PyTree, tree: PyTree) -> PyTree:
    """Applies a tree of functions to a tree of values, leaf by leaf.

    If all functions have the same `apply_many` (see `make_shard_and_gather_fns`), it is called once for all leaves, so
    that a whole tree moves at once.

    Example:
        >>> tree_apply({"a": abs, "b": str}, {"a": -1, "b": -1})
        {'a': 1, 'b': '-1'}
    """
    structure: Any  # JAX does not export the type of a treedef
    functions, structure = jax.tree.flatten(fns)
    for function in functions:
        if not callable(function):
            raise TreeError(f"the first tree must contain functions; found {function!r}.")
    try:
        values = structure.flatten_up_to(tree)
    except (ValueError, TypeError) as error:
        raise TreeError(f"the tree of functions and the tree of values differ in structure: {error}") from None
    ways = {getattr(function, "apply_many", _one_by_one) for function in functions}
    apply_many = ways.pop() if len(ways) == 1 else _one_by_one
    return structure.unflatten(apply_many(functions, values))


def _one_by_one(functions: Sequence[Any], values: Sequence[Any]) -> list[Any]:
    return [function(value) for function, value in zip(functions, values, strict=True)]


class NamedLeaf(NamedTuple):
    """One leaf with JAX's key path and its `/`-joined name."""

    name: str
    keys: tuple[Any, ...]
    value: Any


def named_leaves(tree: PyTree) -> list[NamedLeaf]:
    """Returns every leaf with its `/`-joined name.

    Boxes around one array (`nn.Partitioned`, `nnx.Variable`) add no level to the name: `dense/kernel` is the array's
    name with or without a box.
    """
    return list(each_named_leaf(tree))


def each_named_leaf(tree: PyTree) -> Iterator[NamedLeaf]:
    """Yields the leaves of `named_leaves` one at a time, which is faster for trees with 10,000 leaves."""
    is_box = _box_test()
    seen: dict[str, tuple[Any, ...]] = {}

    folder: tuple[Any, ...] = ()
    prefix = ""

    def named(path: tuple[Any, ...], value: Any) -> NamedLeaf:
        nonlocal folder, prefix
        if path[:-1] != folder:  # siblings are adjacent, so most leaves reuse this prefix
            folder = path[:-1]
            prefix = "".join([f"{key_to_string(key)}/" for key in folder])
        name = prefix + key_to_string(path[-1]) if path else ""
        if name in seen:
            raise _collision(name, seen[name], path)
        seen[name] = path
        return NamedLeaf(name, path, value)

    for path, node in jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_box)[0]:
        if is_box is None or not is_box(node):
            yield named(path, node)
            continue
        inside = jax.tree_util.tree_flatten_with_path(node)[0]
        for inner, value in inside:
            yield named(path if len(inside) == 1 else (*path, *inner), value)


def split_primals(tree: PyTree) -> tuple[PyTree, list[bool]]:
    """Returns the values in an argument of a `custom_vjp` rule with symbolic zeros, and which leaves need gradients."""
    leaves, structure = jax.tree.flatten(tree, is_leaf=lambda node: hasattr(node, "perturbed"))
    return jax.tree.unflatten(structure, [leaf.value for leaf in leaves]), [leaf.perturbed for leaf in leaves]


def named_boxes(tree: PyTree) -> Iterator[NamedLeaf]:
    """Yields the leaves of `named_leaves`, each with its box if it has one."""
    is_box = _box_test()
    for path, node in jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_box)[0]:
        yield NamedLeaf("/".join(key_to_string(key) for key in path), path, node)


def _box_test() -> Callable[[Any], bool] | None:
    if "flax" not in sys.modules:  # a tree can contain flax's boxes only if flax was imported
        return None
    from flax import nnx
    from flax.core.meta import AxisMetadata

    boxes = (AxisMetadata, nnx.Variable)
    return lambda node: isinstance(node, boxes)
