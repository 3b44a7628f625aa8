"""The model, the optimizer and the mesh of a run, from their names and options; a mesh can also be chosen."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import optax

from meshwright.errors import ConfigError, LayoutError, MeshError, did_you_mean
from meshwright.layout import format_bytes
from meshwright.loop.config import OptimizerOptions
from meshwright.loop.logging.memory_use import read_memory
from meshwright.mesh.build import create_abstract_mesh
from meshwright.models import XLSTM, Decoder
from meshwright.models.language import LanguageModel
from meshwright.parallel.heads import heads_fit
from meshwright.specs import round_up
from meshwright.train.state import state_layout
from meshwright.tree import named_tree_map
from meshwright.types import PyTree

FAMILIES: dict[str, type[LanguageModel]] = {"decoder": Decoder, "xlstm": XLSTM}
# What a state may take of a device's memory: gradients take a third to a half as much again, and activations the rest.
STATE_SHARE = 0.35

# --- Models ---


def model_names() -> list[str]:
    """Returns the names of all models.

    Example:
        >>> "decoder-7b" in model_names()
        True
    """
    return [f"{family}-{size}" for family, model in FAMILIES.items() for size in model.SIZES]


def make_model(name: str, options: tuple[str, ...] = (), *, vocab_size: int | None = None) -> LanguageModel:
    """Returns a model by its name, with some of its fields changed by `field=value`.

    Args:
        vocab_size: how many tokens the tokenizer knows. A model's own number stays where it is at least as large;
            where it is smaller, the next multiple of 128 is taken, which any usual mesh divides.

    Example:
        >>> make_model("decoder-tiny", ("num_layers=3", "dropout=0.1")).num_layers
        3
    """
    family, _, size = name.partition("-")
    if name not in model_names():
        hint = did_you_mean(name, model_names()) or f"use one of: {', '.join(model_names())}."
        raise ConfigError(f"there is no model {name!r}.", hint=hint)
    kind = FAMILIES[family]
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
    model = kind.named(size, **changes)
    if vocab_size is not None and model.vocab_size < vocab_size:
        if "vocab_size" in changes:
            raise ConfigError(
                f"the tokenizer knows {vocab_size} tokens; the model has room for {model.vocab_size}.",
                hint=f"vocab_size={round_up(vocab_size, 128)}, or leave it out.",
            )
        model = dataclasses.replace(model, vocab_size=round_up(vocab_size, 128))
    return model


def _value(option: str, text: str, kind: Any) -> Any:
    """Returns text as a value of the kind that the field has, which its annotation says."""
    kinds = str(kind).split(" | ")
    if "bool" in kinds:
        if text not in ("true", "false"):
            raise ConfigError(f"{option!r} is neither true nor false.", hint="write true or false.")
        return text == "true"
    if text in ("none", "None", "null") and "None" in kinds:
        return None
    for name, parse in (("int", int), ("float", float)):
        if name in kinds:
            with contextlib.suppress(ValueError):
                return parse(text)
    if "str" in kinds:
        return text
    hint = "a whole number, such as 4." if "int" in kinds else "a number, such as 0.1."
    raise ConfigError(f"{option!r} does not give {'a whole number' if 'int' in kinds else 'a number'}.", hint=hint)


# --- Optimizers ---


def make_schedule(options: OptimizerOptions, num_steps: int) -> Callable[[Any], Any]:
    """Returns the learning rate as a function of how many steps were taken before.

    Example:
        >>> rate = make_schedule(OptimizerOptions(learning_rate=1.0, warmup=10), 100)
        >>> [round(float(rate(n)), 2) for n in (0, 5, 10, 100)]
        [0.09, 0.55, 1.0, 0.1]
    """
    peak, warmup = options.learning_rate, min(options.warmup, num_steps)
    last, rest = peak * options.final_learning_rate, max(1, num_steps - warmup)
    after: Callable[[Any], Any] = {
        "cosine": lambda: optax.cosine_decay_schedule(peak, rest, options.final_learning_rate),
        "linear": lambda: optax.linear_schedule(peak, last, rest),
        "constant": lambda: optax.constant_schedule(peak),
    }[options.schedule]()
    if not warmup:
        return after
    # The first step is not at 0: it would be computed for nothing.
    rising = optax.linear_schedule(peak / (warmup + 1), peak, warmup)
    joined: Callable[[Any], Any] = optax.join_schedules([rising, after], [warmup])
    return joined


def make_optimizer(options: OptimizerOptions, num_steps: int) -> Any:
    """Returns an optax optimizer; clipping by the norm is the step's."""
    rate = make_schedule(options, num_steps)
    decay = options.weight_decay
    if options.optimizer == "adamw":
        return optax.adamw(rate, b1=options.beta1, b2=options.beta2, weight_decay=decay, mask=decayed)
    if options.optimizer == "lion":
        return optax.lion(rate, b1=options.beta1, b2=options.beta2, weight_decay=decay, mask=decayed)
    if options.optimizer == "adafactor":
        return optax.adafactor(rate, weight_decay_rate=decay or None, weight_decay_mask=decayed)
    return optax.chain(optax.add_decayed_weights(decay, mask=decayed), optax.sgd(rate, momentum=options.beta1 or None))


def decayed(params: PyTree) -> PyTree:
    """Returns which parameters decay: matrices, not norms and biases (whose stacks over layers have two dims).

    Example:
        >>> import jax.numpy as jnp
        >>> decayed({"mlp": {"up": jnp.ones((2, 4, 8))}, "mlp_norm": {"scale": jnp.ones((2, 4))}})
        {'mlp': {'up': True}, 'mlp_norm': {'scale': False}}
    """

    def decays(name: str, leaf: Any) -> bool:
        return leaf.ndim > 1 and not any(word in name for word in ("norm", "bias", "scale"))

    return named_tree_map(decays, params, sep="/")


# --- Meshes ---


@dataclass(frozen=True)
class MeshChoice:
    """A mesh as a string, and why it was chosen."""

    mesh: str
    reason: str


def device_memory() -> int | None:
    """Returns the bytes of one device; simulated ones share the machine's. None if nobody knows."""
    limit = read_memory().limit
    if limit is not None or jax.devices()[0].platform != "cpu":
        return limit
    try:
        # Of all processes, which may be on one machine.
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // jax.device_count()
    except (AttributeError, ValueError, OSError):  # not on this system
        return None


def choose_mesh(
    job: Any,
    optimizer: Any,
    *,
    num_devices: int,
    batch_size: int,
    memory: int | None,
    precision: Any = "float32",
    heads: int | None = None,
    kv_heads: int | None = None,
    minibatches: int = 1,
) -> MeshChoice:
    """Returns the mesh with the least communication on which the state fits and the batch can be split.

    That is data parallelism where each device can hold the whole state, FSDP where it cannot, and tensor parallelism on
    top where there are more devices than rows.

    Args:
        memory: bytes of one device; None where nobody knows, and then the state is split.
        heads: how many attention heads a model has, which a tensor axis must divide.
        kv_heads: heads of keys and values, if fewer; an axis must divide them or be a multiple of them.
        minibatches: parts of a batch, each of which must have rows for all devices.

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
        return MeshChoice("dp:1", "there is one device.")
    tried = []
    rows = batch_size // minibatches if batch_size % minibatches == 0 else 0
    for mesh, how in _candidates(num_devices, rows, heads or 0, kv_heads or 0):
        try:
            layout = state_layout(job, optimizer, create_abstract_mesh(mesh), precision=precision)
        except LayoutError:
            tried.append(f"{mesh} does not fit the model's rules")
            continue
        need = layout.bytes_per_device
        if mesh.startswith("dp:") and "," not in mesh and memory is None:
            tried.append(f"{mesh} would need {format_bytes(need)} on each device, whose memory is not known")
            continue
        if memory is not None and need > STATE_SHARE * memory:
            tried.append(f"{mesh} would need {format_bytes(need)} of {format_bytes(memory)} for the state alone")
            continue
        room = "" if memory is None else f" of {format_bytes(memory)}"
        before = f" ({'; '.join(tried)})" if tried else ""
        return MeshChoice(mesh, f"{how}; the state takes {format_bytes(need)}{room} on each device{before}.")
    raise MeshError(
        f"no mesh of {num_devices} devices was found for a batch of {batch_size} rows"
        f"{f' in {minibatches} parts' if minibatches > 1 else ''}{': ' if tried else ''}{'; '.join(tried)}.",
        hint="name one with --mesh, use more devices, or more rows per batch.",
    )


def _candidates(num_devices: int, rows: int, heads: int, kv_heads: int) -> Iterator[tuple[str, str]]:
    """Yields meshes in the order of how much they communicate: data, then parameters, then activations."""
    if not rows:
        return
    if rows % num_devices == 0:
        yield f"dp:{num_devices}", "every device has its rows, and only gradients travel"
        yield f"fsdp:{num_devices}", "every device has its rows and a slice of the state"
    for tensor in range(2, num_devices + 1):
        ways = num_devices // tensor
        fit = heads_fit(heads, tensor) and heads_fit(kv_heads or heads, tensor, shared=True)
        if num_devices % tensor or rows % ways or not fit:
            continue
        if ways > 1:
            yield f"dp:{ways},tp:{tensor}", f"{rows} rows over {ways}, features over {tensor} devices"
            yield f"fsdp:{ways},tp:{tensor}", f"{rows} rows and the state over {ways}, features over {tensor}"
        else:
            yield f"tp:{tensor}", f"features over all devices, since {rows} rows cannot be split over them"
