"""Folders of safetensors files: found by their index, read by slices, written in pieces with an index.

Files are opened for each read: a file that stays open keeps its pages in this process, and a whole model would add up.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from meshwright.checkpoint.convert.config_json import read_json
from meshwright.errors import CheckpointError
from meshwright.files import explain_failure, write_atomically

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
Array = np.ndarray[Any, Any]


class StoredTensor(NamedTuple):
    """A tensor in a file."""

    path: Path
    shape: tuple[int, ...]
    dtype: Any


class TensorFiles:
    """The tensors of a folder, by name; only headers are read until `read` is called."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tensors: dict[str, StoredTensor] = {}
        for path in weight_files(folder):
            with opened(path) as file:
                for name in file.keys():  # noqa: SIM118 - not a dict
                    stored = file.get_slice(name)
                    kind = stored.get_dtype()
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
                    self.tensors[name] = StoredTensor(path, tuple(stored.get_shape()), jnp.dtype(DTYPES[kind]))

    def read(self, parts: Iterable[tuple[str, tuple[slice, ...]]]) -> Iterator[Array]:
        """Yields slices of tensors, in order; neighbors in one file share its opening."""
        path, file, stack = None, None, contextlib.ExitStack()
        with stack:
            for name, index in parts:
                if self.tensors[name].path != path:
                    stack.close()
                    path = self.tensors[name].path
                    file = stack.enter_context(opened(path))
                assert file is not None
                try:
                    yield file.get_slice(name)[index]
                except (OSError, _safetensors().SafetensorError) as error:
                    raise CheckpointError(
                        f"cannot read {name} from {path}: {error}.", hint="fetch the file again."
                    ) from None


def weight_files(folder: Path) -> list[Path]:
    """Returns the weight files of a folder, from its index if it has one.

    Example:
        >>> import tempfile
        >>> weight_files(Path(tempfile.mkdtemp()))  # doctest: +IGNORE_EXCEPTION_DETAIL
        Traceback (most recent call last):
        meshwright.errors.CheckpointError: the folder has neither model.safetensors nor model.safetensors.index.json.
    """
    if (folder / INDEX).exists():
        index = read_json(folder / INDEX).get("weight_map")
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
    """Opens a safetensors file; the errors name the reason."""
    package = _safetensors()
    try:
        path.open("rb").close()  # names the reason; safetensors reports every failure as a missing file
        file = package.safe_open(path, framework="np")
    except (OSError, package.SafetensorError) as error:
        raise CheckpointError(f"cannot read {path}: {error}.", hint="fetch it again; it may be incomplete.") from None
    with file:
        yield file


def write_tensors(
    folder: Path, tensors: Iterable[tuple[str, Array]], sizes: Mapping[str, int], *, max_shard_bytes: int
) -> list[Path]:
    """Writes tensors, in the order of `sizes`, into files of a limited size; one file at a time is in memory."""
    shards = _shards(sizes, max_shard_bytes)
    count = len(shards)
    names = [SINGLE] if count == 1 else [f"model-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)]
    paths, source = [folder / name for name in names], iter(tensors)
    save_file = _safetensors().numpy.save_file
    for path, shard in zip(paths, shards, strict=True):
        held = dict(next(source) for _ in shard)
        assert list(held) == list(shard)
        save_file(held, path, metadata={"format": "pt"})
    if count > 1:
        places = {name: path.name for path, shard in zip(paths, shards, strict=True) for name in shard}
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": dict(sorted(places.items()))}
        write_atomically(folder / INDEX, json.dumps(index, indent=1) + "\n")
        paths.append(folder / INDEX)
    return paths


@contextlib.contextmanager
def write_errors(folder: Path) -> Iterator[None]:
    """Turns failures to write into errors that name the folder and the reason."""
    try:
        yield
    except (OSError, _safetensors().SafetensorError) as error:
        raise CheckpointError(f"cannot write to {folder}: {explain_failure(error)}.") from error


def _shards(sizes: Mapping[str, int], most: int) -> Sequence[Sequence[str]]:
    """Groups tensors into files, in order; starts a new file when one would exceed `most` bytes."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if shards[-1] and filled + size > most:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    return shards


def _safetensors() -> Any:
    try:
        import safetensors
        import safetensors.numpy
    except ModuleNotFoundError:
        raise CheckpointError("this needs safetensors.", hint="run `pip install safetensors`.") from None
    return safetensors
