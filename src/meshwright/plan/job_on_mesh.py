"""A job on a mesh of a target: checked, profiled and laid out, ready to plan any number of rows."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from typing import Any

from meshwright.errors import MeshwrightWarning, PlacementError
from meshwright.layout import Layout, make_layout
from meshwright.mesh.build import create_abstract_mesh
from meshwright.mesh.string import MeshSpec
from meshwright.pages.numbers import plural
from meshwright.plan.costs.job_costs import JobCosts, profile_job
from meshwright.plan.possible_meshes import check_mesh, check_mesh_axes
from meshwright.plan.step_setup import Setup, named_optimizer, view_of_setup
from meshwright.plan.target import Target, check_slices, mesh_on, parse_target
from meshwright.train.padding import padding_suggested, view_of_layout
from meshwright.train.state import state_layout
from meshwright.train.views import ViewChoice, sync_needs_local_view


@dataclass(frozen=True)
class Prepared:
    """A job on a mesh of a target, before the number of rows is known."""

    profile: JobCosts
    layout: Layout
    target: Target
    spec: MeshSpec
    setup: Setup
    view: ViewChoice
    notes: tuple[str, ...] = ()

    @property
    def row_parts(self) -> int:
        """Number of parts that rows are split into, over devices, minibatches and microbatches."""
        sizes = self.layout.mesh.shape
        parts = self.setup.num_minibatches * self.profile.stages(sizes, self.setup).microbatches
        return int(sizes.get("dp", 1) * sizes.get("fsdp", 1) * parts)


def prepare(job: Any, target: str | Target, setup: Setup, *, profile: JobCosts | None = None) -> Prepared:
    """Checks a setup, profiles the job unless `profile` is given, and lays out its state."""
    target = parse_target(target)
    spec = mesh_on(target, setup.mesh)
    check_slices(target, spec)
    sizes = mesh_sizes(spec)
    if profile is None:
        check_mesh_axes(job, sizes, setup)  # fail before seconds of tracing
        profile = profile_of(job, target, setup)
    view, laid_out = view_of_setup(job, sizes, setup), None
    if setup.pad:  # padding may need the global view
        laid_out = lay_out(job, profile, spec, setup)
        view = view_of_layout(job, laid_out[0], setup.view)  # type: ignore[arg-type]
        if view.view == "global" and setup.sync is not None:
            raise sync_needs_local_view(setup.sync, view)
    profile = replace(profile, view=view.view)
    check_mesh(job, profile, sizes, setup)
    layout, notes = laid_out or lay_out(job, profile, spec, setup)
    return Prepared(profile, layout, target, spec, setup, view, notes + profile.notes)


def mesh_sizes(spec: MeshSpec) -> dict[str, int]:
    """Returns the size of each axis of a resolved mesh."""
    return {axis.name: axis.size for axis in spec.axes}


def profile_of(job: Any, target: Target, setup: Setup) -> JobCosts:
    """Profiles a job for one setup, with its remat policy and "none", which memory plans need too."""
    return profile_job(
        job,
        precision=setup.precision,
        optimizer=setup.optimizer,
        platform=target.platform,
        remats=tuple(dict.fromkeys(("none", setup.remat))),
    )


def lay_out(job: Any, profile: JobCosts, spec: MeshSpec, setup: Setup) -> tuple[Layout, tuple[str, ...]]:
    """Returns the layout of the train state, and its warnings."""
    mesh = create_abstract_mesh(spec)
    with warnings.catch_warnings(record=True) as caught, padding_suggested(job):
        warnings.simplefilter("always", MeshwrightWarning)
        if setup.zero_axis is None and not setup.pad:
            layout = make_layout(job.rules, profile.state, mesh)
        else:
            options: Any = {"zero_axis": setup.zero_axis, "precision": profile.precision, "pad": setup.pad or False}
            layout = state_layout(job, named_optimizer(setup.optimizer, job), mesh, **options)
    return layout, tuple(str(warning.message) for warning in caught if warning.category is MeshwrightWarning)


def check_rows(prepared: Prepared, rows: int) -> None:
    """Raises if the rows do not divide over devices, minibatches and pipeline microbatches."""
    setup, ways = prepared.setup, prepared.row_parts
    for count, name in ((rows, "rows"), (setup.num_minibatches, "minibatches")):
        if count < 1:
            raise PlacementError(f"the number of {name} must be at least 1; got {count}.", hint=f"add {name}.")
    if rows % ways:
        stages = prepared.profile.stages(prepared.layout.mesh.shape, setup)
        devices = ways // (setup.num_minibatches * stages.microbatches)
        parts = f"{plural(devices, 'device')} and {plural(setup.num_minibatches, 'minibatch')}"
        parts += f" of {plural(stages.microbatches, 'microbatch')}" if stages.count > 1 else ""
        raise PlacementError(
            f"{plural(rows, 'row')} {'does' if rows == 1 else 'do'} not divide over {parts}.",
            hint=f"use {plural(max(1, rows // ways) * ways, 'row')}, or another number of "
            f"{'microbatches' if stages.count > 1 else 'minibatches'}.",
        )
