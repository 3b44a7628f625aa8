"""Published training runs, against which step times are fitted and checked.

`published.toml` lists them by source. Runs of a chip alternate: the first, third, ... fit its rates, the others check
the fit. A throughput published in TFLOP/s is converted with 6 operations per parameter and token, and causal attention
counted as the half that is needed, as its authors did.
"""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

from meshwright.models.decoder import Decoder
from meshwright.plan.costs.job_costs import JobCosts
from meshwright.plan.costs.memory import SLOP_OPTION
from meshwright.plan.job_on_mesh import profile_of
from meshwright.plan.plan import Plan, make_plan
from meshwright.plan.step_setup import Setup
from meshwright.plan.target import parse_target
from meshwright.train.jobs.language_job import language_job

_SAME_CHIP = {"a100-40": "a100"}


@dataclass(frozen=True)
class PublishedRun:
    """One training run that somebody else measured.

    Args:
        source: the publication.
        name: name of the model.
        tokens: tokens per row.
        tokens_per_second: published throughput per device.
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
    tokens_per_second: float
    is_fitted: bool

    @property
    def chip(self) -> str:
        """The chip; both sizes of an A100 count as one."""
        kind = parse_target(self.target).kind
        return _SAME_CHIP.get(kind, kind)

    def plan(self, profiles: dict[Any, JobCosts] | None = None) -> Plan:
        """Plans the run by arithmetic; `profiles` keeps profiles, which take seconds each, for other runs."""
        job = language_job(self.model, batch_size=self.rows, num_tokens=self.tokens)
        target = parse_target(self.target)
        # All runs on GPUs used PyTorch, whose overlap does not depend on a scheduler's limit.
        options = {SLOP_OPTION: 1000} if target.platform == "gpu" else {}
        setup = Setup(
            mesh=self.mesh, rows=self.rows, remat=self.remat, num_minibatches=self.minibatches, compiler_options=options
        )
        known = {} if profiles is None else profiles
        key = (self.name, self.tokens, self.remat, target.platform)
        if key not in known:
            known[key] = profile_of(job, target, setup)
        return make_plan(job, target, setup, profile=known[key])


@functools.cache
def published_runs() -> tuple[PublishedRun, ...]:
    """Returns the runs in `published.toml`.

    Example:
        >>> runs = published_runs()
        >>> len(runs) > 50, sorted({run.chip for run in runs})
        (True, ['a100', 'h100', 'v4', 'v5e', 'v5p', 'v6e'])
    """
    text = resources.files("meshwright.plan").joinpath("published.toml").read_text(encoding="utf-8")
    table = tomllib.loads(text)
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
            tokens_per_second=_tokens_per_second(row, model),
            is_fitted=False,
        )
        fitted = sum(run.chip == other.chip for other in found) % 2 == 0
        found.append(PublishedRun(**{**vars(run), "is_fitted": fitted}))
    return tuple(found)


def _tokens_per_second(row: Mapping[str, Any], model: Decoder) -> float:
    if "tokens_per_second" in row:
        return float(row["tokens_per_second"])
    head_dim = model.head_dim or model.d_model // model.num_heads
    attention = model.num_layers * model.num_heads * head_dim * row["tokens"]
    return float(row["tflops"] * 1e12 / (6 * model.num_params + 6 * attention))
