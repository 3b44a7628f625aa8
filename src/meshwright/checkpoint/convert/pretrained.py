"""Hugging Face model folders: `read_pretrained` and `write_pretrained`.

Reading places each leaf on its mesh before the next one is read, and reads each byte that this process needs once. So a
process holds the weights of its devices, plus one leaf on its way to an accelerator.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from meshwright.checkpoint.arrays import nest
from meshwright.checkpoint.convert.config_json import CONFIG, ConfigJson, read_model_json
from meshwright.checkpoint.convert.families import family_named, family_of
from meshwright.checkpoint.convert.family import Family
from meshwright.checkpoint.convert.leaf_pieces import is_shared, pieces_of, tensor_forms
from meshwright.checkpoint.convert.tensor_files import TensorFiles
from meshwright.checkpoint.convert.tensor_names import (
    TensorPart,
    abstract_params,
    leaf_shapes,
    require_same,
    tensor_parts,
    tensor_shapes,
)
from meshwright.checkpoint.convert.tensor_regions import Region, zero_array
from meshwright.checkpoint.convert.tensor_writer import write_errors, write_tensors
from meshwright.checkpoint.file_hashes import new_folder
from meshwright.distributed.agreement import is_first, together
from meshwright.dtypes import as_dtype, is_float
from meshwright.errors import CheckpointError
from meshwright.files import write_atomically
from meshwright.layout import Layout, make_layout
from meshwright.layout.leaf import LeafLayout, count_leaves
from meshwright.mesh.build import create_mesh
from meshwright.models import Decoder
from meshwright.remote import ObjectStore
from meshwright.types import PyTree

TOKENIZER_FILES = [
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
]
_CHUNK = 2**24  # bytes
Index = tuple[slice, ...]
Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Pretrained:
    """A model and its parameters, as `read_pretrained` returns them.

    Args:
        config: the fields of `config.json`.
        notes: everything unusual, such as casts.
    """

    model: Decoder
    params: PyTree
    config: Mapping[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


class PretrainedFolder:
    """A model folder whose configuration and headers were checked; no weights are read until `leaf` is called.

    Args:
        ignore: fields of `config.json` that are not supported, but do not change the logits.
        store: holds the weights, if the files in the folder have only their headers.

    Example:
        >>> import tempfile
        >>> model, folder = Decoder.named("tiny"), tempfile.mkdtemp()
        >>> _ = write_pretrained(folder, model, model.init(jax.random.key(0)))
        >>> opened = PretrainedFolder(folder)
        >>> opened.family.model_type, opened.shapes["embed/table"], str(opened.dtypes["embed/table"])
        ('llama', (256, 64), 'float32')
    """

    def __init__(self, folder: Path | str, *, ignore: Collection[str] = (), store: ObjectStore | None = None) -> None:
        self.folder = Path(folder)
        self.config = read_model_json(self.folder / CONFIG)
        self.family: Family = family_named(self.config.get("model_type"))
        where = str(self.folder / CONFIG)
        self.model, self.notes = self.family.decoder(ConfigJson(self.config, where=where), ignore=ignore)
        self.files = TensorFiles(self.folder, store=store)
        if self.model.tied_embeddings:
            self._require_tied(self.family.names["head/kernel"].name, self.family.names["embed/table"].name)
        shapes = {name: tensor.shape for name, tensor in self.files.tensors.items()}
        require_same(f"the files in {self.folder}", shapes, tensor_shapes(self.model, self.family))
        self.shapes = leaf_shapes(self.model)
        self._parts: dict[str, list[tuple[str, TensorPart]]] = {}
        for tensor, parts in tensor_parts(self.model, self.family).items():
            for part in parts:
                self._parts.setdefault(part.leaf, []).append((tensor, part))
        self.dtypes = {
            leaf: jnp.result_type(*{self.files.tensors[tensor].dtype for tensor, _ in parts})
            for leaf, parts in self._parts.items()
        }

    def _require_tied(self, head: str, table: str) -> None:
        """Some tied models also store their head, which must equal the embedding; it is compared in pieces."""
        tensors = self.files.tensors
        if head not in tensors or table not in tensors:
            return
        rows, width = tensors[table].shape
        step = max(1, _CHUNK // (width * tensors[table].dtype.itemsize))
        pieces = [slice(first, min(rows, first + step)) for first in range(0, rows, step)]
        same = tensors[head].shape == tensors[table].shape and all(
            np.array_equal(
                self.files.rows(head, piece.start, piece.stop), self.files.rows(table, piece.start, piece.stop)
            )
            for piece in pieces
        )
        if not same:
            raise CheckpointError(
                f"{CONFIG} ties the embeddings, but {head} differs from the embedding.",
                hint="set tie_word_embeddings to false in config.json if the model was trained without tying.",
            )
        del tensors[head]

    def leaf(self, name: str, index: Index, dtype: Any) -> Array:
        """Reads a slice of a leaf; places beyond the shape in the files are zero, as padding is."""
        return self._read(name, [index], dtype)[0]

    def _read(self, name: str, slices: Sequence[Index], dtype: Any) -> list[Array]:
        """Reads several slices of a leaf at once, so that a row that they share is read once."""
        shape, parts = self.shapes[name], self._parts[name]
        stacked = parts[0][1].layer is not None
        found: list[Array] = []
        wanted: dict[str, list[Region]] = {}
        for index in slices:
            starts = [part.start or 0 for part in index]
            stops = [size if part.stop is None else part.stop for part, size in zip(index, shape, strict=True)]
            sizes = tuple(np.subtract(stops, starts).tolist())
            ends = [max(start, min(stop, size)) for start, stop, size in zip(starts, stops, shape, strict=True)]
            inside = [slice(start, end) for start, end in zip(starts, ends, strict=True)]
            held = tuple(slice(0, part.stop - part.start) for part in inside)
            out = zero_array(sizes, dtype)
            found.append(out)
            if not out[held].size:
                continue
            for place, (tensor, part) in enumerate(parts[inside[0]] if stacked else parts):
                target = out[place][held[1:]] if stacked else out[held]
                wanted.setdefault(tensor, []).append(_region(part, inside[1:] if stacked else inside, target))
        self.files.fill(wanted, found)
        return found

    def place(self, name: str, leaf: LeafLayout, mesh: Any, dtype: Any) -> jax.Array:
        """Reads a leaf onto a mesh; this process reads only the slices of its own devices, each once."""
        sharding = NamedSharding(mesh, leaf.spec)
        slices: dict[Any, list[Any]] = {}
        for device, index in sharding.addressable_devices_indices_map(leaf.stored_shape).items():
            assert index is not None
            key = tuple((part.start or 0, size if part.stop is None else part.stop)
                        for part, size in zip(index, leaf.stored_shape, strict=True))  # fmt: skip
            slices.setdefault(key, []).append(device)
        values = self._read(name, [tuple(slice(*ends) for ends in key) for key in slices], dtype)
        arrays = [
            jax.device_put(value, device)
            for value, devices in zip(values, slices.values(), strict=True)
            for device in devices
        ]
        return jax.make_array_from_single_device_arrays(leaf.stored_shape, sharding, arrays)

    def cast_note(self, names: Collection[str], dtype: Any) -> list[str]:
        """Returns a note about leaves whose dtype changes."""
        if dtype is None:
            return []
        counts: dict[str, int] = {}
        for name in names:
            if self.dtypes[name] != dtype:
                counts[str(self.dtypes[name])] = counts.get(str(self.dtypes[name]), 0) + 1
        return [f"{count_leaves(count)} cast from {old} to {dtype}" for old, count in counts.items()]


def _region(part: TensorPart, index: Sequence[slice], target: Array) -> Region:
    """Returns the region of a tensor for a slice of a leaf; a vector is a column."""
    if len(index) == 1:
        index, target = [*index, slice(0, 1)], target[:, None]
    rows, columns = index[::-1] if part.turned else index
    first = part.first_row + rows.start, part.first_row + rows.stop
    return Region(first, (columns.start, columns.stop), target.T if part.turned else target)


def read_pretrained(
    folder: Path | str,
    *,
    mesh: Mesh | str | None = None,
    layout: Layout | None = None,
    dtype: Any = None,
    ignore: Collection[str] = (),
) -> Pretrained:
    """Reads a Hugging Face model folder as a decoder and its parameters.

    Args:
        mesh: mesh to place the parameters on, by the model's rules; each process reads only the slices that its devices
            hold (default: host memory).
        layout: layout of the parameters, instead of `mesh`.
        dtype: dtype to cast all weights to (default: no cast).
        ignore: fields of `config.json` that are not supported, but do not change the logits.

    Example:
        >>> import tempfile
        >>> model, folder = Decoder.named("tiny"), tempfile.mkdtemp()
        >>> _ = write_pretrained(folder, model, model.init(jax.random.key(0)))
        >>> found = read_pretrained(folder, mesh="fsdp:4,tp:2", dtype="bfloat16")
        >>> found.params["layers"]["attn"]["q"].sharding.spec, found.notes
        (P(None, 'fsdp', 'tp'), ['12 leaves cast from float32 to bfloat16'])
    """
    source = PretrainedFolder(folder, ignore=ignore)
    target = None if dtype is None else _float_dtype(dtype)
    if mesh is not None and layout is None:
        placed = create_mesh(mesh) if isinstance(mesh, str) else mesh
        layout = make_layout(source.model.rules, abstract_params(source.model), placed)
    flat: dict[str, Any] = {}
    for name, shape in source.shapes.items():
        wanted = target or source.dtypes[name]
        if layout is None:
            flat[name] = source.leaf(name, tuple(slice(0, size) for size in shape), wanted)
        else:
            flat[name] = source.place(name, layout[name], layout.mesh, wanted)
    notes = [*source.notes, *source.cast_note(source.shapes, target)]
    return Pretrained(source.model, nest(list(flat), list(flat.values())), source.config, notes)


def write_pretrained(
    folder: Path | str,
    model: Decoder,
    params: PyTree,
    *,
    like: Path | str | Mapping[str, Any] | None = None,
    family: str | None = None,
    dtype: Any = None,
    max_shard_bytes: int = 5 * 10**9,
    max_positions: int | None = None,
) -> list[Path]:
    """Writes a decoder as a Hugging Face folder: `config.json`, and one or more safetensors files with an index.

    Args:
        params: arrays on the host or on any mesh, or leaves that are read in turn. On the CPU, one layer of one leaf is
            copied at a time; an accelerator sends one leaf at a time. If several processes hold parts of them, all
            call this with the same arguments; the first one gathers and writes one layer of one leaf at a time.
        like: model folder whose configuration fields and tokenizer files are copied, or only its `config.json` as a
            dict; it also names the family. Sizes and switches come from `model`.
        family: `model_type` of the family (default: that of `like`, or the first that has all features of the model).
        dtype: dtype to cast all weights to (default: no cast).
        max_shard_bytes: maximum size of a file, in bytes.
        max_positions: longest text in `config.json`, in tokens.

    Returns:
        The files, `config.json` last; none on a process that did not write.

    Example:
        >>> import tempfile
        >>> model = Decoder.named("tiny")
        >>> params = model.init(jax.random.key(0))
        >>> [path.name for path in write_pretrained(tempfile.mkdtemp(), model, params, dtype="bfloat16")]
        ['model.safetensors', 'config.json']
    """
    folder = Path(folder)
    if max_shard_bytes < 1:
        raise CheckpointError(f"max_shard_bytes must be at least 1; got {max_shard_bytes}.", hint="try 5000000000.")
    target = None if dtype is None else _float_dtype(dtype)
    kept = target or jax.tree.leaves(params)[0].dtype
    base = like if isinstance(like, Mapping) else {} if like is None else read_model_json(Path(like) / CONFIG)
    chosen = family_named(family or base["model_type"]) if family or "model_type" in base else family_of(model)
    if base and max_positions is None and not (model.rope_scaling or "").startswith("dynamic"):
        max_positions = base.get("max_position_embeddings")
    config = {**_others(base, chosen), **chosen.config(model, dtype=kept, max_positions=max_positions)}
    forms = tensor_forms(model, params, chosen, target)
    shared = is_shared(params)
    is_writer = is_first() or not shared
    pieces = pieces_of(model, params, chosen, forms, is_writer=is_writer)

    def write() -> list[Path]:
        with write_errors(folder), new_folder(folder, empty=True):
            paths = write_tensors(folder, pieces, forms, max_shard_bytes=max_shard_bytes)
            if isinstance(like, (str, Path)):
                paths += copy_tokenizer(Path(like), folder)
            write_atomically(folder / CONFIG, json.dumps(config, indent=1) + "\n")
        return [*paths, folder / CONFIG]

    def take_part() -> list[Path]:
        try:
            return write() if is_writer else []
        finally:
            for _ in pieces:  # other processes wait in the gathers of the pieces, also after a failure to write
                pass

    return together("writing the model", take_part) if shared else write()


def copy_tokenizer(source: Path, target: Path) -> list[Path]:
    """Copies the tokenizer files of a model folder; returns the copies.

    Example:
        >>> import tempfile
        >>> copy_tokenizer(Path(tempfile.mkdtemp()), Path(tempfile.mkdtemp()))
        []
    """
    copied = []
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)
            copied.append(target / name)
    return copied


def _others(base: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """Returns the fields of a configuration that do not follow from the decoder, such as token ids."""
    if not base:
        return {}
    config = ConfigJson(base)
    with contextlib.suppress(CheckpointError):
        family.decoder(config)
    left_out = {"torch_dtype", "dtype", "transformers_version", "quantization_config", "_name_or_path"}
    return {name: value for name, value in base.items() if name not in config.seen | left_out}


def _float_dtype(dtype: Any) -> Any:
    found = as_dtype(dtype)
    if not is_float(found):
        raise CheckpointError(f"weights cannot be cast to {found}.", hint="use bfloat16, float16 or float32.")
    return found
