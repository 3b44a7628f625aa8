"""Train step of a 956M decoder on one GPU against torch, plain JAX, and the same recipe without the library.

    PYTHONPATH=src python3 benchmarks/decoder_h200.py --peers FOLDER

FOLDER contains peer_torch_decoder.py and peer_plain_jax_decoder.py. Each program runs in a separate process: 3 warmup
steps, then 20 timed, synchronized steps. FLOPs are counted as the peers do: 6 x non-embedding parameters and causal
attention. `--tiny` runs the two JAX programs of this repository on a CPU, to test the script.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from measure import machine, table, verdict, versions

SIZES = {"vocab_size": 32768, "num_layers": 16, "d_model": 2048, "num_heads": 16, "d_ff": 5632}
TINY = {"vocab_size": 512, "num_layers": 2, "d_model": 64, "num_heads": 2, "d_ff": 128}
SHAPES = [(2048, 16), (8192, 4)]
PROGRAMS = ("torch", "by hand", "meshwright", "plain JAX")
GPU_OPTIONS = {"xla_gpu_enable_triton_gemm": False, "xla_gpu_enable_dynamic_slice_fusion": False}


def main() -> None:
    args = arguments()
    if args.one:
        print(json.dumps(RUNS[args.one](args)), flush=True)
        return
    if not args.only_curve and not args.kernel_curve:
        compare(args)
    if args.curve or args.only_curve:
        compare_losses(args)
    if args.kernel_curve:
        compare_kernels(args)


def compare(args: argparse.Namespace) -> None:
    rows = []
    for length, batch in [(32, 4)] if args.tiny else [shape for shape in SHAPES if shape[0] in args.lengths]:
        results = {}
        for name, command, variables in programs(args, length, batch):
            result = child(command, variables)
            results[name] = result
            print(json.dumps({"program": name, "shape": f"{batch} x {length}", **result}), file=sys.stderr, flush=True)
        best = results.get("torch", {}).get("tok_s")
        for name, result in results.items():
            if "failed" in result:
                rows.append([f"{batch} x {length}", name, result["failed"][:60], "", "", "", "", ""])
                continue
            numbers = (f"{result['ms']:.1f}", f"{result['tok_s']:.0f}", f"{result['tflops']:.1f}")
            ratio = f"{result['tok_s'] / best:.3f}" if best else ""
            used = (f"{result['peak_GiB']:.1f}", f"{result['compile_s']:.0f}")
            rows.append([f"{batch} x {length}", name, *numbers, ratio, *used])
    print(f"{machine()}; {versions('jax', 'optax', 'torch')}")
    print(table(["shape", "program", "ms", "tokens/s", "TFLOP/s", "of torch", "peak GiB", "compile s"], rows))
    judge(rows)


def compare_losses(args: argparse.Namespace) -> None:
    """Compares losses in bfloat16 with float32, and float32 with itself in another row order, as a noise level."""
    length, rows = (32, 2) if args.tiny else (2048, 2 if args.random else 4)
    command = [*own(args, length, rows), *(["--random"] if args.random else [])]
    losses = {name: child([*command, "--one", name], {})["losses"] for name in CURVES}
    exact = losses["curve_float32"]

    def apart(name: str) -> float:
        return max(abs(a - b) / b for a, b in zip(losses[name], exact, strict=True))

    print(
        f"losses of {len(exact)} steps of {rows} x {length} tokens, bfloat16: {[round(x, 3) for x in losses['curve']]}"
    )
    print(f"losses of the same steps, float32: {[round(x, 3) for x in exact]}")
    print(f"float32 with rows in another order differs by {apart('curve_float32_turned'):.1e}")
    worst = apart("curve")
    print(verdict(f"largest relative difference of bfloat16 {worst:.1e} (1e-2 allowed)", worst < 1e-2))


def compare_kernels(args: argparse.Namespace) -> None:
    """Compares losses of steps with kernels and by XLA alone; the same steps again with kernels are the noise level."""
    length, rows = (32, 2) if args.tiny else (2048, 4)
    losses = {name: child([*own(args, length, rows), "--one", name], {}) for name in KERNEL_CURVES}
    print(f"{machine()}; {versions('jax', 'optax')}")
    if failed := {name: found["failed"] for name, found in losses.items() if "failed" in found}:
        print(failed)
        return
    plain = losses["curve_without_kernels"]["losses"]
    print(f"losses by XLA alone: {[round(x, 3) for x in plain]}")
    for name in ("curve", "curve_again"):
        apart = [abs(a - b) / b for a, b in zip(losses[name]["losses"], plain, strict=True)]
        print(f"{name}: at most {max(apart):.1e} from XLA alone, {apart[-4]:.1e} at step {len(plain) - 3}")
    pairs = zip(losses["curve"]["losses"], losses["curve_again"]["losses"], strict=True)
    print(f"with kernels, twice: at most {max(abs(a - b) / b for a, b in pairs):.1e} apart")


def programs(args: argparse.Namespace, length: int, batch: int) -> list[tuple[str, list[str], dict[str, str]]]:
    ours = own(args, length, batch)
    found = [("by hand", [*ours, "--one", "by_hand"], {}), ("meshwright", [*ours, "--one", "meshwright"], {})]
    if not args.peers:
        return [one for one in found if one[0] in args.programs]
    shape = ["--seq", str(length), "--batch", str(batch)]
    plain = [sys.executable, str(Path(args.peers) / "peer_plain_jax_decoder.py"), *shape]
    plain += ["--scan", "0", "--bf16_grad", "1"]
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_enable_triton_gemm=false"
    torch = [sys.executable, str(Path(args.peers) / "peer_torch_decoder.py"), *shape]
    found = [("torch", torch, {}), *found, ("plain JAX", plain, {"XLA_FLAGS": flags})]
    return [one for one in found if one[0] in args.programs]


def own(args: argparse.Namespace, length: int, batch: int) -> list[str]:
    shape = ["--seq", str(length), "--batch", str(batch), "--steps", str(args.steps)]
    shape += ["--warmup", str(args.warmup)]
    return [sys.executable, __file__, *shape, *(["--tiny"] if args.tiny else [])]


def child(command: list[str], variables: dict[str, str]) -> dict[str, Any]:
    done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True)
    if done.returncode:
        return {"failed": (done.stderr.strip().splitlines() or ["?"])[-1]}
    return json.loads(done.stdout.strip().splitlines()[-1])


def judge(rows: list[list[str]]) -> None:
    for shape in dict.fromkeys(row[0] for row in rows):
        here = {row[1]: row for row in rows if row[0] == shape and row[4]}
        if "meshwright" in here and "torch" in here:
            ratio = float(here["meshwright"][5])
            print(verdict(f"{shape}: {ratio:.3f}x torch's tokens per second (target: 1.05)", ratio >= 1.05))
            ours, theirs = float(here["meshwright"][6]), float(here["torch"][6])
            print(verdict(f"{shape}: {ours} GiB peak memory, torch {theirs}", ours <= theirs))
        if "meshwright" in here and "by hand" in here:
            over = float(here["meshwright"][2]) / float(here["by hand"][2])
            print(verdict(f"{shape}: {over:.3f}x the time of the same in plain JAX (target: 1.01)", over <= 1.01))


# --- Programs that run in separate processes ---


def run_meshwright(args: argparse.Namespace) -> dict[str, Any]:
    import jax

    state, step, tokens = make_meshwright(args, "mixed")
    batch = step.place({"inputs": tokens[:, :-1], "targets": tokens[:, 1:]})
    start = time.time()
    compiled = step.lower(batch).compile()
    seconds = time.time() - start
    memory = compiled.memory_analysis().peak_memory_in_bytes
    del compiled

    def once(state: Any) -> tuple[Any, Any]:
        state, metrics = step(state, batch)
        return state, metrics["loss"]

    result = timed(once, state, args, jax)
    return result | {"compile_s": seconds, "planned_GiB": memory / 2**30}


def run_by_hand(args: argparse.Namespace) -> dict[str, Any]:
    import decoder_by_hand
    import jax
    import jax.numpy as jnp

    sizes = sizes_of(args)
    on_gpu = jax.default_backend() == "gpu"
    step = decoder_by_hand.make_step(sizes["num_heads"], "cudnn" if on_gpu else None, GPU_OPTIONS if on_gpu else None)
    params = jax.jit(lambda key: decoder_by_hand.init(key, sizes))(jax.random.key(0))
    zeros = jax.jit(lambda params: jax.tree.map(jnp.zeros_like, params))
    state, tokens = (params, zeros(params), zeros(params), jnp.float32(1)), make_tokens(args)
    start = time.time()
    compiled = step.lower(state, tokens).compile()
    seconds = time.time() - start
    return timed(lambda state: compiled(state, tokens), state, args, jax) | {"compile_s": seconds}


def run_curve(
    args: argparse.Namespace, precision: str, *, turned: bool = False, kernels: bool | None = None
) -> dict[str, Any]:
    import jax
    import numpy as np

    if precision == "float32":
        jax.config.update("jax_default_matmul_precision", "highest")
    state, step, tokens = make_meshwright(args, precision, kernels)
    if args.random:  # three repeated batches, which the model memorizes; unstable
        batches = [np.roll(np.asarray(tokens), number % 3, axis=1) for number in range(10)]
    else:
        batches = text_batches(args, 30)
    losses = []
    for batch in batches:
        rows = batch[::-1] if turned else batch
        state, metrics = step(state, {"inputs": rows[:, :-1], "targets": rows[:, 1:]})
        losses.append(float(metrics["loss"]))
    return {"losses": losses}


def text_batches(args: argparse.Namespace, count: int) -> list[Any]:
    """Returns distinct batches of bytes from the standard library's sources."""
    import numpy as np

    files = sorted(Path(os.__file__).parent.glob("*.py"))
    text = np.frombuffer(b"\n".join(path.read_bytes() for path in files), np.uint8).astype(np.int32)
    size = args.batch * (args.seq + 1)
    assert count * size <= len(text), "too little text"
    return [text[i * size : (i + 1) * size].reshape(args.batch, -1) for i in range(count)]


def make_meshwright(args: argparse.Namespace, precision: str, kernels: bool | None = None) -> tuple[Any, Any, Any]:
    import jax
    import optax

    import meshwright as mw
    from meshwright.models import Decoder, Execution
    from meshwright.train import init_state, language_job, make_train_step, state_layout

    run = Execution(kernels=kernels)
    job = language_job(Decoder(**sizes_of(args)), batch_size=args.batch, num_tokens=args.seq, run=run)
    rate = optax.linear_schedule(0.0, 3e-4, args.warmup) if args.warmup else 3e-4
    optimizer = optax.adamw(rate, b1=0.9, b2=0.95, weight_decay=0.1)
    layout = state_layout(job, optimizer, mw.create_mesh("dp:1", devices=1))
    state = init_state(job, optimizer, layout, jax.random.key(0))
    return state, make_train_step(job, optimizer, layout, precision=precision), make_tokens(args)


def make_tokens(args: argparse.Namespace) -> Any:
    import jax

    return jax.random.randint(jax.random.key(1), (args.batch, args.seq + 1), 0, sizes_of(args)["vocab_size"])


def sizes_of(args: argparse.Namespace) -> dict[str, int]:
    return TINY if args.tiny else SIZES


def timed(once: Any, state: Any, args: argparse.Namespace, jax: Any) -> dict[str, Any]:
    for _ in range(3):
        state, loss = once(state)
    loss.block_until_ready()
    times = []
    for _ in range(args.steps):
        start = time.time()
        state, loss = once(state)
        loss.block_until_ready()
        times.append(time.time() - start)
    start = time.time()
    for _ in range(args.steps):
        state, loss = once(state)
    loss.block_until_ready()
    free = (time.time() - start) / args.steps
    seconds, sizes = statistics.median(times), sizes_of(args)
    d, layers = sizes["d_model"], sizes["num_layers"]
    weights = layers * (4 * d * d + 3 * d * sizes["d_ff"] + 2 * d) + d + d * sizes["vocab_size"]
    tokens = args.batch * args.seq
    flops = tokens * (6 * weights + 6 * layers * args.seq * d)
    stats = jax.local_devices()[0].memory_stats() or {}
    return {
        "ms": seconds * 1e3, "free_ms": free * 1e3, "tok_s": tokens / seconds, "tflops": flops / seconds / 1e12,
        "peak_GiB": stats.get("peak_bytes_in_use", 0) / 2**30, "loss": float(loss),
    }  # fmt: skip


CURVES = ("curve", "curve_float32", "curve_float32_turned")
KERNEL_CURVES = ("curve", "curve_again", "curve_without_kernels")
RUNS = {
    "meshwright": run_meshwright,
    "by_hand": run_by_hand,
    "curve": lambda args: run_curve(args, "mixed"),
    "curve_again": lambda args: run_curve(args, "mixed"),
    "curve_without_kernels": lambda args: run_curve(args, "mixed", kernels=False),
    "curve_float32": lambda args: run_curve(args, "float32"),
    "curve_float32_turned": lambda args: run_curve(args, "float32", turned=True),
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peers", help="folder with the peers' programs (default: leave the peers out)")
    parser.add_argument("--programs", nargs="+", choices=PROGRAMS, default=PROGRAMS, help="programs (default: all)")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 8192], help="tokens per row")
    parser.add_argument("--curve", action="store_true", help="also compare losses with float32")
    parser.add_argument("--warmup", type=int, default=0, help="steps of learning rate warmup to 3e-4 (default: 0)")
    parser.add_argument("--only-curve", action="store_true", help="only compare losses")
    parser.add_argument("--kernel-curve", action="store_true", help="only compare losses with those of XLA alone")
    parser.add_argument("--random", action="store_true", help="compare losses on three repeated random batches")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--one", choices=RUNS, help=argparse.SUPPRESS)
    parser.add_argument("--seq", type=int, default=2048, help=argparse.SUPPRESS)
    parser.add_argument("--batch", type=int, default=16, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
