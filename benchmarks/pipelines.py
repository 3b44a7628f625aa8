"""Ticks, idle time and memory of the pipeline schedules.

    python benchmarks/pipelines.py                             # the tables, by arithmetic
    python benchmarks/pipelines.py --target v5p:2x2x1          # compiles a decoder; needs libtpu, but no TPU
    python benchmarks/pipelines.py --target cpu:4 --remat full

Compiles the train step of a 20M decoder on four stages, for 8 and 32 microbatches of one row of 512 tokens.
"""

from __future__ import annotations

import argparse

from measure import table

from meshwright.models import Decoder, Execution
from meshwright.parallel import make_schedule
from meshwright.parallel.pipeline.named_schedules import SCHEDULE_NAMES
from meshwright.plan.compiled.compile import compile_step
from meshwright.plan.step_setup import Setup
from meshwright.train import language_job

MODEL = Decoder(vocab_size=1024, num_layers=8, d_model=512, num_heads=4, num_kv_heads=4, head_dim=128, d_ff=1024)


def main() -> None:
    args = arguments()
    if args.target is None:
        for num_stages, num_microbatches in ((4, 8), (4, 32), (8, 32)):
            print(f"\n{num_stages} stages, {num_microbatches} microbatches")
            print(table(HEADS, [figures(name, num_stages, num_microbatches) for name in SCHEDULE_NAMES]))
        return
    rows = []
    for name in args.schedules:
        peaks = [compiled_peak(name, count, args.target, args.remat) / 2**20 for count in (8, 32)]
        rows.append((name, *(f"{peak:.1f}" for peak in peaks), f"{peaks[1] - peaks[0]:+.1f}"))
        print(rows[-1], flush=True)
    print(table(("schedule", "8 microbatches", "32", "difference, MiB"), rows))


HEADS = ("schedule", "ticks", "idle", "microbatches in memory", "time, recomputing", "time, saving")


def figures(name: str, num_stages: int, num_microbatches: int) -> tuple[str, ...]:
    """Returns a row of the table; a forward pass of a device takes 1, and so do both halves of the backward pass."""
    schedule = make_schedule(name, num_stages, num_microbatches)  # type: ignore[arg-type]
    one = 1 / schedule.num_rounds
    halves = 1 if schedule.splits_backward else 2
    ideal = 4 * num_microbatches
    recomputing = schedule.makespan(forward=one, backward=(halves + 1) * one, weights=one) / ideal
    saving = schedule.makespan(forward=one, backward=halves * one, weights=one) / ideal
    return (
        name,
        str(schedule.num_ticks),
        f"{schedule.bubble_fraction:.1%}",
        f"{max(schedule.peak_microbatches):g}",
        f"{recomputing:.2f}",
        "-" if name == "gpipe" else f"{saving:.2f}",
    )


def compiled_peak(name: str, num_microbatches: int, target: str, remat: str) -> int:
    """Returns the compiler's peak memory per device in bytes."""
    run = Execution(pipeline=name, num_microbatches=num_microbatches)  # type: ignore[arg-type]
    job = language_job(MODEL, batch_size=num_microbatches, num_tokens=512, run=run)
    compiled = compile_step(job, target, Setup(mesh="pp:4", optimizer="sgd", remat=remat))
    on_cpu = target.startswith("cpu")
    return compiled.memory["temp"] if on_cpu else compiled.peak_bytes


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="target to compile for")
    parser.add_argument("--remat", default="none")
    parser.add_argument("--schedules", nargs="+", default=[name for name in SCHEDULE_NAMES if name != "circular"])
    return parser.parse_args()


if __name__ == "__main__":
    main()
