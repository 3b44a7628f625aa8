"""Hashes of a step's files, computed in threads and compared with a manifest; creation of folders to write into."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, TypeVar

from meshwright.bounded_reader import open_regular
from meshwright.errors import CheckpointError, FileFormatError

T = TypeVar("T")


class FileHash(NamedTuple):
    """The size and hash of a file."""

    num_bytes: int
    sha256: str


def list_files(folder: Path) -> list[str]:
    """Returns all files below a folder as sorted, `/`-joined relative paths; links count as files and are not followed.

    A missing folder has no files; a folder that cannot be read raises `OSError`.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> (folder / "a").mkdir()
        >>> _ = (folder / "a" / "x").write_text("1"), (folder / "b").write_text("2")
        >>> list_files(folder)
        ['a/x', 'b']
    """

    def ignore_missing(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError):
            raise error

    found = []
    for parent, folders, names in os.walk(folder, onerror=ignore_missing):
        links = [name for name in folders if os.path.islink(os.path.join(parent, name))]
        found += [Path(parent, name).relative_to(folder).as_posix() for name in (*names, *links)]
    return sorted(found)


def hash_file(path: Path, *, sync: bool = False) -> FileHash:
    """Returns the size and the SHA-256 of a file; with `sync`, also flushes it to disk.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "x"
        >>> _ = path.write_bytes(b"abc")
        >>> hash_file(path).num_bytes, hash_file(path).sha256[:8]
        (3, 'ba7816bf')
    """
    with open_regular(path) as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        if sync:
            os.fsync(file.fileno())
        return FileHash(file.tell(), digest)


def hash_files(folder: Path, names: Iterable[str], *, sync: bool = False) -> dict[str, FileHash]:
    """Returns the hashes of files below a folder, computed in threads."""
    sizes = {name: (folder / name).stat().st_size for name in names}
    return _in_threads(lambda name: hash_file(folder / name, sync=sync), sizes)


def compare_files(
    folder: Path,
    wanted: Mapping[str, FileHash],
    *,
    leave_out: Sequence[str] = (),
    own: Callable[[int], bool] = lambda place: True,
    strict: bool = True,
) -> list[str]:
    """Returns the differences between the files below a folder and their recorded hashes, one line for each file.

    Args:
        leave_out: files to ignore.
        own: which places of the sorted list to hash; the other files are only checked for their size (default: all).
        strict: whether a file without a recorded hash is a difference.
    """
    try:
        there = [name for name in list_files(folder) if name not in leave_out]
    except OSError as error:
        return [unreadable(Path(error.filename).relative_to(folder).as_posix(), error)]
    problems = [f"{name}: missing" for name in wanted if name not in set(there)]
    problems += [f"{name}: not in the manifest" for name in there if strict and name not in wanted]
    known = [name for name in there if name in wanted]
    hashed = {name for place, name in enumerate(known) if own(place)}

    def compare(name: str) -> str | None:
        written = wanted[name]
        try:
            info = (folder / name).lstat()
            if stat.S_ISLNK(info.st_mode):
                return f"{name}: is a link, not a file"
            if not stat.S_ISREG(info.st_mode):
                return f"{name}: is not a regular file"
            if info.st_size != written.num_bytes:
                return f"{name}: {info.st_size} bytes instead of {written.num_bytes}"
            found = hash_file(folder / name).sha256 if name in hashed else written.sha256
        except OSError as error:
            return unreadable(name, error)
        except FileFormatError as error:  # replaced in the meantime
            return f"{name}: {error}"
        if found == written.sha256:
            return None
        return f"{name}: contents changed (sha256 {found[:12]} instead of {written.sha256[:12]})"

    compared = _in_threads(compare, {name: wanted[name].num_bytes for name in known})
    return sorted([*problems, *filter(None, compared.values())])


def _in_threads(work: Callable[[str], T], sizes: Mapping[str, int]) -> dict[str, T]:
    """Applies `work` to each file in threads, largest files first; hashing releases the GIL."""
    order = sorted(sizes, key=lambda name: (-sizes[name], name))
    # One thread per core, up to 16, beyond which memory bandwidth is the limit.
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with ThreadPoolExecutor(min(16, cores), "hash") as pool:
        done = dict(zip(order, pool.map(work, order), strict=True))
    return {name: done[name] for name in sizes}


_UNREADABLE = ": cannot be read: "


def unreadable(name: str, error: OSError) -> str:
    """Returns the problem text for a file or folder that cannot be read, and may still be intact."""
    return f"{name}{_UNREADABLE}{error.strerror}"


def is_unreadable(problem: str) -> bool:
    """Returns whether a problem text comes from `unreadable`."""
    return _UNREADABLE in problem


@contextlib.contextmanager
def new_folder(folder: Path, *, empty: bool = False) -> Iterator[None]:
    """Creates a folder to write into; if that or the body fails, removes what was created.

    Args:
        empty: an existing folder must be empty, and a failure empties it again. Otherwise an existing folder keeps its
            contents.
    """
    made = [place for place in (folder, *folder.parents) if not os.path.lexists(place)]
    hint = "pass a new folder inside a writable one."
    if empty and folder.is_dir() and any(folder.iterdir()):
        raise CheckpointError(f"{folder} is not empty.", hint=hint)
    try:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()
        except OSError as error:
            raise CheckpointError(f"cannot write to {folder}: {error.strerror}.", hint=hint) from None
        yield
    except BaseException:
        with contextlib.suppress(OSError):
            for path in folder.iterdir() if empty else ():
                path.unlink()
        for place in made:
            with contextlib.suppress(OSError):
                shutil.rmtree(place) if place == folder else place.rmdir()
        raise
