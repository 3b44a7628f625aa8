"""Documents, and the files that hold them."""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.bounded_reader import open_regular
from meshwright.errors import DataError, FileFormatError, did_you_mean

BLOCK = 1 << 22
TOOLS = "tools"
"""The field of a conversation with the descriptions of its tools."""


@dataclass(frozen=True)
class Document:
    """A text that is not read yet. `where` names it in errors; `pieces` yields blocks of bytes, or one whole text."""

    where: str
    pieces: Callable[[], Iterator[Any]]

    def text(self) -> Any:
        """Returns the whole text, or a conversation: its messages, or a dict of `messages` and `tools`."""
        pieces: list[Any] = list(self.pieces())
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)


class FileDocuments(abc.ABC):
    """The documents of one file.

    Attributes:
        kind: part of the fingerprint of the file.
    """

    kind = ""

    def __init__(self, path: Path) -> None:
        self.path = path

    @abc.abstractmethod
    def __len__(self) -> int: ...

    @abc.abstractmethod
    def document(self, index: int) -> Document:
        """Returns a document by number."""

    def stream(self) -> Iterator[Document]:
        """Yields the documents in order."""
        return (self.document(index) for index in range(len(self)))

    def fields(self) -> list[str]:
        """Returns the fields of the first record; none if the file has no fields."""
        return []

    def group_sizes(self) -> list[int] | None:
        """Returns the number of documents in each group that is decoded as a whole; None for access one by one."""
        return None


def field_of(record: Mapping[str, Any], field: str, where: str) -> Any:
    """Returns the text or the messages in a field of a record."""
    if field not in record:
        names = list(record)
        others = f"set the text field to one of: {', '.join(map(repr, names[:8]))}." if names else None
        raise DataError(f"{where} has no field {field!r}.", hint=did_you_mean(field, names) or others)
    return record[field]


def checked_value(value: Any, field: str, where: str, *, messages: bool) -> Any:
    """Returns the value of a field; raises if it is not a string, or not a list for conversations."""
    if not isinstance(value, list if messages else str):
        wanted = "list of messages" if messages else "string"
        raise DataError(f"{where}: field {field!r} is a {type(value).__name__}, not a {wanted}.")
    return value


def conversation(messages: Any, tools: Any) -> Any:
    """Returns the messages of a conversation, with its tools if there are any."""
    return messages if tools is None or tools in ("", []) else {"messages": messages, TOOLS: tools}


def blocks(path: Path) -> Iterator[bytes]:
    """Yields the contents of a file in blocks."""
    with read_errors(path), open_regular(path) as file:
        while block := file.read(BLOCK):
            yield block


@contextlib.contextmanager
def read_errors(path: Path) -> Iterator[None]:
    """Turns errors of the file system into a `DataError` that names the file."""
    try:
        yield
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}.") from None
    except FileFormatError as error:
        raise DataError(str(error)) from None
