"""Adapters in the files of Hugging Face's PEFT: `adapter_config.json` and `adapter_model.safetensors`.

PEFT stores A and B of each layer transposed, `[rank, inputs]` and `[outputs, rank]`, under the name of the module that
they adapt, and the same factor `lora_alpha / r`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshwright.bounded_reader import read_json, require_fields
from meshwright.checkpoint.convert.families.llama import LLAMA
from meshwright.checkpoint.convert.tensor_files import opened, safetensors_package
from meshwright.checkpoint.file_hashes import new_folder
from meshwright.dtypes import is_float
from meshwright.errors import CheckpointError, FileFormatError, did_you_mean
from meshwright.files import write_atomically
from meshwright.parallel.lora.low_rank import LORA_A, LORA_B, is_adapted
from meshwright.train.fine_tuning.lora import merged
from meshwright.train.fine_tuning.lora_settings import LoraSettings
from meshwright.tree import tree_path_to_string
from meshwright.types import PyTree

PLACES = LLAMA.names
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
Array = np.ndarray[Any, Any]

# Settings of PEFT that change the result, with the only value that we compute.
_PLAIN = {
    "peft_type": "LORA", "bias": "none", "use_rslora": False, "use_dora": False, "fan_in_fan_out": False,
    "modules_to_save": None, "rank_pattern": {}, "alpha_pattern": {}, "layers_to_transform": None,
    "layer_replication": None, "lora_bias": False,
}  # fmt: skip


def merged_params(params: PyTree, facts: Mapping[str, Any]) -> PyTree:
    """Returns a checkpoint's parameters with adapters merged into their matrices; others are returned unchanged.

    Merged trees have one float dtype, the widest of their leaves: a frozen base may be narrower than its adapters.
    """
    if not _nodes(params):
        return params
    whole = merged(params, settings_of(facts))
    widest = jnp.result_type(*{leaf.dtype for leaf in jax.tree.leaves(whole) if is_float(leaf.dtype)})
    return jax.tree.map(lambda leaf: leaf.astype(widest) if is_float(leaf.dtype) else leaf, whole)


def settings_of(facts: Mapping[str, Any]) -> LoraSettings:
    """Returns the settings of the adapters that a checkpoint holds."""
    if not isinstance(facts.get("lora"), Mapping):
        raise CheckpointError(
            "the checkpoint does not record the settings of its adapters.",
            hint='save it with the fact "lora": dataclasses.asdict(job.lora), as `meshwright train` does.',
        )
    return LoraSettings(**facts["lora"])


def write_peft(
    folder: Path | str, params: PyTree, settings: LoraSettings, *, base_model: str | None = None
) -> list[Path]:
    """Writes the adapters in a decoder's parameters, without their base, as PEFT reads them.

    Args:
        params: parameters of a job with adapters.
        base_model: name or folder of the base model, for `adapter_config.json`.

    Example:
        >>> import tempfile
        >>> from meshwright.models import Decoder
        >>> from meshwright.train import language_job, lora
        >>> job = lora(language_job(Decoder.named("tiny"), batch_size=2, num_tokens=8), rank=4, targets="attn/(q|v)$")
        >>> paths = write_peft(tempfile.mkdtemp(), job.init(jax.random.key(0)), job.lora)
        >>> [path.name for path in paths], json.loads(paths[1].read_text())["target_modules"]
        (['adapter_model.safetensors', 'adapter_config.json'], ['q_proj', 'v_proj'])
    """
    folder, found = Path(folder), _nodes(params)
    if not found:
        raise CheckpointError("the parameters have no adapters.", hint="train with --lora, or export the whole model.")
    tensors = {
        tensor: np.ascontiguousarray(np.asarray(node[part] if layer is None else node[part][layer]).T)
        for name, node in found.items()
        for layer, part, tensor in _tensors(name, len(np.asarray(node[LORA_A])))
    }
    config = {
        **_PLAIN,
        "base_model_name_or_path": base_model,
        "task_type": "CAUSAL_LM",
        "inference_mode": True,
        "init_lora_weights": True,
        "r": settings.rank,
        "lora_alpha": int(settings.alpha) if settings.alpha == int(settings.alpha) else settings.alpha,
        "lora_dropout": settings.dropout,
        "target_modules": sorted({_module(name) for name in found}),
    }
    with new_folder(folder, empty=True):
        safetensors_package().numpy.save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
        write_atomically(folder / CONFIG, json.dumps(config, indent=1) + "\n")
    return [folder / WEIGHTS, folder / CONFIG]


def peft_settings(folder: Path | str) -> LoraSettings:
    """Returns the settings in a PEFT folder; raises if its adapters compute something else than ours.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> _ = (folder / CONFIG).write_text(
        ...     '{"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}'
        ... )
        >>> peft_settings(folder)
        LoraSettings(rank=4, alpha=8.0, targets='^(layers/attn/q)$', dropout=0.0, base=None, block=64)
    """
    path = Path(folder) / CONFIG
    try:
        config: dict[str, Any] = read_json(path)
        require_fields(config, {"r": int, "lora_alpha": float}, where=str(path))
        require_fields({"lora_dropout": 0.0} | config, {"lora_dropout": (float, type(None))}, where=str(path))
    except (OSError, FileFormatError) as error:
        raise CheckpointError(f"cannot read {path}: {error}", hint="pass a folder that PEFT wrote.") from None
    fits = 0 < config["r"] < 2**20 and 0 < config["lora_alpha"] < 1e12 and 0 <= (config.get("lora_dropout") or 0) < 1
    if not fits:
        raise CheckpointError(
            f"{path} has an r, lora_alpha or lora_dropout out of range.", hint="pass a folder that PEFT wrote."
        )
    for name, plain in _PLAIN.items():
        if (config.get(name) or plain or None) != (plain or None):
            raise CheckpointError(
                f"{path} has {name}={config[name]!r}; only {plain!r} is supported.",
                hint="merge the adapters with PEFT and convert the whole model.",
            )
    modules = config.get("target_modules")
    known = {_module(name): name for name, place in PLACES.items() if place.turned}
    modules = [str(name) for name in modules] if isinstance(modules, list) else modules
    if not isinstance(modules, list) or not modules or not set(modules) <= set(known):
        unknown = next((name for name in modules if name not in known), "?") if isinstance(modules, list) else modules
        hint = did_you_mean(str(unknown), known) or f"use modules among: {', '.join(known)}."
        raise CheckpointError(f"{path} adapts {unknown!r}, which a decoder does not have.", hint=hint)
    targets = "|".join(re.escape(known[name]) for name in sorted(modules))
    return LoraSettings(
        rank=config["r"],
        alpha=float(config["lora_alpha"]),
        targets=f"^({targets})$",
        dropout=float(config.get("lora_dropout") or 0.0),
    )


def read_peft(folder: Path | str, params: PyTree) -> PyTree:
    """Returns the parameters of a job with adapters, with the adapters of a PEFT folder in place of theirs.

    Args:
        params: parameters of `lora(job, peft_settings(folder))`, in arrays or shapes; only adapters are replaced, by
            float32 arrays in host memory. Place the result with `params_layout(layout).shard(...)`.

    Example:
        >>> import tempfile
        >>> from meshwright.models import Decoder
        >>> from meshwright.train import language_job, lora
        >>> job = lora(language_job(Decoder.named("tiny"), batch_size=2, num_tokens=8), rank=4, targets="attn/q$")
        >>> params, folder = job.init(jax.random.key(0)), tempfile.mkdtemp()
        >>> _ = write_peft(folder, params, job.lora)
        >>> bool(
        ...     (
        ...         read_peft(folder, params)["layers"]["attn"]["q"]["lora_a"]
        ...         == params["layers"]["attn"]["q"]["lora_a"]
        ...     ).all()
        ... )
        True
    """
    path = Path(folder) / WEIGHTS
    with opened(path) as file:
        stored = {name: np.asarray(file.get_tensor(name)).astype(np.float32) for name in file.keys()}  # noqa: SIM118
    used: set[str] = set()

    def filled(at: Any, node: Any) -> Any:
        if not is_adapted(node):
            return node
        name, new = str(tree_path_to_string(at, sep="/")), dict(node)
        parts: dict[str, list[Array]] = {LORA_A: [], LORA_B: []}
        for layer, part, tensor in _tensors(name, node[LORA_A].shape[0]):
            if tensor not in stored:
                raise CheckpointError(f"{path} has no tensor {tensor}.", hint="use the job of peft_settings(folder).")
            shape = tuple(node[part].shape if layer is None else node[part].shape[1:])
            if stored[tensor].shape != shape[::-1]:
                raise CheckpointError(
                    f"{tensor} in {path} has shape {stored[tensor].shape}; the model needs {shape[::-1]}.",
                    hint="use the rank of peft_settings(folder), and the model that was adapted.",
                )
            used.add(tensor)
            parts[part].append(np.ascontiguousarray(stored[tensor].T))
        for part, arrays in parts.items():
            new[part] = np.stack(arrays) if "{}" in PLACES[name].name else arrays[0]
        return new

    result = jax.tree.map_with_path(filled, params, is_leaf=is_adapted)
    # With an adapter of the head, PEFT also saves the frozen head itself.
    if extra := sorted(name for name in stored if name not in used and ".base_layer." not in name):
        raise CheckpointError(
            f"{path} has {len(extra)} tensors that the job does not have, e.g. {extra[0]}.",
            hint="use the job of peft_settings(folder).",
        )
    return result


def _nodes(params: PyTree) -> dict[str, Mapping[str, Any]]:
    """Returns the adapted weights of a tree by path."""
    found = jax.tree.leaves_with_path(params, is_leaf=is_adapted)
    return {str(tree_path_to_string(path, sep="/")): node for path, node in found if is_adapted(node)}


def _tensors(name: str, num_layers: int) -> Iterator[tuple[int | None, str, str]]:
    """Yields the layer, the part and the PEFT name of each tensor of an adapted weight."""
    module = _place(name).removesuffix(".weight")
    for layer in range(num_layers) if "{}" in module else (None,):
        for part, letter in ((LORA_A, "A"), (LORA_B, "B")):
            yield layer, part, f"base_model.model.{module.format(layer)}.lora_{letter}.weight"


def _module(name: str) -> str:
    return _place(name).removesuffix(".weight").rpartition(".")[2]


def _place(name: str) -> str:
    if name not in PLACES or not PLACES[name].turned:
        raise CheckpointError(
            f"`{name}` is not a linear layer of Llama, so PEFT's format has no adapter for it.",
            hint="export the merged model instead.",
        )
    return PLACES[name].name
