"""Folders of safetensors files: found by their index, read by byte ranges."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from meshwright.bounded_reader import open_regular
from meshwright.checkpoint.convert.config_json import read_model_json
from meshwright.checkpoint.convert.tensor_regions import Array, Region, StoredTensor, fill_regions
from meshwright.checkpoint.convert.tensor_writer import DTYPES, INDEX, SINGLE
from meshwright.errors import CheckpointError, FileFormatError
from meshwright.files import explain_failure
from meshwright.remote import ObjectStore
from meshwright.remote.ranges import RemoteFile


class TensorFiles:
    """The tensors of a folder, by name; only headers are read until `fill` is called.

    Args:
        store: holds the weights, if the files in the folder have only their headers.

    Attributes:
        bytes_read: the bytes of weights that this process has read.
    """

    def __init__(self, folder: Path, *, store: ObjectStore | None = None) -> None:
        self.folder, self.bytes_read = folder, 0
        self.tensors: dict[str, StoredTensor] = {}
        for path in weight_files(folder):
            for name, kind, shape, start in _header(path):
                if name.endswith("rotary_emb.inv_freq"):
                    continue  # in old files; they follow from the sizes
                if name in self.tensors:
                    raise CheckpointError(
                        f"{path} and {self.tensors[name].path} both hold {name}.",
                        hint="remove the file that does not belong to the model.",
                    )
                if kind not in DTYPES:
                    raise CheckpointError(
                        f"{name} in {path} is {kind}; only {', '.join(DTYPES)} weights are supported.",
                        hint="dequantize the model, or save it in bfloat16.",
                    )
                place = path if store is None else RemoteFile(store, path.name)
                self.tensors[name] = StoredTensor(place, tuple(shape), jnp.dtype(DTYPES[kind]), start)

    def fill(self, wanted: Mapping[str, Sequence[Region]], new: Sequence[Array] = ()) -> None:
        """Reads regions of tensors, by name, into their targets, parts of arrays that may be `new`."""
        asked = [(self.tensors[name], regions) for name, regions in wanted.items()]
        try:
            self.bytes_read += fill_regions(asked, new)
        except OSError as error:
            raise CheckpointError(
                f"cannot read weights from {self.folder}: {explain_failure(error)}.", hint="fetch the files again."
            ) from None

    def rows(self, name: str, first: int, last: int) -> Array:
        """Returns some rows of a matrix."""
        tensor = self.tensors[name]
        out = np.empty((last - first, tensor.shape[1]), tensor.dtype)
        self.fill({name: [Region((first, last), (0, tensor.shape[1]), out)]})
        return out


def _header(path: Path) -> Iterator[tuple[str, str, list[int], int]]:
    """Yields the name, the dtype, the shape and the first byte of each tensor; safetensors checks the header before."""
    with opened(path) as file:
        names = set(file.keys())
    with path.open("rb") as raw:
        size = int.from_bytes(raw.read(8), "little")
        header = json.loads(raw.read(size))
    for name, entry in header.items():
        if name in names:
            yield name, entry["dtype"], entry["shape"], 8 + size + entry["data_offsets"][0]


def weight_files(folder: Path) -> list[Path]:
    """Returns the weight files of a folder, from its index if it has one.

    Example:
        >>> import tempfile
        >>> weight_files(Path(tempfile.mkdtemp()))  # doctest: +IGNORE_EXCEPTION_DETAIL
        Traceback (most recent call last):
        meshwright.errors.CheckpointError: the folder has neither model.safetensors nor model.safetensors.index.json.
    """
    if (folder / INDEX).exists():
        index = read_model_json(folder / INDEX).get("weight_map")
        if not isinstance(index, dict) or not index:
            raise CheckpointError(f"{folder / INDEX} has no weight_map.", hint="fetch it again.")
        for name in index.values():
            if not isinstance(name, str) or Path(name).name != name or not (folder / name).is_file():
                raise CheckpointError(f"{folder / INDEX} names {name!r}, which is not a file in its folder.")
        return [folder / name for name in dict.fromkeys(index.values())]
    if (folder / SINGLE).exists():
        return [folder / SINGLE]
    raise CheckpointError(f"{folder} has neither {SINGLE} nor {INDEX}.", hint="pass a Hugging Face model folder.")


@contextlib.contextmanager
def opened(path: Path) -> Iterator[Any]:
    """Opens a safetensors file; errors, also of reading from it, name the reason."""
    package = safetensors_package()
    try:
        open_regular(path).close()  # names the reason; safetensors reports every failure as a missing file
        with package.safe_open(path, framework="np") as file:
            yield file
    except (OSError, FileFormatError, package.SafetensorError) as error:
        why = str(error).rstrip(".")
        raise CheckpointError(f"cannot read {path}: {why}.", hint="fetch it again; it may be incomplete.") from None


def safetensors_package() -> Any:
    """Imports safetensors; raises an error with a hint if it is not installed."""
    try:
        import safetensors
        import safetensors.numpy
    except ModuleNotFoundError:
        raise CheckpointError("this needs safetensors.", hint="run `pip install safetensors`.") from None
    return safetensors
