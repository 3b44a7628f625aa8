"""Hashes of the files of a step: found, hashed in threads, compared with a manifest; and the folders they go into."""

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

from meshwright.errors import CheckpointError

T = TypeVar("T")


class FileHash(NamedTuple):
    """What a file held when it was hashed."""

    num_bytes: int
    sha256: str


def list_files(folder: Path) -> list[str]:
    """Returns all files below a folder as `/`-joined relative paths, sorted; links count as files and are not followed.

    Raises where a folder cannot be read; one that is not there has no files.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> (folder / "a").mkdir()
        >>> _ = (folder / "a" / "x").write_text("1"), (folder / "b").write_text("2")
        >>> list_files(folder)
        ['a/x', 'b']
    """

    def told(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError):
            raise error

    found = []
    for parent, folders, names in os.walk(folder, onerror=told):
        links = [name for name in folders if os.path.islink(os.path.join(parent, name))]
        found += [Path(parent, name).relative_to(folder).as_posix() for name in (*names, *links)]
    return sorted(found)


def hash_file(path: Path, *, sync: bool = False) -> FileHash:
    """Returns the size and the SHA-256 of a file; with `sync`, only once the file is on the disk.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "x"
        >>> _ = path.write_bytes(b"abc")
        >>> hash_file(path).num_bytes, hash_file(path).sha256[:8]
        (3, 'ba7816bf')
    """
    with open(path, "rb", buffering=0) as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        if sync:
            os.fsync(file.fileno())
        return FileHash(file.tell(), digest)


def hash_files(folder: Path, names: Iterable[str], *, sync: bool = False) -> dict[str, FileHash]:
    """Returns the hashes of files below a folder, several at a time."""
    sizes = {name: (folder / name).stat().st_size for name in names}
    return _in_threads(lambda name: hash_file(folder / name, sync=sync), sizes)


def compare_files(
    folder: Path,
    wanted: Mapping[str, FileHash],
    *,
    leave_out: Sequence[str] = (),
    own: Callable[[int], bool] = lambda place: True,
) -> list[str]:
    """Returns what is wrong with the files below a folder, each problem with the file's name; nothing if all is well.

    Args:
        leave_out: files that need not be known.
        own: which places of the sorted list to hash here; others are only looked for. All by default.
    """
    try:
        there = [name for name in list_files(folder) if name not in leave_out]
    except OSError as error:
        return [unreadable(Path(error.filename).relative_to(folder).as_posix(), error)]
    problems = [f"{name}: missing" for name in wanted if name not in set(there)]
    problems += [f"{name}: not in the manifest" for name in there if name not in wanted]
    known = [name for name in there if name in wanted]
    hashed = {name for place, name in enumerate(known) if own(place)}

    def compare(name: str) -> str | None:
        written = wanted[name]
        try:
            info = (folder / name).lstat()
            if stat.S_ISLNK(info.st_mode):
                return f"{name}: a link instead of a file"
            if info.st_size != written.num_bytes:
                return f"{name}: {info.st_size} bytes instead of {written.num_bytes}"
            found = hash_file(folder / name).sha256 if name in hashed else written.sha256
        except OSError as error:
            return unreadable(name, error)
        if found == written.sha256:
            return None
        return f"{name}: contents changed (sha256 {found[:12]} instead of {written.sha256[:12]})"

    compared = _in_threads(compare, {name: wanted[name].num_bytes for name in known})
    return sorted([*problems, *filter(None, compared.values())])


def _in_threads(work: Callable[[str], T], sizes: Mapping[str, int]) -> dict[str, T]:
    """Returns what `work` returns for each file, the large ones first; hashing does not hold the interpreter's lock."""
    order = sorted(sizes, key=lambda name: (-sizes[name], name))
    # One per core, up to 16, where memory is the limit.
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with ThreadPoolExecutor(min(16, cores), "hash") as pool:
        done = dict(zip(order, pool.map(work, order), strict=True))
    return {name: done[name] for name in sizes}


_UNREADABLE = ": cannot be read: "


def unreadable(name: str, error: OSError) -> str:
    """Returns the problem of a file or folder that cannot be read, which says nothing about what is in it."""
    return f"{name}{_UNREADABLE}{error.strerror}"


def is_unreadable(problem: str) -> bool:
    """Returns whether a problem is one of `unreadable`."""
    return _UNREADABLE in problem


@contextlib.contextmanager
def new_folder(folder: Path, *, empty: bool = False) -> Iterator[None]:
    """Makes a folder to write into; where that fails, or what is done in it, nothing new is left behind.

    Args:
        empty: the folder may be there already only if nothing is in it, and failures leave it so. Otherwise one that
            is there already stays, with all in it.
    """
    made = [place for place in (folder, *folder.parents) if not os.path.lexists(place)]
    hint = "name a new folder, in one that you may write to."
    if empty and folder.is_dir() and any(folder.iterdir()):
        raise CheckpointError(f"{folder} is not empty.", hint=hint)
    try:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except FileExistsError:
            raise CheckpointError(f"{folder} is no folder.", hint=hint) from None
        except OSError as error:
            raise CheckpointError(f"the folder {folder} cannot be made: {error.strerror}.", hint=hint) from None
        try:
            tempfile.TemporaryFile(dir=folder).close()
        except OSError as error:
            raise CheckpointError(f"nothing can be written to {folder}: {error.strerror}.", hint=hint) from None
        yield
    except BaseException:
        with contextlib.suppress(OSError):
            for path in folder.iterdir() if empty else ():
                path.unlink()
        for place in made:
            with contextlib.suppress(OSError):
                shutil.rmtree(place) if place == folder else place.rmdir()
        raise
