"""Objects of a store that are read by byte ranges, like local files that are opened, positioned and read."""

from __future__ import annotations

from typing import Any

from meshwright.remote.object_store import ObjectStore


class RemoteFile:
    """An object that `open` reads by ranges: one request for each read.

    Example:
        >>> from meshwright.remote import open_store
        >>> store, buffer = open_store("memory://bucket/ranges"), bytearray(3)
        >>> store.put("a", b"0123456789")
        >>> with RemoteFile(store, "a").open("rb") as file:
        ...     _ = file.seek(4), file.readinto(buffer)
        >>> bytes(buffer)
        b'456'
    """

    def __init__(self, store: ObjectStore, name: str) -> None:
        self.store, self.name = store, name

    def __str__(self) -> str:
        return f"{self.store}/{self.name}"

    def open(self, mode: str, buffering: int = 0) -> RangeReader:
        """Returns a reader at the start of the object."""
        assert mode == "rb"
        return RangeReader(self)


class RangeReader:
    """A position in an object."""

    def __init__(self, file: RemoteFile) -> None:
        self._file, self._at, self.name = file, 0, str(file)

    def seek(self, place: int) -> None:
        self._at = place

    def readinto(self, buffer: Any) -> int:
        """Fills a buffer from the position on; returns the number of bytes."""
        view = memoryview(buffer)
        data = self._file.store.read_range(self._file.name, self._at, self._at + len(view))
        view[: len(data)] = data
        self._at += len(data)
        return len(data)

    def __enter__(self) -> RangeReader:
        return self

    def __exit__(self, *_: object) -> None:
        pass
