"""Models by name, and the automatic choice of a mesh."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax

from meshwright.errors import ConfigError, LayoutError, MeshError, did_you_mean
from meshwright.layout import format_bytes
from meshwright.layout.report import PadPolicy
from meshwright.loop.logging.memory_use import read_memory
from meshwright.mesh.build import create_abstract_mesh
from meshwright.models import XLSTM, Decoder
from meshwright.models.language import LanguageModel
from meshwright.parallel.heads import heads_fit
from meshwright.specs import round_up
from meshwright.train.state import state_layout

FAMILIES: dict[str, type[LanguageModel]] = {"decoder": Decoder, "xlstm": XLSTM}
DEFAULT_MODEL = "decoder-small"
# Largest fraction of device memory for the state; gradients need another third to half of it, activations the rest.
STATE_SHARE = 0.35

# --- Models ---


def model_names() -> list[str]:
    """Returns the names of all built-in models.

    Example:
        >>> "decoder-7b" in model_names()
        True
    """
    return [f"{family}-{size}" for family, model in FAMILIES.items() for size in model.SIZES]


def make_model(name: str, options: tuple[str, ...] = (), *, vocab_size: int | None = None) -> LanguageModel:
    """Returns a built-in model, with fields overridden by `field=value` options.

    Args:
        vocab_size: vocabulary size of the tokenizer. A smaller model vocabulary grows to the next multiple of 128,
            which any usual mesh divides; a larger one stays.

    Example:
        >>> make_model("decoder-tiny", ("num_layers=3", "dropout=0.1")).num_layers
        3
    """
    if name == "auto":
        name = DEFAULT_MODEL
    family, _, size = name.partition("-")
    if name not in model_names():
        hint = did_you_mean(name, model_names()) or f"use one of: {', '.join(model_names())}."
        raise ConfigError(f"there is no model {name!r}.", hint=hint)
    return change_model(FAMILIES[family].named(size), options, vocab_size=vocab_size, name=name)


def change_model(
    model: LanguageModel, options: tuple[str, ...], *, vocab_size: int | None = None, name: str = "the model"
) -> LanguageModel:
    """Returns a model with fields overridden by `field=value` options; see `make_model`.

    Args:
        name: name of the model in errors.

    Example:
        >>> change_model(Decoder.named("tiny"), ("dropout=0.1",)).dropout
        0.1
    """
    kind = type(model)
    fields = {item.name: item for item in dataclasses.fields(kind)}
    changes: dict[str, Any] = {}
    for option in options:
        field, equals, text = option.partition("=")
        if not equals and field in fields:
            raise ConfigError(f"the model option {option!r} has no value.", hint=f"write {field}=VALUE.")
        if not equals or field not in fields:
            hint = did_you_mean(field, fields) or f"write one of {', '.join(fields)}, then = and its value."
            raise ConfigError(f"{name} has no option {option!r}.", hint=hint)
        changes[field] = _value(option, text, fields[field].type)
    model = dataclasses.replace(model, **changes)
    if vocab_size is not None and model.vocab_size < vocab_size:
        if "vocab_size" in changes:
            raise ConfigError(
                f"the tokenizer has {vocab_size} tokens, but the model's vocab_size is {model.vocab_size}.",
                hint=f"set vocab_size={round_up(vocab_size, 128)}, or leave it out.",
            )
        model = dataclasses.replace(model, vocab_size=round_up(vocab_size, 128))
    return model


def _value(option: str, text: str, kind: Any) -> Any:
    """Parses a value according to the field's type annotation."""
    kinds = str(kind).split(" | ")
    if "bool" in kinds:
        if text.lower() not in ("true", "false"):
            raise ConfigError(f"{option!r} is neither true nor false.", hint="use true or false.")
        return text.lower() == "true"
    if text in ("none", "None", "null") and "None" in kinds:
        return None
    for name, parse in (("int", int), ("float", float)):
        if name in kinds:
            with contextlib.suppress(ValueError):
                return parse(text)
    if "str" in kinds:
        return text
    wanted, example = ("a whole number", "4") if "int" in kinds else ("a number", "0.1")
    raise ConfigError(f"{option!r} is not {wanted}.", hint=f"use {wanted}, e.g. {example}.")


# --- Meshes ---


@dataclass(frozen=True)
class MeshChoice:
    """A mesh string, with the reason for choosing it."""

    mesh: str
    reason: str


def device_memory() -> int | None:
    """Returns the memory of one device in bytes, or None if unknown; simulated devices share the machine's memory."""
    limit = read_memory().limit
    if limit is not None or jax.devices()[0].platform != "cpu":
        return limit
    try:
        # Divide by the devices of all processes, which may share one machine.
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // jax.device_count()
    except (AttributeError, ValueError, OSError):  # not available on this system
        return None


def choose_mesh(
    job: Any,
    optimizer: Any,
    *,
    num_devices: int,
    batch_size: int,
    memory: int | None,
    precision: Any = "float32",
    ema: float | None = None,
    pad: PadPolicy = False,
    heads: int | None = None,
    kv_heads: int | None = None,
    minibatches: int = 1,
) -> MeshChoice:
    """Returns the mesh with the least communication on which the state fits and the batch divides evenly.

    It tries data parallelism first, FSDP if a device cannot hold the whole state, and adds tensor parallelism if there
    are more devices than rows.

    Args:
        memory: bytes of memory per device; None if unknown, which rules out pure data parallelism.
        ema, pad: as for `state_layout`.
        heads: number of attention heads, which must be divisible by the tensor axis.
        kv_heads: number of key/value heads, if fewer; the tensor axis must divide it or be a multiple of it.
        minibatches: number of minibatches; each must have rows for all devices.

    Example:
        >>> import optax
        >>> from meshwright.models import Decoder
        >>> from meshwright.train import language_job
        >>> job = language_job(Decoder.named("tiny"), batch_size=16, num_tokens=16)
        >>> choose_mesh(job, optax.adam(1e-3), num_devices=8, batch_size=16, memory=2**30).mesh
        'dp:8'
        >>> choose_mesh(job, optax.adam(1e-3), num_devices=8, batch_size=16, memory=2**20).mesh
        'fsdp:8'
    """
    if num_devices == 1:
        return MeshChoice("dp:1", "only one device is available.")
    tried = []
    rows = batch_size // minibatches if batch_size % minibatches == 0 else 0
    for mesh, how in _candidates(num_devices, rows, heads or 0, kv_heads or 0):
        try:
            layout = state_layout(job, optimizer, create_abstract_mesh(mesh), precision=precision, ema=ema, pad=pad)
        except LayoutError:
            tried.append(f"{mesh} does not fit the model's rules")
            continue
        need = layout.bytes_per_device
        if mesh.startswith("dp:") and "," not in mesh and memory is None:
            tried.append(f"{mesh} needs {format_bytes(need)} per device, and the device memory is unknown")
            continue
        if memory is not None and need > STATE_SHARE * memory:
            tried.append(f"{mesh} needs {format_bytes(need)} of {format_bytes(memory)} per device for the state alone")
            continue
        room = "" if memory is None else f" of {format_bytes(memory)}"
        before = f" ({'; '.join(tried)})" if tried else ""
        return MeshChoice(mesh, f"{how}; the state takes {format_bytes(need)}{room} per device{before}.")
    raise MeshError(
        f"found no mesh of {num_devices} devices for a batch of {batch_size} rows"
        f"{f' in {minibatches} minibatches' if minibatches > 1 else ''}{': ' if tried else ''}{'; '.join(tried)}.",
        hint="set --mesh, use more devices, or use more rows per batch.",
    )


def _candidates(num_devices: int, rows: int, heads: int, kv_heads: int) -> Iterator[tuple[str, str]]:
    """Yields meshes with a description, from the least communication (gradients) to the most (activations)."""
    if not rows:
        return
    if rows % num_devices == 0:
        yield f"dp:{num_devices}", "data parallel, which communicates only gradients"
        yield f"fsdp:{num_devices}", "data parallel with a sharded state"
    for tensor in range(2, num_devices + 1):
        ways = num_devices // tensor
        fit = heads_fit(heads, tensor) and heads_fit(kv_heads or heads, tensor, shared=True)
        if num_devices % tensor or rows % ways or not fit:
            continue
        if ways > 1:
            yield f"dp:{ways},tp:{tensor}", f"{rows} rows over {ways} devices, features over {tensor}"
            yield f"fsdp:{ways},tp:{tensor}", f"{rows} rows and the state over {ways} devices, features over {tensor}"
        else:
            yield f"tp:{tensor}", f"features over all devices, because {rows} rows cannot be split over them"
