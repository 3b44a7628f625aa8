"""An object store behind a few operations: list, read, put, put if absent, remove. fsspec does the rest."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from meshwright.errors import StoreError, did_you_mean

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
BLOCK_BYTES = 32 * 2**20
"""Bytes per request for large objects."""
WRITABLE = ("s3", "s3a", "gs", "gcs", "az", "abfs", "file", "memory")
"""Schemes with an atomic "put if absent", which a run needs; data may come from any scheme."""
_INSTALL = {"s3": "meshwright[s3]", "s3a": "meshwright[s3]", "gs": "meshwright[gcs]", "gcs": "meshwright[gcs]"}
_CREDENTIALS = {
    "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE",
    "gs": "run `gcloud auth application-default login`, or set GOOGLE_APPLICATION_CREDENTIALS",
    "az": "set AZURE_STORAGE_CONNECTION_STRING, or AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
}
_ENDPOINTS = {"s3": "AWS_ENDPOINT_URL", "gs": "FSSPEC_GS_ENDPOINT_URL"}
_SAME = {"s3a": "s3", "gcs": "gs", "abfs": "az"}


def is_url(text: str | None) -> bool:
    """Returns whether a text is a URL such as s3://bucket/name, and not a path.

    Example:
        >>> is_url("s3://bucket/runs/a"), is_url("runs/a"), is_url(None)
        (True, False, False)
    """
    return text is not None and _URL.match(text.strip()) is not None


def scheme_of(url: str) -> str:
    """Returns the scheme of a URL in lower case: "s3" for s3://bucket/name."""
    return url.strip().split("://", 1)[0].lower()


def check_scheme(url: str, *, writes: bool) -> None:
    """Raises `StoreError` if a URL cannot be used; asks no server, and imports only the package of the scheme.

    Args:
        writes: whether a run is to be written there, which needs an atomic "put if absent".
    """
    import fsspec

    scheme, _, rest = url.strip().partition("://")
    scheme = scheme.lower()
    if writes and scheme not in WRITABLE:
        raise StoreError(
            f"{url}: a run cannot be in a store of the scheme {scheme}://.",
            hint=did_you_mean(scheme, WRITABLE) or "use a folder, s3://, gs:// or az://.",
        )
    if not rest.strip("/"):
        raise StoreError(f"{url} names no bucket.", hint=f"use {scheme}://BUCKET/NAME.")
    if scheme in ("http", "https"):
        raise StoreError(f"{url}: web servers do not list files.", hint="download the files, or use s3:// or gs://.")
    try:
        fsspec.get_filesystem_class(scheme)
    except ValueError:
        hint = did_you_mean(scheme, WRITABLE) or "use a path, s3://, gs:// or az://."
        raise StoreError(f"{url}: the scheme {scheme}:// is unknown.", hint=hint) from None
    except ImportError as error:
        package = _INSTALL.get(scheme)
        hint = f"pip install '{package}'." if package else f"{error}."
        raise StoreError(f"{url}: the package for {scheme}:// is not installed.", hint=hint) from None


def open_store(url: str, *, writes: bool = False) -> ObjectStore:
    """Returns the store at a URL, after asking its server once; raises `StoreError` if it cannot be used.

    Credentials and endpoints come from the environment, as the SDK of each store reads them.

    Example:
        >>> store = open_store("memory://bucket/example")
        >>> store.put("a/x", b"abc")
        >>> store.list(), store.read("a/x"), store.put_new("a/x", b"other")
        ({'a/x': 3}, b'abc', False)
    """
    import fsspec

    check_scheme(url, writes=writes)
    scheme = scheme_of(url)
    try:
        # Runs are resumed elsewhere and objects come and go, so neither listings nor connections may be shared.
        fs = fsspec.filesystem(scheme, use_listings_cache=False, skip_instance_cache=scheme != "memory")
    except Exception as error:
        raise _problem("open", url, error) from error
    store = ObjectStore(url, fs)
    store.check()
    return store


class ObjectStore:
    """The objects below a URL; names are relative to it. Every failure of the store is a `StoreError`.

    Args:
        fs: the fsspec file system of the scheme.
    """

    def __init__(self, url: str, fs: Any) -> None:
        self.url = url.strip().rstrip("/")
        self.scheme = scheme_of(self.url)
        self._fs = fs
        self._root = str(fs._strip_protocol(self.url)).rstrip("/")

    def __str__(self) -> str:
        return self.url

    def below(self, name: str) -> ObjectStore:
        """Returns the store of the objects below a name."""
        return ObjectStore(f"{self.url}/{name}", self._fs)

    def check(self) -> None:
        """Raises if the server cannot be reached, refuses the credentials or has no such bucket."""
        self.infos()

    def list(self, prefix: str = "") -> dict[str, int]:
        """Returns the names and sizes of all objects below a prefix, in order."""
        return {name: int(info["size"]) for name, info in self.infos(prefix).items()}

    def infos(self, prefix: str = "") -> dict[str, dict[str, Any]]:
        """Returns what the store says about each object below a prefix, by name, in order."""
        with self._asking("list"):
            self._fs.invalidate_cache()
            return self._named(self._fs.find(self._path(prefix) if prefix else self._root, detail=True))

    def infos_of(self, pattern: str) -> dict[str, dict[str, Any]]:
        """Returns what the store says about each object that matches a glob, by name, in order."""
        with self._asking("list"):
            self._fs.invalidate_cache()
            return self._named(self._fs.glob(self._path(pattern), detail=True))

    def _named(self, found: Any) -> dict[str, dict[str, Any]]:
        start = len(self._root) + 1
        names = {str(path)[start:]: info for path, info in found.items() if info["type"] == "file"}
        return {name: names[name] for name in sorted(names) if name}

    def read(self, name: str) -> bytes | None:
        """Returns the bytes of an object, or None if there is none."""
        with self._asking(f"read {name} of"):
            try:
                return bytes(self._fs.cat_file(self._path(name)))
            except FileNotFoundError:
                return None

    def read_range(self, name: str, start: int, stop: int) -> bytes:
        """Returns some bytes of an object; fewer if it ends before."""
        with self._asking(f"read {name} of"):
            return bytes(self._fs.cat_file(self._path(name), start=start, end=stop))

    def blocks(self, name: str, size: int) -> Iterator[bytes]:
        """Yields the bytes of an object of this size, in blocks; fewer if it is shorter by now."""
        for start in range(0, size, BLOCK_BYTES):
            with self._asking(f"read {name} of"):
                try:
                    yield bytes(self._fs.cat_file(self._path(name), start=start, end=min(start + BLOCK_BYTES, size)))
                except FileNotFoundError:
                    return

    def put(self, name: str, data: bytes) -> None:
        """Writes an object; readers see the old one or the new one."""
        with self._asking(f"write {name} to"):
            self._make_parent(name)
            if self.scheme == "file":
                from meshwright.files import write_atomically

                write_atomically(Path(self._path(name)), data)
            else:
                self._fs.pipe_file(self._path(name), data)

    def put_new(self, name: str, data: bytes) -> bool:
        """Writes an object if there is none, in one operation of the store; returns whether it did."""
        with self._asking(f"write {name} to"):
            self._make_parent(name)
            try:
                if self.scheme == "file":
                    with open(self._path(name), "xb") as file:
                        file.write(data)
                else:
                    self._fs.pipe_file(self._path(name), data, mode="create")
            except FileExistsError:
                return False
            except Exception as error:
                if _is_refused_condition(error):
                    return False
                raise
        return True

    def upload(self, path: Path, name: str) -> None:
        """Writes the contents of a file as an object."""
        with self._asking(f"write {name} to"):
            self._make_parent(name)
            self._fs.put_file(str(path), self._path(name))

    def remove(self, names: Iterable[str]) -> None:
        """Removes objects; those that do not exist are ignored."""
        for name in names:
            with self._asking(f"remove {name} of"), contextlib.suppress(FileNotFoundError):
                self._fs.rm_file(self._path(name))

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _make_parent(self, name: str) -> None:
        if self.scheme == "file":
            Path(self._path(name)).parent.mkdir(parents=True, exist_ok=True)

    @contextlib.contextmanager
    def _asking(self, doing: str) -> Iterator[None]:
        try:
            yield
        except StoreError:
            raise
        except Exception as error:  # each SDK has its own errors
            raise _problem(doing, self.url, error) from error


def _problem(doing: str, url: str, error: BaseException) -> StoreError:
    text = " ".join(str(error).split())[:300]
    kind, scheme = type(error).__name__, scheme_of(url)
    said = f"{kind} {text}".lower()
    endpoint = _ENDPOINTS.get(_SAME.get(scheme, scheme), "the endpoint")
    if isinstance(error, FileNotFoundError):
        hint = "create the bucket, or check its name."
    elif "credential" in said or "token" in said or "invalidaccesskey" in said.replace(" ", ""):
        hint = f"{_credentials(scheme)}."
    elif isinstance(error, PermissionError) or "forbidden" in said or "denied" in said:
        hint = f"check that the credentials may read and write there; {_credentials(scheme)}."
    elif isinstance(error, (ConnectionError, TimeoutError)) or "connect" in said or "timeout" in said:
        hint = f"check {endpoint} and the network."
    else:
        hint = f"check {endpoint}, the credentials and the name of the bucket."
    return StoreError(f"cannot {doing} {url}: {kind}: {text}", hint=hint)


def _credentials(scheme: str) -> str:
    return _CREDENTIALS.get(_SAME.get(scheme, scheme), "check the credentials")


def _is_refused_condition(error: BaseException) -> bool:
    """Returns whether a store refused a conditional write because the object exists."""
    text = f"{type(error).__name__} {error} {getattr(error, 'code', '')} {getattr(error, 'status', '')}"
    return any(word in text for word in ("PreconditionFailed", "At least one of the pre-conditions", "412"))
