"""Scaled rotary positions: how a model trained on short texts rotates the heads of longer ones.

A scaling is a short text, so that it can be a field of a frozen model, an option on the command line and a fact of a
checkpoint: `llama3:factor=8,low_freq_factor=1,high_freq_factor=4,original=8192`. `original` is the number of positions
before scaling. The rates of `dynamic` and `longrope` depend on the length of a row, which includes all documents of a
packed row: a length that depended on the documents would differ between devices.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from meshwright.errors import ConfigError, did_you_mean

Floats = np.ndarray[Any, np.dtype[np.float64]]
Values = Mapping[str, Any]

_LISTS = ("short_factor", "long_factor")
# The values of each kind, with their defaults; None means required.
KINDS: dict[str, dict[str, float | None]] = {
    "linear": {"factor": None},
    "dynamic": {"factor": None, "original": None},
    "llama3": {"factor": None, "low_freq_factor": None, "high_freq_factor": None, "original": None},
    "yarn": {
        "factor": None,
        "original": None,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "attention_factor": 0.0,
        "truncate": 1.0,
    },
    "longrope": {"short_factor": None, "long_factor": None, "original": None, "attention_factor": 1.0},
}
"""The kinds of scaling with their values; 0 for `attention_factor` of yarn means the factor of its paper."""


def format_scaling(kind: str, values: Values) -> str:
    """Returns a scaling as text.

    Example:
        >>> format_scaling("linear", {"factor": 8.0})
        'linear:factor=8.0'
    """
    texts = [
        f"{name}={'/'.join(map(repr, map(float, value))) if name in _LISTS else repr(float(value))}"
        for name, value in values.items()
    ]
    return f"{kind}:{','.join(texts)}"


@functools.lru_cache(maxsize=64)
def parse_scaling(text: str) -> tuple[str, Values]:
    """Returns the kind and all values of a scaling.

    Example:
        >>> parse_scaling("dynamic:factor=2,original=2048")
        ('dynamic', {'factor': 2.0, 'original': 2048.0})
    """
    kind, _, rest = text.partition(":")
    if kind not in KINDS:
        hint = did_you_mean(kind, KINDS) or f"use one of: {', '.join(KINDS)}."
        raise ConfigError(f"rope_scaling has no kind {kind!r}.", hint=hint)
    known, found = KINDS[kind], dict[str, Any]()
    for part in filter(None, rest.split(",")):
        name, _, value = part.partition("=")
        try:
            found[name] = tuple(map(float, value.split("/"))) if name in _LISTS else float(value)
        except ValueError:
            raise ConfigError(f"rope_scaling {text!r}: {part!r} is not NAME=NUMBER.") from None
        if name not in known:
            raise ConfigError(f"rope_scaling {kind!r} has no {name!r}.", hint=f"use {', '.join(known)}.")
    missing = [name for name, default in known.items() if default is None and name not in found]
    if missing:
        raise ConfigError(
            f"rope_scaling {text!r} lacks {', '.join(missing)}.", hint="write kind:name=value,name=value."
        )
    values: dict[str, Any] = {key: found.get(key, default) for key, default in known.items()}
    for name, numbers in values.items():
        numbers = numbers if name in _LISTS else (numbers,)
        least = min(numbers, default=0.0)
        if not all(map(math.isfinite, numbers)) or least < 0 or (name in ("factor", "original") and least == 0):
            raise ConfigError(f"rope_scaling {text!r}: {name} is out of range.", hint="use positive finite numbers.")
    if kind == "llama3" and not values["high_freq_factor"] > values["low_freq_factor"]:
        raise ConfigError(f"rope_scaling {text!r}: high_freq_factor must be above low_freq_factor.")
    return kind, values


def scaled_rates(text: str, dim: int, theta: float, num_tokens: int) -> tuple[Floats, float]:
    """Returns the angle per position of each pair of features, and the factor of all cosines and sines.

    Args:
        dim: number of rotated features of a head.
        num_tokens: length of a row.

    Example:
        >>> rates, factor = scaled_rates("linear:factor=4", dim=4, theta=100.0, num_tokens=8)
        >>> rates.tolist(), factor
        ([0.25, 0.025], 1.0)
    """
    kind, values = parse_scaling(text)
    return _RATES[kind](values, dim, theta, num_tokens)


def yarn_attention_factor(factor: float, mscale: float = 1.0) -> float:
    """Returns YaRN's factor for cosines and sines: `0.1 * mscale * ln(factor) + 1`.

    Example:
        >>> round(yarn_attention_factor(4.0), 4)
        1.1386
    """
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _plain(dim: int, theta: float) -> Floats:
    return theta ** (-np.arange(0, dim, 2) / dim)


def _linear(values: Values, dim: int, theta: float, num_tokens: int) -> tuple[Floats, float]:
    return _plain(dim, theta) / values["factor"], 1.0


def _dynamic(values: Values, dim: int, theta: float, num_tokens: int) -> tuple[Floats, float]:
    if dim == 2:  # a single pair turns at rate 1 for every theta
        return _plain(dim, theta), 1.0
    factor, length = values["factor"], max(num_tokens, values["original"])
    grown = theta * (factor * length / values["original"] - (factor - 1)) ** (dim / (dim - 2))
    return _plain(dim, grown), 1.0


def _llama3(values: Values, dim: int, theta: float, num_tokens: int) -> tuple[Floats, float]:
    rates, factor = _plain(dim, theta), values["factor"]
    turns = values["original"] * rates / (2 * math.pi)  # over the original length
    low, high = values["low_freq_factor"], values["high_freq_factor"]
    share = np.clip((turns - low) / (high - low), 0.0, 1.0)  # of the unscaled rate
    return (1 - share) * rates / factor + share * rates, 1.0


def _yarn(values: Values, dim: int, theta: float, num_tokens: int) -> tuple[Floats, float]:
    def place(num_turns: float) -> float:
        """Returns the (fractional) pair that turns so often over the original length."""
        return dim * math.log(values["original"] / (num_turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = place(values["beta_fast"]), place(values["beta_slow"])
    if values["truncate"]:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    scaled = np.clip((np.arange(dim // 2) - low) / (high - low or 0.001), 0.0, 1.0)
    rates = _plain(dim, theta)
    factor = values["attention_factor"] or yarn_attention_factor(values["factor"])
    return rates / values["factor"] * scaled + rates * (1 - scaled), factor


def _longrope(values: Values, dim: int, theta: float, num_tokens: int) -> tuple[Floats, float]:
    factors = values["long_factor" if num_tokens > values["original"] else "short_factor"]
    if len(factors) != dim // 2:
        raise ConfigError(f"longrope has {len(factors)} factors for {dim // 2} pairs of rotated features.")
    return _plain(dim, theta) / np.asarray(factors), values["attention_factor"]


_RATES: dict[str, Callable[[Values, int, float, int], tuple[Floats, float]]]
_RATES = {"linear": _linear, "dynamic": _dynamic, "llama3": _llama3, "yarn": _yarn, "longrope": _longrope}
