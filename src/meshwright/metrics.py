"""Fetching of metrics from the devices, as numbers to log and plot."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from meshwright.errors import TreeError
from meshwright.tree import named_leaves
from meshwright.types import PyTree


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
