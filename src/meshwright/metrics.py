"""Metrics with a declared meaning, and fetching of metrics from the devices.

A loss returns its metrics for the rows that it sees: a minibatch, on one device. How these parts combine is a property
of the metric, so the loss declares it::

    {"accuracy": Mean(correct.mean(), weight=valid.sum()), "confusion": Sum(matrix), "largest_logit": Max(logits.max())}

A `(sum, count)` pair of scalars and a `{"value": sum, "count": count}` dict also stand for a mean. A plain float scalar
is a mean with the weights of the loss. Any other plain value could be a sum, a mean or a maximum, and is rejected.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from meshwright.dtypes import is_float
from meshwright.errors import JobError, TreeError
from meshwright.mesh.axes import axis_index, axis_size, pcast_varying
from meshwright.tree import key_to_string, named_leaves
from meshwright.types import PyTree

# --- Declared metrics ---


class Metric:
    """Base class of the declared metrics: `Mean`, `Sum`, `Max`, `Min` and `Last`."""

    value: Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class Mean(Metric):
    """A weighted mean over rows, minibatches and devices.

    Args:
        value: the mean over the rows that the loss sees, a scalar or an array.
        weight: the weight of these rows, a scalar or an array like `value` (default: the count of the loss).

    Example:
        >>> two = merge({"accuracy": Mean(0.5, weight=8)}, {"accuracy": Mean(1.0, weight=24)})
        >>> float(compute(two)["accuracy"])
        0.875
    """

    value: Any
    weight: Any = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class Sum(Metric):
    """A sum over rows, minibatches and devices, such as a count or a confusion matrix.

    Example:
        >>> int(compute(merge(Sum(jnp.int32(3)), Sum(jnp.int32(4)))))
        7
    """

    value: Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class Max(Metric):
    """An elementwise maximum over rows, minibatches and devices.

    Example:
        >>> float(compute(merge(Max(3.0), Max(4.0))))
        4.0
    """

    value: Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class Min(Metric):
    """An elementwise minimum over rows, minibatches and devices.

    Example:
        >>> float(compute(merge(Min(3.0), Min(4.0))))
        3.0
    """

    value: Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class Last(Metric):
    """The value of the last minibatch on the last device, for values that do not depend on rows, such as a temperature.

    Example:
        >>> float(compute(merge(Last(3.0), Last(4.0))))
        4.0
    """

    value: Any


def declare(metrics: PyTree) -> PyTree:
    """Returns a loss's metrics with plain float scalars declared as `Mean`; raises for other undeclared values.

    Example:
        >>> declare({"accuracy": jnp.float32(0.5)})["accuracy"].weight is None
        True
        >>> declare({"confusion": jnp.zeros((2, 2))})
        Traceback (most recent call last):
        meshwright.errors.JobError: metric `confusion` is float32[2, 2], and it is not declared how to combine ...
        hint: return metrics.Sum(x) for counts and histograms, or metrics.Mean(x, weight=...), Max(x), Min(x), Last(x).
    """

    def one(path: Any, node: Any) -> Any:
        if isinstance(node, Metric) or is_pair(node) or _is_value_and_count(node):
            return node
        array = jnp.asarray(node) if isinstance(node, (bool, int, float, np.ndarray, np.generic)) else node
        shape, dtype = getattr(array, "shape", None), getattr(array, "dtype", None)
        if shape == () and is_float(dtype):
            return Mean(array)
        kind = type(node).__name__ if dtype is None else f"{dtype}{list(shape) if shape else ''}"
        raise JobError(
            f"metric `{'/'.join(map(key_to_string, path))}` is {kind}, and it is not declared how to combine "
            "the values of several minibatches and devices; only a float scalar is a mean by default.",
            hint="return metrics.Sum(x) for counts and histograms, or metrics.Mean(x, weight=...), Max(x), Min(x), "
            "Last(x).",
        )

    return jax.tree_util.tree_map_with_path(one, metrics, is_leaf=_is_declared)


def merge(first: PyTree, second: PyTree) -> PyTree:
    """Combines declared metrics of two batches, each according to its kind; a `Mean` needs a weight.

    Example:
        >>> both = merge({"loss": (6.0, 3.0), "seen": Sum(3)}, {"loss": (2.0, 1.0), "seen": Sum(1)})
        >>> {name: float(value) for name, value in compute(both).items()}
        {'loss': 2.0, 'seen': 4.0}
    """
    return finish(combine(parts_of(first), parts_of(second)))


def compute(metrics: PyTree) -> PyTree:
    """Returns the values of declared metrics: the mean of a pair, and the value of any other.

    Example:
        >>> {name: float(value) for name, value in compute({"loss": (6.0, 3.0), "peak": Max(4.0)}).items()}
        {'loss': 2.0, 'peak': 4.0}
    """

    def one(node: Any) -> Any:
        if isinstance(node, Metric):
            return node.value
        pair = _pair_of(node)
        return node if pair is None else over(*pair)

    return jax.tree.map(one, metrics, is_leaf=_is_declared)


def is_pair(node: Any) -> bool:
    """Whether this is a `(sum, count)` pair: a tuple of two scalars."""
    is_tuple = type(node) is tuple and len(node) == 2
    return is_tuple and all(isinstance(item, (int, float)) or getattr(item, "ndim", None) == 0 for item in node)


def _is_value_and_count(node: Any) -> bool:
    return isinstance(node, Mapping) and set(node) == {"value", "count"}


def _is_declared(node: Any) -> bool:
    return isinstance(node, Metric) or is_pair(node) or _is_value_and_count(node)


def _pair_of(node: Any) -> tuple[Any, Any] | None:
    if is_pair(node):
        return (node[0], node[1])
    return (node["value"], node["count"]) if _is_value_and_count(node) else None


# --- Parts of metrics, in the form that sums, scans and collectives need ---

How = Literal["sum", "max", "min", "last"]
_HOW: dict[type, How] = {Sum: "sum", Max: "max", Min: "min", Last: "last"}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class MetricPart:
    """A metric of some of the rows. A mean is a total and a count, which are both summed; other kinds have no count."""

    total: Any
    count: Any
    how: How = dataclasses.field(metadata={"static": True})
    form: str = dataclasses.field(metadata={"static": True})  # the form to return: "pair", "dict", "plain" or a class


def parts_of(metrics: PyTree, weight: Any = None) -> PyTree:
    """Returns each metric as a `MetricPart`; `weight` is that of plain values and of means without a weight."""

    def part(node: Any) -> MetricPart:
        pair = _pair_of(node)
        if pair is not None:
            total, count = (wide(item) for item in pair)
            return MetricPart(jnp.where(count > 0, total, jnp.zeros_like(total)), count, "sum", _form(node))
        if isinstance(node, Metric) and not isinstance(node, Mean):
            value = wide(node.value) if isinstance(node, Sum) else jnp.asarray(node.value)
            return MetricPart(value, None, _HOW[type(node)], type(node).__name__)
        own = node.weight if isinstance(node, Mean) else None
        count = weight if own is None else own
        if count is None:
            raise TreeError("a Mean without a weight cannot be merged.", hint="pass Mean(value, weight=...).")
        count = wide(count)
        return MetricPart(times(node.value if isinstance(node, Mean) else node, count), count, "sum", _form(node))

    return jax.tree.map(part, metrics, is_leaf=_is_declared)


def _form(node: Any) -> str:
    if isinstance(node, Metric):
        return type(node).__name__
    return "pair" if is_pair(node) else "dict" if isinstance(node, Mapping) else "plain"


def combine(first: PyTree, second: PyTree) -> PyTree:
    """Returns the parts of two sets of rows as one; `second` holds the later rows."""
    how: dict[How, Callable[[Any, Any], Any]] = {
        "sum": jnp.add,
        "max": jnp.maximum,
        "min": jnp.minimum,
        "last": lambda _, later: later,
    }

    def one(a: MetricPart, b: MetricPart) -> MetricPart:
        count = None if a.count is None else a.count + b.count
        return MetricPart(how[a.how](a.total, b.total), count, a.how, a.form)

    return jax.tree.map(one, first, second, is_leaf=_is_part)


def neutral(parts: PyTree) -> PyTree:
    """Returns zeros as parts of no rows: `combine` with them changes nothing."""

    def one(part: MetricPart) -> MetricPart:
        if part.how not in ("max", "min"):
            return part
        return dataclasses.replace(part, total=jnp.full_like(part.total, _extreme(part)))

    return jax.tree.map(one, parts, is_leaf=_is_part)


def over_devices(parts: PyTree, axes: Sequence[str], *, row_axes: Sequence[str]) -> PyTree:
    """Combines the parts of devices along manual axes.

    Along axes other than `row_axes`, such as that of a pipeline, only the last device computes the loss: on the others,
    sums and counts are zero, and values of other kinds do not count.
    """
    if not axes:
        return parts
    leaves: list[MetricPart]
    structure: Any
    leaves, structure = jax.tree.flatten(parts, is_leaf=_is_part)
    # One collective for all sums.
    sums = iter(lax.psum([(leaf.total, leaf.count) for leaf in leaves if leaf.how == "sum"], tuple(axes)))
    others = [axis for axis in axes if axis not in row_axes]

    def one(part: MetricPart) -> MetricPart:
        if part.how == "sum":
            total, count = next(sums)
            return dataclasses.replace(part, total=total, count=count)
        value = pcast_varying(part.total, axes)
        if part.how == "last":
            last = jnp.where(_is_last(axes), value, jnp.zeros_like(value))
            return dataclasses.replace(part, total=lax.psum(last, tuple(axes)).astype(value.dtype))
        if others:
            value = jnp.where(_is_last(others), value, jnp.full_like(value, _extreme(part)))
        reduce = lax.pmax if part.how == "max" else lax.pmin
        return dataclasses.replace(part, total=reduce(value, tuple(axes)))

    return structure.unflatten([one(leaf) for leaf in leaves])


def finish(parts: PyTree) -> PyTree:
    """Returns parts in the form in which the loss gave them, over all combined rows."""
    classes: dict[str, Callable[..., Any]] = {"Sum": Sum, "Max": Max, "Min": Min, "Last": Last}

    def one(part: MetricPart) -> Any:
        if part.form in classes:
            return classes[part.form](part.total)
        if part.form == "pair":
            return (part.total, part.count)
        if part.form == "dict":
            return {"value": part.total, "count": part.count}
        mean = over(part.total, part.count)
        return mean if part.form == "plain" else Mean(mean, part.count)

    return jax.tree.map(one, parts, is_leaf=_is_part)


def _is_part(node: Any) -> bool:
    return isinstance(node, MetricPart)


def _is_last(axes: Sequence[str]) -> Any:
    last: Any = True
    for axis in axes:
        last = last & (axis_index(axis) == axis_size(axis) - 1)
    return last


def _extreme(part: MetricPart) -> Any:
    dtype = part.total.dtype
    if dtype == jnp.bool_:
        return part.how == "min"
    if is_float(dtype):
        return -jnp.inf if part.how == "max" else jnp.inf
    limits = jnp.iinfo(dtype)
    return limits.min if part.how == "max" else limits.max


# --- Sums that do not lose precision or spread NaN ---


def times(value: Any, weight: Any) -> Any:
    """Returns `value * weight` in float32 or wider, and zero if the weight is zero, even for NaN."""
    value = jnp.asarray(value)
    product = value.astype(jnp.promote_types(value.dtype, jnp.float32)) * weight
    return jnp.where(weight > 0, product, jnp.zeros_like(product))


def over(value: Any, total: Any) -> Any:
    """Returns `value / total`, or zero if the total is zero."""
    return jnp.where(total > 0, value / jnp.where(total > 0, total, 1), jnp.zeros_like(value))


def wide(value: Any) -> Any:
    """Returns a value in the dtype of its sum: at least float32 for floats, int32 for booleans.

    A sum of ones in bfloat16 stops growing at 256.
    """
    value = jnp.asarray(value)
    if value.dtype == jnp.bool_:
        return value.astype(jnp.int32)
    return value.astype(jnp.promote_types(value.dtype, jnp.float32)) if is_float(value.dtype) else value


# --- Fetching ---


def get_metrics(metrics: PyTree, unreplicate: bool = False, stack: bool = False) -> PyTree:
    """Fetches metrics to the host in one transfer: scalars become floats, arrays become numpy arrays.

    Args:
        metrics: a tree of metrics; with `stack`, a sequence of trees, one per step.
        unreplicate: take the first entry along the leading dim, for metrics with one copy per device.
        stack: return one tree, with the steps as leading dim of each leaf.

    Example:
        >>> import jax.numpy as jnp
        >>> get_metrics({"loss": jnp.float32(2.0), "grad": {"norm": jnp.float32(0.5)}})
        {'grad': {'norm': 0.5}, 'loss': 2.0}
        >>> get_metrics([{"loss": jnp.float32(2.0)}, {"loss": jnp.float32(1.0)}], stack=True)
        {'loss': array([2., 1.], dtype=float32)}
    """
    if unreplicate:
        for leaf in named_leaves(metrics):
            if np.ndim(leaf.value) == 0:
                raise TreeError(
                    f"metric `{leaf.name}` is a scalar, so unreplicate=True finds no leading dim of copies.",
                    hint="drop unreplicate=True; arrays on a mesh do not need it.",
                )
        metrics = jax.tree.map(lambda leaf: leaf[0], metrics)
    fetched = jax.device_get(metrics)
    if not stack:
        return jax.tree.map(_plain, fetched)
    steps = list(fetched)
    if not steps:
        raise TreeError("stack=True needs at least one step of metrics.")
    first: Any = jax.tree.structure(steps[0])
    for index, step in enumerate(steps):
        if jax.tree.structure(step) != first:
            names = [sorted(leaf.name for leaf in named_leaves(tree)) for tree in (steps[0], step)]
            differing = sorted(set(names[0]) ^ set(names[1]))
            raise TreeError(f"steps {index} and 0 have different metrics: {', '.join(differing)}.")
    return jax.tree.map(lambda *values: np.stack(values), *steps)


def _plain(value: Any) -> Any:
    array = np.asarray(value)
    return array if array.ndim else float(array)
