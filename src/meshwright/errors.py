"""The one family of errors a user of Meshwright meets, and how their text is built.

Every message says what is wrong, where, and with which numbers; it ends in a `hint:` line with the nearest fix.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class MeshwrightError(ValueError):
    """Base of every error raised for a user's input; `hint` becomes the last line of the message."""

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        self.hint = hint
        super().__init__(f"{message}\nhint: {hint}" if hint else message)


class MeshError(MeshwrightError):
    """A mesh cannot be built or used as asked."""


class TreeError(MeshwrightError):
    """A pytree has leaves that cannot be named or paired as asked."""


class RuleError(MeshwrightError):
    """A partition rule is malformed, unsafe or matches nothing where it must."""


class LayoutError(MeshwrightError):
    """Rules, shapes and mesh do not fit together; `report` holds every problem, not only the first."""

    def __init__(self, message: str, *, hint: str | None = None, report: object = None) -> None:
        self.report = report
        super().__init__(message, hint=hint)


class PlacementError(MeshwrightError):
    """Arrays cannot be moved, cast or constrained as asked."""


class RngError(MeshwrightError):
    """A random key is used where it cannot give what it promises."""


class JobError(MeshwrightError):
    """A `module:attribute` reference does not lead to a usable job."""


class ConfigError(MeshwrightError):
    """An option of a run has a value that it cannot have, or does not exist."""


class TrainingError(MeshwrightError):
    """A run cannot go on: a state that is gone or not the step's own, values that are not finite."""


class CheckpointError(MeshwrightError):
    """A checkpoint cannot be written or restored as asked, or is not what was written."""


class DataError(MeshwrightError):
    """Text, tokens or rows cannot be read, are not what they were, or do not fit what is asked of them."""


class MeshwrightWarning(UserWarning):
    """Something works but costs more than its author probably knows."""


def did_you_mean(name: str, known: Iterable[str]) -> str | None:
    """Returns the text of a spelling hint, or None when nothing known is close.

    >>> did_you_mean("modle", ("data", "model"))
    "did you mean 'model'?"
    """
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else None
