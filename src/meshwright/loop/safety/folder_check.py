"""Notices that the run folder disappears during training."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.errors import TrainingError
from meshwright.loop.callbacks import Callback

if TYPE_CHECKING:
    from meshwright.loop.fit import Loop


class FolderCheck(Callback):
    """Stops a run whose folder was deleted, moved or replaced: nothing that it writes would be found again.

    Open files hide this: writes to a deleted log succeed, and a checkpoint would create a new, incomplete folder.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> check = FolderCheck(folder)
        >>> folder.rmdir()
        >>> check.before_step(None)
        Traceback (most recent call last):
        meshwright.errors.TrainingError: the run folder ... was deleted or moved during training.
        hint: its checkpoints are gone with it; start again, or resume the run where its folder is now.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._identity = self._look()

    def before_step(self, loop: Loop) -> None:
        self.check()

    def after_step(self, loop: Loop) -> bool:
        self.check()
        return False

    def on_end(self, loop: Loop, why: str) -> None:
        self.check()

    def check(self) -> None:
        """Raises if the path no longer leads to the same folder."""
        try:
            now = self._look()
        except OSError:  # e.g. a network file system that does not answer for a moment
            return
        if now != self._identity:
            raise TrainingError(
                f"the run folder {self.folder} was deleted or moved during training.",
                hint="its checkpoints are gone with it; start again, or resume the run where its folder is now.",
            )

    def _look(self) -> tuple[int, int] | None:
        try:
            found = os.stat(self.folder)
        except (FileNotFoundError, NotADirectoryError):
            return None
        return found.st_dev, found.st_ino
