"""Planned against measured peak memory and step time of a 956M decoder on one H200.

    python benchmarks/plan_h200.py --measure > measured.json     # on the H200
    python benchmarks/plan_h200.py --measured measured.json      # with the CUDA plugin; needs no GPU

Three batch sizes and three remat policies, 2048 tokens per row. Each case runs in a separate process: 3 warmup steps,
then the median of 10 synchronized steps. One more case: --one 8,offload [--layers scan].
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

from measure import table, verdict

ROWS, POLICIES, TOKENS = (8, 16, 32), ("none", "dots", "full"), 2048


def main() -> None:
    args = arguments()
    if args.one:
        rows, remat = args.one.split(",")
        print(json.dumps(measure(args, int(rows), remat)), flush=True)
    elif args.measure:
        found = []
        for rows in args.rows:
            for remat in POLICIES:
                command = [sys.executable, __file__, "--one", f"{rows},{remat}", "--size", args.size]
                done = subprocess.run([*command, "--tokens", str(args.tokens)], capture_output=True, text=True)
                if done.returncode:
                    print(f"{rows} rows, {remat}: {done.stderr.strip().splitlines()[-1]}", file=sys.stderr)
                    continue
                found.append(json.loads(done.stdout.strip().splitlines()[-1]))
                print(json.dumps(found[-1]), file=sys.stderr, flush=True)
        print(json.dumps(found, indent=1))
    else:
        compare(args, json.loads(Path(args.measured).read_text()))


def job_of(size: str | dict[str, int], rows: int, tokens: int, layers: Any = "auto") -> Any:
    from meshwright.models import Decoder, Execution
    from meshwright.train import language_job

    model = Decoder.named(size) if isinstance(size, str) else Decoder(**size)
    return language_job(model, batch_size=rows, num_tokens=tokens, run=Execution(layers=layers))


def measure(args: argparse.Namespace, rows: int, remat: str) -> dict[str, Any]:
    import jax
    import optax

    import meshwright as mw
    from meshwright.train import init_state, make_train_step, state_layout

    job, optimizer = job_of(args.size, rows, args.tokens, args.layers), optax.adamw(1e-4)
    layout = state_layout(job, optimizer, mw.create_mesh("dp:1", devices=1))
    state = init_state(job, optimizer, layout, jax.random.key(0))
    step = make_train_step(job, optimizer, layout, precision="mixed", remat=remat, clip=1.0)
    batch = step.place(job.make_batch(0))
    times = []
    for number in range(13):
        begin = time.perf_counter()
        state, metrics = step(state, batch)
        metrics["loss"].block_until_ready()
        if number >= 3:
            times.append(time.perf_counter() - begin)
    stats = jax.local_devices()[0].memory_stats() or {}
    return {
        "rows": rows,
        "tokens": args.tokens,
        "remat": remat,
        "seconds": statistics.median(times),
        "spread": [min(times), max(times)],
        "peak_bytes": stats.get("peak_bytes_in_use", 0),
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
    }


def compare(args: argparse.Namespace, measured: list[dict[str, Any]]) -> None:
    from meshwright.plan.compiled.compile import compile_step
    from meshwright.plan.costs.job_costs import profile_job
    from meshwright.plan.plan import make_plan
    from meshwright.plan.step_setup import Setup

    shown, memory_off, time_off = [], [], []
    predicted: dict[str, list[tuple[float, str]]] = {}
    real: dict[str, list[tuple[float, str]]] = {}
    profiles: dict[str, Any] = {}
    for case in measured:
        rows, remat, precision = case["rows"], case["remat"], case.get("precision", "mixed")
        if remat == "offload":  # its rates were fitted
            continue
        size = case.get("model", args.size)
        job = job_of(size, rows, case["tokens"])
        setup = Setup(mesh="dp:1", remat=remat, num_minibatches=case.get("num_minibatches", 1), precision=precision)
        group = f"{size} {precision}"
        if group not in profiles:
            profiles[group] = profile_job(job, platform="gpu", precision=precision)
        profile = profiles[group]
        compiled = compile_step(job, "h200:1x1", setup, python=args.python)
        plan = make_plan(job, "h200:1x1", setup, profile=profile, compiled=compiled)
        alone = make_plan(job, "h200:1x1", setup, profile=profile)
        ratio = plan.memory.total / case["peak_bytes"]
        slower = plan.time.step.value / case["seconds"]
        memory_off.append(abs(ratio - 1))
        time_off.append(abs(slower - 1))
        predicted.setdefault(f"{group} {rows}", []).append((plan.time.step.value, remat))
        real.setdefault(f"{group} {rows}", []).append((case["seconds"], remat))
        shown.append(
            [
                f"{rows} x {case['tokens']}", precision, remat, f"{case['peak_bytes'] / 2**30:.1f}",
                f"{plan.memory.total / 2**30:.1f}", f"{ratio:.3f}", f"{alone.memory.total / 2**30:.1f}",
                f"{1e3 * case['seconds']:.1f}", f"{1e3 * plan.time.step.value:.1f}", f"{slower:.3f}",
            ]
        )  # fmt: skip
        print(shown[-1], file=sys.stderr, flush=True)
    heads = ["rows", "precision", "remat", "peak GiB", "compiled", "of it", "computed", "ms", "planned", "of it"]
    print(table(heads, shown))
    print(verdict(f"peak memory at most {max(memory_off):.1%} off (10% allowed)", max(memory_off) <= 0.1))
    print(verdict(f"step time at most {max(time_off):.1%} off (20% allowed)", max(time_off) <= 0.2))
    same = all(
        [name for _, name in sorted(predicted[rows])] == [name for _, name in sorted(real[rows])] for rows in real
    )
    print(verdict("policies ranked as measured", same))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", action="store_true")
    parser.add_argument("--measured", help="JSON file written by --measure")
    parser.add_argument("--python", help="Python interpreter with the CUDA plugin (default: this one)")
    parser.add_argument("--size", default="956m")
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--rows", type=int, nargs="*", default=list(ROWS))
    parser.add_argument("--one", help="measure a single case: batch size and remat policy, such as 8,offload")
    parser.add_argument("--layers", default="auto", choices=("auto", "scan", "unroll"), help="layers of --one")
    return parser.parse_args()


if __name__ == "__main__":
    main()
