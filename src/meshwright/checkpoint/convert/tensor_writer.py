"""Safetensors files, written in pieces: the headers first, then rows of any tensor in any order.

The sizes of all tensors are known before, so each piece goes to its place in its file, and only one piece is in memory.
The files are the same, byte for byte, as those of `safetensors.numpy.save_file`.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from meshwright.errors import CheckpointError
from meshwright.files import explain_failure, write_atomically

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
"""The supported dtypes by their names in the files, in the order in which the format sorts tensors."""
_CODES = {name: code for code, name in DTYPES.items()}
Array = np.ndarray[Any, Any]


class TensorForm(NamedTuple):
    """The shape and the dtype of a tensor."""

    shape: tuple[int, ...]
    dtype: Any

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * int(self.dtype.itemsize)


class Piece(NamedTuple):
    """Rows of a tensor, from `first_row` on."""

    name: str
    first_row: int
    values: Array


def write_tensors(
    folder: Path, pieces: Iterable[Piece], forms: Mapping[str, TensorForm], *, max_shard_bytes: int
) -> list[Path]:
    """Writes tensors into files of a limited size, in the order of `forms`, and an index if there are several.

    Args:
        pieces: all rows of all tensors, in any order.

    Example:
        >>> import tempfile
        >>> values, form = np.ones((2, 3), np.float32), TensorForm((2, 3), np.dtype("float32"))
        >>> paths = write_tensors(Path(tempfile.mkdtemp()), [Piece("w", 0, values)], {"w": form}, max_shard_bytes=100)
        >>> import safetensors.numpy
        >>> safetensors.numpy.load_file(paths[0])["w"].shape
        (2, 3)
    """
    shards = _shards(forms, max_shard_bytes)
    count = len(shards)
    names = [SINGLE] if count == 1 else [f"model-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)]
    paths, starts, places = [folder / name for name in names], dict[str, int](), dict[str, Path]()
    for path, shard in zip(paths, shards, strict=True):
        header, offsets = _header({name: forms[name] for name in shard})
        with path.open("wb") as file:
            file.write(header)
            file.truncate(len(header) + sum(forms[name].num_bytes for name in shard))
        starts |= offsets
        places |= dict.fromkeys(shard, path)
    for piece in pieces:
        form = forms[piece.name]
        assert piece.values.dtype == form.dtype
        assert piece.values.shape[1:] == form.shape[1:]
        width = math.prod(form.shape[1:]) * form.dtype.itemsize
        with places[piece.name].open("r+b", buffering=0) as file:
            file.seek(starts[piece.name] + piece.first_row * width)
            _write(file, np.ascontiguousarray(piece.values))
    if count > 1:
        total = sum(form.num_bytes for form in forms.values())
        index = {"metadata": {"total_size": total}, "weight_map": {name: places[name].name for name in sorted(places)}}
        write_atomically(folder / INDEX, json.dumps(index, indent=1) + "\n")
        paths.append(folder / INDEX)
    return paths


@contextlib.contextmanager
def write_errors(folder: Path) -> Iterator[None]:
    """Turns failures to write into errors that name the folder and the reason."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"cannot write to {folder}: {explain_failure(error)}.") from error


def _write(file: Any, values: Array) -> None:
    view = values.reshape(-1).view(np.uint8).data
    while len(view):
        view = view[file.write(view) :]


def _header(forms: Mapping[str, TensorForm]) -> tuple[bytes, dict[str, int]]:
    """Returns the header of a file, and the first byte of each of its tensors."""
    order = list(DTYPES)
    codes = {name: _CODES[str(form.dtype)] for name, form in forms.items()}
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    filled = 0
    for name in sorted(forms, key=lambda name: (order.index(codes[name]), name)):
        end = filled + forms[name].num_bytes
        entries[name] = {"dtype": codes[name], "shape": list(forms[name].shape), "data_offsets": [filled, end]}
        filled = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    first = 8 + len(text)
    starts = {name: first + entries[name]["data_offsets"][0] for name in forms}
    return len(text).to_bytes(8, "little") + text, starts


def _shards(forms: Mapping[str, TensorForm], most: int) -> Sequence[Sequence[str]]:
    """Groups tensors into files, in order; starts a new file when one would exceed `most` bytes."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name, form in forms.items():
        if shards[-1] and filled + form.num_bytes > most:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += form.num_bytes
    return shards
