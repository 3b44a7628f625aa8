"""Random masks for a batch that has masks or weights, so that rows and devices count differently."""

from __future__ import annotations

import re
from typing import Any

import jax
import numpy as np

from meshwright.dtypes import is_float
from meshwright.tree import named_leaves
from meshwright.types import PyTree

_NAMES = re.compile(r"(?:^|[/_])(?:mask|masks|weight|weights|valid)$")


def mask_names(batch: PyTree) -> tuple[str, ...]:
    """Returns the names of the batch's masks and weights: floats or booleans of such a name, with rows.

    Example:
        >>> mask_names({"x": np.ones((4, 2)), "loss_mask": np.ones(4), "weights": np.ones((4, 2), bool)})
        ('loss_mask', 'weights')
    """
    return tuple(leaf.name for leaf in named_leaves(batch) if _is_mask(leaf.name, leaf.value))


def with_random_masks(batch: PyTree, seed: int) -> PyTree:
    """Returns the batch with masks drawn from a seed: zeros and ones, with a share of ones that varies by row.

    Example:
        >>> drawn = with_random_masks({"x": np.ones(4), "mask": np.ones((4, 3), "float32")}, 1)
        >>> bool(0 < drawn["mask"].mean() < 1), drawn["x"].tolist()
        (True, [1.0, 1.0, 1.0, 1.0])
    """
    generator = np.random.default_rng(seed)
    leaves = []
    for leaf in named_leaves(batch):
        if not _is_mask(leaf.name, leaf.value):
            leaves.append(leaf.value)
            continue
        shape, dtype = np.shape(leaf.value), np.asarray(leaf.value).dtype
        share = generator.random((shape[0], *[1] * (len(shape) - 1)))
        drawn = generator.random(shape) < share
        drawn.flat[-1] = True  # something has to count
        leaves.append(drawn.astype(dtype))
    structure: Any = jax.tree.structure(batch)
    return structure.unflatten(leaves)


def _is_mask(name: str, value: Any) -> bool:
    dtype = getattr(value, "dtype", None)
    counts = dtype is not None and (is_float(dtype) or dtype == np.bool_)
    return counts and np.ndim(value) > 0 and _NAMES.search(name) is not None
