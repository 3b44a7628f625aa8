"""Time of the mLSTM cell on one GPU, forward, and forward with backward: the XLA form by chunk size, and the kernels.

    PYTHONPATH=src python3 benchmarks/mlstm_h200.py --steps 10 --write mlstm.json
    PYTHONPATH=src python3 benchmarks/mlstm_h200.py --tiny                  # small shapes, on a CPU as well

Inputs are random: q, k and v in bfloat16, gates in float32. All programs of a shape are compiled in parallel and warmed
up. Then they run in rounds, in a new random order each round, so that no program always runs on a cooler or hotter
chip. A call's time is the mean of `--inner` calls; the table has medians over rounds. The last column is relative to
the default chunk size of the XLA form, which `mlstm_chunkwise` chooses by chip. The row *kernels* is what
`mlstm_chunkwise` uses by default, which is the XLA form on other chips than Hopper GPUs. `--steps` adds train steps of
an 813M xLSTM with chunks of 64 and of twice the key size (XLA), and with the default.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import functools
import json
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from measure import machine, table, versions

from meshwright.models import mlstm_chunkwise

# B, S, H, K, V
SHAPES = [
    (4, 8192, 4, 256, 512),
    (4, 8192, 8, 256, 512),
    (8, 8192, 16, 128, 256),
    (1, 32768, 4, 256, 512),
    (1, 32768, 8, 256, 512),
    (2, 32768, 16, 128, 256),
]
TINY_SHAPES = [(1, 40, 2, 8, 16)]
CHUNK_SIZES = (64, 128, 256, 384, 512)
TINY_CHUNK_SIZES = (16,)
Size = int | str | None  # a chunk size of the XLA form, None for its default, or "kernels"
DIRECTIONS = ("forward", "both")
MODEL = {"vocab_size": 50304, "num_layers": 12, "d_model": 2048, "num_heads": 4, "d_ff": 5504}
TINY_MODEL = {"vocab_size": 128, "num_layers": 1, "d_model": 32, "num_heads": 2, "d_ff": 64}


def main() -> None:
    args = arguments()
    shapes = TINY_SHAPES if args.tiny else [SHAPES[number] for number in args.shapes]
    sizes: list[Size] = [*(TINY_CHUNK_SIZES if args.tiny else args.chunks), None, "kernels"]
    device = jax.devices()[0]
    print(f"{device.device_kind}; {machine()}; {versions('jax', 'jaxlib')}", flush=True)
    results: list[dict[str, Any]] = []
    for shape in shapes:
        results += measure_shape(shape, sizes, args)
        if args.write:  # after every shape, so that a later failure loses nothing
            Path(args.write).write_text(json.dumps(results, indent=1) + "\n")
    print(f"medians of {args.rounds} rounds of {args.inner} calls, bfloat16, milliseconds")
    headings = ["B, S, H, K, V", "chunk", "forward", "range", "and backward", "range", "peak GiB", "of default"]
    print(table(headings, [row(result, results) for result in results]))
    for shape in shapes:
        here = [result for result in results if result["shape"] == list(shape) and "both" in result]
        if here:
            best = min(here, key=lambda result: result["both"])
            print(f"{shape}: fastest chunk size {best['chunk'] or 'default'}, {best['both']:.2f} ms")
    if args.steps:
        results += measure_steps(args)
    if args.write:
        Path(args.write).write_text(json.dumps(results, indent=1) + "\n")
    sys.exit(1 if any("error" in result for result in results) else 0)


def measure_shape(shape: tuple[int, ...], sizes: list[Size], args: argparse.Namespace) -> list[dict[str, Any]]:
    inputs = make_inputs(shape)
    programs: dict[tuple[Size, str], Any] = {}
    errors: dict[Size, str] = {}
    with concurrent.futures.ThreadPoolExecutor(args.threads) as pool:
        pending = {
            (size, direction): pool.submit(make_program(size, direction).lower(*inputs).compile)
            for size in sizes
            for direction in DIRECTIONS
        }
        for (size, direction), compiled in pending.items():
            try:
                programs[size, direction] = compiled.result()
                jax.block_until_ready(programs[size, direction](*inputs))
            except Exception as error:
                errors[size] = str(error).splitlines()[0][:80]
    times: dict[tuple[Size, str], list[float]] = {key: [] for key in programs if key[0] not in errors}
    order = list(times)
    for number in range(args.rounds):
        random.Random(number).shuffle(order)
        for key in order:
            program = programs[key]
            start = time.perf_counter()
            for _ in range(args.inner):
                out = program(*inputs)
            jax.block_until_ready(out)
            times[key].append((time.perf_counter() - start) / args.inner * 1e3)
    return [result_of(shape, size, programs, times, errors) for size in sizes]


def result_of(
    shape: tuple[int, ...], size: Size, programs: dict[Any, Any], times: dict[Any, Any], errors: dict[Any, str]
) -> dict[str, Any]:
    result: dict[str, Any] = {"shape": list(shape), "chunk": size}
    if size in errors:
        return result | {"error": errors[size]}
    for direction in DIRECTIONS:
        values = times[size, direction]
        result |= {direction: statistics.median(values), f"{direction}_range": [min(values), max(values)]}
    memory = programs[size, "both"].memory_analysis()
    return result | {"peak_bytes": getattr(memory, "peak_memory_in_bytes", 0)}


def make_program(size: Size, direction: str) -> Any:
    cell: Any = mlstm_chunkwise
    if size != "kernels":
        cell = functools.partial(mlstm_chunkwise, chunk_size=size, kernels=False)

    def both(*args: Any) -> Any:
        *inputs, d_h = args
        h, pull = jax.vjp(cell, *inputs)
        return h, pull(d_h)

    return jax.jit(both) if direction == "both" else jax.jit(lambda *args: cell(*args[:5]))


def make_inputs(shape: tuple[int, ...]) -> tuple[Any, ...]:
    """Returns q, k, v, both gates, and the gradient of the output."""
    rows, length, heads, keys, values = shape
    dims = [keys, keys, values, values]

    @jax.jit
    def draw(key: Any) -> Any:
        q, k, v, d_h = (
            jax.random.normal(jax.random.fold_in(key, i), (rows, length, heads, dim), jnp.bfloat16)
            for i, dim in enumerate(dims)
        )
        gates = jax.random.normal(jax.random.fold_in(key, 4), (2, rows, length, heads))
        return q, k, v, gates[0] - 2.0, gates[1] + 4.0, d_h

    return jax.block_until_ready(draw(jax.random.key(0)))


def row(result: dict[str, Any], results: list[dict[str, Any]]) -> list[str]:
    first = [", ".join(map(str, result["shape"])), str(result["chunk"] or "default")]
    if "error" in result:
        return [*first, result["error"], "", "", "", "", ""]
    default = next(one for one in results if one["shape"] == result["shape"] and one["chunk"] is None)
    cells = []
    for direction in DIRECTIONS:
        low, high = result[f"{direction}_range"]
        cells += [f"{result[direction]:.2f}", f"{low:.2f}-{high:.2f}"]
    share = f"{result['both'] / default['both']:.2f}" if "both" in default else ""
    return [*first, *cells, f"{result['peak_bytes'] / 2**30:.2f}", share]


# --- Whole train steps ---


def measure_steps(args: argparse.Namespace) -> list[dict[str, Any]]:
    import optax

    import meshwright as mw
    from meshwright.models import XLSTM
    from meshwright.train import init_state, language_job, make_train_step, state_layout

    rows, length = (2, 40) if args.tiny else (4, 8192)
    optimizer, mesh = optax.adamw(1e-4), mw.create_mesh("dp:1", devices=1)
    running: dict[Size, Any] = {}
    memory: dict[Size, int] = {}
    sizes: dict[str, Any] = TINY_MODEL if args.tiny else MODEL
    for size in (64, sizes["d_model"] // sizes["num_heads"], None):
        model = XLSTM(**sizes, chunk_size=size)
        job = language_job(model, batch_size=rows, num_tokens=length)
        layout = state_layout(job, optimizer, mesh)
        step = make_train_step(job, optimizer, layout, precision="mixed", clip=1.0)
        batch = step.place(job.make_batch(0))
        compiled = step.lower(batch).compile()
        memory[size] = getattr(compiled.memory_analysis(), "peak_memory_in_bytes", 0)
        running[size] = (compiled, init_state(job, optimizer, layout, jax.random.key(0)), batch)
    times: dict[Size, list[float]] = {size: [] for size in running}
    order = list(running)
    for number in range(3 + args.steps):
        random.Random(number).shuffle(order)
        for size in order:
            compiled, state, batch = running[size]
            start = time.perf_counter()
            state, metrics = compiled(state, batch)
            jax.block_until_ready(metrics["loss"])
            running[size] = (compiled, state, batch)
            if number >= 3:
                times[size].append((time.perf_counter() - start) * 1e3)
    found = [
        {"step_ms": statistics.median(values), "range": [min(values), max(values)], "chunk": size,
         "peak_bytes": memory[size]}
        for size, values in times.items()
    ]  # fmt: skip
    print(f"train steps of an xLSTM, {rows} x {length} tokens, mixed precision; medians of {args.steps} steps")
    cells = [
        [str(one["chunk"] or "default"), f"{one['step_ms']:.1f}", "{:.1f}-{:.1f}".format(*one["range"]),
         f"{one['peak_bytes'] / 2**30:.2f}"]
        for one in found
    ]  # fmt: skip
    print(table(["chunk", "ms", "range", "program's peak GiB"], cells))
    return found


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbers = range(len(SHAPES))
    parser.add_argument(
        "--shapes", type=int, nargs="+", choices=numbers, default=numbers, help="indices (default: all)"
    )
    parser.add_argument("--chunks", type=int, nargs="+", default=CHUNK_SIZES, help="chunk sizes")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--inner", type=int, default=5, help="calls per synchronization (default: 5)")
    parser.add_argument("--steps", type=int, default=0, help="train steps of a whole model to time (default: 0, none)")
    parser.add_argument("--threads", type=int, default=8, help="number of compile threads (default: 8)")
    parser.add_argument("--write", help="JSON file for the results, written after every shape")
    parser.add_argument("--tiny", action="store_true", help="small shapes, to test the script")
    return parser.parse_args()


if __name__ == "__main__":
    main()
