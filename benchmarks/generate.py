"""Tokens per second of greedy generation with the 956M decoder, beside transformers' generate.

    PYTHONPATH=src python3 benchmarks/generate.py

Needs a CUDA machine with jax, torch and transformers; takes two to four minutes there. Every program runs in a process
of its own, in bfloat16 with random weights: prompts of 128 tokens, 256 new tokens, one call to compile, then the median
of three calls from the prompt to the last token. transformers uses a static cache and torch.compile (CUDA graphs, one
program for all new tokens). Each result is printed as soon as it is there. `--only meshwright` or `--batches 1` leaves
out the others; `--tiny` checks the script on a CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from measure import machine, median, table, verdict, versions

SIZES = {"vocab_size": 32768, "num_layers": 16, "d_model": 2048, "num_heads": 16, "d_ff": 5632}
TINY = {"vocab_size": 512, "num_layers": 2, "d_model": 64, "num_heads": 2, "d_ff": 128}
LIMIT = 150  # seconds per program


def main() -> None:
    args = arguments()
    if args.one:
        print(json.dumps(PROGRAMS[args.one](args, *args.batches)), flush=True)
        return
    rows, rates = [], dict[tuple[int, str], float]()
    for batch in args.batches:
        for name in args.only or PROGRAMS:
            found = child(name, batch, args.tiny)
            print(json.dumps({"program": name, "batch": batch, **found}), file=sys.stderr, flush=True)
            if "failed" in found:
                rows.append([batch, name, found["failed"], "", "", ""])
                continue
            rates[batch, name] = found["tokens_per_s"]
            ms = f"{1e3 * found['seconds'] / found['new_tokens']:.3f}"
            peer = rates.get((batch, "transformers"))
            mine = f"{found['tokens_per_s']:.0f}", ms, f"{found['compile_s']:.0f}", f"{found['peak_GiB']:.1f}"
            rows.append([batch, name, *mine])
            if name == "transformers" and (batch, "meshwright") in rates and peer:
                rows[-2][1] = f"meshwright ({rates[batch, 'meshwright'] / peer:.2f}x)"
    print(f"{machine()}; {versions('jax', 'torch', 'transformers')}")
    print(table(["batch", "program", "tokens/s", "ms per token", "compile s", "peak GiB"], rows))
    for batch in args.batches:
        ours, theirs = rates.get((batch, "meshwright")), rates.get((batch, "transformers"))
        if ours and theirs and not args.tiny:  # tiny runs without torch.compile
            print(
                verdict(f"batch {batch}: {ours / theirs:.2f}x the tokens/s of transformers (target: 1)", ours >= theirs)
            )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--only", nargs="+", choices=list(PROGRAMS))
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--one", choices=list(PROGRAMS), help=argparse.SUPPRESS)
    return parser.parse_args()


def child(name: str, batch: int, tiny: bool) -> dict[str, Any]:
    command = [sys.executable, str(Path(__file__)), "--one", name, "--batches", str(batch), *["--tiny"] * tiny]
    variables = os.environ | ({"JAX_PLATFORMS": "cpu"} if tiny else {})
    try:
        done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=LIMIT)
    except subprocess.TimeoutExpired:
        return {"failed": f"took more than {LIMIT} s"}
    if done.returncode:
        print(done.stderr[-3000:], file=sys.stderr)
        return {"failed": (done.stderr.strip().splitlines() or ["no output"])[-1][:100]}
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def timed(call: Callable[[], int], batch: int) -> dict[str, Any]:
    """Times a call that generates and returns the number of new tokens per row."""
    began = time.perf_counter()
    call()
    compile_s, seconds, count = time.perf_counter() - began, list[float](), 0
    for _ in range(3):
        began = time.perf_counter()
        count = call()
        seconds.append(time.perf_counter() - began)
    taken = median(seconds)
    return {
        "tokens_per_s": batch * count / taken,
        "seconds": taken,
        "range_s": [min(seconds), max(seconds)],
        "new_tokens": count,
        "compile_s": compile_s,
    }


def shape(tiny: bool) -> tuple[int, int]:
    """Returns the number of tokens of a prompt and of new ones."""
    return (16, 16) if tiny else (128, 256)


def meshwright(args: argparse.Namespace, batch: int) -> dict[str, Any]:
    import jax
    import numpy as np

    from meshwright.generate.generator import make_generator
    from meshwright.models import Decoder

    old, new = shape(args.tiny)
    model = Decoder(**(TINY if args.tiny else SIZES))
    generate = make_generator(model, length=old + new, precision="bfloat16", chunk=64)
    params = jax.jit(model.init)(jax.random.key(0))
    weights = generate.load(params, num_rows=batch)
    del params
    prompts = list(np.random.default_rng(0).integers(0, model.vocab_size, (batch, old)))
    found = timed(lambda: len(generate(weights, prompts, new)[0]), batch)
    assert found["new_tokens"] == new
    stats = jax.local_devices()[0].memory_stats() or {}
    return found | {"peak_GiB": stats.get("peak_bytes_in_use", 0) / 2**30}


def transformers(args: argparse.Namespace, batch: int) -> dict[str, Any]:
    import numpy as np
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    old, new = shape(args.tiny)
    sizes = TINY if args.tiny else SIZES
    config = LlamaConfig(
        vocab_size=sizes["vocab_size"],
        hidden_size=sizes["d_model"],
        intermediate_size=sizes["d_ff"],
        num_hidden_layers=sizes["num_layers"],
        num_attention_heads=sizes["num_heads"],
        num_key_value_heads=sizes["num_heads"],
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        attn_implementation="sdpa",
    )
    device = "cpu" if args.tiny else "cuda"
    torch.set_float32_matmul_precision("high")
    with torch.device(device):
        model = LlamaForCausalLM(config).to(torch.bfloat16).eval()
    numbers = np.random.default_rng(0).integers(0, sizes["vocab_size"], (batch, old))
    prompts = torch.as_tensor(numbers, device=device)
    options: dict[str, Any] = {"max_new_tokens": new, "do_sample": False, "cache_implementation": "static"}
    options |= {"eos_token_id": None, "pad_token_id": 0, "attention_mask": torch.ones_like(prompts)}
    # generate() compiles the pass over new tokens by itself for a static cache on a GPU.
    try:
        from transformers.generation.configuration_utils import CompileConfig

        if not args.tiny:
            options["compile_config"] = CompileConfig(mode="reduce-overhead", fullgraph=True, dynamic=False)
    except ImportError:
        if not args.tiny:
            model.forward = torch.compile(model.forward, mode="reduce-overhead", fullgraph=True)

    def call() -> int:
        with torch.no_grad():
            found = model.generate(prompts, **options)
        return int(found.cpu().shape[1]) - old

    found = timed(call, batch)
    peak = 0 if args.tiny else torch.cuda.max_memory_allocated()
    return found | {"peak_GiB": peak / 2**30, "torch": torch.__version__}


PROGRAMS: dict[str, Callable[..., dict[str, Any]]] = {"meshwright": meshwright, "transformers": transformers}


if __name__ == "__main__":
    main()
