"""Which steps stay, and how steps are found and removed, such that an interrupted removal never looks like a step."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from meshwright.checkpoint.manifest import MANIFEST, STATE
from meshwright.checkpoint.step_files import unreadable
from meshwright.errors import CheckpointError
from meshwright.files import remove_folder, sync_folder

SAVING = ".saving"
"""A file that exists while a save of several processes is alive; who cannot go on removes it."""


@dataclass(frozen=True)
class Keep:
    """Which checkpoints stay: the last few, and every n-th step for good.

    Example:
        >>> Keep(last=2, every=100).removable([100, 150, 200, 250, 300, 350])
        [150, 250]
    """

    last: int = 3
    every: int | None = None

    def __post_init__(self) -> None:
        if self.last < 1:
            raise CheckpointError(f"Keep(last={self.last}) keeps no checkpoint to go on from.", hint="last=1 or more.")
        if self.every is not None and self.every < 1:
            raise CheckpointError(f"Keep(every={self.every}) is no number of steps.", hint="every=1000, or None.")

    def removable(self, steps: Sequence[int]) -> list[int]:
        """Returns the steps that may go."""
        kept = sorted(steps)[-self.last :]
        return [step for step in sorted(steps) if step not in kept and (self.every is None or step % self.every)]


def finished_steps(folder: Path) -> list[int]:
    """Returns the steps in a folder that have a manifest, in order."""
    return [step for step in all_steps(folder) if is_finished(folder / str(step))]


def unfinished_steps(folder: Path) -> list[int]:
    """Returns the steps in a folder that have no manifest and hold nothing but what we write."""
    return [step for step in all_steps(folder) if is_unfinished(folder / str(step))]


def is_finished(place: Path) -> bool:
    """Returns whether the folder of a step has a manifest."""
    try:
        with _reading(place):
            return stat.S_ISREG(os.stat(place / MANIFEST).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


def is_unfinished(place: Path) -> bool:
    """Returns whether the folder of a step has no manifest and holds nothing but what we write."""
    try:
        with _reading(place):
            names = os.listdir(place)
    except FileNotFoundError:  # another process has just removed it
        return False
    return MANIFEST not in names and all(name.split(".")[0] in ("", STATE) for name in names)


def all_steps(folder: Path) -> list[int]:
    """Returns the numbers that name folders, in order."""
    if not os.path.isdir(folder):
        return []
    with _reading(folder):
        names = [name for name in os.listdir(folder) if name.isdecimal() and os.path.isdir(folder / name)]
    return sorted(int(name) for name in names if name == str(int(name)))


@contextlib.contextmanager
def _reading(place: Path) -> Iterator[None]:
    """Raises `CheckpointError` where a folder is there and cannot be read."""
    try:
        yield
    except (FileNotFoundError, NotADirectoryError):
        raise
    except OSError as error:
        raise CheckpointError(unreadable(str(place), error), hint="who may read it?") from error


def remove_step(folder: Path, step: int) -> None:
    """Removes a step: first its manifest, so that from then on it is no step, then the rest."""
    place = folder / str(step)
    (place / MANIFEST).unlink(missing_ok=True)
    if place.exists():
        sync_folder(place)
        remove_folder(place)
