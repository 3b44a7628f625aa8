"""Which files a path means: one file, a folder, a glob, or the sources of Python's own library."""

from __future__ import annotations

import glob
import os
import sysconfig
from pathlib import Path

from meshwright.errors import DataError, did_you_mean

# Not the library itself, or not prose-like code: tests, demos, generated tables, what others installed.
_NOT_LIBRARY = (
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idlelib",
    "lib2to3",
    "turtledemo",
    "ensurepip",
    "encodings",
    "pydoc_data",
)


def find_files(path: str | None) -> list[Path]:
    """Returns the files that a path means, in an order that is the same on every machine.

    Of a folder, all files in it and below; names that start with a dot and `__pycache__` are left out.
    """
    if path is None:
        return library_files()
    if not path.strip():
        raise DataError("the path of the data is empty.", hint="a file, folder or glob; is a shell variable not set?")
    try:
        return _find(path)
    except (OSError, ValueError) as error:
        if isinstance(error, DataError):
            raise
        shown = repr(path if len(path) <= 80 else f"{path[:60]}...{path[-15:]}")
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"{shown} cannot be looked at: {reason}.", hint="name a file, a folder or a glob.") from error


def _find(path: str) -> list[Path]:
    expanded = Path(path).expanduser()
    if expanded.is_file():
        return [expanded]
    if expanded.is_dir():
        found = _files_below(expanded)
        if not found:
            raise DataError(f"there is no file in the folder {path!r}.")
        return found
    if glob.has_magic(path):
        # A name of two files on two machines must not depend on how each sorts them.
        found = sorted((Path(name) for name in glob.glob(str(expanded), recursive=True)), key=lambda file: file.parts)
        found = [file for file in found if file.is_file()]
        if found:
            return found
    raise DataError(f"no file matches {path!r}.", hint=_nearest(path, expanded))


def library_files() -> list[Path]:
    """Returns the sources of Python's standard library, without tests, demos and tables."""
    root = Path(sysconfig.get_path("stdlib"))
    found = [
        file
        for file in _files_below(root, without=_NOT_LIBRARY)
        # Written when Python is built: paths of that machine.
        if file.suffix == ".py" and not file.name.startswith("_sysconfigdata")
    ]
    if not found:
        raise DataError(
            "the standard library of this Python has no sources on disk.", hint="name your own text: a file or folder."
        )
    return found


def _files_below(root: Path, *, without: tuple[str, ...] = ()) -> list[Path]:
    found = []
    for folder, names, files in os.walk(root):
        names[:] = [name for name in names if name not in (*without, "__pycache__") and not name.startswith(".")]
        found += [Path(folder, name) for name in files if not name.startswith(".")]
    return sorted((file for file in found if file.is_file()), key=lambda file: file.parts)


def _nearest(path: str, expanded: Path) -> str:
    folder = expanded.parent
    while not folder.is_dir():
        # The folder that is missing is the name that was mistyped.
        expanded, folder = folder, folder.parent
    names = sorted(entry.name for entry in folder.iterdir() if not entry.name.startswith("."))
    spelling = None if glob.has_magic(expanded.name) else did_you_mean(expanded.name, names)
    where = f"the folder {str(folder)!r}"
    if spelling:
        return f"{spelling} (in {where})"
    return f"{where} has {', '.join(names[:8]) + (', ...' if len(names) > 8 else '') if names else 'no files'}."
