"""OLMo 2 (norms after blocks, norms of queries and keys over all heads) and OLMo 3 (with local layers)."""

from meshwright.checkpoint.convert.family import NAMES, Family, norm
from meshwright.checkpoint.convert.layer_types import window_between, write_layer_types

_NAMES = NAMES | {
    "layers/attn_post_norm": norm("post_attention_layernorm"),
    "layers/mlp_post_norm": norm("post_feedforward_layernorm"),
}
_SWITCHES = {"norms": "post", "qk_norm": True, "whole_qk_norm": True}

OLMO2 = Family(
    model_type="olmo2",
    architecture="Olmo2ForCausalLM",
    switches=_SWITCHES,
    only={"attention_bias": False},
    names=_NAMES,
    eps=1e-5,
)
OLMO3 = Family(
    model_type="olmo3",
    architecture="Olmo3ForCausalLM",
    switches=_SWITCHES,
    only={"attention_bias": False},
    names=_NAMES,
    read_kinds=window_between(4),
    write_kinds=write_layer_types,
    theta=500_000.0,
    local_theta=500_000.0,
    eps=1e-5,
)
