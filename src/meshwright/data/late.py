"""Grain, imported when it is first needed: the package must import without it."""

from __future__ import annotations

from typing import Any

from meshwright.errors import DataError


def load_grain(what: str) -> Any:
    """Returns the `grain` module; raises where it is not installed, and says what needs it."""
    try:
        import grain
    except ModuleNotFoundError as error:
        if error.name != "grain":  # it is there, and something that it needs is not
            raise
        raise DataError(f"{what} needs grain.", hint="pip install grain") from None
    return grain
