"""Memory and time of the 956M decoder's train step on one GPU, by batch size and remat policy.

    PYTHONPATH=src python3 benchmarks/remat_h200.py --write benchmarks/h200_measured.json

`plan_h200.py --measured` compares predictions with the file that this writes. Each case runs in a separate process: 3
warmup steps, then `--steps` timed, synchronized steps. Memory is reported twice: `peak_bytes` is the allocator's peak
over init, matmul autotuning and steps; `program_bytes` are the compiler's figures: arguments (state and batch),
temporary memory and the peak of a step. `--tiny` runs small sizes on a CPU, to test the script.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from decoder_h200 import SIZES, TINY
from measure import machine, table, versions

ROWS, REMATS = (4, 8, 16), ("none", "dots", "full", "offload")
GIB, LIMIT = 2**30, 150  # bytes; seconds for one case
PROGRAM = ("peak_memory", "argument_size", "output_size", "alias_size", "temp_size", "host_temp_size")
HEADINGS = ("rows", "remat", "parts", "ms", "range", "peak GiB", "program", "arguments", "temporary", "host", "compile")


def main() -> None:
    args = arguments()
    if args.case:
        print(json.dumps(measure(args, json.loads(args.case))), flush=True)
        return
    results = []
    for case in cases(args):
        results.append(case | child(args, case))
        print(json.dumps(results[-1]), file=sys.stderr, flush=True)
        if args.write:  # after every case, so that a later hang loses nothing
            Path(args.write).write_text(json.dumps(results, indent=1) + "\n")
    print(f"{machine()}; {versions('jax', 'jaxlib', 'optax')}")
    print(table(HEADINGS, [row(result) for result in results]))


def cases(args: argparse.Namespace) -> list[dict[str, Any]]:
    tokens, largest = 32 if args.tiny else 2048, max(args.rows)
    found = [
        {"rows": rows, "tokens": tokens, "remat": remat, "num_minibatches": 1}
        for remat, rows in itertools.product(args.remats, args.rows)
        if remat != "offload"
    ]
    found += [{"rows": largest, "tokens": tokens, "remat": "none", "num_minibatches": 4}]
    # Offloading comes last and for one size only, because it is slow and most likely to fail.
    offloaded = {"rows": largest, "tokens": tokens, "remat": "offload", "num_minibatches": 1}
    return [*found, offloaded] if "offload" in args.remats else found


def child(args: argparse.Namespace, case: dict[str, Any]) -> dict[str, Any]:
    command = [sys.executable, __file__, "--case", json.dumps(case), "--steps", str(args.steps)]
    command += ["--tiny"] if args.tiny else []
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
    except subprocess.TimeoutExpired:
        return {"failed": f"no result after {LIMIT} s"}
    if done.returncode:
        return {"failed": (done.stderr.strip().splitlines() or ["?"])[-1][:300]}
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def row(result: dict[str, Any]) -> list[str]:
    case = [str(result["rows"]), result["remat"], str(result["num_minibatches"])]
    if "failed" in result:
        return [*case, result["failed"][:60], *[""] * 7]
    program = result["program_bytes"]
    sizes = (program["peak_memory"], program["argument_size"], program["temp_size"], program["host_temp_size"])
    low, high = result["spread"]
    return [
        *case,
        f"{1e3 * result['seconds']:.1f}",
        f"{1e3 * low:.0f}-{1e3 * high:.0f}",
        f"{result['peak_bytes'] / GIB:.2f}",
        *(f"{size / GIB:.2f}" for size in sizes),
        f"{result['compile_seconds']:.0f} s",
    ]


# --- Measurement, in a separate process ---


def measure(args: argparse.Namespace, case: dict[str, Any]) -> dict[str, Any]:
    import jax
    import optax

    import meshwright as mw
    from meshwright.models import Decoder
    from meshwright.train import init_state, language_job, make_train_step, state_layout

    device, peaks = jax.local_devices()[0], {}

    def note(stage: str) -> None:
        peaks[stage] = (device.memory_stats() or {}).get("peak_bytes_in_use", 0)

    job = language_job(Decoder(**(TINY if args.tiny else SIZES)), batch_size=case["rows"], num_tokens=case["tokens"])
    optimizer = optax.adamw(1e-4)
    layout = state_layout(job, optimizer, mw.create_mesh("dp:1", devices=1))
    chosen = {"remat": case["remat"], "num_minibatches": case["num_minibatches"]}
    step = make_train_step(job, optimizer, layout, precision="mixed", clip=1.0, **chosen)
    state = jax.block_until_ready(init_state(job, optimizer, layout, jax.random.key(0)))
    note("init")
    batch = step.place(job.make_batch(0))
    start = time.perf_counter()
    compiled = step.lower(batch).compile()  # called directly below, because `step` would compile again
    compile_seconds = time.perf_counter() - start
    note("compile")
    program = compiled.memory_analysis()

    times = []
    for number in range(3 + args.steps):
        start = time.perf_counter()
        state, metrics = compiled(state, batch)
        jax.block_until_ready(metrics["loss"])
        if number >= 3:
            times.append(time.perf_counter() - start)
    note("steps")
    return {
        "seconds": statistics.median(times),
        "spread": [min(times), max(times)],
        "peak_bytes": peaks["steps"],
        "peak_bytes_after": peaks,
        "program_bytes": {name: getattr(program, f"{name}_in_bytes", 0) for name in PROGRAM},
        "compile_seconds": compile_seconds,
        "device": device.device_kind,
        "jax": jax.__version__,
    }


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS, help="batch sizes (default: 4 8 16)")
    parser.add_argument("--remats", nargs="+", choices=REMATS, default=REMATS)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--write", help="JSON file for the results, written after every case")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
