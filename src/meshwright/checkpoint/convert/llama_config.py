"""A decoder's sizes as the `config.json` of a Hugging Face Llama, and as the text of a checkpoint's facts; and back."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from meshwright.errors import CheckpointError
from meshwright.models import Decoder


def llama_config(model: Decoder, *, dtype: Any = "float32", max_positions: int = 4096) -> dict[str, Any]:
    """Returns what `config.json` says of a decoder; raises where a Llama has no word for what it does.

    Args:
        dtype: of the weights beside it.
        max_positions: the longest text; a decoder of ours has no such number, and the rotary positions none either.

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
                f"a Llama has nothing like {field}={getattr(model, field)}, so its logits would differ.",
                hint="only decoders without qk_norm and soft caps can be written in this form.",
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
    """Returns the decoder that a Llama's `config.json` describes; raises where ours would compute something else."""
    _require_llama(config)
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
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
        raise CheckpointError(f"config.json says nothing of {error}.") from None


def _require_llama(config: Mapping[str, Any]) -> None:
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    wanted = {
        "model_type": (config.get("model_type"), "llama"),
        "hidden_act": (config.get("hidden_act", "silu"), "silu"),
        "attention_bias": (bool(config.get("attention_bias", False)), False),
        "mlp_bias": (bool(config.get("mlp_bias", False)), False),
        "the rope type": (rope.get("rope_type", rope.get("type", "default")), "default"),
    }
    for name, (found, known) in wanted.items():
        if found != known:
            raise CheckpointError(
                f"config.json has {found!r} for {name}; a decoder of ours can only be {known!r}.",
                hint="Llama models without biases and without scaled rotary positions can be read.",
            )


def decoder_of_text(text: str) -> Decoder:
    """Returns the decoder whose `repr` a checkpoint's facts hold under `model`; nothing of the text is executed.

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
            raise ValueError("not its fields")
        return Decoder(**values)
    except (SyntaxError, ValueError, TypeError) as error:
        raise CheckpointError(
            f"{text[:80]!r} is not a decoder of ours: {error}.", hint="only decoders have a form that Llama knows."
        ) from None
