"""Comparison of two trees of arrays: the largest error, its leaf and element, and the ratio of the two."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from meshwright.errors import TreeError

Array = np.ndarray[Any, Any]
Named = Mapping[str, Any]
"""A tree as a dict from leaf name to value, in the tree's order."""

GROWTH = 10
"""Factor by which rounding errors may grow over several steps."""


@dataclass(frozen=True)
class Ratio:
    """The elementwise ratio of two arrays, over elements of at least 1% of the largest: median, minimum and maximum."""

    median: float
    low: float
    high: float
    num_elements: int

    @property
    def is_constant(self) -> bool:
        """Whether all elements have the same ratio, up to rounding."""
        return self.num_elements > 0 and self.high - self.low <= 1e-3 * abs(self.median)

    def __str__(self) -> str:
        if self.num_elements == 1:
            return f"{self.median:.6g}"
        if self.is_constant:
            return f"{self.median:.6g} in all {self.num_elements} large elements"
        return f"from {self.low:.4g} to {self.high:.4g}, median {self.median:.4g}"


@dataclass(frozen=True)
class LeafDifference:
    """The worst element of a leaf: its index, its value on one device (`reference`) and on the mesh (`measured`)."""

    path: str
    index: tuple[int, ...]
    reference: float
    measured: float
    error: float
    ratio: Ratio | None = None

    def __str__(self) -> str:
        place = "".join(f"[{number}]" for number in self.index)
        return f"`{self.path}`{place}: {self.reference:.9g} on one device, {self.measured:.9g} on the mesh"


@dataclass(frozen=True)
class Comparison:
    """A tree compared with its reference; `error` is the largest relative error over all leaves."""

    what: str
    num_leaves: int
    num_different: int
    error: float
    tolerance: float
    worst: LeafDifference | None
    """The leaf with the largest error, even if within the tolerance."""
    first: LeafDifference | None
    """The first leaf that differs, in the tree's order."""
    different: tuple[str, ...] = ()
    """The names of all leaves that differ."""

    @property
    def ok(self) -> bool:
        return self.num_different == 0


def compare(
    what: str,
    reference: Named,
    measured: Named,
    *,
    tolerance: float,
    scales: Mapping[str, float] | None = None,
    least_scale: float = 0.0,
    rounding: Mapping[str, float] | None = None,
) -> Comparison:
    """Compares two trees, leaf by leaf.

    An element may differ by `tolerance * scale`. With a tolerance of 0, leaves must be bitwise equal.

    Args:
        scales: the scale of each leaf (default: its largest magnitude).
        least_scale: the smallest scale, so that leaves which are zero up to rounding can be compared.
        rounding: the rounding error of each leaf, which an element may differ by in any case; see `rounding_scales`.

    Example:
        >>> w = np.ones((2, 2), np.float32)
        >>> found = compare("weights", {"w": w}, {"w": 4 * w}, tolerance=1e-5)
        >>> found.ok, found.error, str(found.first.ratio)
        (False, 3.0, '4 in all 4 large elements')
    """
    if list(reference) != list(measured):
        odd = sorted(set(reference) ^ set(measured)) or list(reference)
        raise TreeError(f"{what}: the mesh and one device have different leaves: {', '.join(odd[:3])}.")
    leaves, different = [], []
    for name, expected in reference.items():
        expected, got = np.asarray(expected), np.asarray(measured[name])
        if expected.shape != got.shape:
            raise TreeError(f"{what}: `{name}` has shape {got.shape} on the mesh, {expected.shape} on one device.")
        scale = max(largest(expected) if scales is None else scales[name], least_scale)
        if rounding is not None and tolerance > 0:
            scale = max(scale, rounding[name] / tolerance)
        leaf = compare_leaf(name, expected, got, scale=scale)
        same_bits = tolerance > 0 or expected.tobytes() == got.tobytes()
        leaves.append(leaf)
        if leaf.error > tolerance or not same_bits:
            different.append(leaf)
    worst = max(leaves, key=lambda leaf: leaf.error, default=None)
    return Comparison(
        what=what,
        num_leaves=len(leaves),
        num_different=len(different),
        error=worst.error if worst is not None else 0.0,
        tolerance=tolerance,
        worst=worst,
        first=different[0] if different else None,
        different=tuple(leaf.path for leaf in different),
    )


def compare_leaf(path: str, reference: Array, measured: Array, *, scale: float) -> LeafDifference:
    """Returns a leaf's worst element, with its error relative to `scale`."""
    expected, got = _wide(reference), _wide(measured)
    if expected.size == 0:
        return LeafDifference(path, (), 0.0, 0.0, 0.0)
    distances = apart(reference, measured)
    index = tuple(int(number) for number in np.unravel_index(int(np.argmax(distances)), distances.shape))
    most = float(distances[index])
    error = most / scale if scale > 0 else (math.inf if most else 0.0)
    return LeafDifference(path, index, float(expected[index]), float(got[index]), error, ratio_of(reference, measured))


def ratio_of(reference: Array, measured: Array) -> Ratio | None:
    """Returns the ratio of `measured` to `reference`; None if the reference is zero or either is not finite."""
    expected, got = _wide(reference), _wide(measured)
    if not (expected.size and np.isfinite(expected).all() and np.isfinite(got).all()) or not expected.any():
        return None
    # Small elements are mostly rounding.
    large = np.abs(expected) >= 1e-2 * np.abs(expected).max()
    ratios = got[large] / expected[large]
    return Ratio(float(np.median(ratios)), float(ratios.min()), float(ratios.max()), int(ratios.size))


def apart(first: Array, second: Array) -> Array:
    """Returns the absolute difference of two arrays in float64: 0 where both are NaN, infinite where only one is."""
    a, b = _wide(first), _wide(second)
    with np.errstate(invalid="ignore", over="ignore"):
        distances = np.where(a == b, 0.0, np.abs(a - b))  # inf - inf would be NaN
    return np.where(np.isnan(distances), np.where(np.isnan(a) == np.isnan(b), 0.0, np.inf), distances)


def largest(array: Array) -> float:
    """Returns the largest magnitude of the finite elements, or 0."""
    values = np.abs(_wide(array))
    return float(values[np.isfinite(values)].max(initial=0.0))


def _wide(array: Array) -> Array:
    return np.asarray(array).astype(np.float64)
