"""Bytes sent per step, counted by hand, computed by a plan, and read from programs compiled for two TPU slices.

    python benchmarks/plan_layouts.py                       # needs libtpu, but no TPU; half an hour
    python benchmarks/plan_layouts.py --targets v5p:2x2x2 --layouts 0 1 --no-compile

The counts by hand are for a decoder with four layers in a scan, AdamW, gathers and activations in bfloat16 and
gradients in float32. `tests/plan/costs/test_hand_counts.py` compares them with the computed ones.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

from measure import table, verdict, versions

from meshwright.models import Decoder
from meshwright.plan.compiled.compile import CompileError, compile_step
from meshwright.plan.costs.job_costs import JobCosts, profile_job
from meshwright.plan.plan import make_plan
from meshwright.plan.step_setup import Setup
from meshwright.train import language_job

TARGETS = ("v5e:2x4", "v5p:2x2x2")
LAYERS, WIDTH, HIDDEN, VOCAB = 4, 1024, 2816, 4096
ROWS, TOKENS = 32, 512
MATRICES = 4 * WIDTH * WIDTH + 3 * WIDTH * HIDDEN  # elements of one layer
ENDS = 2 * VOCAB * WIDTH  # embedding and head
NORMS = (2 * LAYERS + 1) * WIDTH  # replicated everywhere
ALL = LAYERS * MATRICES + ENDS
LIMIT = 0.05


def share(ways: int) -> float:
    return (ways - 1) / ways


def gathers(ways: int, tp: int = 1, times: int = 1) -> float:
    """Layers are gathered forward, backward, and one of them ahead; embedding and head once. Two bytes each."""
    return times * 2 * share(ways) * ((2 * LAYERS + 1) * MATRICES + ENDS) / tp


def gathers_once(ways: int) -> float:
    return 2 * share(ways) * ALL


def scatters(ways: int, tp: int = 1, times: int = 1) -> float:
    """Gradients have four bytes."""
    return times * 4 * share(ways) * ALL / tp


def sums(ways: int, elements: float) -> float:
    """An all-reduce is a scatter and a gather."""
    return 2 * 4 * share(ways) * elements


def rows(tp: int, data: int, per_layer: int) -> float:
    """Gathers and scatters of a layer's rows, two at embedding and head each, and five floats per token of the loss."""
    tokens = ROWS * TOKENS / data
    return share(tp) * tokens * (2 * (LAYERS * per_layer + 4) * WIDTH + 4 * 5 * tp)


# A layer has two blocks, each with one gather and one scatter of its rows, forward and backward, and one more gather
# for the gradients of its weights: 10. Recomputing a layer adds two gathers and a scatter: 13.
PLAIN, AGAIN = 10, 13
LAYOUTS: tuple[tuple[Setup, float], ...] = (
    (Setup(mesh="fsdp:8"), gathers(8) + scatters(8) + sums(8, NORMS)),
    (Setup(mesh="fsdp:8", num_minibatches=2, sync="once"), gathers_once(8) + scatters(8) + sums(8, NORMS)),
    (Setup(mesh="dp:2,fsdp:4"), gathers(4) + scatters(4) + sums(2, ALL / 4) + sums(8, NORMS)),
    (
        Setup(mesh="dp:2,fsdp:4", num_minibatches=2, sync="once"),
        gathers_once(4) + scatters(4) + sums(2, ALL / 4) + sums(8, NORMS),
    ),
    (Setup(mesh="fsdp:4,tp:2"), gathers(4, 2) + scatters(4, 2) + rows(2, 4, PLAIN) + sums(4, NORMS) + sums(2, NORMS)),
    (Setup(mesh="fsdp:2,tp:4"), gathers(2, 4) + scatters(2, 4) + rows(4, 2, PLAIN) + sums(2, NORMS) + sums(4, NORMS)),
    (Setup(mesh="dp:8"), sums(8, ALL + NORMS)),
    (Setup(mesh="tp:8"), rows(8, 1, PLAIN) + sums(8, NORMS)),
    (Setup(mesh="dp:4,fsdp:2"), gathers(2) + scatters(2) + sums(4, ALL / 2) + sums(8, NORMS)),
    (
        Setup(mesh="dp:2,fsdp:2,tp:2"),
        gathers(2, 2) + scatters(2, 2) + sums(2, ALL / 4) + rows(2, 4, PLAIN) + sums(4, NORMS) + sums(2, NORMS),
    ),
    (Setup(mesh="fsdp:8", num_minibatches=2), gathers(8, times=2) + scatters(8, times=2) + sums(8, NORMS)),
    (Setup(mesh="dp:2,tp:4"), sums(2, ALL / 4 + NORMS) + rows(4, 2, PLAIN) + sums(4, NORMS)),
    (Setup(mesh="fsdp:8", remat="full"), gathers(8) + scatters(8) + sums(8, NORMS)),
    (
        Setup(mesh="fsdp:2,tp:4", remat="full"),
        gathers(2, 4) + scatters(2, 4) + rows(4, 2, AGAIN) + sums(2, NORMS) + sums(4, NORMS),
    ),
    (Setup(mesh="dp:4,tp:2"), sums(4, ALL / 2 + NORMS) + rows(2, 4, PLAIN) + sums(2, NORMS)),
    (
        # The compiler moves the sums over dp out of the loop over minibatches.
        Setup(mesh="dp:2,fsdp:4", num_minibatches=2, sync="every"),
        gathers(4, times=2) + scatters(4, times=2) + sums(2, ALL / 4) + sums(8, NORMS),
    ),
)


def job() -> Any:
    sizes = {"num_layers": LAYERS, "d_model": WIDTH, "d_ff": HIDDEN, "vocab_size": VOCAB}
    return language_job(Decoder.named("tiny", **sizes), batch_size=ROWS, num_tokens=TOKENS)


def profile(job: Any) -> JobCosts:
    return profile_job(job, platform="tpu", remats=("none", "full"))


def computed(job: Any, target: str, setup: Setup, known: JobCosts) -> float:
    return sum(item.wire_bytes for item in make_plan(job, target, setup, profile=known).sent)


def main() -> None:
    args = arguments()
    decoder = job()
    known, lines, worst = profile(decoder), [], 0.0
    tell: Callable[[str], Any] = lambda text: print(text, file=sys.stderr, flush=True)  # noqa: E731
    for target in args.targets:
        for place in args.layouts or range(len(LAYOUTS)):
            setup, by_hand = LAYOUTS[place]
            found = [computed(decoder, target, setup, known)]
            if args.compile:
                tell(f"{target} {setup}")
                try:
                    found.append(compile_step(decoder, target, setup, timeout_s=900).wire_bytes)
                except CompileError as error:
                    tell(str(error))
                    lines.append((target, setup, f"{by_hand / 2**20:.2f}", f"{found[0] / 2**20:.2f}", error.reason, ""))
                    continue
            off = max(abs(value / by_hand - 1) for value in found)
            worst = max(worst, off)
            lines.append((target, setup, *(f"{value / 2**20:.2f}" for value in (by_hand, *found)), f"{off:.2%}"))
            tell("  ".join(map(str, lines[-1])))
    headings = ("target", "setup", "by hand, MiB", "computed", *(("compiled",) if args.compile else ()), "off")
    print(table(headings, lines))
    print(verdict(f"at most {worst:.2%} off the count by hand (limit: {LIMIT:.0%})", worst <= LIMIT))
    print(versions("jax", "libtpu"))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", nargs="*", default=list(TARGETS))
    parser.add_argument("--layouts", nargs="*", type=int, help="indices into LAYOUTS (default: all)")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    return parser.parse_args()


if __name__ == "__main__":
    main()
