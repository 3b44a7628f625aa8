"""Files of a step: found, hashed in threads, brought to disk, removed."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from meshwright.errors import CheckpointError

BLOCK_BYTES = 4 * 2**20
"""What a thread reads at a time; the hash of a block runs without the interpreter's lock."""


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
    found = []
    for parent, folders, names in os.walk(folder, onerror=_raise):
        links = [name for name in folders if os.path.islink(os.path.join(parent, name))]
        found += [Path(parent, name).relative_to(folder).as_posix() for name in (*names, *links)]
    return sorted(found)


def _raise(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error


def hash_file(path: Path, *, sync: bool = False) -> FileHash:
    """Returns the size and the SHA-256 of a file; with `sync`, only once the file is on the disk.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "x"
        >>> _ = path.write_bytes(b"abc")
        >>> hash_file(path).num_bytes, hash_file(path).sha256[:8]
        (3, 'ba7816bf')
    """
    digest, count = hashlib.sha256(), 0
    block = _block()
    with open(path, "rb", buffering=0) as file:
        while size := file.readinto(block):
            digest.update(block[:size])
            count += size
        if sync:
            os.fsync(file.fileno())
    return FileHash(count, digest.hexdigest())


_own = threading.local()


def _block() -> memoryview:
    if not hasattr(_own, "block"):
        _own.block = memoryview(bytearray(BLOCK_BYTES))
    view: memoryview = _own.block
    return view


def hash_files(
    folder: Path, names: Iterable[str], *, sync: bool = False, failed: dict[str, OSError] | None = None
) -> dict[str, FileHash]:
    """Returns the hashes of files below a folder, several at a time, the large ones first.

    Args:
        failed: where files go that cannot be read; left out, they raise.
    """
    sizes = {name: (folder / name).stat().st_size for name in names}
    order = sorted(sizes, key=lambda name: (-sizes[name], name))
    if not order:
        return {}

    def hashed(name: str) -> FileHash | None:
        try:
            return hash_file(folder / name, sync=sync)
        except OSError as error:
            if failed is None:
                raise
            failed[name] = error
            return None

    with ThreadPoolExecutor(min(len(order), num_hashers()), "hash") as pool:
        done = dict(zip(order, pool.map(hashed, order), strict=True))
    return {name: found for name in sizes if (found := done[name]) is not None}


def num_hashers() -> int:
    """Returns how many files are hashed at a time: one per core up to 16, where memory is the limit."""
    return max(1, min(16, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1))


def compare_files(
    folder: Path,
    wanted: Mapping[str, FileHash],
    *,
    leave_out: Sequence[str] = (),
    own: Callable[[int], bool] | None = None,
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
    intact = []
    for place, name in enumerate(sorted(name for name in there if name in wanted)):
        try:
            info = (folder / name).lstat()
        except OSError as error:
            problems.append(unreadable(name, error))
            continue
        if stat.S_ISLNK(info.st_mode):
            problems.append(f"{name}: a link instead of a file")
        elif info.st_size != wanted[name].num_bytes:
            problems.append(f"{name}: {info.st_size} bytes instead of {wanted[name].num_bytes}")
        elif own is None or own(place):
            intact.append(name)
    failed: dict[str, OSError] = {}
    for name, found in hash_files(folder, intact, failed=failed).items():
        if found.sha256 != wanted[name].sha256:
            problems.append(
                f"{name}: contents changed (sha256 {found.sha256[:12]} instead of {wanted[name].sha256[:12]})"
            )
    problems += [unreadable(name, error) for name, error in failed.items()]
    return sorted(problems)


_UNREADABLE = ": cannot be read: "


def unreadable(name: str, error: OSError) -> str:
    """Returns the problem of a file or folder that cannot be read, which says nothing about what is in it."""
    return f"{name}{_UNREADABLE}{error.strerror}"


def is_unreadable(problem: str) -> bool:
    """Returns whether a problem is one of `unreadable`."""
    return _UNREADABLE in problem


@contextlib.contextmanager
def new_folder(folder: Path) -> Iterator[None]:
    """Makes a folder to write into; where that fails, or what is done in it, the folder is not left behind.

    A folder that is there already stays, with all in it.
    """
    made = [place for place in (folder, *folder.parents) if not os.path.lexists(place)]
    hint = "name a new folder, in one that you may write to."
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise CheckpointError(f"{folder} is no folder.", hint=hint) from None
    except OSError as error:
        _remove_empty(made)
        raise CheckpointError(f"the folder {folder} cannot be made: {error.strerror}.", hint=hint) from None
    try:
        _require_writable(folder)
        yield
    except BaseException:
        if folder in made:
            shutil.rmtree(folder, ignore_errors=True)
            _remove_empty(made[1:])
        raise


def _require_writable(folder: Path) -> None:
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise CheckpointError(
            f"nothing can be written to {folder}: {error.strerror}.", hint="name a folder that you may write to."
        ) from None


def _remove_empty(folders: Iterable[Path]) -> None:
    with contextlib.suppress(OSError):
        for folder in folders:
            folder.rmdir()


def write_atomically(path: Path, data: bytes) -> None:
    """Writes a file that is there whole or not at all, also after a power cut."""
    temporary = path.with_name(f".{path.name}.tmp")
    with open(temporary, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Brings the names in a folder to the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_folders(folder: Path) -> None:
    """Brings the names in a folder and in all below it to the disk."""
    for parent, _, _ in os.walk(folder):
        sync_folder(Path(parent))


def remove_folder(folder: Path, *, seconds: float = 10.0) -> None:
    """Removes a folder with all in it, though others may still be writing into it for a moment."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            shutil.rmtree(folder)
        except FileNotFoundError:
            pass
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.EBUSY) or time.monotonic() > deadline:
                raise
        time.sleep(0.05)
        if not folder.exists():  # asked once more: a writer that was late may have made it again
            return


def explain_failure(error: BaseException) -> str:
    """Returns why a write failed, in one line: a full disk is said to be one."""
    text = " ".join(str(error).split())
    full = ("No space left", "RESOURCE_EXHAUSTED", "Disk quota", "File too large", "not enough space")
    if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) or any(part in text for part in full):
        return f"the disk is full ({text[:300]})"
    return f"{type(error).__name__}: {text[:300]}"
