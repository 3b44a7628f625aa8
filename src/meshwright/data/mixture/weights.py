"""Weights of a mixture: exact shares of the rows, given as numbers or computed from the sizes of the sources."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from fractions import Fraction
from typing import Any

from meshwright.errors import DataError, did_you_mean

# Digits of weights computed from sizes, so that machines whose `pow` differs in the last bit agree.
_DIGITS = 9
_LARGEST = 10**30


def mixture_weights(
    sizes: Mapping[str, int], weights: Mapping[str, Any] | None = None, *, temperature: float | None = None
) -> dict[str, int]:
    """Returns the weight of each source as a whole number without a common factor, by name in sorted order.

    Args:
        sizes: rows of each source.
        weights: weight of each source, as numbers, fractions or decimal strings. They need not add up to 1.
        temperature: without `weights`, a source has the weight `size ** (1 / temperature)`. 1, the default, follows the
            sizes; larger values move toward equal weights.

    Example:
        >>> mixture_weights({"web": 9000, "code": 1000}, {"web": 0.7, "code": 0.3})
        {'code': 3, 'web': 7}
        >>> mixture_weights({"web": 9000, "code": 1000}, temperature=2)  # 1 to 3, the square roots of the sizes
        {'code': 333333333, 'web': 1000000000}
    """
    names = sorted(sizes)
    if not names:
        raise DataError("the mixture has no sources.", hint="name at least one source.")
    if empty := [name for name in names if sizes[name] < 1]:
        raise DataError(f"the source `{empty[0]}` is empty: it has no rows.", hint="add text, or leave it out.")
    if weights is None:
        return _whole(_from_sizes({name: sizes[name] for name in names}, 1.0 if temperature is None else temperature))
    if temperature is not None:
        raise DataError("a mixture has weights or a temperature, not both.", hint="leave one of them out.")
    for name in weights:
        if name not in sizes:
            raise DataError(f"a weight names `{name}`, which is not a source.", hint=_named(name, names))
    if missing := [name for name in names if name not in weights]:
        raise DataError(
            f"the source `{missing[0]}` has no weight.",
            hint="give every source a weight, or none, to weigh them by size.",
        )
    return _whole({name: _exact(name, weights[name]) for name in names})


def shares(weights: Mapping[str, int]) -> dict[str, float]:
    """Returns weights as fractions of 1."""
    total = sum(weights.values())
    return {name: weight / total for name, weight in weights.items()}


def _named(name: str, names: Iterable[str]) -> str:
    return did_you_mean(name, list(names)) or f"the sources are {', '.join(names)}."


def _exact(name: str, weight: Any) -> Fraction:
    try:
        # The decimal 0.7 rather than the binary number beside it, so that common weights have small denominators.
        found = Fraction(repr(weight) if isinstance(weight, float) else weight)
    except (TypeError, ValueError, ZeroDivisionError):
        found = Fraction(0)
    if not 0 < found <= _LARGEST or found.denominator > _LARGEST:
        raise DataError(
            f"the weight of the source `{name}` is {weight}.",
            hint="use a finite number above 0; to drop a source, leave it out.",
        )
    return found


def _from_sizes(sizes: Mapping[str, int], temperature: float) -> dict[str, Fraction]:
    if not 0 < temperature < math.inf:
        raise DataError(
            f"the temperature of a mixture must be finite and above 0; got {temperature}.",
            hint="use 1 for weights by size, and larger values for more equal ones.",
        )
    if temperature == 1:
        return {name: Fraction(size) for name, size in sizes.items()}
    logs = {name: math.log(size) / temperature for name, size in sizes.items()}
    largest = max(logs.values())
    # The smallest weight stays above 0, so that no source is lost.
    return {name: Fraction(max(round(math.exp(value - largest) * 10**_DIGITS), 1)) for name, value in logs.items()}


def _whole(weights: Mapping[str, Fraction]) -> dict[str, int]:
    scale = math.lcm(*(weight.denominator for weight in weights.values()))
    whole = {name: int(weight * scale) for name, weight in weights.items()}
    factor = math.gcd(*whole.values())
    return {name: weight // factor for name, weight in whole.items()}
