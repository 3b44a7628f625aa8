"""The newest verified checkpoint of a run, found without JAX.

`meshwright.checkpoint` verifies every byte when the ranks restore. The launcher reads the manifest, checks its own hash
and compares the sizes of all files, which takes milliseconds, or with `every_byte` hashes them too.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from meshwright.bounded_reader import MOST_DEPTH, open_regular, read_json

_LARGEST_MANIFEST = 256 << 20
_DEPTH = 2 * MOST_DEPTH


def newest_verified(checkpoints: Path | str, *, every_byte: bool = False) -> int | None:
    """Returns the newest step in a run's `checkpoints` folder that is finished, complete and unchanged, or None.

    Example:
        >>> import tempfile
        >>> newest_verified(tempfile.mkdtemp()) is None
        True
    """
    try:
        names = [name for name in os.listdir(checkpoints) if name.isdecimal() and name == str(int(name))]
    except OSError:
        return None
    for step in sorted(map(int, names), reverse=True):
        if is_verified(Path(checkpoints) / str(step), every_byte=every_byte):
            return step
    return None


def is_verified(folder: Path, *, every_byte: bool = False) -> bool:
    """Returns whether a step's folder has an unchanged manifest and all its files, with the recorded sizes."""
    try:
        body = read_json(folder / "manifest.json", most=_LARGEST_MANIFEST, depth=_DEPTH)
        said = body.pop("sha256")
        text = json.dumps(body, indent=1) + "\n"
        if said != hashlib.sha256(text.encode()).hexdigest() or body["step"] != int(folder.name):
            return False
        return all(_is_whole(folder / name, item, every_byte) for name, item in body["files"].items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return False


def _is_whole(path: Path, written: Any, every_byte: bool) -> bool:
    if path.lstat().st_size != written["bytes"]:
        return False
    if not every_byte:
        return True
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == str(written["sha256"])
