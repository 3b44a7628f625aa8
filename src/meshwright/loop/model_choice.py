"""Models by name, for the command line: `decoder-125m`, `xlstm-small`."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

from meshwright.errors import ConfigError, did_you_mean
from meshwright.models import XLSTM, Decoder
from meshwright.models.language import LanguageModel

FAMILIES: dict[str, type[LanguageModel]] = {"decoder": Decoder, "xlstm": XLSTM}


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
                hint=f"vocab_size={-(-vocab_size // 128) * 128}, or leave it out.",
            )
        model = dataclasses.replace(model, vocab_size=-(-vocab_size // 128) * 128)
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
