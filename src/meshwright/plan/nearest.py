"""The candidate that comes closest to fitting if none does, and the number of chips on which it would fit."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from meshwright.errors import MeshwrightError
from meshwright.layout.leaf import format_bytes
from meshwright.mesh.string import parse_mesh
from meshwright.plan.costs.job_costs import GATHER_AXIS, JobCosts
from meshwright.plan.job_on_mesh import prepare
from meshwright.plan.plan import Plan, assemble
from meshwright.plan.step_setup import Setup
from meshwright.plan.target import Target, enlarged
from meshwright.specs import round_up

MOST = 4096
"""Largest factor by which the number of chips is multiplied."""
MOST_MORE = 1.25
"""Largest factor by which the rows grow for the sake of more minibatches."""


@dataclass(frozen=True)
class Nearest:
    """The candidate that needs the least memory, and the same on more chips if that fits.

    Args:
        plan: the candidate, which does not fit.
        larger: its plan on the smallest machine, by doubling, on which it fits with a larger `fsdp`; None if none of
            those tried does.
        tried: number of chips of the largest machine tried.
    """

    plan: Plan
    larger: Plan | None
    tried: int

    def __str__(self) -> str:
        said = f"nothing fits; nearest is {self.plan.setup}: {self.plan.memory.verdict.removeprefix('does not fit: ')}"
        if self.larger is None and self.tried == _chips(self.plan.target):
            return f"{said}\nno larger {self.plan.target.kind} target is known; use less memory, or several slices"
        if self.larger is None:
            return f"{said}\nit would not fit on {self.tried} chips either (fsdp, computed)"
        target, rows = self.larger.target, self.larger.rows
        batch = "" if rows == self.plan.rows else f" with {rows:,} rows for {self.plan.rows:,}"
        return (
            f"{said}\nit would fit on {_chips(target)} chips ({target}){batch}, as {self.larger.setup}: "
            f"{format_bytes(self.larger.memory.total)} of {format_bytes(self.larger.memory.capacity or 0)} (computed)"
        )

    def to_json(self) -> dict[str, Any]:
        """Returns the setups, bytes and chips as JSON data."""
        larger = self.larger
        return {
            "setup": self.plan.setup.to_json(),
            "memory": self.plan.memory.total,
            "capacity": self.plan.memory.capacity,
            "fits_on": None
            if larger is None
            else {"target": larger.target.name, "chips": _chips(larger.target), "setup": larger.setup.to_json()},
        }


def find_nearest(job: Any, profile: JobCosts, plan: Plan, *, pad: tuple[str, ...] = ()) -> Nearest:
    """Returns a plan that does not fit, and the same on more chips: each doubling multiplies the `fsdp` axis.

    The batch stays, with fewer minibatches if its rows no longer divide, or grows if that is not possible or does not
    fit.

    Args:
        pad: regexes of parameters that may be stored padded on larger meshes.

    Example:
        >>> from meshwright.models import Decoder
        >>> from meshwright.plan.costs.job_costs import profile_job
        >>> from meshwright.plan.plan import make_plan
        >>> from meshwright.train import language_job
        >>> job = language_job(Decoder.named("7b"), batch_size=8, num_tokens=4096)
        >>> profile = profile_job(job, remats=("none", "full"))
        >>> plan = make_plan(job, "v5e:2x2", Setup(mesh="fsdp:4", remat="full"), profile=profile)
        >>> str(find_nearest(job, profile, plan)).splitlines()[1][:36]
        'it would fit on 8 chips (v5e:2x4), a'
    """
    tried, factor = _chips(plan.target), 2
    while factor <= MOST and (target := enlarged(plan.target, factor)) is not None:
        setup = replace(plan.setup, mesh=_wider(plan.setup.mesh, factor), pad=pad or plan.setup.pad)
        for made in _plans(job, profile, target, setup, plan.rows):
            if made.memory.fits:
                return Nearest(plan, made, _chips(target))
        tried, factor = _chips(target), 2 * factor
    return Nearest(plan, None, tried)


def _plans(job: Any, profile: JobCosts, target: Target, setup: Setup, rows: int) -> Iterator[Plan]:
    """Yields plans for a larger machine: the batch with as many minibatches as divide it, then larger batches."""
    try:
        prepared = prepare(job, target, setup, profile=profile)
    except MeshwrightError:  # e.g. a dim that the larger axis does not divide
        return
    count = setup.num_minibatches
    each = prepared.row_parts // count
    # The most minibatches first, which need the least memory.
    sizes = [(round_up(rows, each * parts), parts) for parts in range(count, 0, -1) if count % parts == 0]
    same = [size for size in sizes if size[0] == rows][:1]
    larger = [size for size in sizes if rows < size[0] <= MOST_MORE * rows][:1]
    for wanted, parts in dict.fromkeys([*same, *larger, sizes[-1]]):
        sync = setup.sync if parts > 1 or setup.pipeline else None
        changed = replace(prepared, setup=replace(setup, rows=wanted, num_minibatches=parts, sync=sync))
        with contextlib.suppress(MeshwrightError):
            yield assemble(changed, rows=wanted)


def _wider(mesh: str, factor: int) -> str:
    spec = parse_mesh(mesh)
    if GATHER_AXIS not in spec.names:
        others = [axis for axis in spec.axes if axis.size > 1]
        outside = [str(axis) for axis in others if axis.name == "dp"]
        return ",".join([*outside, f"{GATHER_AXIS}:{factor}", *(str(axis) for axis in others if axis.name != "dp")])
    axes = (replace(axis, size=axis.size * factor) if axis.name == GATHER_AXIS else axis for axis in spec.axes)
    return ",".join(map(str, axes))


def _chips(target: Target) -> int:
    return target.num_devices // (1 if target.chip is None else target.chip.devices_per_chip)
