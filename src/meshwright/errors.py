"""The errors that Meshwright raises for a user's input.

Every message says what is wrong, where, and with which values; its last line is a `hint:` with a likely fix.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class MeshwrightError(ValueError):
    """Base class of all errors about a user's input; `hint` becomes the last line of the message."""

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        self.hint = hint
        super().__init__(f"{message}\nhint: {hint}" if hint else message)


class MeshError(MeshwrightError):
    """A mesh cannot be built, or a call does not fit the current mesh."""


class TreeError(MeshwrightError):
    """The leaves of a pytree cannot be named or paired."""


class RuleError(MeshwrightError):
    """A partition rule is malformed, or could take exponential time to match."""


class LayoutError(MeshwrightError):
    """Rules, shapes and mesh do not fit together; `report` lists every problem."""

    def __init__(self, message: str, *, hint: str | None = None, report: object = None) -> None:
        self.report = report
        super().__init__(message, hint=hint)


class PlacementError(MeshwrightError):
    """Arrays cannot be moved, cast or constrained."""


class RngError(MeshwrightError):
    """A random key is used in a place where its results would not be reproducible."""


class JobError(MeshwrightError):
    """A `module:attribute` reference does not lead to a job."""


class ConfigError(MeshwrightError):
    """A run option is unknown or has an invalid value."""


class TrainingError(MeshwrightError):
    """A run cannot continue, for example because of non-finite values or a state that does not fit the step."""


class CheckpointError(MeshwrightError):
    """A checkpoint cannot be saved or restored, or is corrupt."""


class StoreError(MeshwrightError):
    """An object store cannot be reached or used, or another process writes there."""


class DataError(MeshwrightError):
    """Data cannot be found or read, has changed, or does not fit the request."""


class LaunchError(MeshwrightError):
    """The processes could not form one run."""


class FileFormatError(MeshwrightError):
    """A file is too large or nested too deeply, is not a regular file, or lacks the expected form."""


class MeshwrightWarning(UserWarning):
    """A likely mistake or an unexpected cost in something that works."""


def did_you_mean(name: str, known: Iterable[str]) -> str | None:
    """Returns a spelling hint, or None if no known name is similar.

    >>> did_you_mean("modle", ("data", "model"))
    "did you mean 'model'?"
    """
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else None
