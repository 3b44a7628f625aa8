"""Decoders to and from safetensors files with the names of a Hugging Face Llama.

There, weights are `[outputs, inputs]`, each layer has tensors of its own, and queries and keys are rotated by halves of
a head, as `models/ops.py` does: so weights are transposed and unstacked, and nothing else changes.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from meshwright.checkpoint.convert.llama_config import decoder_of_config, llama_config
from meshwright.checkpoint.step_files import explain_failure, new_folder, write_atomically
from meshwright.dtypes import as_dtype, is_float
from meshwright.errors import CheckpointError
from meshwright.layout import Layout
from meshwright.layout.leaf import text_table
from meshwright.models import Decoder
from meshwright.placement import shard_leaves
from meshwright.tree import flatten_tree
from meshwright.types import PyTree

CONFIG, SINGLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
Array = np.ndarray[Any, Any]


class TensorName(NamedTuple):
    """Where a leaf is in a Llama's files: `{}` is the layer's number, and `turned` says it is transposed there."""

    name: str
    turned: bool


PLACES: dict[str, TensorName] = {
    "embed/table": TensorName("model.embed_tokens.weight", False),
    "layers/attn_norm": TensorName("model.layers.{}.input_layernorm.weight", False),
    "layers/attn/q": TensorName("model.layers.{}.self_attn.q_proj.weight", True),
    "layers/attn/k": TensorName("model.layers.{}.self_attn.k_proj.weight", True),
    "layers/attn/v": TensorName("model.layers.{}.self_attn.v_proj.weight", True),
    "layers/attn/o": TensorName("model.layers.{}.self_attn.o_proj.weight", True),
    "layers/mlp_norm": TensorName("model.layers.{}.post_attention_layernorm.weight", False),
    "layers/mlp/gate": TensorName("model.layers.{}.mlp.gate_proj.weight", True),
    "layers/mlp/up": TensorName("model.layers.{}.mlp.up_proj.weight", True),
    "layers/mlp/down": TensorName("model.layers.{}.mlp.down_proj.weight", True),
    "final_norm/scale": TensorName("model.norm.weight", False),
    "head/kernel": TensorName("lm_head.weight", True),
}


class Llama(NamedTuple):
    """What `read_llama` found."""

    model: Decoder
    params: PyTree


# --- Names and shapes ---


def to_llama(model: Decoder, params: PyTree) -> Iterator[tuple[str, Array]]:
    """Yields a decoder's parameters as a Llama's tensors, by name, one at a time, whole and on the host."""
    flat = flatten_tree(params, sep="/")
    _require_same("the parameters", {name: np.shape(leaf) for name, leaf in flat.items()}, _shapes(model))
    for name, place in PLACES.items():
        if name not in flat:
            continue
        layers = range(model.num_layers) if "{}" in place.name else (None,)
        for layer in layers:
            whole = np.asarray(flat[name] if layer is None else flat[name][layer])
            yield place.name.format(layer), np.ascontiguousarray(whole.T if place.turned else whole)


def llama_shapes(model: Decoder) -> dict[str, tuple[int, ...]]:
    """Returns the names and shapes of a Llama's tensors of these sizes.

    Example:
        >>> llama_shapes(Decoder.named("tiny"))["model.layers.1.mlp.up_proj.weight"]
        (128, 64)
    """
    found: dict[str, tuple[int, ...]] = {}
    for name, shape in _shapes(model).items():
        place = PLACES[name]
        stacked = "{}" in place.name
        own = shape[1:] if stacked else shape
        for layer in range(model.num_layers) if stacked else (None,):
            found[place.name.format(layer)] = own[::-1] if place.turned else own
    return found


def _shapes(model: Decoder) -> dict[str, tuple[int, ...]]:
    abstract = jax.eval_shape(model.init, jax.eval_shape(lambda: jax.random.key(0)))
    return {name: leaf.shape for name, leaf in flatten_tree(abstract, sep="/").items()}


def _require_same(what: str, found: Mapping[str, tuple[int, ...]], wanted: Mapping[str, tuple[int, ...]]) -> None:
    rows = [("missing", name, "-", str(list(shape))) for name, shape in wanted.items() if name not in found]
    rows += [("extra", name, str(list(shape)), "-") for name, shape in found.items() if name not in wanted]
    rows += [
        ("shape", name, str(list(found[name])), str(list(shape)))
        for name, shape in wanted.items()
        if name in found and tuple(found[name]) != tuple(shape)
    ]
    if rows:
        table = text_table(("problem", "leaf", "there", "in the model"), rows[:30])
        raise CheckpointError(f"{what} and the model differ in {len(rows)} places.\n{table}")


# --- Files ---


def write_llama(
    folder: Path | str,
    model: Decoder,
    params: PyTree,
    *,
    dtype: Any = None,
    max_shard_bytes: int = 5 * 10**9,
    max_positions: int = 4096,
) -> list[Path]:
    """Writes a decoder as a Hugging Face folder: `config.json` and one or several safetensors files with an index.

    Args:
        params: arrays on the host or on any mesh; they are fetched one layer at a time.
        dtype: casts all weights; kept as they are by default.
        max_shard_bytes: how large a file may become.
        max_positions: what `config.json` says is the longest text.

    Returns:
        The files, `config.json` last.
    """
    save_file = _safetensors().numpy.save_file
    folder = Path(folder)
    if max_shard_bytes < 1:
        raise CheckpointError(f"files of {max_shard_bytes} bytes hold nothing.", hint="5000000000, say.")
    _require_empty(folder)
    target = None if dtype is None else as_dtype(dtype)
    if target is not None and not is_float(target):
        raise CheckpointError(f"weights cannot be cast to {target}.", hint="bfloat16, float16 or float32.")
    kept = target or jax.tree.leaves(params)[0].dtype
    config = llama_config(model, dtype=kept, max_positions=max_positions)
    sizes = {name: int(np.prod(shape)) * jnp.dtype(kept).itemsize for name, shape in llama_shapes(model).items()}
    shards = _shards(sizes, max_shard_bytes)
    shard_of = {name: number for number, names in enumerate(shards) for name in names}
    waiting: dict[int, dict[str, Array]] = {}
    paths = [folder / _file_name(number, len(shards)) for number in range(len(shards))]
    with new_folder(folder), _all_or_none(folder):
        for name, tensor in to_llama(model, params):
            number = shard_of[name]
            held = waiting.setdefault(number, {})
            held[name] = tensor if target is None else tensor.astype(target)
            if len(held) == len(shards[number]):
                save_file(waiting.pop(number), paths[number], metadata={"format": "pt"})
        if len(shards) > 1:
            index = {
                "metadata": {"total_size": sum(sizes.values())},
                "weight_map": {name: paths[shard_of[name]].name for name in sorted(sizes)},
            }
            write_atomically(folder / INDEX, (json.dumps(index, indent=1) + "\n").encode())
            paths.append(folder / INDEX)
        write_atomically(folder / CONFIG, (json.dumps(config, indent=1) + "\n").encode())
    return [*paths, folder / CONFIG]


def _require_empty(folder: Path) -> None:
    try:
        full = any(folder.iterdir())
    except FileNotFoundError:
        return
    except OSError as error:
        raise CheckpointError(
            f"{folder} is no folder to write to: {error.strerror}.", hint="name a new folder."
        ) from None
    if full:
        raise CheckpointError(f"{folder} is not empty.", hint="name a new folder.")


@contextlib.contextmanager
def _all_or_none(folder: Path) -> Iterator[None]:
    """Empties a folder, which was empty before, where what is written into it cannot be."""
    try:
        yield
    except BaseException as error:
        with contextlib.suppress(OSError):
            for path in folder.iterdir():
                path.unlink(missing_ok=True)
        if isinstance(error, (OSError, _safetensors().SafetensorError)):
            raise CheckpointError(f"cannot write to {folder}: {explain_failure(error)}.") from error
        raise


def read_llama(folder: Path | str, *, dtype: Any = None, layout: Layout | None = None) -> Llama:
    """Reads a Hugging Face Llama, in one file or several, as a decoder and its parameters.

    Args:
        dtype: casts all weights; kept as they are by default.
        layout: of the parameters; places each of them on its mesh as it is read. On the host by default.
    """
    folder = Path(folder)
    model = decoder_of_config(_read_json(folder / CONFIG))
    wanted = llama_shapes(model)
    with ExitStack() as stack:
        sources: dict[str, Any] = {}
        for path in _weight_files(folder):
            file = stack.enter_context(_opened(path))
            # Old files carry the rotary angles, which follow from the sizes.
            sources |= {name: file for name in file.keys() if not name.endswith("rotary_emb.inv_freq")}  # noqa: SIM118
        if model.tied_embeddings and "lm_head.weight" in sources:
            _require_tied(sources)
            del sources["lm_head.weight"]
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name, file in sources.items()}
        _require_same(f"the files in {folder}", shapes, wanted)
        flat = {}
        for name in _shapes(model):
            leaf = _read_leaf(sources, PLACES[name], model.num_layers, None if dtype is None else as_dtype(dtype))
            flat[name] = leaf if layout is None else shard_leaves([leaf], [_sharding(layout, name)])[0]
    return Llama(model, _unflatten(flat))


def _opened(path: Path) -> Any:
    package = _safetensors()
    try:
        path.open("rb").close()  # which says why not, where safetensors takes each failure for a missing file
        return package.safe_open(path, framework="np")
    except (OSError, package.SafetensorError) as error:
        raise CheckpointError(
            f"cannot read {path}: {error}.", hint="was it copied or downloaded whole? Fetch it again."
        ) from None


def _read_leaf(sources: Mapping[str, Any], place: TensorName, num_layers: int, dtype: Any) -> Array:
    def one(name: str) -> Array:
        tensor: Array = sources[name].get_tensor(name)
        tensor = tensor.T if place.turned else tensor
        return tensor if dtype is None else tensor.astype(dtype)

    if "{}" not in place.name:
        return np.ascontiguousarray(one(place.name))
    return np.stack([one(place.name.format(layer)) for layer in range(num_layers)])


def _require_tied(sources: Mapping[str, Any]) -> None:
    head, table = (sources[name].get_tensor(name) for name in ("lm_head.weight", "model.embed_tokens.weight"))
    if not np.array_equal(head, table):
        raise CheckpointError("config.json ties head and embedding, and lm_head.weight is not the embedding's table.")


def _sharding(layout: Layout, name: str) -> Any:
    return jax.sharding.NamedSharding(layout.mesh, layout[name].spec)


def _unflatten(flat: Mapping[str, Any]) -> dict[str, Any]:
    from meshwright.checkpoint.stored_tree import nest

    return nest(list(flat), list(flat.values()))


def _shards(sizes: Mapping[str, int], most: int) -> list[list[str]]:
    """Returns which tensors go into which file: in order, a new file where one would become too large."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if shards[-1] and filled + size > most:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    return shards


def _file_name(number: int, count: int) -> str:
    return SINGLE if count == 1 else f"model-{number + 1:05d}-of-{count:05d}.safetensors"


def _weight_files(folder: Path) -> list[Path]:
    if (folder / INDEX).exists():
        names = list(dict.fromkeys(_read_json(folder / INDEX)["weight_map"].values()))
        for name in names:
            if Path(name).name != name or not (folder / name).is_file():
                raise CheckpointError(f"{folder / INDEX} names {name!r}, which is no file beside it.")
        return [folder / name for name in names]
    if (folder / SINGLE).exists():
        return [folder / SINGLE]
    raise CheckpointError(f"{folder} has neither {SINGLE} nor {INDEX}.", hint="name a Hugging Face model's folder.")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {path}: {error}.") from None
    return data


def _safetensors() -> Any:
    try:
        import safetensors
        import safetensors.numpy
    except ModuleNotFoundError:
        raise CheckpointError("this needs safetensors.", hint="pip install safetensors") from None
    return safetensors
