"""Compares planned with published throughput, and fits the rates of `hardware/chips.toml`.

    .venv/3.11/bin/python benchmarks/published_runs.py [--chips h100 v5p] [--markdown FILE]

Each run in `plan/published.toml` is planned by arithmetic. Of a chip's runs, every second one is held out. The others
fit two shares of the peak, of matmuls and of attention, by least squares of the log ratio of planned to published
tokens per second, with a weak preference for the attention share measured elsewhere, which short rows hardly
determine. If the shares of a chip were measured, all of its runs are held out. `PublishedRun.compared` says which runs
are only compared. Held-out runs decide *met* or *MISSED*: a median ratio of 0.90 to 1.10, nine in ten within 25%.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from meshwright.hardware.chips import chip_of
from meshwright.plan.costs.step_time import RING_FACTOR
from meshwright.plan.plan import Plan
from meshwright.plan.published import PublishedRun, published_runs

MATMUL_SHARES = [share / 100 for share in range(40, 96)]
ATTENTION_SHARES = [share / 100 for share in range(20, 80, 2)]
PREFERRED = {"gpu": 0.39, "tpu": 0.46}  # measured on one H200; first fitted to rows of 8192 tokens on v6e
WEIGHT = 0.01
FEW = 5  # runs, below which a chip's error is at least the one wanted of held-out runs
WITHIN = 0.25


@dataclass(frozen=True)
class Case:
    """A run and its plan."""

    run: PublishedRun
    plan: Plan

    def ratio(self, matmul: float | None = None, attention: float | None = None) -> float:
        """Returns planned over published tokens per second, with other shares of the peak if given."""
        plan, chip = self.plan, self.plan.target.chip
        assert plan.time is not None
        assert chip is not None
        assert plan.peak_flops is not None
        if self.run.pipeline is not None:  # never fitted
            return plan.tokens_per_step / plan.time.step.value / plan.target.num_devices / self.run.tokens_per_second
        seconds = plan.time.step.value - plan.time.matmul.value
        ring = RING_FACTOR[chip.platform] if "tp:" in self.run.mesh else 1.0
        peak = plan.target.num_devices * plan.peak_flops
        seconds += (plan.flops.matmul - plan.flops.attention) * ring / peak / (matmul or chip.rates.matmul)
        seconds += plan.flops.attention / peak / (attention or chip.rates.attention)
        return plan.tokens_per_step / seconds / plan.target.num_devices / self.run.tokens_per_second


def fit(cases: list[Case]) -> tuple[float, float]:
    """Returns the shares of the peak of matmuls and of attention that fit these runs best."""
    chip = cases[0].plan.target.chip
    assert chip is not None
    preferred = PREFERRED[chip.platform]

    def loss(shares: tuple[float, float]) -> float:
        errors = [math.log(case.ratio(*shares)) for case in cases]
        return math.fsum(error**2 for error in errors) + WEIGHT * math.log(shares[1] / preferred) ** 2

    return min(itertools.product(MATMUL_SHARES, ATTENTION_SHARES), key=loss)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chips", nargs="*", help="only these chips")
    parser.add_argument("--markdown", type=Path, help="write the table of runs to this file")
    options = parser.parse_args()
    profiles: dict = {}
    by_chip: dict[str, list[Case]] = defaultdict(list)
    for run in published_runs():
        if not options.chips or run.chip in options.chips:
            by_chip[run.chip].append(Case(run, run.plan(profiles)))
    lines = []
    for name, cases in by_chip.items():
        chip = chip_of(name)
        assert chip is not None
        fitted = [case for case in cases if case.run.half == "fitted"]
        held = [case.ratio() for case in cases if case.run.half == "held out"]
        compared = sorted((case for case in cases if case.run.compared), key=lambda case: case.run.compared)
        stored = (chip.rates.matmul, chip.rates.attention, chip.rates.error)
        shares = fit(fitted) if fitted else stored[:2]
        median, near = statistics.median(held), sum(abs(ratio - 1) <= WITHIN for ratio in held) / len(held)
        ratios = [case.ratio() for case in cases if not case.run.compared]
        worst = max(abs(math.log(ratio)) for ratio in ratios)
        least = WITHIN if len(ratios) < FEW else 0.10
        error = max(least, math.ceil(100 * (math.exp(worst) - 1)) / 100)
        said = "met" if 0.90 <= median <= 1.10 and near >= 0.9 else "MISSED"
        kept = "as stored" if (*shares, error) == stored else f"STORED: {stored}"
        print(
            f"{name}: fit {shares[0]:.2f} and {shares[1]:.2f} of the peak, error {error:.2f} ({kept}); held-out runs "
            f"{len(held)}, median {median:.3f}, {near:.0%} within 25%: {said}"
        )
        by_source = itertools.groupby((case for case in cases if not case.run.compared), lambda case: case.run.source)
        by_reason = itertools.groupby(compared, lambda case: f"only compared ({case.run.compared})")
        for group, members in itertools.chain(by_source, by_reason):
            each = [case.ratio() for case in members]
            print(f"  {group}: {len(each)}, median {statistics.median(each):.2f}, {min(each):.2f} to {max(each):.2f}")
        for case in cases:
            run, plan = case.run, case.plan
            planned = case.ratio() * run.tokens_per_second
            lines.append(
                f"| {run.name} | {run.target} | `{run.mesh}` | {run.rows} x {run.tokens} | {run.remat} | "
                f"{run.tokens_per_second:,.0f} | {planned:,.0f} | {case.ratio():.2f} | {plan.mfu:.1%} | {run.half} | "
                f"{run.source} |"
            )
    heading = [
        "model",
        "machine",
        "mesh",
        "rows x tokens",
        "remat",
        "published",
        "planned",
        "ratio",
        "planned MFU",
        "half",
        "source",
    ]
    text = "\n".join([f"| {' | '.join(heading)} |", "|" + "---|" * len(heading), *lines])
    print(text)
    if options.markdown:
        options.markdown.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
