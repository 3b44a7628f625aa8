"""Tokens per second of greedy generation with the 956M decoder, beside transformers' generate, or with an xLSTM.

    PYTHONPATH=src python3 benchmarks/generate.py
    PYTHONPATH=src python3 benchmarks/generate.py --model xlstm
    PYTHONPATH=src python3 benchmarks/generate.py --bytes --model xlstm --batches 1 8 32

Needs a CUDA machine with jax, torch and transformers; takes two to four minutes there. Every program runs in a process
of its own, in bfloat16 with random weights: prompts of 128 tokens, 256 new tokens, one call to compile, then the median
of three calls from the prompt to the last token. transformers uses a static cache and torch.compile (CUDA graphs, one
program for all new tokens). Each result is printed as soon as it is there. `--only meshwright` or `--batches 1` leaves
out the others; `--tiny` checks the script on a CPU.

Two programs are earlier forms. *one sum*: an mLSTM reads its memory by one sum over all keys. *before*: so it
does, and for batches of one row XLA stores the products of each weight with the token. `--bytes` needs no GPU, but
JAX's CUDA plugin: it compiles the program of a token for an H200, with two layers, and counts the bytes that its
kernels move, beside the least: weights, keys and values once, and states twice.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from measure import machine, median, table, verdict, versions

SIZES = {"vocab_size": 32768, "num_layers": 16, "d_model": 2048, "num_heads": 16, "d_ff": 5632}
XLSTM_SIZES = {"vocab_size": 50304, "num_layers": 24, "d_model": 2048, "num_heads": 4, "d_ff": 5504}
TINY = {"vocab_size": 512, "num_layers": 2, "d_model": 64, "num_heads": 2, "d_ff": 128}
EARLIER = {"decoder": ["before"], "xlstm": ["one sum", "before"]}
LIMIT = 150  # seconds per program


def main() -> None:
    args = arguments()
    if args.one:
        run = transformers if args.one == "transformers" else meshwright
        print(json.dumps(run(args, *args.batches)), flush=True)
        return
    if args.bytes:
        count_bytes(args)
        return
    rows, rates = [], dict[tuple[int, str], float]()
    for batch in args.batches:
        for name in args.only or names(args.model):
            found = child(name, batch, args)
            print(json.dumps({"program": name, "batch": batch, **found}), file=sys.stderr, flush=True)
            if "failed" in found:
                rows.append([batch, name, found["failed"], "", "", ""])
                continue
            rates[batch, name] = found["tokens_per_s"]
            ms = f"{1e3 * found['seconds'] / found['new_tokens']:.3f}"
            peer = rates.get((batch, "transformers"))
            mine = f"{found['tokens_per_s']:.0f}", ms, f"{found['compile_s']:.0f}", f"{found['peak_GiB']:.1f}"
            rows.append([batch, name, *mine])
            if name in EARLIER[args.model] and (batch, "meshwright") in rates:
                rows[-1][1] = f"{name} ({rates[batch, name] / rates[batch, 'meshwright']:.2f}x of meshwright)"
            if name == "transformers" and (batch, "meshwright") in rates and peer:
                rows[-2][1] = f"meshwright ({rates[batch, 'meshwright'] / peer:.2f}x)"
    print(f"{args.model}; {machine()}; {versions('jax', 'torch', 'transformers')}")
    print(table(["batch", "program", "tokens/s", "ms per token", "compile s", "peak GiB"], rows))
    for batch in args.batches:
        ours, theirs = rates.get((batch, "meshwright")), rates.get((batch, "transformers"))
        if ours and theirs and not args.tiny:  # tiny runs without torch.compile
            print(
                verdict(f"batch {batch}: {ours / theirs:.2f}x the tokens/s of transformers (target: 1)", ours >= theirs)
            )


def arguments() -> argparse.Namespace:
    every = list(dict.fromkeys(name for model in EARLIER for name in names(model)))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=EARLIER, default="decoder")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--only", nargs="+", choices=every)
    parser.add_argument("--bytes", action="store_true", help="count bytes of programs compiled for an H200")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--one", choices=every, help=argparse.SUPPRESS)
    return parser.parse_args()


def names(model: str) -> list[str]:
    """Returns the programs for a model, ours before transformers'."""
    return ["meshwright", *["transformers"] * (model == "decoder"), *EARLIER[model]]


def child(name: str, batch: int, args: argparse.Namespace) -> dict[str, Any]:
    command = [sys.executable, str(Path(__file__)), "--one", name, "--batches", str(batch), "--model", args.model]
    command += ["--tiny"] * args.tiny
    variables = os.environ | ({"JAX_PLATFORMS": "cpu"} if args.tiny else {})
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


def make_model(args: argparse.Namespace, **sizes: int) -> Any:
    from meshwright.models import XLSTM, Decoder

    if args.model == "xlstm":
        return XLSTM(**{**(TINY if args.tiny else XLSTM_SIZES), **sizes})
    return Decoder(**{**(TINY if args.tiny else SIZES), **sizes})


def earlier(name: str) -> Any:
    """Returns a context in which programs are traced and compiled in an earlier form."""
    import jax.numpy as jnp

    from meshwright.generate import generator
    from meshwright.models import mlstm

    patches = contextlib.ExitStack()
    if name in ("one sum", "before"):
        patches.enter_context(mock.patch.object(mlstm, "_sums", lambda q, c: jnp.sum(q[..., None] * c, axis=-2)))
    if name == "before":
        patches.enter_context(mock.patch.object(generator, "_continue_one", generator._continue))
    return patches


def meshwright(args: argparse.Namespace, batch: int) -> dict[str, Any]:
    import jax
    import numpy as np

    from meshwright.generate.generator import make_generator

    old, new = shape(args.tiny)
    model = make_model(args)
    generate = make_generator(model, length=old + new, precision="bfloat16", chunk=64)
    params = jax.jit(model.init)(jax.random.key(0))
    weights = generate.load(params, num_rows=batch)
    del params
    prompts = list(np.random.default_rng(0).integers(0, model.vocab_size, (batch, old)))
    with earlier(args.one):
        found = timed(lambda: len(generate(weights, prompts, new)[0]), batch)
    assert found["new_tokens"] == new
    stats = jax.local_devices()[0].memory_stats() or {}
    return found | {"peak_GiB": stats.get("peak_bytes_in_use", 0) / 2**30}


def count_bytes(args: argparse.Namespace) -> None:
    """Prints the bytes that a token of a model with two layers moves."""
    import jax
    import numpy as np
    from jax.sharding import SingleDeviceSharding
    from traffic import loop_kernels

    from meshwright.generate import generator
    from meshwright.generate.draw import Sampling
    from meshwright.generate.limits import cache_shapes
    from meshwright.generate.loaded_weights import unstacked
    from meshwright.generate.spread import Spread
    from meshwright.models import MLSTMState
    from meshwright.plan.compiled.topology import target_devices
    from meshwright.train import Precision

    model, length = make_model(args, num_layers=2), sum(shape(args.tiny))
    sharding, precision, sampling = (
        SingleDeviceSharding(target_devices("h200:1x1")[0]), Precision.named("bfloat16"), Sampling(),
    )  # fmt: skip
    static: Any = {"sizes": generator._Sizes(model, length, model.vocab_size, 64, True), "mode": sampling.mode}
    weights = jax.eval_shape(lambda: unstacked(model.init(jax.random.key(0)), precision=precision))
    lines = []
    for batch in args.batches:
        cache = cache_shapes(model, batch, length, precision)
        rows = generator._Rows(cache, np.zeros(batch, np.int32), np.zeros(batch, np.int32), np.zeros(batch, bool))
        values = sampling.values(model.vocab_size), np.zeros(0, np.int32)
        given = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
            (weights, rows, np.int32(0), np.zeros(batch, bool), *values),
        )
        parts = {name: part for name, part in weights.items() if name != "embed"}
        # A token reads one row of the embedding.
        least = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(parts))
        for layer in cache:
            for one in layer:
                passes = 2 if isinstance(one, MLSTMState) else 1
                least += passes * sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(one))
        for name in ["meshwright", *EARLIER[args.model]]:
            with earlier(name):
                program = generator.program_of(batch, Spread()).lower(*given, spread=Spread(), **static).compile()
            # A new trace for each form, because JAX keeps traces by function.
            jax.clear_caches()
            kernels = loop_kernels(program.as_text())
            moved = sum(kernel.moved for kernel in kernels)
            lines.append(
                [batch, name, len(kernels), f"{moved / 1e6:.0f}", f"{least / 1e6:.0f}", f"{moved / least:.2f}"]
            )
    print(f"{args.model}, two layers, compiled for an H200; {versions('jax')}")
    print(table(["batch", "program", "kernels per token", "MB per token", "least MB", "of the least"], lines))


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


if __name__ == "__main__":
    main()
