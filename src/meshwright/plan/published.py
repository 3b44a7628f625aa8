"""Published training runs, against which step times are fitted and checked.

`published.toml` lists them by source. Runs of a chip alternate: the first, third, ... fit its rates, the others check
the fit; if the rates were measured instead, all runs check them. Some runs are only compared, because they do not test
the two rates: see `PublishedRun.compared`. A throughput published in TFLOP/s is converted with 6 operations per
parameter and token, and causal attention counted as the half that is needed, as its authors did.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from meshwright.hardware.chips import chip_of
from meshwright.models.decoder import Decoder
from meshwright.plan.costs.job_costs import JobCosts
from meshwright.plan.costs.overlap_limit import SLOP_OPTION
from meshwright.plan.job_on_mesh import profile_of
from meshwright.plan.plan import Plan, make_plan
from meshwright.plan.published_table import chip_with_runs, published_table, why_only_compared
from meshwright.plan.step_setup import Setup
from meshwright.plan.target import parse_target
from meshwright.train.jobs.language_job import language_job


@dataclass(frozen=True)
class PublishedRun:
    """One training run that somebody else measured.

    Args:
        source: the publication.
        name: name of the model.
        tokens: tokens per row.
        zero_axis, pipeline, microbatches: fields of `Setup`.
        tokens_per_second: published throughput per device.
        compared: why the run neither fits rates nor checks them: "pipeline" (devices of other engines do not wait for
            each other at each tick, as ours do), "tp on GPUs" (no other engine overlaps its communication as our rings
            do, whose factor was measured), or "superseded" (the same publisher repeated it later). "" if it does.
        is_fitted: whether the rates of its chip were fitted to it.
    """

    source: str
    name: str
    model: Decoder
    target: str
    mesh: str
    rows: int
    tokens: int
    remat: str
    minibatches: int
    zero_axis: str | None
    pipeline: str | None
    microbatches: int | None
    tokens_per_second: float
    compared: str
    is_fitted: bool

    @property
    def chip(self) -> str:
        """The chip; both sizes of an A100 count as one."""
        return chip_with_runs(parse_target(self.target).kind)

    @property
    def half(self) -> str:
        """What the run is for: "fitted", "held out", or "compared" and why."""
        if self.compared:
            return f"compared: {self.compared}"
        return "fitted" if self.is_fitted else "held out"

    def plan(self, profiles: dict[Any, JobCosts] | None = None) -> Plan:
        """Plans the run by arithmetic; `profiles` keeps profiles, which take seconds each, for other runs."""
        job = language_job(self.model, batch_size=self.rows, num_tokens=self.tokens)
        target = parse_target(self.target)
        # Overlap in PyTorch does not depend on a scheduler's limit; runs on GPUs in JAX are planned in the same way.
        options = {SLOP_OPTION: 1000} if target.platform == "gpu" else {}
        setup = Setup(
            mesh=self.mesh,
            rows=self.rows,
            remat=self.remat,
            num_minibatches=self.minibatches,
            zero_axis=self.zero_axis,
            pipeline=self.pipeline,
            num_microbatches=self.microbatches,
            compiler_options=options,
        )
        known = {} if profiles is None else profiles
        key = (self.name, self.tokens, self.remat, self.pipeline, target.platform)
        if key not in known:
            known[key] = profile_of(job, target, setup)
        return make_plan(job, target, setup, profile=known[key])


@functools.cache
def published_runs() -> tuple[PublishedRun, ...]:
    """Returns the runs in `published.toml`.

    Example:
        >>> runs = published_runs()
        >>> len(runs) > 50, sorted({run.chip for run in runs})
        (True, ['a100', 'h100', 'h200', 'v4', 'v5e', 'v5p', 'v6e'])
    """
    table = published_table()
    found: list[PublishedRun] = []
    for row in table["runs"]:
        model = Decoder(**table["models"][row["model"]])
        run = PublishedRun(
            source=table["sources"][row["source"]],
            name=row["model"],
            model=model,
            target=row["target"],
            mesh=row["mesh"],
            rows=row["rows"],
            tokens=row["tokens"],
            remat=row["remat"],
            minibatches=row.get("minibatches", 1),
            zero_axis=row.get("zero_axis"),
            pipeline=row.get("pipeline"),
            microbatches=row.get("microbatches"),
            tokens_per_second=_tokens_per_second(row, model),
            compared=why_only_compared(row),
            is_fitted=False,
        )
        before = sum(run.chip == other.chip and not other.compared for other in found)
        chip = chip_of(run.chip)
        fits = chip is not None and chip.rates.is_fitted and not run.compared
        found.append(replace(run, is_fitted=fits and before % 2 == 0))
    return tuple(found)


def _tokens_per_second(row: Mapping[str, Any], model: Decoder) -> float:
    if "tokens_per_second" in row:
        return float(row["tokens_per_second"])
    if "seconds" in row:
        return float(row["rows"] * row["tokens"] / row["seconds"] / parse_target(row["target"]).num_devices)
    head_dim = model.head_dim or model.d_model // model.num_heads
    attention = model.num_layers * model.num_heads * head_dim * row["tokens"]
    return float(row["tflops"] * 1e12 / (6 * model.num_params + 6 * attention))
