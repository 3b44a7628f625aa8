"""Ticks, idle time and memory of the pipeline schedules.

    python benchmarks/pipelines.py                             # the tables, by arithmetic
    python benchmarks/pipelines.py --target v5p:2x2x1          # compiles a decoder; needs libtpu, but no TPU
    python benchmarks/pipelines.py --target cpu:4 --remat full
    python benchmarks/pipelines.py --target v5p:2x2x1 --vocab-size 32768   # mostly embedding and head

Compiles the train step of a 20M decoder on four stages, for 8 and 32 microbatches of one row of 512 tokens. The state
is the memory of the step's arguments.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import replace

from measure import table

from meshwright.mesh.string import parse_mesh
from meshwright.models import Decoder, Execution
from meshwright.models.execution import DATA_AXES
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
        found = [compiled_bytes(name, count, args) for count in (8, 32)]
        (state, few), (_, many) = [(state / 2**20, peak / 2**20) for state, peak in found]
        rows.append((name, f"{state:.1f}", f"{few:.1f}", f"{many:.1f}", f"{many - few:+.1f}"))
        print(rows[-1], flush=True)
    print(table(("schedule", "state", "8 microbatches", "32", "difference, MiB"), rows))


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


def compiled_bytes(name: str, num_microbatches: int, args: argparse.Namespace) -> tuple[int, int]:
    """Returns the bytes of a step's arguments per device, and the compiler's peak memory."""
    run = Execution(pipeline=name, num_microbatches=num_microbatches)  # type: ignore[arg-type]
    model = replace(MODEL, vocab_size=args.vocab_size, tied_embeddings=args.tied)
    data = math.prod(axis.size for axis in parse_mesh(args.mesh).axes if axis.name in DATA_AXES)
    job = language_job(model, batch_size=num_microbatches * data, num_tokens=512, run=run)
    setup = Setup(mesh=args.mesh, optimizer=args.optimizer, remat=args.remat)
    compiled = compile_step(job, args.target, setup)
    on_cpu = args.target.startswith("cpu")
    return compiled.memory["argument"], compiled.memory["temp"] if on_cpu else compiled.peak_bytes


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="target to compile for")
    parser.add_argument("--mesh", default="pp:4")
    parser.add_argument("--remat", default="none")
    parser.add_argument("--optimizer", default="sgd")
    parser.add_argument("--vocab-size", type=int, default=MODEL.vocab_size)
    parser.add_argument("--tied", action="store_true")
    parser.add_argument("--schedules", nargs="+", default=[name for name in SCHEDULE_NAMES if name != "circular"])
    return parser.parse_args()


if __name__ == "__main__":
    main()
