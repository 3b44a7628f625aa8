"""Compares logits of Llama safetensors files with Hugging Face transformers, in both directions.

usage: python benchmarks/llama_transformers.py

Needs torch and transformers. `LlamaForCausalLM.from_pretrained` reads a decoder that `write_llama` wrote and runs it in
float32 on the CPU; then `read_llama` reads a Llama with random weights that transformers saved.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from measure import machine, table, verdict, versions

TOLERANCE = 1e-5
FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "grouped queries, head_dim 16, rope_theta 5e5": {"num_kv_heads": 2, "head_dim": 16, "rope_theta": 5e5},
    "tied embeddings, eps 1e-5": {"tied_embeddings": True, "norm_eps": 1e-5},
}


def main() -> None:
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_default_matmul_precision", "highest")
    import numpy as np
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from meshwright.checkpoint.convert.llama import llama_config, read_llama, write_llama
    from meshwright.models import Decoder

    print(", ".join(f"{name} {version}" for name, version in versions("jax", "torch", "transformers").items()))
    print(f"machine: {machine()}\n")
    tokens = np.random.default_rng(0).integers(0, 96, (2, 40))
    rows, worst = [], 0.0
    for form, changes in FORMS.items():
        model = Decoder(vocab_size=96, num_layers=3, d_model=64, num_heads=8, d_ff=112, **changes)
        params = noisy(model)
        folder = Path(tempfile.mkdtemp())
        write_llama(folder / "ours", model, params, max_shard_bytes=60_000)
        theirs = LlamaForCausalLM.from_pretrained(folder / "ours", dtype=torch.float32).eval()
        there = difference(model.apply(params, tokens), run(theirs, tokens))
        torch.manual_seed(0)
        random = LlamaForCausalLM(LlamaConfig(**llama_config(model))).float().eval()
        with torch.no_grad():
            for weight in random.parameters():
                weight.add_(0.05 * torch.randn_like(weight))
        random.save_pretrained(folder / "theirs")
        found = read_llama(folder / "theirs")
        back = difference(found.model.apply(found.params, tokens), run(random, tokens))
        rows.append((form, f"{there:.1e}", f"{back:.1e}"))
        worst = max(worst, there, back)
    print(table(("decoder", "meshwright to transformers", "transformers to meshwright"), rows) + "\n")
    fine = worst <= TOLERANCE
    print(verdict(f"logits differ by at most {worst:.1e} relative to the largest (target: {TOLERANCE:.0e})", fine))
    sys.exit(0 if fine else 1)


def noisy(model: Any) -> Any:
    """Returns parameters with noise, so that no scale of one or bias of zero hides a mistake."""
    import jax

    params = model.init(jax.random.key(1))
    keys = iter(jax.random.split(jax.random.key(2), len(jax.tree.leaves(params))))
    return jax.tree.map(lambda x: x + 0.1 * jax.random.normal(next(keys), x.shape), params)


def run(model: Any, tokens: Any) -> Any:
    import torch

    with torch.no_grad():
        return model(torch.as_tensor(tokens)).logits.numpy()


def difference(ours: Any, theirs: Any) -> float:
    import numpy as np

    return float(np.abs(np.asarray(ours) - theirs).max() / np.abs(theirs).max())


if __name__ == "__main__":
    main()
