"""Compares pipelines with one device: loss, metrics and every gradient, for all combinations of options.

    python benchmarks/pipeline_equality.py                                    # 288 cases, about 15 minutes on a core
    python benchmarks/pipeline_equality.py --layers 9                         # stages that do not divide the layers

Runs a tiny packed decoder on eight simulated devices, in float32. A difference is relative to the largest element of
its array. Prints every case above the bound, and the largest difference of each schedule.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import sys
import time

import jax
import numpy as np
import optax
from measure import table

import meshwright as mw
from meshwright.models import Decoder, Execution
from meshwright.parallel.pipeline.named_schedules import SCHEDULE_NAMES, check_rounds
from meshwright.train import init_state, language_job, state_layout
from meshwright.train.gradients import make_gradients

BOUND = 4e-5
"""As in `tests/models/test_pipeline_schedules.py`."""


def main() -> None:
    args = arguments()
    mw.simulate_cpu_devices(8)
    cases = itertools.product((2, 4), ("dp", "fsdp", "tp"), (False, True), (1, 2), (0.0, 0.1))
    cases, rows, num_above, num_run = list(cases), [], 0, 0
    for name in args.schedules:
        start, found = time.monotonic(), []
        for pp, other, tied, num_minibatches, dropout in cases:
            if pp * check_rounds(name, None) > args.layers:
                continue  # fewer layers than stages
            run = Execution(pipeline=name, num_microbatches=pp)
            mesh = mw.create_mesh(f"pp:{pp},{other}:2", devices=2 * pp)
            got = gradients(args.layers, tied, dropout, mesh, run, num_minibatches)
            largest, leaf = difference(got, one_device(args.layers, tied, dropout), args.layers)
            found.append(largest)
            if not largest < BOUND:
                num_above += 1
                print(f"{name} pp:{pp},{other}:2 {tied=} {num_minibatches=} {dropout=}: {largest:.2e} at {leaf}")
        num_run += len(found)
        rows.append((name, str(len(found)), f"{max(found, default=0):.2e}", f"{np.median(found or [0]):.2e}"))
        print(*rows[-1], f"in {time.monotonic() - start:.0f} s", flush=True)
    print(table(("schedule", "cases", "largest difference", "median"), rows))
    skipped = len(rows) * len(cases) - num_run
    print(f"{num_run} cases, {num_above} above {BOUND:g}; {skipped} left out, with more stages than layers")
    sys.exit(bool(num_above))


def gradients(
    num_layers: int, tied: bool, dropout: float, mesh: jax.sharding.Mesh, run: Execution | None, num_minibatches: int
) -> tuple[object, object, object]:
    """Returns the loss, the metrics and the gradients of the first batch."""
    model = Decoder(
        vocab_size=32, num_layers=num_layers, d_model=16, num_heads=4, num_kv_heads=2, head_dim=4, d_ff=24,
        dropout=dropout, tied_embeddings=tied,
    )  # fmt: skip
    job = language_job(model, batch_size=16, num_tokens=8, run=run, packed=True, z_loss=1e-3)
    layout = state_layout(job, optax.sgd(0.1), mesh, pad=("layers/",))
    params = init_state(job, optax.sgd(0.1), layout, jax.random.key(0)).params
    options = {"xla_backend_optimization_level": 0}  # compiling takes most of the time
    compute = jax.jit(make_gradients(job, layout, num_minibatches=num_minibatches), compiler_options=options)
    result, _ = compute(params, job.make_batch(0), jax.random.key(1))
    found: tuple[object, object, object] = jax.device_get((result.loss, result.metrics, result.grads))
    return found


@functools.cache
def one_device(num_layers: int, tied: bool, dropout: float) -> tuple[object, object, object]:
    """Returns the same of one device and the whole batch."""
    return gradients(num_layers, tied, dropout, mw.create_mesh("dp:1", devices=1), None, 1)


def difference(got: object, expected: object, num_layers: int) -> tuple[float, str]:
    """Returns the largest difference, and the name of its array; gradients of padding must be exactly zero."""
    found = []
    for (path, a), (_, b) in zip(jax.tree.leaves_with_path(got), jax.tree.leaves_with_path(expected), strict=True):
        padding = 0.0
        if np.shape(a) != np.shape(b):
            a, padding = a[:num_layers], np.abs(a[num_layers:]).max()
        largest = np.abs(a - b).max() / np.abs(b).max() if np.any(b) else np.abs(a).max()
        found.append((float("inf") if padding else float(largest), jax.tree_util.keystr(path)))
    return max(found, key=lambda one: (np.isnan(one[0]), one[0]))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--schedules", nargs="+", default=list(SCHEDULE_NAMES), choices=SCHEDULE_NAMES)
    return parser.parse_args()


if __name__ == "__main__":
    main()
