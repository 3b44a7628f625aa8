"""Compares logits of all families of model folders with Hugging Face transformers, in both directions.

usage: python benchmarks/pretrained_transformers.py [--store] [MODEL ...]

Needs torch and transformers. For each family, transformers saves a small model with random weights (float32 and
bfloat16), `read_pretrained` reads it, and both compute 48 tokens in float32 on the CPU, three times the length before
scaling of rotary positions. Then `write_pretrained` writes it, and transformers reads that. `--store` writes the
configurations and some of transformers' logits to tests/checkpoint/convert/families/, where the tests use them.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from measure import ROOT, machine, table, verdict, versions

TOLERANCE = 1e-5
STORE = ROOT / "tests/checkpoint/convert/families"
SIZES = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
LONG = {"rope_type": "longrope", "short_factor": [1.0, 1.5], "long_factor": [2.0, 4.0], "partial_rotary_factor": 0.5}
LOCAL = {"rope_type": "default", "rope_theta": 1e4}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"head_dim": 16, "rope_parameters": {"rope_theta": 5e5}, "rms_norm_eps": 1e-5}),
    "smollm": ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    "llama_linear": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0}}),
    "llama_dynamic": (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}, "max_position_embeddings": 16},
    ),
    "llama_llama3": ("llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "llama_yarn": ("llama", {"rope_parameters": YARN | {"beta_fast": 8.0, "truncate": False}}),
    "llama_yarn_mscale": ("llama", {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 1.3}}),
    "mistral": ("mistral", {"sliding_window": 7}),
    "mistral_full": ("mistral", {"sliding_window": None, "head_dim": 16}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2_window": ("qwen2", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 2}),
    "qwen3": ("qwen3", {"head_dim": 16, "rope_parameters": YARN | {"rope_theta": 1e6}}),
    "gemma2": (
        "gemma2",
        {"head_dim": 16, "sliding_window": 5, "query_pre_attn_scalar": 24, "final_logit_softcapping": 3.0,
         "attn_logit_softcapping": 2.0},
    ),
    "gemma3": (
        "gemma3_text",
        {"head_dim": 16, "sliding_window": 5, "query_pre_attn_scalar": 24, "sliding_window_pattern": 3,
         "rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e6},
                             "sliding_attention": LOCAL}},
    ),
    "olmo2": ("olmo2", {}),
    "olmo3": (
        "olmo3",
        {"sliding_window": 6,
         "rope_parameters": {"full_attention": YARN | {"rope_theta": 5e5},
                             "sliding_attention": {"rope_type": "default", "rope_theta": 5e5}}},
    ),
    "phi3": (
        "phi3",
        {"rope_parameters": LONG, "original_max_position_embeddings": 16},
    ),
    "phi3_window": ("phi3", {"sliding_window": 9, "tie_word_embeddings": True}),
    "smollm3": ("smollm3", {"no_rope_layer_interval": 2}),
}  # fmt: skip


def main() -> None:
    import jax

    jax.config.update("jax_platforms", "cpu")
    import torch
    import transformers

    sys.path.insert(0, str(ROOT / "tests/checkpoint/convert"))
    print(", ".join(f"{name} {version}" for name, version in versions("jax", "torch", "transformers").items()))
    print(f"machine: {machine()}\n")
    rows, worst = [], 0.0
    chosen = [case for case in CASES if case in sys.argv] or list(CASES)
    for case in chosen:
        kind, fields = CASES[case]
        config = transformers.AutoConfig.for_model(kind, **(SIZES | fields))
        found = [compare(config, case, dtype) for dtype in (torch.float32, torch.bfloat16)]
        rows.append((case, *(f"{value:.1e}" for pair in found for value in pair)))
        print(*rows[-1], file=sys.stderr)
        worst = max([worst, *(value for pair in found for value in pair)])
    header = ("model", "float32: read", "float32: written", "bfloat16: read", "bfloat16: written")
    print(table(header, rows) + "\n")
    fine = worst <= TOLERANCE
    print(verdict(f"logits differ by at most {worst:.1e} relative to the largest (target: {TOLERANCE:.0e})", fine))
    sys.exit(0 if fine else 1)


def compare(config: Any, case: str, dtype: Any) -> tuple[float, float]:
    """Returns the differences of logits after reading a folder of transformers, and after writing it again."""
    import jax
    import torch
    import transformers
    from seeded import seeded_weights

    from meshwright.checkpoint.convert.fingerprint import make_fingerprint, model_logits, probe_tokens
    from meshwright.checkpoint.convert.pretrained import read_pretrained, write_pretrained

    folder = Path(tempfile.mkdtemp())
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    state = {name: value for name, value in model.state_dict().items() if "lm_head" not in name or not tied(config)}
    shapes = {name: tuple(value.shape) for name, value in state.items()}
    drawn = seeded_weights(shapes, norm_offset="gemma" in config.model_type)
    model.load_state_dict({name: torch.as_tensor(value) for name, value in drawn.items()}, strict=False)
    model.tie_weights()
    model.to(dtype).save_pretrained(folder / "theirs", max_shard_size="20KB")
    tokens = probe_tokens(config.vocab_size)
    theirs = logits_of(folder / "theirs", tokens)
    found = read_pretrained(folder / "theirs", dtype="float32")
    ours = model_logits(found.model, found.params, tokens)
    # Only a change of the weights shows that the written ones are read.
    changed = jax.tree.map(lambda leaf: leaf * 1.02, found.params)
    write_pretrained(folder / "ours", found.model, changed, like=folder / "theirs", max_shard_bytes=20_000)
    written = difference(model_logits(found.model, changed, tokens), logits_of(folder / "ours", tokens))
    if "--store" in sys.argv and dtype == torch.float32:
        STORE.mkdir(exist_ok=True)
        source = f"transformers {transformers.__version__}"
        fields = json.loads((folder / "theirs" / "config.json").read_text())
        stored = {"config": fields, "logits": make_fingerprint(tokens, theirs, source=source)}
        (STORE / f"{case}.json").write_text(json.dumps(stored) + "\n")
    return difference(ours, theirs), written


def tied(config: Any) -> bool:
    return bool(config.tie_word_embeddings)


def logits_of(folder: Path, tokens: Any) -> Any:
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        return model(torch.as_tensor(tokens[None].astype("int64"))).logits[0].numpy()


def difference(ours: Any, theirs: Any) -> float:
    import numpy as np

    return float(np.abs(np.asarray(ours) - theirs).max() / np.abs(theirs).max())


if __name__ == "__main__":
    main()
