"""Files to and from a store in threads, with the hashes of the bytes that arrived."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from meshwright.errors import StoreError
from meshwright.remote.object_store import ObjectStore

THREADS = 8
"""Requests at a time: they mostly wait."""


class Arrived(NamedTuple):
    """The size and hash of the bytes that a store sent."""

    num_bytes: int
    sha256: str


def upload_files(store: ObjectStore, folder: Path, names: Iterable[str]) -> None:
    """Writes files below a folder as objects of the same names, largest first."""
    ordered = sorted(names, key=lambda name: -(folder / name).stat().st_size)
    _in_threads(lambda name: store.upload(folder / name, name), ordered)


def download_files(store: ObjectStore, sizes: Mapping[str, int], folder: Path) -> dict[str, Arrived]:
    """Writes objects as files of the same names below a folder; returns the hashes of what arrived.

    Example:
        >>> import tempfile
        >>> from meshwright.remote import open_store
        >>> store, folder = open_store("memory://bucket/downloads"), Path(tempfile.mkdtemp())
        >>> store.put("a/x", b"abc")
        >>> download_files(store, store.list(), folder)["a/x"].sha256[:8], (folder / "a" / "x").read_bytes()
        ('ba7816bf', b'abc')
    """

    def download(name: str) -> Arrived:
        path = folder / name
        if ".." in path.parts or folder not in path.parents:  # a store allows any name
            raise StoreError(f"{store} has an object named {name!r}.", hint="rename it: it would leave the folder.")
        path.parent.mkdir(parents=True, exist_ok=True)
        digest, count = hashlib.sha256(), 0
        with open(path, "wb") as file:
            for block in store.blocks(name, sizes[name]):
                file.write(block)
                digest.update(block)
                count += len(block)
            file.flush()
            os.fsync(file.fileno())
        return Arrived(count, digest.hexdigest())

    return _in_threads(download, sorted(sizes, key=lambda name: -sizes[name]))


def hash_objects(store: ObjectStore, sizes: Mapping[str, int]) -> dict[str, Arrived]:
    """Reads objects and returns their hashes, without writing anything."""

    def read(name: str) -> Arrived:
        digest, count = hashlib.sha256(), 0
        for block in store.blocks(name, sizes[name]):
            digest.update(block)
            count += len(block)
        return Arrived(count, digest.hexdigest())

    return _in_threads(read, sorted(sizes, key=lambda name: -sizes[name]))


def _in_threads(work: Callable[[str], Any], names: list[str]) -> dict[str, Any]:
    with ThreadPoolExecutor(THREADS, "store") as pool:
        return dict(zip(names, pool.map(work, names), strict=True))
