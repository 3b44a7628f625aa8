"""The folder of snapshots in host memory, which outlives the ranks: made, checked, searched and removed without JAX.

The launcher names one folder below /dev/shm for each launch. Every host has its own, for its user alone. The launcher
holds a lock on that of its host, so that the next launch can tell a folder in use from one that a killed launcher left.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import shutil
import socket
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from meshwright.bounded_reader import MOST_DEPTH, read_json
from meshwright.errors import ConfigError
from meshwright.files import try_lock, wait_for_lock

FOLDER = "MESHWRIGHT_SNAPSHOTS"
"""Variable with the folder of the snapshots."""
EVERY = "MESHWRIGHT_SNAPSHOT_EVERY"
"""Variable with the number of steps between snapshots."""

SHARED_MEMORY = Path("/dev/shm")
_MOUNTS = Path("/proc/self/mounts")
_LARGEST_TABLE = 256 << 20
_DEPTH = 2 * MOST_DEPTH
_HINT = "leave out --snapshot-every; checkpoints work without it."


def snapshot_variables(every: int | None) -> dict[str, str]:
    """Returns the variables that let the ranks of a launch take snapshots; empty without `every`.

    Example:
        >>> snapshot_variables(None)
        {}
        >>> snapshot_variables(5)["MESHWRIGHT_SNAPSHOT_EVERY"]
        '5'
    """
    if every is None:
        return {}
    folder = SHARED_MEMORY / f"{_prefix()}{secrets.token_hex(8)}"
    return {FOLDER: str(folder), EVERY: str(every)}


def _prefix() -> str:
    return f"meshwright-snapshots-{socket.gethostname()}-"


@contextlib.contextmanager
def hold_folder(variables: Mapping[str, str]) -> Iterator[None]:
    """Makes the folder on the launcher's host and removes it at the end, with those that killed launchers left."""
    if FOLDER not in variables:
        yield
        return
    while True:
        folder = open_folder(variables[FOLDER])
        handle = os.open(folder, os.O_RDONLY)
        wait_for_lock(handle)
        if folder.exists() and os.path.samestat(os.fstat(handle), os.stat(folder)):
            break
        os.close(handle)  # another launcher removed it before it was locked
    try:
        remove_abandoned(folder.parent)
        yield
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(handle)


def open_folder(path: Path | str) -> Path:
    """Returns the folder, made if it is missing; raises unless it is in memory and this user's alone.

    Example:
        >>> open_folder("/sys/snapshots")
        Traceback (most recent call last):
        meshwright.errors.ConfigError: snapshots need /dev/shm in memory, and this host has none.
        hint: leave out --snapshot-every; checkpoints work without it.
    """
    folder = Path(path)
    if not is_memory(folder.parent):
        raise ConfigError(f"snapshots need {SHARED_MEMORY} in memory, and this host has none.", hint=_HINT)
    try:
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        found = folder.lstat()
    except OSError as error:
        raise ConfigError(f"cannot make the folder of snapshots {folder}: {error.strerror}.", hint=_HINT) from None
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise ConfigError(
            f"{folder} is not a folder of this user alone (mode 700), so it may hold another user's snapshots.",
            hint="remove it, and start again.",
        )
    return folder


def is_memory(folder: Path) -> bool:
    """Returns whether a folder is the root of a file system in memory (tmpfs)."""
    try:
        lines = [line.split() for line in _MOUNTS.read_text().splitlines()]
    except OSError:
        return False
    kinds = [words[2] for words in lines if words[1] == str(folder)]
    return bool(kinds) and kinds[-1] == "tmpfs"


def remove_abandoned(parent: Path) -> list[Path]:
    """Removes the folders of this user and host whose launcher is gone, and returns them."""
    removed = []
    for folder in sorted(parent.glob(f"{_prefix()}*")):
        with contextlib.suppress(OSError):
            if folder.lstat().st_uid != os.geteuid():
                continue
            handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                if try_lock(handle):
                    shutil.rmtree(folder, ignore_errors=True)
                    removed.append(folder)
            finally:
                os.close(handle)
    return removed


# --- What it holds ---


def steps_in(folder: Path) -> list[int]:
    """Returns the steps of which the folder holds anything, the newest first."""
    try:
        names = os.listdir(folder)
    except OSError:
        return []
    return sorted((int(name) for name in names if name.isdecimal() and name == str(int(name))), reverse=True)


def newest_snapshot(folder: Path) -> int | None:
    """Returns the newest step of which this host holds the snapshots of all ranks, with unchanged tables; else None.

    The ranks compare every byte with its hash when they restore.

    Example:
        >>> newest_snapshot(Path("/nowhere")) is None
        True
    """
    return next((step for step in steps_in(folder) if _is_whole(folder / str(step))), None)


def _is_whole(place: Path) -> bool:
    try:
        tables = [read_table(path) for path in sorted(place.glob("rank-*.json"))]
        if not tables or any(table is None for table in tables):
            return False
        found = [table for table in tables if table is not None]
        sizes = [(place / f"rank-{table['rank']}.data").lstat().st_size == table["bytes"] for table in found]
        is_one = len({(table["course"], table["num_ranks"]) for table in found}) == 1
        ranks = sorted(table["rank"] for table in found)
        return all(sizes) and is_one and ranks == list(range(len(found))) and found[0]["num_ranks"] == len(found)
    except (OSError, KeyError, TypeError, ValueError):
        return False


def read_table(path: Path) -> dict[str, Any] | None:
    """Returns the table of a rank's snapshot, or None if it is damaged or missing."""
    try:
        body: dict[str, Any] = read_json(path, most=_LARGEST_TABLE, depth=_DEPTH)
        said = body.pop("sha256")
        return body if said == hash_table(body) else None
    except (OSError, ValueError, KeyError):
        return None


def hash_table(body: Mapping[str, Any]) -> str:
    """Returns the hash that a table ends with."""
    return hashlib.sha256(json.dumps(body).encode()).hexdigest()
