"""Metrics of minibatches: pairs of a value and a count are added up, other numbers averaged, other leaves kept.

A pair is a dict with the numbers `value` and `count`, or a tuple of two scalars. Leaves that are not numbers, such as
the strings of `"log_modes": ["mean"]`, must be the same in all minibatches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from meshwright.errors import PlacementError
from meshwright.metrics import over, times, wide
from meshwright.tree import tree_path_to_string
from meshwright.types import Metrics

Kind = Literal["sum", "mean", "kept"]


class MetricsForm(NamedTuple):
    """Everything about the metrics of a minibatch but their numbers; the same for all minibatches."""

    structure: Any
    names: tuple[Any, ...]
    kinds: tuple[Kind, ...]
    dtypes: tuple[Any, ...]  # None for leaves that are not numbers
    kept: tuple[Any, ...]  # the leaves that are not numbers


def count_of(metrics: Any, key: str) -> Any:
    """Returns the count of the pair `metrics[key]` as a scalar, or 1 (equal weights) if there is no such pair."""
    pair: Any = metrics.get(key) if isinstance(metrics, Mapping) else None
    if not is_pair(pair):
        return np.float32(1)
    count: Any = pair["count"] if isinstance(pair, Mapping) else pair[1]
    if isinstance(count, jax.Array):
        count = wide(count)
    else:  # a constant, the same on all devices
        count = np.asarray(count, np.float32 if np.result_type(count).kind == "f" else np.int32)
    if count.size != 1:
        raise PlacementError(
            f"accumulate_gradients: the count of metric {key!r} has shape {count.shape}, so it cannot weigh a "
            "minibatch.",
            hint="return one count for the loss, or name another metric with weight_key=.",
        )
    return count.reshape(())


def summands(metrics: Any, weight: Any) -> tuple[list[Any], MetricsForm]:
    """Returns the numbers of a minibatch's metrics, to be added up over minibatches, and the form of the metrics."""
    kinds = [kind for node in jax.tree.leaves(metrics, is_leaf=is_pair) for kind in _kinds(node)]
    names, leaves = zip(*jax.tree.leaves_with_path(metrics), strict=True) if kinds else ((), ())
    cleaned = jax.tree.leaves(jax.tree.map(_finite_if_empty, metrics, is_leaf=is_pair))
    numbers: list[Any] = []
    dtypes: list[Any] = []
    kept: list[Any] = []
    for name, leaf, clean, kind in zip(names, leaves, cleaned, kinds, strict=True):
        if kind == "kept":
            _require_constant(name, leaf)
            kept.append(leaf)
            dtypes.append(None)
        else:
            dtypes.append(jnp.result_type(leaf))
            numbers.append(wide(clean) if kind == "sum" else times(leaf, weight))
    shown = tuple(tree_path_to_string(name, sep="/") for name in names)
    return numbers, MetricsForm(jax.tree.structure(metrics), shown, tuple(kinds), tuple(dtypes), tuple(kept))


def finished(sums: Sequence[Any], total: Any, form: MetricsForm) -> Metrics:
    """Returns the metrics of the whole batch; pairs have their own dtypes again, which booleans lack for sums."""
    numbers, kept = iter(sums), iter(form.kept)
    leaves = []
    for kind, dtype in zip(form.kinds, form.dtypes, strict=True):
        if kind == "kept":
            leaves.append(next(kept))
        elif kind == "mean":
            leaves.append(over(next(numbers), total))
        else:
            number = next(numbers)
            leaves.append(number if dtype == jnp.bool_ else number.astype(dtype))
    metrics: Metrics = form.structure.unflatten(leaves)
    return metrics


def require_same_form(first: MetricsForm, other: MetricsForm) -> None:
    """Raises if two minibatches returned metrics that cannot be combined."""
    if first.structure != other.structure or first.kinds != other.kinds:
        differing = sorted(set(first.names) ^ set(other.names)) or [
            name for name, a, b in zip(first.names, first.kinds, other.kinds, strict=True) if a != b
        ]
        raise PlacementError(
            f"accumulate_gradients: two minibatches returned different metrics: {', '.join(differing)}.",
            hint="return the same metrics for every minibatch.",
        )
    names = [name for name, kind in zip(first.names, first.kinds, strict=True) if kind == "kept"]
    for name, a, b in zip(names, first.kept, other.kept, strict=True):
        if not (a is b or np.array_equal(a, b)):
            raise PlacementError(
                f"accumulate_gradients: metric `{name}` is {a!r} in one minibatch and {b!r} in another.",
                hint="return numbers for values that depend on the minibatch.",
            )


def is_pair(node: Any) -> bool:
    """Returns whether this is a dict with the numbers `value` and `count`, or a tuple of two scalars."""
    if isinstance(node, Mapping):
        return all(part in node and _is_number(node[part]) for part in ("value", "count"))
    return type(node) is tuple and len(node) == 2 and all(_is_number(item) and np.ndim(item) == 0 for item in node)


def _kinds(node: Any) -> list[Kind]:
    """Returns the kind of each leaf of a pair, or of a single leaf."""
    if type(node) is tuple and is_pair(node):
        return ["sum", "sum"]
    return [
        "kept" if not _is_number(leaf) else "sum" if _is_part(path) and is_pair(node) else "mean"
        for path, leaf in jax.tree.leaves_with_path(node)
    ]


def _is_part(path: tuple[Any, ...]) -> bool:
    return len(path) == 1 and getattr(path[0], "key", None) in ("value", "count")


def _finite_if_empty(node: Any) -> Any:
    """Returns a pair without the NaN or infinity of an empty one, and any other leaf unchanged."""
    if not is_pair(node):
        return node
    value, count = (node["value"], node["count"]) if isinstance(node, Mapping) else node
    value = jnp.asarray(value)
    if np.shape(count) in ((), value.shape):
        value = jnp.where(jnp.isfinite(value) | (jnp.asarray(count) != 0), value, jnp.zeros_like(value))
    if not isinstance(node, Mapping):
        return (value, count)
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: value if len(path) == 1 and path[0].key == "value" else leaf, node
    )


def _is_number(leaf: Any) -> bool:
    if isinstance(leaf, (bool, int, float, complex)):
        return True
    dtype = getattr(leaf, "dtype", None)
    return dtype is not None and (jnp.issubdtype(dtype, jnp.number) or dtype == jnp.bool_)


def _require_constant(name: Any, leaf: Any) -> None:
    if isinstance(leaf, jax.Array):  # such as a random key, which differs between minibatches
        raise PlacementError(
            f"accumulate_gradients: metric `{tree_path_to_string(name, sep='/')}` is an array of {leaf.dtype}, which "
            "can be neither added up nor averaged.",
            hint="return it in the mutable variables, which are stacked.",
        )
