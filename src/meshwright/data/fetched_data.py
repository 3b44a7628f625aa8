"""Data in an object store: fetched once into a cache folder, verified there, and read like any other files.

The cache has a folder per snapshot, which is named by the names, sizes and versions (ETags) of its objects. An object
that changes makes a new snapshot; nothing is ever updated in place.
"""

from __future__ import annotations

import functools
import glob
import hashlib
import json
import shutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.data.cache_folder import open_or_build
from meshwright.data.formats.bin_tokens import BIN_SUFFIX, SIDECAR_SUFFIX
from meshwright.errors import DataError
from meshwright.remote.object_store import ObjectStore, is_url, open_store
from meshwright.remote.transfer import download_files

# What stores call the version of an object, or the time of its last change.
_VERSIONS = (
    *("ETag", "etag", "md5Hash", "crc32c", "content_md5", "generation"),
    *("LastModified", "last_modified", "updated", "mtime", "created"),
)


@dataclass(frozen=True)
class LocalData:
    """A local path, and the names of the files below it for people.

    Args:
        path: file, folder or glob to read.
        root: folder of the cache that holds the files, or None if `path` was local anyway.
        url: URL of that folder.
    """

    path: str
    root: Path | None = None
    url: str = ""

    def shown(self, file: Path) -> str:
        """Returns a file as the user would name it."""
        if self.root is None or self.root not in file.parents:
            return str(file)
        return f"{self.url}/{file.relative_to(self.root).as_posix()}"


def fetch_data(path: str, folder: Path, *, tell: Callable[[str], None] = lambda text: None) -> LocalData:
    """Returns a local copy of the files at a URL, from the cache if they have not changed; a path stays as it is.

    Args:
        path: file, folder or glob, such as `s3://bucket/text/*.jsonl`.
        folder: the cache.
        tell: called with a line of text before a download.

    Example:
        >>> import tempfile
        >>> from meshwright.remote import open_store
        >>> open_store("memory://bucket/text").put("a.txt", b"some text")
        >>> found = fetch_data("memory://bucket/text/*.txt", Path(tempfile.mkdtemp()))
        >>> [file.read_text() for file in found.root.iterdir()]
        ['some text']
    """
    if not is_url(path):
        return LocalData(path)
    base, name = _split(path.strip().rstrip("/"))
    store = open_store(base)
    infos = _find(store, name)
    if not infos:
        raise DataError(f"{path} names no object.", hint="check the URL; a folder needs objects below it.")
    root = _fetch(store, name, infos, folder, tell)
    return LocalData(str(root / name) if name else str(root), root, base)


def fetch_named(store: ObjectStore, names: Collection[str], folder: Path) -> Path:
    """Returns a folder of the cache with the objects of these names; those that do not exist are left out.

    Example:
        >>> import tempfile
        >>> from meshwright.remote import open_store
        >>> store = open_store("memory://bucket/named")
        >>> store.put("a.json", b"{}")
        >>> [file.name for file in fetch_named(store, ["a.json", "b.json"], Path(tempfile.mkdtemp())).iterdir()]
        ['a.json']
    """
    infos = {name: info for name, info in store.infos().items() if name in names}
    return _fetch(store, "", infos, folder, lambda text: None)


def versions_of(infos: Mapping[str, Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Returns the size and version of each object, as its store names it."""
    return {
        name: [int(info["size"]), *(str(info[key]) for key in _VERSIONS if key in info)] for name, info in infos.items()
    }


def _fetch(
    store: ObjectStore, name: str, infos: Mapping[str, Mapping[str, Any]], folder: Path, tell: Callable[[str], None]
) -> Path:
    versions = versions_of(infos)
    fingerprint = hashlib.sha256(json.dumps([store.url, name, versions]).encode()).hexdigest()
    write = functools.partial(_download, store, {name: int(info["size"]) for name, info in infos.items()}, tell)
    target, _ = open_or_build(folder, fingerprint, write, tell=tell)
    return target / "files"


def _split(url: str) -> tuple[str, str]:
    """Returns the URL of a folder, and the file, folder or glob in it."""
    scheme, _, rest = url.partition("://")
    parts = rest.split("/")
    end = next((place for place, part in enumerate(parts) if glob.has_magic(part)), len(parts) - 1)
    end = max(end, 1)  # the bucket
    return f"{scheme}://{'/'.join(parts[:end])}", "/".join(parts[end:])


def _find(store: ObjectStore, name: str) -> dict[str, dict[str, Any]]:
    if not glob.has_magic(name):
        found = store.infos(name)
        if name.endswith(BIN_SUFFIX):
            found |= store.infos(name.removesuffix(BIN_SUFFIX) + SIDECAR_SUFFIX)
    else:
        found = store.infos_of(name)
        every = store.infos() if any(item.endswith(BIN_SUFFIX) for item in found) else {}
        found |= {item: info for item, info in every.items() if item.removesuffix(SIDECAR_SUFFIX) + BIN_SUFFIX in found}
    hidden = [item for item in found if any(part.startswith(".") for part in item.split("/"))]
    return {item: info for item, info in found.items() if item not in hidden}


def _download(
    store: ObjectStore, sizes: Mapping[str, int], tell: Callable[[str], None], folder: Path
) -> dict[str, Any]:
    total, free = sum(sizes.values()), shutil.disk_usage(folder).free
    if free < total:
        raise DataError(
            f"cannot fetch {store}: its {len(sizes):,} files take {total:,} bytes, but only {free:,} are free.",
            hint="choose a cache folder on another disk with --data-cache.",
        )
    tell(f"fetching {len(sizes):,} files ({total:,} bytes) of {store}")
    arrived = download_files(store, sizes, folder / "files")
    for name, found in arrived.items():
        if found.num_bytes != sizes[name]:
            raise DataError(f"{store}/{name} changed while it was read.", hint="start again.")
    files = {f"files/{name}": {"bytes": found.num_bytes, "sha256": found.sha256} for name, found in arrived.items()}
    return {"url": store.url, "files": files}
