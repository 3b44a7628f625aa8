"""Documents: the texts in files, folders or globs, streamed in order or read by number.

A document is a text file, a line of a `.jsonl` file, a record of an `.array_record` file, or a row of a `.parquet` or
`.arrow` file. Files are read on demand, one document or block at a time.
"""

from __future__ import annotations

import bisect
import functools
import glob
import hashlib
import itertools
import json
import operator
import os
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from meshwright.data.formats.bin_tokens import SIDECAR_SUFFIX
from meshwright.data.formats.columns import COLUMN_SUFFIXES, dataset_files, open_columns
from meshwright.data.formats.line_files import ArrayRecords, JsonLinesFile, TextFile
from meshwright.data.formats.part import Document, FileDocuments, blocks, read_errors
from meshwright.errors import DataError, did_you_mean

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
            `.arrayrecord`) a text per record, `.parquet` and `.arrow` files a text per row, and every other file is one
            document. A folder may be one that Hugging Face datasets saved with `save_to_disk`.
        text_field: the field of a JSONL object, or the column, that holds the text.

    Example:
        >>> import os
        >>> documents = open_documents(os.__file__)
        >>> len(documents), b"def walk(" in documents[0]
        (1, True)
    """
    return Documents(find_files(path), text_field=text_field)


class Documents(Sequence[str | bytes]):
    """The documents of some files: `documents[i]` is a text, and `stream` yields all of them without holding any."""

    def __init__(self, files: Sequence[Path], *, text_field: str = "text", messages: bool = False) -> None:
        self.files = tuple(files)
        self.text_field = text_field
        self.messages = messages
        self._parts = [_part(file, text_field, messages=messages) for file in self.files]

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
            digest = hashlib.sha256(part.kind.encode())
            for block in blocks(part.path):
                digest.update(block)
            total.update(digest.digest())
        return total.hexdigest()

    def fields(self) -> list[str]:
        """Returns the fields of the first record; none if the files have no fields."""
        return next((fields for part in self._parts if (fields := part.fields())), [])

    def group_ends(self) -> list[int] | None:
        """Returns where groups of documents that are decoded together end; None if all can be read one by one."""
        sizes = [part.group_sizes() for part in self._parts]
        if not any(sizes):
            return None
        counted = zip(self._parts, sizes, strict=True)
        return list(itertools.accumulate(size for part, own in counted for size in own or [1] * len(part)))

    def stamps(self) -> list[list[Any]]:
        """Returns the name, size and modification time of each file, to detect changes without reading it."""
        found = []
        for file in self.files:
            with read_errors(file):
                stat = file.stat()
            found.append([str(file.resolve()), stat.st_size, stat.st_mtime_ns])
        return found


def _part(path: Path, field: str, *, messages: bool) -> FileDocuments:
    if path.suffix == ".jsonl":
        return JsonLinesFile(path, field, messages=messages)
    if path.suffix in COLUMN_SUFFIXES:
        return open_columns(path, field, messages=messages)
    if messages:
        raise DataError(f"{path} holds no messages.", hint="use .jsonl, .parquet or .arrow files for conversations.")
    return ArrayRecords(path) if path.suffix in RECORD_SUFFIXES else TextFile(path)


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
        found = dataset_files(expanded) or _files_below(expanded)
        if not found:
            raise DataError(f"the folder {path!r} has no files.")
        return found
    if glob.has_magic(path):
        # Sorted, since the order of glob differs between machines.
        found = sorted((Path(name) for name in glob.glob(str(expanded), recursive=True)), key=lambda file: file.parts)
        found = [file for file in found if file.is_file() and not file.name.endswith(SIDECAR_SUFFIX)]
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
    return sorted(
        (file for file in found if file.is_file() and not file.name.endswith(SIDECAR_SUFFIX)),
        key=lambda file: file.parts,
    )


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
