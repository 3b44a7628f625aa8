"""Decoders with the switches of published families, at tiny sizes."""

from meshwright.models import Decoder

SIZES = {"vocab_size": 64, "num_layers": 4, "d_model": 32, "num_heads": 4, "d_ff": 48, "num_kv_heads": 2}
_YARN = "yarn:factor=4,original=16"
FAMILIES = {
    "llama3": Decoder(
        **SIZES, rope_scaling="llama3:factor=8,low_freq_factor=1,high_freq_factor=4,original=16", tied_embeddings=True
    ),
    "mistral": Decoder(**SIZES, sliding_window=5),
    "qwen2": Decoder(**SIZES, qkv_bias=True, sliding_window=6, layer_pattern="ggll"),
    "gemma3": Decoder(
        **SIZES, head_dim=16, qk_norm=True, norms="both", norm_offset=True, scaled_embeddings=True, query_scalar=24.0,
        activation="gelu_tanh", sliding_window=5, layer_pattern="llg", local_rope_theta=100.0, logit_soft_cap=9.0,
        attention_soft_cap=5.0, rope_scaling="linear:factor=4", tied_embeddings=True,
    ),
    "olmo3": Decoder(
        **SIZES, qk_norm=True, whole_qk_norm=True, norms="post", sliding_window=4, layer_pattern="lllg",
        local_rope_theta=1e4, rope_scaling=_YARN,
    ),
    "phi3": Decoder(
        **SIZES, rotary_fraction=0.5,
        rope_scaling="longrope:short_factor=1.0/1.5,long_factor=2.0/4.0,original=8,attention_factor=1.2",
    ),
    "smollm3": Decoder(**SIZES, layer_pattern="gn", rope_scaling="dynamic:factor=2,original=8"),
}  # fmt: skip
