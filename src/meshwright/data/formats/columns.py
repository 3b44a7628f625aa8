"""Parquet and Arrow files, read through pyarrow: one document per row of a column."""

from __future__ import annotations

import bisect
import contextlib
import functools
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from meshwright.data.formats.part import Document, Part, checked_value, field_of, read_errors
from meshwright.errors import DataError

COLUMN_SUFFIXES = (".parquet", ".arrow")
_BATCH = 1024  # rows of a Parquet file to decode at once


def open_columns(path: Path, field: str, *, messages: bool = False) -> Part:
    """Returns the documents of a Parquet file, or of an Arrow file in either IPC format."""
    return (ParquetFile if path.suffix == ".parquet" else ArrowFile)(path, field, messages=messages)


class _Columns(Part):
    def __init__(self, path: Path, field: str, *, messages: bool) -> None:
        super().__init__(path)
        self.field, self.messages = field, messages

    def _document(self, index: int, value: Any) -> Document:
        where = f"{self.path}, row {index}"
        return Document(where, lambda: iter([checked_value(value, self.field, where, messages=self.messages)]))

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
                self.path.open("rb").close()
            yield pyarrow
        except (pyarrow.ArrowException, OSError) as error:
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
            return self._file.read_row_group(number, columns=[self.field]).column(0)

    def __len__(self) -> int:
        return int(self._file.metadata.num_rows)

    def document(self, index: int) -> Document:
        self._require_field()
        number = bisect.bisect_right(self._ends, index)
        first = self._ends[number - 1] if number else 0
        return self._document(index, self._group(number)[index - first].as_py())

    def stream(self) -> Iterator[Document]:
        self._require_field()
        done = 0
        with self._reading():
            for batch in self._file.iter_batches(batch_size=_BATCH, columns=[self.field]):
                for value in batch.column(0).to_pylist():
                    yield self._document(done, value)
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
        return self._document(index, self._table.column(self.field)[index].as_py())

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
    files = [folder / str(entry["filename"]) for entry in state["_data_files"] or ()]
    if not files:
        raise DataError(f"the Hugging Face dataset {folder} has no data files.")
    return files


def _json(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read {path}: {error}") from None
    return found if isinstance(found, dict) else None
