"""Step time and memory of LoRA beside full fine-tuning: the 956M decoder on one GPU.

    PYTHONPATH=src python3 benchmarks/lora.py --write benchmarks/h200_lora.json

Each case runs in a separate process: 3 warmup steps, then `--steps` timed, synchronized steps. `full` trains all
parameters; the others train adapters of rank 16 of all projections, with the frozen matrices in float32, bfloat16, int8
or nf4. Memory is reported twice: `peak` is the allocator's peak over init, matmul autotuning and steps; `program` is
the compiler's peak of a step, `state` its arguments. `--tiny` runs small sizes on a CPU, to test the script. All cases
take about three minutes on an H200.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from decoder_h200 import SIZES, TINY
from measure import machine, table, versions

CASES: dict[str, str | None] = {
    "full": None,
    "lora, bfloat16 base": "base=bfloat16",
    "lora, int8 base": "base=int8",
    "lora, nf4 base": "base=nf4",
    "lora, float32 base": "rank=16",
}
GIB, LIMIT = 2**30, 100  # bytes; seconds for one case
HEADINGS = ("rows", "remat", "case", "ms", "range", "of full", "peak GiB", "program", "state", "trained", "compile")


def main() -> None:
    args = arguments()
    if args.case:
        print(json.dumps(measure(args, json.loads(args.case))), flush=True)
        return
    results = []
    for remat in args.remats:
        for name in CASES:
            case = {"name": name, "remat": remat, "rows": args.rows, "tokens": 32 if args.tiny else 2048}
            results.append(case | child(args, case))
            print(json.dumps(results[-1]), file=sys.stderr, flush=True)
            if args.write:  # after every case, so that a later hang loses nothing
                Path(args.write).write_text(json.dumps(results, indent=1) + "\n")
    print(f"{machine()}; {versions('jax', 'jaxlib', 'optax')}")
    print(table(HEADINGS, [row(result, results) for result in results]))


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


def row(result: dict[str, Any], results: list[dict[str, Any]]) -> list[str]:
    case = [str(result["rows"]), result["remat"], result["name"]]
    if "failed" in result:
        return [*case, result["failed"][:60], *[""] * 7]
    full = next((one for one in results if one["name"] == "full" and one["remat"] == result["remat"]), {})
    low, high = result["spread"]
    return [
        *case,
        f"{1e3 * result['seconds']:.1f}",
        f"{1e3 * low:.0f}-{1e3 * high:.0f}",
        f"{result['seconds'] / full['seconds']:.3f}" if "seconds" in full else "",
        *(f"{result[name] / GIB:.2f}" for name in ("peak_bytes", "program_bytes", "state_bytes")),
        f"{result['trained'] / 1e6:.1f}M",
        f"{result['compile_seconds']:.0f} s",
    ]


# --- Measurement, in a separate process ---


def measure(args: argparse.Namespace, case: dict[str, Any]) -> dict[str, Any]:
    import jax
    import optax

    import meshwright as mw
    from meshwright.models import Decoder
    from meshwright.train import init_state, language_job, lora, make_train_step, state_layout
    from meshwright.train.state import only_trainable, trainable_leaves

    model = Decoder(**(TINY if args.tiny else SIZES))
    job = language_job(model, batch_size=case["rows"], num_tokens=case["tokens"])
    settings = CASES[case["name"]]
    if settings is not None:
        job = lora(job, settings, rank=16, alpha=32, block=32 if args.tiny else 64)
    optimizer = optax.adamw(1e-4)
    layout = state_layout(job, optimizer, mw.create_mesh("dp:1", devices=1), precision="mixed")
    step = make_train_step(job, optimizer, layout, precision="mixed", clip=1.0, remat=case["remat"])
    state = jax.block_until_ready(init_state(job, optimizer, layout, jax.random.key(0), precision="mixed"))
    trained = only_trainable(state.params, trainable_leaves(job, state.params))
    num_trained = sum(leaf.size for leaf in jax.tree.leaves(trained))
    state_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves((state.params, state.opt_state)))
    batch = step.place(job.make_batch(0))
    start = time.perf_counter()
    compiled = step.lower(batch).compile()  # called directly below, because `step` would compile again
    compile_seconds = time.perf_counter() - start
    program = compiled.memory_analysis()
    times, losses = [], []
    for number in range(3 + args.steps):
        start = time.perf_counter()
        state, metrics = compiled(state, batch)
        losses.append(float(metrics["loss"]))
        if number >= 3:
            times.append(time.perf_counter() - start)
    stats = jax.local_devices()[0].memory_stats() or {}
    return {
        "seconds": statistics.median(times),
        "spread": [min(times), max(times)],
        "peak_bytes": stats.get("peak_bytes_in_use", 0),
        "program_bytes": getattr(program, "peak_memory_in_bytes", 0) or program.temp_size_in_bytes,
        "temporary_bytes": program.temp_size_in_bytes,
        "state_bytes": state_bytes,
        "trained": num_trained,
        "losses": [losses[0], losses[-1]],
        "compile_seconds": compile_seconds,
    }


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--remats", nargs="+", default=["none"])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--write", help="write the results to this JSON file")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
