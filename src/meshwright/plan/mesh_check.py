"""Whether a job can run on a mesh at all, apart from memory and rows: the same rules for one plan and for a search."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from meshwright.errors import MeshError
from meshwright.models.execution import Execution
from meshwright.parallel.heads import heads_fit
from meshwright.plan.costs.communication import TENSOR_AXIS
from meshwright.plan.costs.job_costs import JobCosts
from meshwright.plan.costs.stages import PIPELINE_AXIS
from meshwright.train.job import check_axes, execution_of


def mesh_problem(job: Any, profile: JobCosts, sizes: Mapping[str, int]) -> tuple[str, str] | None:
    """Returns what keeps a job from a mesh: in a few words that many meshes share, and for this one; or None."""
    tp, pp = sizes.get(TENSOR_AXIS, 1), sizes.get(PIPELINE_AXIS, 1)
    run = execution_of(job) or Execution()
    if run.tensor_axis is not None:  # otherwise XLA splits what it can
        if profile.heads and not heads_fit(profile.heads, tp):
            return "do not divide the heads", f"tp={tp} does not divide {profile.heads} heads"
        if profile.kv_heads and not heads_fit(profile.kv_heads, tp, shared=True):
            return (
                "do not divide the heads",
                f"tp={tp} is no factor or multiple of {profile.kv_heads} key/value heads",
            )
        if run.sequence_parallel and profile.tokens_per_row % tp:
            return "do not divide the tokens", f"tp={tp} does not divide {profile.tokens_per_row} tokens"
    if profile.num_layers % pp:
        return "do not divide the layers", f"pp={pp} does not divide {profile.num_layers} layers"
    if pp > 1 and not profile.by_layer:
        return "have no stages", "the model is not one of ours, whose layers can be stages of a pipeline"
    return None


def check_mesh(job: Any, profile: JobCosts, sizes: Mapping[str, int]) -> None:
    """Raises where a job cannot run on a mesh; of models that are not ours, only what their rules say is known."""
    check_axes(job, sizes)
    if profile.d_model is None:
        return
    problem = mesh_problem(job, profile, sizes)
    if problem is None:
        return
    axis = PIPELINE_AXIS if problem[0] == "do not divide the layers" else TENSOR_AXIS
    devices = math.prod(sizes.values())
    fit = [
        size
        for size in range(1, devices + 1)
        if devices % size == 0 and mesh_problem(job, profile, {axis: size}) is None
    ]
    raise MeshError(
        f"{problem[1]}, so that this model cannot run on such a mesh.", hint=f"{axis} may be {one_of(fit)}."
    )


def one_of(sizes: list[int]) -> str:
    """Returns numbers to choose from, in words.

    >>> one_of([1, 2, 4]), one_of([1])
    ('1, 2 or 4', '1 only')
    """
    if len(sizes) == 1:
        return f"{sizes[0]} only"
    return f"{', '.join(map(str, sizes[:-1]))} or {sizes[-1]}"
