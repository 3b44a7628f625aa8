"""Documents: the texts in files, folders or globs, streamed in order or read by number.

A document is a text file, a line of a `.jsonl` file, or a record of an `.array_record` file. Files are read on demand,
one document or block at a time.
"""

from __future__ import annotations

import abc
import array
import bisect
import contextlib
import functools
import glob
import hashlib
import itertools
import json
import operator
import os
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.errors import DataError, did_you_mean

BLOCK = 1 << 22
RECORD_SUFFIXES = (".array_record", ".arrayrecord")
# Folders to skip: tests, demos, generated tables and installed packages.
_NOT_LIBRARY = (
    *("site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo"),
    *("ensurepip", "encodings", "pydoc_data"),
)


def open_documents(path: str | None = None, text_field: str = "text") -> Documents:
    """Returns the documents at a path, or the sources of Python's standard library without one.

    Args:
        path: a file, a folder or a glob. `.jsonl` files hold an object per line, `.array_record` files (also
            `.arrayrecord`) a text per record, and every other file is one document.
        text_field: the field of a JSONL object that holds the text.

    Example:
        >>> import os
        >>> documents = open_documents(os.__file__)
        >>> len(documents), b"def walk(" in documents[0]
        (1, True)
    """
    return Documents(find_files(path), text_field=text_field)


@dataclass(frozen=True)
class Document:
    """A text that is not read yet. `where` names it in errors; `pieces` yields blocks of bytes, or one whole text."""

    where: str
    pieces: Callable[[], Iterator[Any]]

    def text(self) -> str | bytes:
        """Returns the whole text."""
        pieces: list[Any] = list(self.pieces())
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)


class Documents(Sequence[str | bytes]):
    """The documents of some files: `documents[i]` is a text, and `stream` yields all of them without holding any."""

    def __init__(self, files: Sequence[Path], *, text_field: str = "text") -> None:
        self.files = tuple(files)
        self.text_field = text_field
        self._parts = [_part(file, text_field) for file in self.files]

    @functools.cached_property
    def _ends(self) -> list[int]:
        return list(itertools.accumulate(len(part) for part in self._parts))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: Any) -> Any:
        index = operator.index(index)
        if not -len(self) <= index < len(self):
            raise IndexError(f"document {index} of {len(self)}")
        index %= len(self)
        part = bisect.bisect_right(self._ends, index)
        return self._parts[part].document(index - (self._ends[part - 1] if part else 0)).text()

    def stream(self) -> Iterator[Document]:
        """Yields the documents in order, without counting them first."""
        for part in self._parts:
            yield from part.stream()

    @functools.cached_property
    def fingerprint(self) -> str:
        """A hash of the contents of the files; their names and times do not matter."""
        total = hashlib.sha256(json.dumps(self.text_field).encode())
        for part in self._parts:
            digest = hashlib.sha256(type(part).__name__.encode())
            for block in _blocks(part.path):
                digest.update(block)
            total.update(digest.digest())
        return total.hexdigest()

    def stamps(self) -> list[list[Any]]:
        """Returns the name, size and modification time of each file, to detect changes without reading it."""
        found = []
        for file in self.files:
            with _read_errors(file):
                stat = file.stat()
            found.append([str(file.resolve()), stat.st_size, stat.st_mtime_ns])
        return found


# --- The documents of one file ---


class _Part(abc.ABC):
    """The documents of one file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @abc.abstractmethod
    def __len__(self) -> int: ...

    @abc.abstractmethod
    def document(self, index: int) -> Document: ...

    def stream(self) -> Iterator[Document]:
        return (self.document(index) for index in range(len(self)))


class _Text(_Part):
    def __len__(self) -> int:
        return 1

    def document(self, index: int) -> Document:
        return Document(str(self.path), lambda: _blocks(self.path))


class _Lines(_Part):
    """Lines of JSON; empty lines are skipped."""

    def __init__(self, path: Path, text_field: str) -> None:
        super().__init__(path)
        self.text_field = text_field

    @functools.cached_property
    def _starts(self) -> array.array[int]:
        starts, at = array.array("q"), 0
        for line in self._lines():
            if line.rstrip(b"\r\n"):
                starts.append(at)
            at += len(line)
        return starts

    def _lines(self, start: int = 0) -> Iterator[bytes]:
        with _read_errors(self.path), self.path.open("rb") as file:
            file.seek(start)
            yield from file

    def __len__(self) -> int:
        return len(self._starts)

    def document(self, index: int) -> Document:
        return self._document(next(self._lines(self._starts[index])), f"{self.path}, document {index}")

    def stream(self) -> Iterator[Document]:
        for number, line in enumerate(self._lines(), start=1):
            if line.rstrip(b"\r\n"):
                yield self._document(line, f"{self.path}, line {number}")

    def _document(self, line: bytes, where: str) -> Document:
        return Document(where, lambda: iter([_parse(line, self.text_field, where)]))


def _parse(line: bytes, field: str, where: str) -> str:
    try:
        value = json.loads(line.rstrip(b"\r\n"))
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: byte {error.start} is not UTF-8.", hint="convert the file to UTF-8.") from None
    except json.JSONDecodeError as error:
        raise DataError(
            f"{where} is not JSON: {error.msg} at column {error.colno}.", hint="write one complete object per line."
        ) from None
    if not isinstance(value, dict):
        raise DataError(f"{where} is a {type(value).__name__}, not an object.", hint=f'write {{"{field}": "..."}}.')
    if field not in value:
        names = list(value)
        others = f"set the text field to one of: {', '.join(map(repr, names[:8]))}." if names else None
        raise DataError(f"{where} has no field {field!r}.", hint=did_you_mean(field, names) or others)
    text = value[field]
    if not isinstance(text, str):
        raise DataError(f"{where}: field {field!r} is a {type(text).__name__}, not a string.")
    return text


class _Records(_Part):
    @functools.cached_property
    def _source(self) -> Any:
        import grain

        with self._reading():
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


def _part(path: Path, text_field: str) -> _Part:
    if path.suffix == ".jsonl":
        return _Lines(path, text_field)
    return _Records(path) if path.suffix in RECORD_SUFFIXES else _Text(path)


def _blocks(path: Path) -> Iterator[bytes]:
    with _read_errors(path), path.open("rb") as file:
        while block := file.read(BLOCK):
            yield block


@contextlib.contextmanager
def _read_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}.") from None


# --- The files at a path ---


def find_files(path: str | None) -> list[Path]:
    """Returns the files at a path, in the same order on every machine.

    A folder stands for all files in it and below, except `__pycache__` and names that start with a dot.
    """
    if path is None:
        return library_files()
    if not path.strip():
        raise DataError("the data path is empty.", hint="pass a file, folder or glob; is a shell variable unset?")
    try:
        return _find(path)
    except (OSError, ValueError) as error:
        if isinstance(error, DataError):
            raise
        shown = repr(path if len(path) <= 80 else f"{path[:60]}...{path[-15:]}")
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"cannot access {shown}: {reason}.", hint="pass a file, a folder or a glob.") from error


def _find(path: str) -> list[Path]:
    expanded = Path(path).expanduser()
    if expanded.is_file():
        return [expanded]
    if expanded.is_dir():
        found = _files_below(expanded)
        if not found:
            raise DataError(f"the folder {path!r} has no files.")
        return found
    if glob.has_magic(path):
        # Sorted, since the order of glob differs between machines.
        found = sorted((Path(name) for name in glob.glob(str(expanded), recursive=True)), key=lambda file: file.parts)
        found = [file for file in found if file.is_file()]
        if found:
            return found
    raise DataError(f"no file matches {path!r}.", hint=_nearest(path, expanded))


def library_files() -> list[Path]:
    """Returns the sources of Python's standard library, without tests, demos and tables."""
    root = Path(sysconfig.get_path("stdlib"))
    found = [
        file
        for file in _files_below(root, without=_NOT_LIBRARY)
        # Generated when Python is built, with paths of that machine.
        if file.suffix == ".py" and not file.name.startswith("_sysconfigdata")
    ]
    if not found:
        raise DataError("this Python has no standard library sources on disk.", hint="pass a file or folder of text.")
    return found


def _files_below(root: Path, *, without: tuple[str, ...] = ()) -> list[Path]:
    found = []
    for folder, names, files in os.walk(root):
        names[:] = [name for name in names if name not in (*without, "__pycache__") and not name.startswith(".")]
        found += [Path(folder, name) for name in files if not name.startswith(".")]
    return sorted((file for file in found if file.is_file()), key=lambda file: file.parts)


def _nearest(path: str, expanded: Path) -> str:
    folder = expanded.parent
    while not folder.is_dir():
        # The outermost missing folder is the mistyped name.
        expanded, folder = folder, folder.parent
    names = sorted(entry.name for entry in folder.iterdir() if not entry.name.startswith("."))
    spelling = None if glob.has_magic(expanded.name) else did_you_mean(expanded.name, names)
    where = f"the folder {str(folder)!r}"
    if spelling:
        return f"{spelling} (in {where})"
    return f"{where} has {', '.join(names[:8]) + (', ...' if len(names) > 8 else '') if names else 'no files'}."
