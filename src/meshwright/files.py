"""Atomic file writes, syncing, file locks, folder removal, and one-line explanations of failed writes."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import time
from pathlib import Path
from typing import IO, Any


def write_atomically(path: Path, data: bytes | str) -> None:
    """Writes a file atomically: even after a power cut, it is complete or unchanged.

    A failure leaves no temporary file. Several processes may write the same file at once; one of them wins.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with open(temporary, "xb") as file:
            file.write(data.encode() if isinstance(data, str) else data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Flushes a folder's entries to disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def try_lock(file: IO[Any] | int) -> bool | None:
    """Locks an open file until it is closed or its process ends, even by a kill; returns None if there are no locks.

    Returns False if another process holds the lock.

    Example:
        >>> import tempfile
        >>> with tempfile.NamedTemporaryFile() as first, open(first.name) as second:
        ...     try_lock(first), try_lock(second)
        (True, False)
    """
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except (ImportError, OSError):  # not on this system, or not on this file system
        return None
    return True


def wait_for_lock(file: IO[Any] | int) -> None:
    """Locks an open file as soon as no other process holds it."""
    import fcntl

    fcntl.flock(file, fcntl.LOCK_EX)


def remove_folder(folder: Path, *, seconds: float = 10.0) -> None:
    """Removes a folder, retrying for `seconds` while another process still writes into it."""
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
        if not folder.exists():  # a late writer may have created it again
            return


def explain_failure(error: BaseException) -> str:
    """Returns the reason for a failed write in one line; recognizes a full disk."""
    text = " ".join(str(error).split())
    full = ("No space left", "RESOURCE_EXHAUSTED", "Disk quota", "File too large", "not enough space")
    if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) or any(part in text for part in full):
        return f"the disk is full ({text[:300]})"
    return f"{type(error).__name__}: {text[:300]}"
