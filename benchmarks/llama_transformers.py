"""Our safetensors files beside Hugging Face's own Llama: are the logits the same, there and back?

usage: python benchmarks/llama_transformers.py

Needs torch and transformers, which nothing else here does. A decoder of ours is written, read by
`LlamaForCausalLM.from_pretrained` and run in float32 on the CPU; then a Llama with random weights of its own is saved
by transformers and read by `read_llama`.
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
    print(table(("decoder", "written by us, run by transformers", "saved by transformers, run by us"), rows) + "\n")
    fine = worst <= TOLERANCE
    print(verdict(f"logits differ by at most {worst:.1e} of the largest (target: {TOLERANCE:.0e})", fine))
    sys.exit(0 if fine else 1)


def noisy(model: Any) -> Any:
    """Returns parameters of which none is one or zero, so that no mistake hides."""
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
