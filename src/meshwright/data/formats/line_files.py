"""Text files, JSON lines and ArrayRecord files."""

from __future__ import annotations

import array
import contextlib
import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from meshwright.bounded_reader import bounded_lines, open_regular, require_depth
from meshwright.data.formats.part import (
    TOOLS,
    Document,
    FileDocuments,
    blocks,
    checked_value,
    conversation,
    field_of,
    read_errors,
)
from meshwright.errors import DataError


class TextFile(FileDocuments):
    """A text file is one document."""

    kind = "_Text"

    def __len__(self) -> int:
        return 1

    def document(self, index: int) -> Document:
        return Document(str(self.path), lambda: blocks(self.path))


class JsonLinesFile(FileDocuments):
    """Lines of JSON; empty lines are skipped."""

    kind = "_Lines"

    def __init__(self, path: Path, field: str, *, messages: bool = False) -> None:
        super().__init__(path)
        self.field, self.messages = field, messages

    @functools.cached_property
    def _starts(self) -> array.array[int]:
        starts, at = array.array("q"), 0
        for line in self._lines():
            if line.rstrip(b"\r\n"):
                starts.append(at)
            at += len(line)
        return starts

    def _lines(self, start: int = 0) -> Iterator[bytes]:
        with read_errors(self.path), open_regular(self.path) as file:
            file.seek(start)
            yield from bounded_lines(file, self.path)

    def __len__(self) -> int:
        return len(self._starts)

    def document(self, index: int) -> Document:
        return self._document(next(self._lines(self._starts[index])), f"{self.path}, document {index}")

    def stream(self) -> Iterator[Document]:
        for number, line in enumerate(self._lines(), start=1):
            if line.rstrip(b"\r\n"):
                yield self._document(line, f"{self.path}, line {number}")

    def _document(self, line: bytes, where: str) -> Document:
        return Document(where, lambda: iter([self._value(line, where)]))

    def _value(self, line: bytes, where: str) -> Any:
        record = _parse(line, where, self.field)
        value = checked_value(field_of(record, self.field, where), self.field, where, messages=self.messages)
        return conversation(value, record.get(TOOLS)) if self.messages else value

    def fields(self) -> list[str]:
        for number, line in enumerate(self._lines(), start=1):
            if line.rstrip(b"\r\n"):
                return list(_parse(line, f"{self.path}, line {number}", self.field))
        return []


def _parse(line: bytes, where: str, field: str) -> dict[str, Any]:
    text = line.rstrip(b"\r\n")
    try:
        require_depth(text, where=where)
        value = json.loads(text)
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: byte {error.start} is not UTF-8.", hint="convert the file to UTF-8.") from None
    except json.JSONDecodeError as error:
        raise DataError(
            f"{where} is not JSON: {error.msg} at column {error.colno}.", hint="write one complete object per line."
        ) from None
    except ValueError as error:  # too deep, or an integer of thousands of digits
        raise DataError(str(error).split(";")[0], hint="write one plain object per line.") from None
    if not isinstance(value, dict):
        raise DataError(f"{where} is a {type(value).__name__}, not an object.", hint=f'write {{"{field}": "..."}}.')
    return value


class ArrayRecords(FileDocuments):
    """Records of an ArrayRecord file, each a text."""

    kind = "_Records"

    @functools.cached_property
    def _source(self) -> Any:
        import grain

        with self._reading():
            open_regular(self.path).close()
            return grain.sources.ArrayRecordDataSource([str(self.path)])

    def __len__(self) -> int:
        return len(self._source)

    def document(self, index: int) -> Document:
        return Document(f"{self.path}, record {index}", lambda: self._pieces(index))

    def _pieces(self, index: int) -> Iterator[bytes]:
        with self._reading():
            yield self._source[index]

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, ValueError, OSError, IndexError) as error:
            raise DataError(f"cannot read {self.path} as ArrayRecord: {error}") from error
