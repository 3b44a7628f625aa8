"""Step time of the 956M decoder on one GPU with AdamW, with Muon, and with optax's Muon on the same matrices.

    PYTHONPATH=src python3 benchmarks/muon_h200.py

All programs are compiled first. Then they take turns in a random order, `--steps` synchronized steps each round, with
states of their own. `--tiny` runs small sizes on a CPU, to test the script.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from typing import Any

import jax
import optax
from decoder_h200 import SIZES, TINY
from measure import machine, table, versions

import meshwright as mw
from meshwright.models import Decoder
from meshwright.train import init_state, language_job, make_train_step, muon, state_layout
from meshwright.train.muon import NOT_MATRICES
from meshwright.tree import named_tree_map

RATE, LIMIT = 1e-4, 1.10


def optax_muon() -> Any:
    """Returns `optax.contrib.muon` with the matrices that ours chooses."""
    matrix = optax.contrib.MuonDimensionNumbers(-2, -1)

    def numbers(params: Any) -> Any:
        return named_tree_map(
            lambda name, leaf: matrix if leaf.ndim > 1 and not any(word in name for word in NOT_MATRICES) else None,
            params,
            sep="/",
        )

    return optax.contrib.muon(RATE, consistent_rms=0.2, muon_weight_dimension_numbers=numbers)


OPTIMIZERS = {
    "adamw": lambda: optax.adamw(RATE),
    "muon": lambda: muon(RATE),
    "muon, 4 iterations": lambda: muon(RATE, num_iterations=4),
    "optax.contrib.muon": optax_muon,
}


def main() -> None:
    args = arguments()
    sizes, rows, tokens = (TINY, 4, 32) if args.tiny else (SIZES, 16, 2048)
    job = language_job(Decoder(**sizes), batch_size=rows, num_tokens=tokens)
    mesh = mw.create_mesh("dp:1", devices=1)
    programs, states, peaks, batch = {}, {}, {}, None
    for name, make in OPTIMIZERS.items():
        optimizer = make()
        layout = state_layout(job, optimizer, mesh)
        step = make_train_step(job, optimizer, layout, precision="mixed", clip=1.0)
        batch = step.place(job.make_batch(0))
        programs[name] = step.lower(batch).compile()
        peaks[name] = programs[name].memory_analysis().peak_memory_in_bytes
        states[name] = init_state(job, optimizer, layout, jax.random.key(0))
    times: dict[str, list[float]] = {name: [] for name in programs}
    losses = dict.fromkeys(programs, 0.0)
    order, draw = list(programs), random.Random(0)
    for number in range(1 + args.rounds):
        draw.shuffle(order)
        for name in order:
            for _ in range(args.steps):
                start = time.perf_counter()
                states[name], metrics = programs[name](states[name], batch)
                losses[name] = float(metrics["loss"])
                if number:  # the first round warms up
                    times[name].append(time.perf_counter() - start)
    base = statistics.median(times["adamw"])
    print(f"{machine()}; {versions('jax', 'jaxlib', 'optax')}")
    lines = [
        [name, f"{1e3 * statistics.median(found):.1f}", f"{statistics.median(found) / base:.3f}",
         f"{peaks[name] / 2**30:.1f}", f"{losses[name]:.3f}"]
        for name, found in times.items()
    ]  # fmt: skip
    print(table(("optimizer", "ms", "over adamw", "peak GiB", "last loss"), lines))
    ratio = statistics.median(times["muon"]) / base
    print(f"muon over adamw {ratio:.3f}, at most {LIMIT:.2f}: {'met' if ratio <= LIMIT else 'MISSED'}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8, help="steps of each optimizer in a round")
    parser.add_argument("--tiny", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    main()
