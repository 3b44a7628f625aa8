"""Overhead of the training loop over the bare compiled step: logs, progress, guards, prefetching, but no saves.

    python benchmarks/loop_overhead.py
    python benchmarks/loop_overhead.py --model decoder-125m --rows 16 --tokens 1024   # on a GPU

Both run the same number of steps on the same device, in turns. The bare step gets batches that are already on the
device and synchronizes once, at the end of a turn.
"""

from __future__ import annotations

import argparse
import io
import tempfile
import time
from pathlib import Path

import jax
from measure import machine, median, table, verdict, versions


def main() -> None:
    args = arguments()
    jax.config.update("jax_num_cpu_devices", args.devices)
    import meshwright as mw
    from meshwright.data import Batches, Rows, load_tokenizer, open_documents, prepare_tokens
    from meshwright.loop import (
        Loop,
        Preemption,
        Progress,
        RunLog,
        SkippedSteps,
        StepLog,
        Watchdog,
        make_model,
        make_optimizer,
    )
    from meshwright.loop.fit import fit
    from meshwright.loop.settings.options import OptimizerOptions
    from meshwright.train import NonFiniteGuard, init_state, language_job, make_train_step, state_layout

    model = make_model(args.model)
    job = language_job(model, batch_size=args.rows, num_tokens=args.tokens, packed=True)
    optimizer = make_optimizer(OptimizerOptions(), 10_000)
    layout = state_layout(job, optimizer, mw.create_mesh(f"dp:{args.devices}"))
    step = make_train_step(job, optimizer, layout)
    state = init_state(job, optimizer, layout, jax.random.key(0))
    with tempfile.TemporaryDirectory() as folder:
        tokens = prepare_tokens(open_documents(), load_tokenizer("bytes"), folder=Path(folder) / "tokens")
        rows = Rows(tokens, args.tokens)

        def batches(start: int = 0) -> Batches:
            options = {"batch_size": args.rows, "shardings": step.batch_shardings, "seed": 0, "start_row": start}
            return Batches(rows, **options)

        with batches() as source:
            ready = [next(source).arrays for _ in range(8)]
        log = RunLog(Path(folder) / "run", tensorboard=True)
        guard = NonFiniteGuard.for_layout(layout)
        bare, looped = [], []
        with Preemption() as preemption, Watchdog(600, tell=print, folder=folder) as watchdog:
            for turn in range(args.turns + 1):
                began = time.perf_counter()
                for number in range(args.steps):
                    state, metrics = step._jit(state, ready[number % len(ready)])
                jax.block_until_ready(metrics)
                bare.append((time.perf_counter() - began) / args.steps)
                progress = Progress(10**6, stream=io.StringIO(), plain_seconds=1.0)
                stats = StepLog(flops_per_step=1e12, peak_flops=1e15)
                callbacks = [watchdog, stats, SkippedSteps(guard), progress, preemption]
                loop = Loop(step, int(state.step) + args.steps, log, callbacks)
                source = batches(turn * args.steps * args.rows)
                began = time.perf_counter()
                state = fit(loop, state, source).state
                jax.block_until_ready(state)
                looped.append((time.perf_counter() - began) / args.steps)
        log.close()
    ratios = [ours / theirs for ours, theirs in zip(looped[1:], bare[1:], strict=True)]  # the first turn compiles
    print(f"{machine()}; {jax.devices()[0].device_kind} x {args.devices}; {versions('jax', 'grain')}")
    print(
        table(
            ["", "ms per step, median", "min", "max"],
            [
                [name, *(f"{1e3 * pick(values[1:]):.1f}" for pick in (median, min, max))]
                for name, values in (("bare step", bare), ("in the loop", looped))
            ],
        )
    )
    over = median(ratios)
    print(verdict(f"the loop takes {over:.3f}x the bare step (target: below 1.02)", over < 1.02))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--model", default="decoder-small")
    parser.add_argument("--rows", type=int, default=4, help="batch size (default: 4, about 50 ms on two cores)")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--steps", type=int, default=40, help="steps per turn (default: 40)")
    parser.add_argument("--turns", type=int, default=9)
    return parser.parse_args()


if __name__ == "__main__":
    main()
