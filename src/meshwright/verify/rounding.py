"""Rounding scale of each result: how much it changes if inputs change by one unit in the last place.

Two correct programs that sum in different orders differ by rounding errors. Usually these are far below the tolerance,
but a gradient that is mathematically zero, like that of a key bias in attention or of a bias before a normalization,
consists of nothing else, and an optimizer such as Adam turns it into updates of full size. So the single device repeats
its steps from jittered inputs. Its results then differ from the first ones by rounding errors of the same size as those
of another program, and amplified in the same way.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshwright.dtypes import is_float
from meshwright.types import PyTree
from meshwright.verify.compare import Array, apart

SAMPLES = 4
"""Number of jittered repetitions."""

MARGIN = 8.0
"""Allowed multiple of the largest difference between jittered repetitions.

Rounding errors vary by chance. If they are normally distributed, the error of a leaf with a single element exceeds
eight times the largest of four samples in one of 5,000 cases; the largest of many elements varies far less.
"""


def jitter(tree: PyTree, number: int, *, dtype: Any = None) -> PyTree:
    """Returns a tree with each float multiplied by 1, 1 - eps or 1 + eps; the same for the same number.

    Whole numbers, such as the zeros and ones of a mask, stay as they are.

    Args:
        dtype: the dtype whose eps counts, if coarser than that of the leaf.

    Example:
        >>> jitter({"x": np.array([0.3, 1.0, 0.0], np.float32), "n": np.arange(2)}, 0)["x"].tolist()[1:]
        [1.0, 0.0]
    """
    generator = np.random.default_rng(number)

    def change(leaf: Any) -> Any:
        if not is_float(getattr(leaf, "dtype", np.asarray(0).dtype)):
            return leaf
        array = np.asarray(leaf)
        eps = max(float(jnp.finfo(kind).eps) for kind in (array.dtype, dtype or array.dtype))
        signs = generator.integers(-1, 2, array.shape)
        wide = array.astype(np.float64)
        return np.where(wide == np.round(wide), wide, wide * (1 + eps * signs)).astype(array.dtype)

    return jax.tree.map(change, tree)


def rounding_scales(reference: Mapping[str, Any], samples: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Returns the largest acceptable rounding error of each leaf: `MARGIN` times the largest difference of a sample.

    Example:
        >>> rounding_scales({"w": np.ones(2)}, [{"w": np.array([1.0, 1.25])}, {"w": np.ones(2)}])
        {'w': 2.0}
    """
    found = dict.fromkeys(reference, 0.0)
    for sample in samples:
        for name, leaf in sample.items():
            found[name] = max(found[name], _apart(reference[name], leaf))
    return {name: MARGIN * value for name, value in found.items()}


def _apart(first: Array, second: Array) -> float:
    distance = float(apart(np.asarray(first), np.asarray(second)).max(initial=0.0))
    # A sample that is not finite says nothing about the size of errors.
    return distance if np.isfinite(distance) else 0.0
