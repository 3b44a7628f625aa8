"""Qwen 2 and 2.5 (biases of queries, keys and values) and Qwen 3 (norms of queries and keys)."""

from meshwright.checkpoint.convert.family import Family
from meshwright.checkpoint.convert.layer_types import window_after, write_window_after

QWEN2 = Family(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    switches={"qkv_bias": True},
    only={},
    read_kinds=window_after,
    write_kinds=write_window_after,
    defaults={"num_key_value_heads": 32},
)
QWEN3 = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    switches={"qk_norm": True},
    only={"attention_bias": False},
    read_kinds=window_after,
    write_kinds=write_window_after,
    defaults={"num_key_value_heads": 32, "head_dim": 128},
)
