"""Parquet and Arrow files, read through pyarrow: one document per row of a column."""

from __future__ import annotations

import bisect
import contextlib
import functools
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from meshwright.bounded_reader import open_regular, read_json
from meshwright.data.formats.part import (
    TOOLS,
    Document,
    FileDocuments,
    checked_value,
    conversation,
    field_of,
    read_errors,
)
from meshwright.errors import DataError, FileFormatError

COLUMN_SUFFIXES = (".parquet", ".arrow")
_BATCH = 1024  # rows of a Parquet file to decode at once


def open_columns(path: Path, field: str, *, messages: bool = False) -> FileDocuments:
    """Returns the documents of a Parquet file, or of an Arrow file in either IPC format."""
    return (ParquetFile if path.suffix == ".parquet" else ArrowFile)(path, field, messages=messages)


class _Columns(FileDocuments):
    def __init__(self, path: Path, field: str, *, messages: bool) -> None:
        super().__init__(path)
        self.field, self.messages = field, messages

    @functools.cached_property
    def _names(self) -> list[str]:
        """The columns to read."""
        return [self.field, TOOLS] if self.messages and TOOLS in self.fields() else [self.field]

    def _document(self, index: int, value: Any, tools: Any = None) -> Document:
        where = f"{self.path}, row {index}"

        def found() -> Any:
            text = checked_value(value, self.field, where, messages=self.messages)
            return conversation(text, tools) if self.messages else text

        return Document(where, lambda: iter([found()]))

    def _require_field(self) -> None:
        field_of(dict.fromkeys(self.fields()), self.field, str(self.path))

    @contextlib.contextmanager
    def _reading(self) -> Iterator[Any]:
        try:
            import pyarrow
        except ModuleNotFoundError:
            raise DataError(f"{self.path} needs pyarrow.", hint="run `pip install 'meshwright[data]'`.") from None
        try:
            with read_errors(self.path):
                open_regular(self.path).close()
            yield pyarrow
        except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
            raise DataError(f"cannot read {self.path}: {error}", hint="check that the file is complete.") from None


class ParquetFile(_Columns):
    """A Parquet file; one row group is decoded at a time."""

    kind = "parquet"

    @functools.cached_property
    def _file(self) -> Any:
        with self._reading():
            import pyarrow.parquet

            return pyarrow.parquet.ParquetFile(self.path)

    @functools.cached_property
    def _ends(self) -> list[int]:
        facts = self._file.metadata
        return list(itertools.accumulate(facts.row_group(n).num_rows for n in range(facts.num_row_groups)))

    @functools.lru_cache(maxsize=1)  # noqa: B019 - the group in use, so that reading rows in order decodes each once
    def _group(self, number: int) -> Any:
        with self._reading():
            return self._file.read_row_group(number, columns=self._names)

    def __len__(self) -> int:
        return int(self._file.metadata.num_rows)

    def document(self, index: int) -> Document:
        self._require_field()
        number = bisect.bisect_right(self._ends, index)
        first = self._ends[number - 1] if number else 0
        with self._reading():
            group = self._group(number)
            values = [group.column(name)[index - first].as_py() for name in self._names]
        return self._document(index, *values)

    def group_sizes(self) -> list[int]:
        return [after - before for before, after in itertools.pairwise([0, *self._ends])]

    def stream(self) -> Iterator[Document]:
        self._require_field()
        done = 0
        with self._reading():
            for batch in self._file.iter_batches(batch_size=_BATCH, columns=self._names):
                for values in zip(*(batch.column(name).to_pylist() for name in self._names), strict=True):
                    yield self._document(done, *values)
                    done += 1

    def fields(self) -> list[str]:
        return list(self._file.schema_arrow.names)


class ArrowFile(_Columns):
    """An Arrow file, mapped into memory, in the stream format (of Hugging Face datasets) or the file format."""

    kind = "arrow"

    @functools.cached_property
    def _table(self) -> Any:
        with self._reading() as pyarrow:
            source = pyarrow.memory_map(str(self.path))
            is_file = source.read(6) == b"ARROW1"
            source.seek(0)
            return (pyarrow.ipc.open_file if is_file else pyarrow.ipc.open_stream)(source).read_all()

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def document(self, index: int) -> Document:
        self._require_field()
        with self._reading():
            values = [self._table.column(name)[index].as_py() for name in self._names]
        return self._document(index, *values)

    def fields(self) -> list[str]:
        return list(self._table.schema.names)


def dataset_files(folder: Path) -> list[Path] | None:
    """Returns the Arrow files of a folder that Hugging Face datasets saved, or None if it is not one."""
    splits = _json(folder / "dataset_dict.json")
    if splits is not None:
        names = [str(name) for name in splits.get("splits", [])]
        raise DataError(
            f"{folder} is a Hugging Face dataset with the splits {', '.join(names)}.",
            hint=f"pass one of them, e.g. {folder / (names[0] if names else 'train')}.",
        )
    state = _json(folder / "state.json")
    if state is None or "_data_files" not in state:
        return None
    if state.get("_indices_files") or state.get("_indices_data_files"):
        raise DataError(
            f"{folder} is a Hugging Face dataset that selects rows by an index file.",
            hint="save it again after `dataset.flatten_indices()`.",
        )
    listed = state["_data_files"] or []
    found = [entry.get("filename") if isinstance(entry, dict) else None for entry in listed]
    if not isinstance(listed, list) or any(not isinstance(name, str) or Path(name).name != name for name in found):
        raise DataError(f"{folder / 'state.json'} does not list files of its folder.", hint="save the dataset again.")
    files = [folder / str(name) for name in found]
    if not files:
        raise DataError(f"the Hugging Face dataset {folder} has no data files.")
    return files


def _json(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    try:
        found = read_json(path, object)
    except (OSError, FileFormatError) as error:
        raise DataError(f"cannot read {path}: {error}") from None
    return found if isinstance(found, dict) else None
