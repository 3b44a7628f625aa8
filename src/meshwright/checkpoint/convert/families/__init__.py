"""The families of published models that convert to and from `Decoder`, one table each.

To add a family, write its table and list it here; `benchmarks/pretrained_transformers.py` compares its logits with
transformers and stores a test case.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from meshwright.checkpoint.convert.config_json import ConfigJson
from meshwright.checkpoint.convert.families.gemma import GEMMA2, GEMMA3
from meshwright.checkpoint.convert.families.llama import LLAMA, MISTRAL, SMOLLM3
from meshwright.checkpoint.convert.families.olmo import OLMO2, OLMO3
from meshwright.checkpoint.convert.families.phi import PHI3
from meshwright.checkpoint.convert.families.qwen import QWEN2, QWEN3
from meshwright.checkpoint.convert.family import Family
from meshwright.errors import CheckpointError, did_you_mean
from meshwright.models import Decoder

FAMILIES: dict[str, Family] = {
    family.model_type: family for family in (LLAMA, MISTRAL, QWEN2, QWEN3, GEMMA2, GEMMA3, OLMO2, OLMO3, SMOLLM3, PHI3)
}
"""All families by `model_type`, in the order in which export tries them."""


def family_named(model_type: Any) -> Family:
    """Returns the family with this `model_type`.

    Example:
        >>> family_named("qwen3").architecture
        'Qwen3ForCausalLM'
    """
    if model_type == "gemma3":
        raise CheckpointError(
            "model_type 'gemma3' is a model of text and images; only its text part ('gemma3_text') is supported.",
            hint="save the text model with Gemma3ForCausalLM, or use a text-only checkpoint.",
        )
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        hint = did_you_mean(str(model_type), FAMILIES) or f"use one of: {', '.join(FAMILIES)}."
        raise CheckpointError(f"there is no family with model_type {model_type!r}.", hint=hint)
    return FAMILIES[model_type]


def family_of(model: Decoder) -> Family:
    """Returns the first family that has all features of a decoder.

    Example:
        >>> family_of(Decoder.named("tiny", qk_norm=True)).model_type
        'qwen3'
    """
    reasons = []
    for family in FAMILIES.values():
        try:
            family.config(model)
        except CheckpointError as error:
            reasons.append(str(error).partition("\n")[0])
        else:
            return family
    lines = "\n  ".join(reasons)
    raise CheckpointError(f"no family has all features of this decoder.\n  {lines}", hint="export a model of a family.")


def decoder_of_config(config: Mapping[str, Any], *, ignore: Collection[str] = ()) -> Decoder:
    """Returns the decoder that a `config.json` describes; raises if it would compute something else.

    Args:
        ignore: fields that are not supported, but do not change the logits.

    Example:
        >>> decoder_of_config(config_of_decoder(Decoder.named("tiny")) | {"hidden_size": 32}).d_model
        32
    """
    return family_named(config.get("model_type")).decoder(ConfigJson(config), ignore=ignore)[0]


def config_of_decoder(
    model: Decoder, *, family: str | None = None, dtype: Any = "float32", max_positions: int | None = None
) -> dict[str, Any]:
    """Returns the `config.json` of a decoder.

    Args:
        family: `model_type` of the family (default: the first one that has all features of the decoder).
        dtype: dtype of the weights.
        max_positions: longest text, in tokens; required by the format, although `Decoder` has no such limit.

    Example:
        >>> config = config_of_decoder(Decoder.named("tiny", num_kv_heads=2))
        >>> config["model_type"], config["hidden_size"], config["num_key_value_heads"], config["head_dim"]
        ('llama', 64, 2, 8)
    """
    found = family_of(model) if family is None else family_named(family)
    return found.config(model, dtype=dtype, max_positions=max_positions)
