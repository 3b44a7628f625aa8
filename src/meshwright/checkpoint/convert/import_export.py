"""Import and export of checkpoints, as `meshwright checkpoint convert` does."""

from __future__ import annotations

import dataclasses
import math
import sys
import warnings
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from meshwright.checkpoint.arrays import read_anything
from meshwright.checkpoint.convert.config_json import CONFIG, read_model_json
from meshwright.checkpoint.convert.families import decoder_of_config, family_named
from meshwright.checkpoint.convert.family import canonical
from meshwright.checkpoint.convert.fingerprint import available_memory, model_logits, probe_tokens, write_fingerprint
from meshwright.checkpoint.convert.peft_adapters import settings_of, write_peft
from meshwright.checkpoint.convert.pretrained import PretrainedFolder, read_pretrained, write_pretrained
from meshwright.checkpoint.convert.stored_params import load_all, merged_lazily, one_device_layout, stored_params
from meshwright.checkpoint.file_hashes import new_folder
from meshwright.checkpoint.manifest import Manifest, model_fact, model_text, parse_model, read_manifest
from meshwright.checkpoint.retention import Keep
from meshwright.checkpoint.store import Checkpoints
from meshwright.errors import CheckpointError, MeshwrightWarning
from meshwright.layout.leaf import format_bytes
from meshwright.models import Decoder
from meshwright.parallel.lora.low_rank import LORA_A, LORA_B
from meshwright.tree import named_leaves
from meshwright.types import PyTree

COPY = "init"
"""The folder of a run with the small files of the model that it started from, beside its checkpoints."""


def export_pretrained(
    folder: Path | str,
    target: Path | str,
    *,
    step: int | None = None,
    model: Decoder | None = None,
    like: Path | str | None = None,
    fingerprint: bool = False,
    tell: Callable[[str], None] | None = None,
    **options: Any,
) -> list[Path]:
    """Writes the parameters of a checkpoint, after verifying it, as a Hugging Face folder; adapters are merged.

    Args:
        folder: the folder of the steps.
        step: the step to export (default: the last good one).
        model: the decoder (default: the checkpoint's fact `model`).
        like: model folder whose configuration and tokenizer are copied (default: the folder that the checkpoint was
            made from, or the run's own copy of its small files if that folder is gone).
        fingerprint: also write some logits, for `meshwright checkpoint check`.
        tell: called with a line of text about everything unusual, such as damaged later steps (default: a warning).
        options: options of `write_pretrained`.

    Example:
        >>> import tempfile
        >>> model, folder = Decoder.named("tiny"), Path(tempfile.mkdtemp())
        >>> save_params(folder, model.init(jax.random.key(0)), step=5, facts={"model": model_fact(model)})
        >>> [path.name for path in export_pretrained(folder, folder / "hf")]
        ['model.safetensors', 'config.json']
    """
    tell = tell or (lambda note: warnings.warn(note, MeshwrightWarning, stacklevel=3))
    params, manifest = _open_params(folder, step, tell)
    params = merged_lazily(params, manifest.facts)
    if model is None:
        text = model_text(manifest.facts.get("model"))
        if text is None:
            hint = "pass it, e.g. --model decoder-1b."
            raise CheckpointError(f"step {manifest.step} does not name its model.", hint=hint)
        model = decoder_of_text(text)
    base = _origin(Path(folder), manifest, model, tell) if like is None else _model_folder(Path(like))
    paths = write_pretrained(target, model, params, like=base, **options)
    if fingerprint:
        paths += _write_fingerprint(Path(target), f"an export of step {manifest.step}", tell)
    return paths


def _write_fingerprint(folder: Path, source: str, tell: Callable[[str], None]) -> list[Path]:
    """Writes some logits of a folder; they need the whole model in float32, so a model that does not fit has none."""
    needed = 4 * sum(math.prod(shape) for shape in PretrainedFolder(folder).shapes.values())
    memory = available_memory()
    if memory is not None and 1.5 * needed > memory:
        tell(
            f"no fingerprint: the model takes {format_bytes(needed)} in float32, and {format_bytes(memory)} are free; "
            "run `meshwright checkpoint check` where there is more memory"
        )
        return []
    found = read_pretrained(folder, dtype="float32")
    tokens = probe_tokens(found.model.vocab_size)
    return [write_fingerprint(folder, tokens, model_logits(found.model, found.params, tokens), source=source)]


def export_adapters(
    folder: Path | str,
    target: Path | str,
    *,
    step: int | None = None,
    base_model: str | None = None,
    tell: Callable[[str], None] | None = None,
) -> list[Path]:
    """Writes only the adapters of a checkpoint, after verifying it, in the format of PEFT.

    Args:
        folder, step, tell: see `export_pretrained`.
        base_model: name or folder of the base model, for PEFT.

    Example:
        >>> import dataclasses, tempfile
        >>> from meshwright.train import language_job, lora
        >>> job = lora(language_job(Decoder.named("tiny"), batch_size=2, num_tokens=8), rank=4)
        >>> folder, facts = Path(tempfile.mkdtemp()), {"lora": dataclasses.asdict(job.lora)}
        >>> save_params(folder, job.init(jax.random.key(0)), step=5, facts=facts)
        >>> [path.name for path in export_adapters(folder, folder / "adapters")]
        ['adapter_model.safetensors', 'adapter_config.json']
    """
    tell = tell or (lambda note: warnings.warn(note, MeshwrightWarning, stacklevel=3))
    params, manifest = _open_params(folder, step, tell)
    origin, trained = manifest.facts.get("pretrained"), manifest.facts.get("config", {}).get("train")
    kind = origin["config"].get("model_type") if isinstance(origin, Mapping) else None
    if kind is not None and family_named(kind).is_fused:
        raise CheckpointError(
            f"{kind} stores several matrices in one tensor, which PEFT would adapt as one.",
            hint="export the merged model instead.",
        )
    if trained:
        raise CheckpointError(
            f"the run also trained {', '.join(trained)}, and these files hold adapters only.",
            hint="export the merged model instead.",
        )
    adapters = load_all(params, lambda name: name in (LORA_A, LORA_B))
    return write_peft(target, adapters, settings_of(manifest.facts), base_model=base_model)


def _open_params(folder: Path | str, step: int | None, tell: Callable[[str], None]) -> tuple[PyTree, Manifest]:
    """Returns the parameters of a verified step, by default the last good one, as leaves to load in turn."""
    checkpoints = Checkpoints(folder)
    if step is None:
        step, notes = checkpoints.last_good_or_raise()
        for note in [*notes, f"exporting step {step}, the last good one"] if notes else []:
            tell(note)
    else:
        checkpoints.require_good(step)
    place = checkpoints.folder / str(step)
    manifest = read_manifest(place)
    if any(leaf.name.startswith("ema/") for leaf in manifest.tree):
        tell("exporting the last parameters, not their moving average, which `eval` and `generate` use by default")
    return stored_params(place, manifest), manifest


def _model_folder(folder: Path) -> Path:
    if not (folder / CONFIG).is_file():
        raise CheckpointError(
            f"--like {folder} has no {CONFIG}, so it is not a model folder.",
            hint="pass the folder of the original model, or leave out --like to use the one that the checkpoint names.",
        )
    return folder


def _origin(steps: Path, manifest: Manifest, model: Decoder, tell: Callable[[str], None]) -> Any:
    """Returns the folder that a checkpoint was made from, the run's copy of it, only its configuration, or None."""
    origin = manifest.facts.get("pretrained")
    if not isinstance(origin, Mapping):
        return None
    folder, config = Path(str(origin.get("folder"))), origin.get("config", {})
    try:
        known = canonical(decoder_of_config(config, ignore=tuple(config)))
    except CheckpointError:
        return None
    if dataclasses.replace(known, vocab_size=model.vocab_size) != canonical(model):
        return None
    copy = steps.absolute().parent / COPY
    for place in (folder, copy):
        # Another model may lie there by now.
        if (place / CONFIG).is_file() and read_model_json(place / CONFIG) == config:
            return place
    tell(f"{folder} is gone or holds another model, so no tokenizer files are copied; name its folder with --like")
    return config


def import_pretrained(
    source: Path | str,
    folder: Path | str,
    *,
    step: int = 0,
    dtype: Any = None,
    ignore: Collection[str] = (),
    tell: Callable[[str], None] | None = None,
) -> Decoder:
    """Makes a checkpoint from the parameters of a Hugging Face folder, for `restore(layout, part="params")`.

    Args:
        dtype: dtype to cast all weights to (default: no cast).
        ignore: fields of `config.json` that are not supported, but do not change the logits.
        tell: called with a line of text about everything unusual, such as casts.

    Example:
        >>> import tempfile
        >>> model, folder = Decoder.named("tiny"), Path(tempfile.mkdtemp())
        >>> _ = write_pretrained(folder / "hf", model, model.init(jax.random.key(0)))
        >>> made = import_pretrained(folder / "hf", folder / "checkpoints")
        >>> made.num_layers, Checkpoints(folder / "checkpoints").steps()
        (2, [0])
    """
    found = read_pretrained(source, dtype=dtype, ignore=ignore)
    for note in found.notes if tell is not None else ():
        tell(note)  # type: ignore[misc]
    facts = {"model": model_fact(found.model), "pretrained": pretrained_fact(source, found.config)}
    save_params(folder, found.params, step=step, facts=facts)
    return found.model


def pretrained_fact(folder: Path | str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fact about the origin of a checkpoint, which an export looks up.

    Example:
        >>> pretrained_fact("/models/a", {"model_type": "llama"})
        {'folder': '/models/a', 'config': {'model_type': 'llama'}}
    """
    return {"folder": str(Path(folder).absolute()), "config": dict(config)}


def decoder_of_text(text: str) -> Decoder:
    """Returns the decoder with this `repr`, from a checkpoint's fact `model`; the text is not executed.

    Example:
        >>> decoder_of_text(repr(Decoder.named("tiny"))) == Decoder.named("tiny")
        True
    """
    try:
        fact = parse_model(text)
        if fact["class"] != Decoder.__name__:
            raise ValueError("not a Decoder")
        if not set(fact["fields"]) <= {field.name for field in dataclasses.fields(Decoder)}:
            raise ValueError("unknown fields")
        return Decoder(**fact["fields"])
    except (SyntaxError, ValueError, TypeError) as error:
        raise CheckpointError(f"{text[:80]!r} is not a Decoder: {error}.", hint="convert Decoders only.") from None


def import_linen(source: Path | str, folder: Path | str, *, forms: Mapping[str, Any], step: int = 0) -> PyTree:
    """Makes a checkpoint from a tree that Orbax wrote, with its tensor-parallel linen layers as global arrays.

    Args:
        forms: a `meshwright.linen.DenseForm` for each path that holds such a layer.

    Example:
        >>> import tempfile
        >>> from orbax.checkpoint import v1 as ocp
        >>> from meshwright.linen import DenseForm
        >>> folder = Path(tempfile.mkdtemp())
        >>> ocp.save(folder / "old", {"up": {"module": {"sharded": {"kernel": jax.numpy.ones((4, 8, 2))}}}})
        >>> params = import_linen(
        ...     folder / "old", folder / "new", forms={"up": DenseForm(tp_mode="gather", axis_size=4)}
        ... )
        >>> params["up"]["kernel"].shape
        (8, 8)
    """
    from meshwright.linen.global_params import to_global

    tree = _unboxed(read_anything(Path(source)))
    params = to_global(tree.get("params", tree), forms)
    save_params(folder, params, step=step, facts={"source": str(source)})
    return params


def save_params(folder: Path | str, params: PyTree, *, step: int, facts: Mapping[str, Any]) -> None:
    """Saves only parameters as a finished step, from one device; other steps in the folder are kept.

    Example:
        >>> import tempfile
        >>> folder = tempfile.mkdtemp()
        >>> save_params(folder, {"w": np.ones(4, "float32")}, step=3, facts={})
        >>> Checkpoints(folder).steps()
        [3]
    """
    checkpoints = Checkpoints(folder, keep=Keep(last=sys.maxsize), asynchronous=False)
    if step in checkpoints.steps():
        raise CheckpointError(f"{folder} already has a step {step}.", hint="pass another folder or --step.")
    tree = {"params": params}
    leaves = [(leaf.name, np.shape(leaf.value), leaf.value.dtype) for leaf in named_leaves(tree)]
    layout = one_device_layout(leaves, jax.tree.structure(tree))
    with new_folder(Path(folder)):
        checkpoints.save(layout.shard(tree), step=step, layout=layout, facts=facts)
        if step in checkpoints.failures:
            raise CheckpointError(f"could not write step {step} to {folder}: {checkpoints.failures[step]}.")
    if checkpoints.problems:
        raise CheckpointError(checkpoints.problems[-1])


def _unboxed(tree: Any) -> Any:
    """Returns a tree without the extra level that Orbax writes for each Flax box."""
    if not isinstance(tree, Mapping):
        return tree
    if set(tree) == {"value"} and not isinstance(tree["value"], Mapping):
        return tree["value"]
    return {name: _unboxed(node) for name, node in tree.items()}
