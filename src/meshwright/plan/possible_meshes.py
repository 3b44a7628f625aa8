"""Which meshes a job can be planned on, and why not the others."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from meshwright.errors import MeshError
from meshwright.models.execution import Execution
from meshwright.parallel.heads import heads_fit
from meshwright.plan.costs.job_costs import LAYERS, PIPELINE_AXIS, TENSOR_AXIS, JobCosts
from meshwright.plan.step_setup import Setup, view_of_setup, with_schedule
from meshwright.plan.target import Target
from meshwright.train.job import check_axes, execution_of

# libtpu 0.0.42 crashed with SIGFPE on a 7B decoder with fsdp:4096, but compiled dp:16,fsdp:256 for the same chips.
CRASHES_FROM = 4096

NO_STAGES, NOT_IN_PIPELINES, NOT_DIVISIBLE = "no pipeline stages", "not in pipelines", "layers not divisible"
"""Why candidates are rejected: the job has no stages, its pipeline does not take an option, or too few layers."""


Problem = tuple[str, str] | None
"""A short reason and a sentence, or None."""


def mesh_problem(job: Any, profile: JobCosts, sizes: Mapping[str, int], *, pads: bool = False) -> Problem:
    """Returns why a job cannot be placed on a mesh, whatever its pipeline schedule.

    Args:
        pads: whether layers may be stored padded.
    """
    tp, pp = sizes.get(TENSOR_AXIS, 1), sizes.get(PIPELINE_AXIS, 1)
    run = execution_of(job) or Execution()
    if profile.d_model is not None and run.tensor_axis is not None:  # otherwise XLA handles any size
        if profile.heads and not heads_fit(profile.heads, tp):
            return "heads not divisible", f"tp={tp} does not divide {profile.heads} heads"
        if profile.kv_heads and not heads_fit(profile.kv_heads, tp, shared=True):
            return "heads not divisible", f"tp={tp} is not a factor or multiple of {profile.kv_heads} key/value heads"
        if run.sequence_parallel and profile.has_tokens and profile.tokens_per_row % tp:
            return "tokens not divisible", f"tp={tp} does not divide {profile.tokens_per_row} tokens"
    if pp > 1 and not profile.by_layer:
        return NO_STAGES, "searches split only built-in models into pipeline stages"
    if profile.num_layers % pp and not pads:
        return NOT_DIVISIBLE, f"pp={pp} does not divide {profile.num_layers} layers"
    return None


def pipeline_problem(profile: JobCosts, sizes: Mapping[str, int], setup: Setup) -> Problem:
    """Returns why the pipeline of a setup cannot run on a mesh."""
    if profile.ways(sizes) == 1:
        return None
    stages, pp = profile.stages(sizes, setup), sizes[PIPELINE_AXIS]
    if profile.num_layers < pp * stages.rounds:
        return NOT_DIVISIBLE, (
            f"{profile.num_layers} layers cannot be cut into {pp} x {stages.rounds} pipeline stages of at least one "
            "layer"
        )
    if setup.dtypes.fp8 is not None and profile.d_model is None:
        return NOT_IN_PIPELINES, "a custom loss does not run in fp8 in a pipeline"
    if stages.is_scheduled and setup.remat == "offload":
        return NOT_IN_PIPELINES, f"remat=offload does not work with the pipeline schedule {stages.schedule}"
    return None


def check_mesh_axes(job: Any, sizes: Mapping[str, int], setup: Setup) -> None:
    """Raises a `MeshError` if an axis of the mesh or an option splits nothing, or if the job cannot run in the view."""
    zero = () if setup.zero_axis is None else (setup.zero_axis,)
    check_axes(job, {axis: size for axis, size in sizes.items() if axis not in zero})
    if setup.asks_for_stages and sizes.get(PIPELINE_AXIS, 1) == 1:
        raise MeshError(
            "a pipeline schedule or a number of microbatches has no effect: the mesh has no axis pp with 2 or more "
            "devices.",
            hint="leave it out, or use e.g. pp:2,fsdp:4.",
        )
    with_schedule(job, setup)  # raises if the job has stages of its own
    view_of_setup(job, sizes, setup)


def check_mesh(job: Any, profile: JobCosts, sizes: Mapping[str, int], setup: Setup) -> None:
    """Raises a `MeshError` if a job cannot run on a mesh; for custom models it checks only the axes and the view."""
    check_mesh_axes(job, sizes, setup)
    if setup.asks_for_stages and profile.view == "global":
        raise MeshError(
            "a pipeline schedule or a number of microbatches has no effect: XLA runs no pipeline in the global view.",
            hint="leave it out, or use the local view.",
        )
    if profile.d_model is None:
        return

    def problem_of(sizes: Mapping[str, int], *, pads: bool) -> Problem:
        return mesh_problem(job, profile, sizes, pads=pads) or pipeline_problem(profile, sizes, setup)

    problem = problem_of(sizes, pads=bool(setup.pad))
    if problem is None:
        return
    if problem[0] == NOT_IN_PIPELINES:
        raise MeshError(f"{problem[1]}.", hint="use another precision or remat, or a mesh without pp.")
    axis = PIPELINE_AXIS if problem[0] == NOT_DIVISIBLE else TENSOR_AXIS
    devices = math.prod(sizes.values())
    fit = [
        size
        for size in range(1, devices + 1)
        if devices % size == 0 and problem_of({axis: size}, pads=bool(setup.pad)) is None
    ]
    other = ""
    if problem_of(sizes, pads=True) is None:
        other = f", or pass --pad {LAYERS}, which stores empty layers at the end"
    raise MeshError(f"{problem[1]}, so this mesh cannot be planned.", hint=f"set {axis} to {one_of(fit)}{other}.")


def one_of(sizes: list[int]) -> str:
    """Lists numbers to choose from.

    >>> one_of([1, 2, 4]), one_of([1])
    ('1, 2 or 4', '1')
    """
    *rest, last = map(str, sizes)
    return f"{', '.join(rest)} or {last}" if rest else last


def known_to_fail(target: Target, sizes: Mapping[str, int]) -> tuple[str, ...]:
    """Returns a note if the compiler is known to crash on such a mesh."""
    ways = sizes.get("fsdp", 1)
    if target.platform != "tpu" or ways < CRASHES_FROM:
        return ()
    others = {"dp": sizes.get("dp", 1) * ways // 256, "fsdp": 256}
    others |= {axis: size for axis, size in sizes.items() if axis not in others}
    other = ",".join(f"{axis}:{size}" for axis, size in others.items() if size > 1)
    return (f"libtpu 0.0.42 crashes (SIGFPE) on fsdp:{CRASHES_FROM}, so this may not compile; try {other}",)
