"""Which mesh axes a job uses. An axis that splits nothing leaves its devices to compute the same, and a plan wrong."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshwright.errors import MeshError, did_you_mean
from meshwright.mesh.string import parse_mesh
from meshwright.models.execution import Execution
from meshwright.rules import as_rules
from meshwright.specs import spec_axes
from meshwright.train.gradients import DATA_AXES


def run_of(job: Any) -> Execution | None:
    """Returns how the model of a job runs, where it is one of ours."""
    loss = getattr(job, "loss", None)
    return next((part for part in getattr(loss, "args", ()) if isinstance(part, Execution)), None)


def known_axes(job: Any) -> tuple[str, ...]:
    """Returns all axes that a job can use: those of its batch, its rules and its model.

    Of a model that is not ours, those of the mesh that the job names are taken to be used.

    Example:
        >>> from meshwright.models import Decoder
        >>> from meshwright.train import language_job
        >>> known_axes(language_job(Decoder.named("tiny"), batch_size=8, num_tokens=16))
        ('dp', 'fsdp', 'pp', 'tp')
    """
    found = [*DATA_AXES]
    for _, spec in as_rules(job.rules):
        found += spec_axes(spec)
    run = run_of(job)
    mesh = getattr(job, "mesh", None)
    if run is not None:
        found += [*run.data_axes, *filter(None, (run.pipeline_axis, run.tensor_axis))]
    elif isinstance(mesh, str) and mesh:
        # A loss of a user's own can use axes by name. Whoever wrote it says so with its mesh.
        found += parse_mesh(mesh).names
    return tuple(dict.fromkeys(found))


def unused_axes(job: Any, mesh_sizes: Mapping[str, int]) -> list[str]:
    """Returns the axes of a mesh, of more than one device, that split nothing of a job.

    Example:
        >>> from meshwright.models import Decoder
        >>> from meshwright.train import language_job
        >>> job = language_job(Decoder.named("tiny"), batch_size=8, num_tokens=16)
        >>> unused_axes(job, {"dp": 2, "fdsp": 4, "spare": 1})
        ['fdsp']
    """
    known = known_axes(job)
    return [axis for axis, size in mesh_sizes.items() if size > 1 and axis not in known]


def check_axes(job: Any, mesh_sizes: Mapping[str, int]) -> None:
    """Raises where an axis of a mesh splits nothing of a job."""
    unused = unused_axes(job, mesh_sizes)
    if not unused:
        return
    known = known_axes(job)
    names = f"its axes are {', '.join(known)}"
    if run_of(job) is None:
        names += "; if its loss uses another one, name that in the job's own mesh"
    close = did_you_mean(unused[0], known)
    which = f"axis {unused[0]!r} splits" if len(unused) == 1 else f"axes {', '.join(map(repr, unused))} split"
    raise MeshError(f"{which} nothing of this job.", hint=f"{close} {names}." if close else f"{names}.")
