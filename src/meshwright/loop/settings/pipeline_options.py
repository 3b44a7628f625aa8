"""The pipeline options of a run: applied to its job, and checked against its mesh, view and batch."""

from __future__ import annotations

import math
from typing import Any

from meshwright.errors import ConfigError
from meshwright.loop.settings.options import PlacementOptions
from meshwright.loop.sources import rows_of
from meshwright.models.execution import recomputes_stages
from meshwright.parallel.pipeline.named_schedules import make_schedule
from meshwright.parallel.pipeline.stage_moves import make_moves
from meshwright.specs import round_up
from meshwright.train import Step
from meshwright.train.job import execution_of, model_of
from meshwright.train.jobs.language_job import with_execution
from meshwright.train.views import PIPELINE_AXES


def pipeline_changes(options: PlacementOptions) -> dict[str, Any]:
    """Returns the fields of `Execution` that the options change."""
    wanted = {
        "pipeline": options.pipeline,
        "pipeline_rounds": options.pipeline_rounds,
        "num_microbatches": options.microbatches,
    }
    return {name: value for name, value in wanted.items() if value is not None}


def with_pipeline(job: Any, options: PlacementOptions) -> Any:
    """Returns the job with the pipeline options in its execution options."""
    changes = pipeline_changes(options)
    return with_execution(job, **changes) if changes else job


def pipeline_line(step: Step, job: Any, options: PlacementOptions) -> str | None:
    """Returns a line on the pipeline of a step, if it has one; raises if options have no effect."""
    sizes = step.layout.mesh.shape
    num_stages = math.prod(sizes.get(axis, 1) for axis in PIPELINE_AXES)
    changes, run = pipeline_changes(options), execution_of(job)
    if changes and (num_stages == 1 or step.view.view != "local"):
        names = " and ".join(_OPTIONS[name] for name in changes)
        if num_stages == 1:
            why = "the mesh has no axis pp with 2 or more devices"
            none = " ".join(f"{_OPTIONS[name]} None" for name in changes)
            hint = f"leave it out (a resumed run: pass {none}), or use e.g. --mesh pp:2,dp:4."
        else:
            why, hint = "XLA runs no pipeline in the global view", "use --view local."
        raise ConfigError(f"{names} would have no effect: {why}.", hint=hint)
    if num_stages == 1 or run is None or step.view.view != "local":
        return None
    count = run.num_microbatches or 2 * num_stages
    schedule = make_schedule(run.pipeline, num_stages, count, num_rounds=run.pipeline_rounds)
    if (model := model_of(job)) is not None:
        if run.pipeline != "gpipe":
            recomputes_stages(options.remat)  # raises if stages cannot do it
        make_moves(schedule.devices, num_stages, model.num_layers)  # raises if the layers do not fit
    return (
        f"pipeline: {run.pipeline}, {num_stages} stages, {count} microbatches; {schedule.num_ticks} ticks, "
        f"{schedule.bubble_fraction:.1%} idle"
    )


def require_rows(step: Step, job: Any, options: PlacementOptions) -> None:
    """Raises if the rows of a batch do not divide over devices, minibatches and microbatches."""
    step.batch_shardings(job.batch)
    rows, minibatches = rows_of(job), options.minibatches
    devices = math.prod(step.layout.mesh.shape[axis] for axis in step.row_axes)
    num_stages, run = math.prod(step.layout.mesh.shape.get(axis, 1) for axis in PIPELINE_AXES), execution_of(job)
    micro = 1
    if step.view.view == "local" and num_stages > 1 and run is not None:
        micro = run.num_microbatches or 2 * num_stages
    parts = minibatches * devices * micro
    if rows % parts:
        down, up = rows // parts * parts, round_up(rows, parts)
        of = f" of {micro} microbatches" if micro > 1 else ""
        raise ConfigError(
            f"cannot split a batch of {rows} rows into {minibatches} minibatches{of} for {devices} devices.",
            hint=f"use --batch-size {f'{down} or {up}' if down else up}{', or other --microbatches' * (micro > 1)}.",
        )


_OPTIONS = {
    "pipeline": "--pipeline",
    "pipeline_rounds": "--pipeline-rounds",
    "num_microbatches": "--microbatches",
}
