"""Documents: the texts that a path leads to, one after the other or by number, whatever kind of file they lie in.

A text file is one document. A line of a `.jsonl` file is one, and so is a record of an `.array_record` file. Files are
read when asked for, a document or a piece of one at a time.
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
# Not the library itself, or not prose-like code: tests, demos, generated tables, what others installed.
_NOT_LIBRARY = (
    *("site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo"),
    *("ensurepip", "encodings", "pydoc_data"),
)


def open_documents(path: str | None = None, text_field: str = "text") -> Documents:
    """Returns the documents that a path leads to; without one, the sources of Python's standard library.

    Args:
        path: a file, a folder or a glob. `.jsonl` files hold an object per line, `.array_record` files (also
            `.arrayrecord`) a text per record, and every other file is one document.
        text_field: the field of a JSONL object that is the text.

    Example:
        >>> import os
        >>> documents = open_documents(os.__file__)
        >>> len(documents), b"def walk(" in documents[0]
        (1, True)
    """
    return Documents(find_files(path), text_field=text_field)


@dataclass(frozen=True)
class Document:
    """A text, not yet read. `where` is what an error calls it; `pieces` gives bytes of a file, or one whole text."""

    where: str
    pieces: Callable[[], Iterator[Any]]

    def text(self) -> str | bytes:
        """Returns the whole text."""
        pieces: list[Any] = list(self.pieces())
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)


class Documents(Sequence[str | bytes]):
    """The documents of some files: `documents[i]` is a text. `stream` gives all of them without holding any."""

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
        """Gives the documents in order, without counting them first."""
        for part in self._parts:
            yield from part.stream()

    @functools.cached_property
    def fingerprint(self) -> str:
        """A hash of everything that is in the files; their names and times do not matter."""
        total = hashlib.sha256(json.dumps(self.text_field).encode())
        for part in self._parts:
            digest = hashlib.sha256(type(part).__name__.encode())
            for block in _blocks(part.path):
                digest.update(block)
            total.update(digest.digest())
        return total.hexdigest()

    def stamps(self) -> list[list[Any]]:
        """Returns name, size and time of each file: while these stay, so does what is in it."""
        found = []
        for file in self.files:
            with _telling(file):
                stat = file.stat()
            found.append([str(file.resolve()), stat.st_size, stat.st_mtime_ns])
        return found


# --- What one file holds ---


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
    """Lines of JSON. Lines with nothing in them are no documents."""

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
        with _telling(self.path), self.path.open("rb") as file:
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
        raise DataError(f"{where}: byte {error.start} is not UTF-8.", hint="JSON is always UTF-8.") from None
    except json.JSONDecodeError as error:
        raise DataError(
            f"{where} is not JSON: {error.msg} at column {error.colno}.", hint="one whole object on each line."
        ) from None
    if not isinstance(value, dict):
        raise DataError(f"{where} is not an object but a {type(value).__name__}.", hint=f'{{"{field}": "..."}}')
    if field not in value:
        names = list(value)
        hint = did_you_mean(field, names) or f"it has {', '.join(map(repr, names[:8])) or 'none'}."
        raise DataError(f"{where} has no field {field!r}.", hint=hint)
    text = value[field]
    if not isinstance(text, str):
        raise DataError(f"{where}: the field {field!r} is not a text but a {type(text).__name__}.")
    return text


class _Records(_Part):
    """Records of an ArrayRecord file, each a text as bytes."""

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
            raise DataError(f"{self.path} cannot be read as ArrayRecord: {error}") from error


def _part(path: Path, text_field: str) -> _Part:
    if path.suffix == ".jsonl":
        return _Lines(path, text_field)
    return _Records(path) if path.suffix in RECORD_SUFFIXES else _Text(path)


def _blocks(path: Path) -> Iterator[bytes]:
    with _telling(path), path.open("rb") as file:
        while block := file.read(BLOCK):
            yield block


@contextlib.contextmanager
def _telling(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}.") from None


# --- Which files a path means ---


def find_files(path: str | None) -> list[Path]:
    """Returns the files that a path means, in an order that is the same on every machine.

    Of a folder, all files in it and below; names that start with a dot and `__pycache__` are left out.
    """
    if path is None:
        return library_files()
    if not path.strip():
        raise DataError("the path of the data is empty.", hint="a file, folder or glob; is a shell variable not set?")
    try:
        return _find(path)
    except (OSError, ValueError) as error:
        if isinstance(error, DataError):
            raise
        shown = repr(path if len(path) <= 80 else f"{path[:60]}...{path[-15:]}")
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"{shown} cannot be looked at: {reason}.", hint="name a file, a folder or a glob.") from error


def _find(path: str) -> list[Path]:
    expanded = Path(path).expanduser()
    if expanded.is_file():
        return [expanded]
    if expanded.is_dir():
        found = _files_below(expanded)
        if not found:
            raise DataError(f"there is no file in the folder {path!r}.")
        return found
    if glob.has_magic(path):
        # A name of two files on two machines must not depend on how each sorts them.
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
        # Written when Python is built: paths of that machine.
        if file.suffix == ".py" and not file.name.startswith("_sysconfigdata")
    ]
    if not found:
        raise DataError(
            "the standard library of this Python has no sources on disk.", hint="name your own text: a file or folder."
        )
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
        # The folder that is missing is the name that was mistyped.
        expanded, folder = folder, folder.parent
    names = sorted(entry.name for entry in folder.iterdir() if not entry.name.startswith("."))
    spelling = None if glob.has_magic(expanded.name) else did_you_mean(expanded.name, names)
    where = f"the folder {str(folder)!r}"
    if spelling:
        return f"{spelling} (in {where})"
    return f"{where} has {', '.join(names[:8]) + (', ...' if len(names) > 8 else '') if names else 'no files'}."
