"""Which steps to keep, and how to find and remove steps so that an interrupted removal never looks like a step."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from meshwright.checkpoint.file_hashes import unreadable
from meshwright.checkpoint.manifest import MANIFEST, STATE
from meshwright.errors import CheckpointError
from meshwright.files import remove_folder, sync_folder

SAVING = ".saving"
"""A marker file that exists during a multi-process save; a process that fails removes it."""


@dataclass(frozen=True)
class Keep:
    """Which checkpoints to keep: the `last` ones, every step that is a multiple of `every`, and the given `steps`.

    Example:
        >>> Keep(last=2, every=100).removable([100, 150, 200, 250, 300, 350])
        [150, 250]
    """

    last: int = 3
    every: int | None = None
    steps: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.last < 1:
            raise CheckpointError(f"`last` must be at least 1; got {self.last}.", hint="keep at least one.")
        if self.every is not None and self.every < 1:
            raise CheckpointError(f"`every` must be at least 1; got {self.every}.", hint="pass e.g. 1000, or None.")

    def removable(self, steps: Sequence[int]) -> list[int]:
        """Returns the steps that may be removed."""
        kept = {*sorted(steps)[-self.last :], *self.steps}
        return [step for step in sorted(steps) if step not in kept and (self.every is None or step % self.every)]


def finished_steps(folder: Path) -> list[int]:
    """Returns the steps in a folder that have a manifest, in order."""
    return [step for step in all_steps(folder) if step_status(folder / str(step)) == "finished"]


def unfinished_steps(folder: Path) -> list[int]:
    """Returns the steps in a folder that have no manifest and contain only files of a save."""
    return [step for step in all_steps(folder) if step_status(folder / str(step)) == "unfinished"]


def step_status(place: Path) -> Literal["finished", "unfinished", "unreadable", "foreign"]:
    """Returns the status of a step's folder by the names in it; "foreign" if a save did not write it."""
    try:
        with _reading(place):
            names = os.listdir(place)
            if MANIFEST in names:
                return "finished" if stat.S_ISREG(os.stat(place / MANIFEST).st_mode) else "unreadable"
    except FileNotFoundError:  # a broken link, or another process has just removed it
        return "unreadable" if os.path.lexists(place / MANIFEST) else "foreign"
    return "unfinished" if all(name.split(".")[0] in ("", STATE) for name in names) else "foreign"


def all_steps(folder: Path) -> list[int]:
    """Returns the folder names that are numbers, in order."""
    if not os.path.isdir(folder):
        return []
    with _reading(folder):
        names = [name for name in os.listdir(folder) if name.isdecimal() and os.path.isdir(folder / name)]
    return sorted(int(name) for name in names if name == str(int(name)))


@contextlib.contextmanager
def _reading(place: Path) -> Iterator[None]:
    """Raises `CheckpointError` if a folder exists but cannot be read."""
    try:
        yield
    except (FileNotFoundError, NotADirectoryError):
        raise
    except OSError as error:
        raise CheckpointError(unreadable(str(place), error), hint="check its permissions.") from error


def remove_step(folder: Path, step: int) -> None:
    """Removes a step's manifest first, so that it no longer counts as a step, and then the rest."""
    place = folder / str(step)
    (place / MANIFEST).unlink(missing_ok=True)
    if place.exists():
        sync_folder(place)
        remove_folder(place)
