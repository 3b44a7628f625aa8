"""Llama 2 and 3 (and SmolLM 1 and 2, which are Llamas), Mistral, and SmolLM 3."""

from meshwright.checkpoint.convert.family import Family
from meshwright.checkpoint.convert.layer_types import bare_layers, window_everywhere, write_bare_layers, write_window

LLAMA = Family(model_type="llama", architecture="LlamaForCausalLM")
MISTRAL = Family(
    model_type="mistral",
    architecture="MistralForCausalLM",
    only={},
    read_kinds=window_everywhere(4096),
    write_kinds=write_window,
    defaults={"num_key_value_heads": 8},
)
SMOLLM3 = Family(
    model_type="smollm3",
    architecture="SmolLM3ForCausalLM",
    read_kinds=bare_layers,
    write_kinds=write_bare_layers,
    theta=2_000_000.0,
    defaults={"num_key_value_heads": 4},
    tied=True,
)
