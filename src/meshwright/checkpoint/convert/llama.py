"""Conversion between `Decoder` and Hugging Face Llama: sizes in `config.json`, weights in safetensors files.

Llama stores weights as `[outputs, inputs]`, one tensor per layer, and rotates queries and keys by halves of a head like
`models/ops.py`. So conversion only transposes and unstacks.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from meshwright.checkpoint.arrays import nest
from meshwright.checkpoint.file_hashes import new_folder
from meshwright.dtypes import as_dtype, is_float
from meshwright.errors import CheckpointError
from meshwright.files import explain_failure, write_atomically
from meshwright.layout import Layout
from meshwright.layout.leaf import text_table
from meshwright.models import Decoder
from meshwright.placement import shard_leaves
from meshwright.tree import flatten_tree
from meshwright.types import PyTree

CONFIG, SINGLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
Array = np.ndarray[Any, Any]


class TensorName(NamedTuple):
    """The name of a leaf in Llama's files: `{}` is the layer number, and `turned` means stored transposed."""

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
    """A model and its parameters, as `read_llama` returns them."""

    model: Decoder
    params: PyTree


# --- Names and shapes ---


def to_llama(model: Decoder, params: PyTree) -> Iterator[tuple[str, Array]]:
    """Yields a decoder's parameters as named Llama tensors, one at a time, in host memory.

    Example:
        >>> model = Decoder.named("tiny")
        >>> shapes = {name: tensor.shape for name, tensor in to_llama(model, model.init(jax.random.key(0)))}
        >>> shapes == llama_shapes(model)
        True
    """
    flat = flatten_tree(params, sep="/")
    _require_same("the parameters", {name: np.shape(leaf) for name, leaf in flat.items()}, _shapes(model))
    for name in (name for name in PLACES if name in flat):
        for layer, tensor in _tensors(model, name):
            whole = np.asarray(flat[name] if layer is None else flat[name][layer])
            yield tensor, np.ascontiguousarray(whole.T if PLACES[name].turned else whole)


def llama_shapes(model: Decoder) -> dict[str, tuple[int, ...]]:
    """Returns the names and shapes of the Llama tensors for a decoder.

    Example:
        >>> llama_shapes(Decoder.named("tiny"))["model.layers.1.mlp.up_proj.weight"]
        (128, 64)
    """
    found: dict[str, tuple[int, ...]] = {}
    for name, shape in _shapes(model).items():
        for layer, tensor in _tensors(model, name):
            own = shape if layer is None else shape[1:]
            found[tensor] = own[::-1] if PLACES[name].turned else own
    return found


def _tensors(model: Decoder, name: str) -> list[tuple[int | None, str]]:
    """Returns the tensors of a leaf with their layer numbers; a leaf outside the layers is one tensor."""
    layers = range(model.num_layers) if "{}" in PLACES[name].name else [None]
    return [(layer, PLACES[name].name.format(layer)) for layer in layers]


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
        table = text_table(("problem", "leaf", "found", "model"), rows[:30])
        raise CheckpointError(f"{what} do not match the model: {len(rows)} differences.\n{table}")


# --- Configurations ---


def llama_config(model: Decoder, *, dtype: Any = "float32", max_positions: int = 4096) -> dict[str, Any]:
    """Returns the `config.json` of a decoder; raises if it uses a feature that Llama does not have.

    Args:
        dtype: dtype of the weights.
        max_positions: longest text, in tokens; required by the format, although `Decoder` has no such limit.

    Example:
        >>> config = llama_config(Decoder.named("tiny", num_kv_heads=2))
        >>> config["hidden_size"], config["num_key_value_heads"], config["head_dim"]
        (64, 2, 8)
        >>> decoder_of_config(config) == Decoder.named("tiny", num_kv_heads=2, head_dim=8)
        True
    """
    for field in ("qk_norm", "logit_soft_cap", "attention_soft_cap"):
        if getattr(model, field):
            raise CheckpointError(
                f"Llama has no equivalent of {field}={getattr(model, field)}, so its logits would differ.",
                hint="export a decoder without qk_norm and soft caps.",
            )
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": model.vocab_size,
        "hidden_size": model.d_model,
        "intermediate_size": model.d_ff,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads or model.num_heads,
        "head_dim": model.head_dim or model.d_model // model.num_heads,
        "hidden_act": "silu",
        "rms_norm_eps": model.norm_eps,
        "rope_theta": model.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": model.rope_theta},
        "max_position_embeddings": max_positions,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "tie_word_embeddings": model.tied_embeddings,
        "torch_dtype": str(jnp.dtype(dtype)),
        "use_cache": True,
    }


def decoder_of_config(config: Mapping[str, Any]) -> Decoder:
    """Returns the decoder that a Llama `config.json` describes; raises if it would compute something else.

    Example:
        >>> decoder_of_config(llama_config(Decoder.named("tiny")) | {"hidden_size": 32}).d_model
        32
    """
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    wanted = {
        "model_type": (config.get("model_type"), "llama"),
        "hidden_act": (config.get("hidden_act", "silu"), "silu"),
        "attention_bias": (bool(config.get("attention_bias", False)), False),
        "mlp_bias": (bool(config.get("mlp_bias", False)), False),
        "rope_type": (rope.get("rope_type", rope.get("type", "default")), "default"),
    }
    for name, (found, known) in wanted.items():
        if found != known:
            raise CheckpointError(
                f"config.json has {name} {found!r}; only {known!r} is supported.",
                hint="convert a Llama model without biases and scaled rotary positions.",
            )
    try:
        heads = int(config["num_attention_heads"])
        return Decoder(
            vocab_size=int(config["vocab_size"]),
            num_layers=int(config["num_hidden_layers"]),
            d_model=int(config["hidden_size"]),
            num_heads=heads,
            d_ff=int(config["intermediate_size"]),
            num_kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or int(config["hidden_size"]) // heads),
            rope_theta=float(rope.get("rope_theta") or config.get("rope_theta", 10_000.0)),
            norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        )
    except KeyError as error:
        raise CheckpointError(f"config.json has no {error}.") from None


def decoder_of_text(text: str) -> Decoder:
    """Returns the decoder with this `repr`, from a checkpoint's fact `model`; the text is not executed.

    Example:
        >>> decoder_of_text(repr(Decoder.named("tiny"))) == Decoder.named("tiny")
        True
    """
    fields = {field.name for field in dataclasses.fields(Decoder)}
    try:
        call = ast.parse(text, mode="eval").body
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.func.id != "Decoder":
            raise ValueError("not a Decoder")
        values = {str(item.arg): ast.literal_eval(item.value) for item in call.keywords}
        if call.args or not set(values) <= fields:
            raise ValueError("unknown fields")
        return Decoder(**values)
    except (SyntaxError, ValueError, TypeError) as error:
        raise CheckpointError(f"{text[:80]!r} is not a Decoder: {error}.", hint="convert Decoders only.") from None


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
    """Writes a decoder as a Hugging Face folder: `config.json`, and one or more safetensors files with an index.

    Args:
        params: arrays on the host or on any mesh; they are fetched one layer at a time.
        dtype: dtype to cast all weights to (default: no cast).
        max_shard_bytes: maximum size of a file, in bytes.
        max_positions: longest text in `config.json`, in tokens.

    Returns:
        The files, `config.json` last.

    Example:
        >>> import tempfile
        >>> model = Decoder.named("tiny")
        >>> params = model.init(jax.random.key(0))
        >>> [path.name for path in write_llama(tempfile.mkdtemp(), model, params, dtype="bfloat16")]
        ['model.safetensors', 'config.json']
    """
    save_file = _safetensors().numpy.save_file
    folder = Path(folder)
    if max_shard_bytes < 1:
        raise CheckpointError(f"max_shard_bytes must be at least 1; got {max_shard_bytes}.", hint="try 5000000000.")
    target = None if dtype is None else as_dtype(dtype)
    if target is not None and not is_float(target):
        raise CheckpointError(f"weights cannot be cast to {target}.", hint="use bfloat16, float16 or float32.")
    kept = target or jax.tree.leaves(params)[0].dtype
    config = llama_config(model, dtype=kept, max_positions=max_positions)
    sizes = {name: int(np.prod(shape)) * jnp.dtype(kept).itemsize for name, shape in llama_shapes(model).items()}
    shards = _shards(sizes, max_shard_bytes)
    shard_of = {name: number for number, names in enumerate(shards) for name in names}
    waiting: dict[int, dict[str, Array]] = {}
    count = len(shards)
    names = [SINGLE] if count == 1 else [f"model-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)]
    paths = [folder / name for name in names]
    with _write_errors(folder), new_folder(folder, empty=True):
        for name, tensor in to_llama(model, params):
            number = shard_of[name]
            held = waiting.setdefault(number, {})
            held[name] = tensor if target is None else tensor.astype(target)
            if len(held) == len(shards[number]):
                save_file(waiting.pop(number), paths[number], metadata={"format": "pt"})
        if count > 1:
            index = {
                "metadata": {"total_size": sum(sizes.values())},
                "weight_map": {name: paths[shard_of[name]].name for name in sorted(sizes)},
            }
            write_atomically(folder / INDEX, json.dumps(index, indent=1) + "\n")
            paths.append(folder / INDEX)
        write_atomically(folder / CONFIG, json.dumps(config, indent=1) + "\n")
    return [*paths, folder / CONFIG]


@contextlib.contextmanager
def _write_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, _safetensors().SafetensorError) as error:
        raise CheckpointError(f"cannot write to {folder}: {explain_failure(error)}.") from error


def read_llama(folder: Path | str, *, dtype: Any = None, layout: Layout | None = None) -> Llama:
    """Reads a Hugging Face Llama, in one or more files, as a decoder and its parameters.

    Args:
        dtype: dtype to cast all weights to (default: no cast).
        layout: layout of the parameters, to place each on its mesh as it is read (default: host memory).

    Example:
        >>> import tempfile
        >>> model, folder = Decoder.named("tiny"), tempfile.mkdtemp()
        >>> _ = write_llama(folder, model, model.init(jax.random.key(0)))
        >>> read_llama(folder, dtype="bfloat16").params["layers"]["attn"]["q"].shape
        (2, 64, 64)
    """
    folder = Path(folder)
    model = decoder_of_config(_read_json(folder / CONFIG))
    wanted = llama_shapes(model)
    with ExitStack() as stack:
        sources: dict[str, Any] = {}
        for path in _weight_files(folder):
            file = stack.enter_context(_opened(path))
            # Old files store the rotary frequencies, which follow from the sizes.
            sources |= {name: file for name in file.keys() if not name.endswith("rotary_emb.inv_freq")}  # noqa: SIM118
        if model.tied_embeddings and "lm_head.weight" in sources:
            head, table = (sources[name].get_tensor(name) for name in ("lm_head.weight", "model.embed_tokens.weight"))
            if not np.array_equal(head, table):
                raise CheckpointError("config.json ties the embeddings, but lm_head.weight differs from the embedding.")
            del sources["lm_head.weight"]
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name, file in sources.items()}
        _require_same(f"the files in {folder}", shapes, wanted)
        flat = {}
        for name in _shapes(model):
            leaf: Any = _read_leaf(sources, model, name, None if dtype is None else as_dtype(dtype))
            if layout is not None:
                (leaf,) = shard_leaves([leaf], [NamedSharding(layout.mesh, layout[name].spec)])
            flat[name] = leaf
    return Llama(model, nest(list(flat), list(flat.values())))


def _opened(path: Path) -> Any:
    package = _safetensors()
    try:
        path.open("rb").close()  # names the reason; safetensors reports every failure as a missing file
        return package.safe_open(path, framework="np")
    except (OSError, package.SafetensorError) as error:
        raise CheckpointError(f"cannot read {path}: {error}.", hint="fetch it again; it may be incomplete.") from None


def _read_leaf(sources: Mapping[str, Any], model: Decoder, name: str, dtype: Any) -> Array:
    parts: list[Array] = []
    for _, tensor in _tensors(model, name):
        value = sources[tensor].get_tensor(tensor)
        value = value.T if PLACES[name].turned else value
        parts.append(value if dtype is None else value.astype(dtype))
    return np.stack(parts) if "{}" in PLACES[name].name else np.ascontiguousarray(parts[0])


def _shards(sizes: Mapping[str, int], most: int) -> list[list[str]]:
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


def _weight_files(folder: Path) -> list[Path]:
    if (folder / INDEX).exists():
        names = list(dict.fromkeys(_read_json(folder / INDEX)["weight_map"].values()))
        for name in names:
            if Path(name).name != name or not (folder / name).is_file():
                raise CheckpointError(f"{folder / INDEX} names {name!r}, which is not a file in its folder.")
        return [folder / name for name in names]
    if (folder / SINGLE).exists():
        return [folder / SINGLE]
    raise CheckpointError(f"{folder} has neither {SINGLE} nor {INDEX}.", hint="pass a Hugging Face model folder.")


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
        raise CheckpointError("this needs safetensors.", hint="run `pip install safetensors`.") from None
    return safetensors
