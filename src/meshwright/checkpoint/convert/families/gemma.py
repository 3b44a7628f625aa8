"""Gemma 2 (soft caps) and the text models of Gemma 3 (norms of queries and keys, local rotary positions)."""

from meshwright.checkpoint.convert.family import NAMES, Family, norm
from meshwright.checkpoint.convert.layer_types import window_between, write_layer_types

_NAMES = NAMES | {
    "layers/attn_post_norm": norm("post_attention_layernorm"),
    "layers/mlp_norm": norm("pre_feedforward_layernorm"),
    "layers/mlp_post_norm": norm("post_feedforward_layernorm"),
}
_SWITCHES = {"norms": "both", "norm_offset": True, "scaled_embeddings": True, "activation": "gelu_tanh"}
_ONLY = {"attention_bias": False, "use_bidirectional_attention": False}
_FIELDS = {
    "query_pre_attn_scalar": "query_scalar",
    "attn_logit_softcapping": "attention_soft_cap",
    "final_logit_softcapping": "logit_soft_cap",
}
_DEFAULTS = {"num_key_value_heads": 4, "head_dim": 256, "query_pre_attn_scalar": 256}

GEMMA2 = Family(
    model_type="gemma2",
    architecture="Gemma2ForCausalLM",
    switches=_SWITCHES,
    fields=_FIELDS,
    only=_ONLY,
    names=_NAMES,
    read_kinds=window_between(2),
    write_kinds=write_layer_types,
    defaults=_DEFAULTS | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    tied=True,
)
GEMMA3 = Family(
    model_type="gemma3_text",
    architecture="Gemma3ForCausalLM",
    switches=_SWITCHES | {"qk_norm": True},
    fields=_FIELDS,
    only=_ONLY,
    names=_NAMES,
    read_kinds=window_between(6, field="sliding_window_pattern"),
    write_kinds=write_layer_types,
    theta=1_000_000.0,
    local_theta=10_000.0,
    defaults=_DEFAULTS,
    tied=True,
)
