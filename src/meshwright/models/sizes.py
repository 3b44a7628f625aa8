"""The sizes of a model, checked when it is made: a wrong one would only be met deep in a program."""

from __future__ import annotations

import dataclasses
from typing import Any

from meshwright.errors import ConfigError


def check_sizes(model: Any) -> None:
    """Raises where a field of whole numbers has one below 1, or where a rate is none.

    Example:
        >>> from meshwright.models import Decoder
        >>> Decoder.named("tiny", num_layers=0)
        Traceback (most recent call last):
        meshwright.errors.ConfigError: num_layers of Decoder is 0.
        hint: a whole number from 1 on.
    """
    kind = type(model).__name__
    for field in dataclasses.fields(model):
        value = getattr(model, field.name)
        may_be_none = field.type == "int | None"
        if (field.type == "int" or may_be_none) and not (may_be_none and value is None):
            try:
                fits = not isinstance(value, bool) and value == int(value) and value >= 1
            except (TypeError, ValueError):
                fits = False
            if not fits or isinstance(value, float):
                raise ConfigError(f"{field.name} of {kind} is {value!r}.", hint="a whole number from 1 on.")
    if not 0 <= model.dropout < 1:
        raise ConfigError(f"dropout of {kind} is {model.dropout!r}.", hint="a rate, 0 up to below 1.")


def check_division(model: Any, whole: str, parts: str) -> None:
    """Raises where one size does not divide another."""
    size, count = getattr(model, whole), getattr(model, parts)
    if size % count:
        below, above = size // count * count, -(-size // count) * count
        near = f"{below} or {above}" if below else f"{above}"
        raise ConfigError(
            f"{whole} of {type(model).__name__} is {size}, which its {parts} of {count} does not divide.",
            hint=f"{whole} of {near}, or another {parts}.",
        )
