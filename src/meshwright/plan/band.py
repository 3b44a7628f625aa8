"""What the band of a step time does not cover: parts of a plan that none of the runs behind the band has."""

from __future__ import annotations

import functools
from collections.abc import Mapping

from meshwright.hardware.chips import Chip
from meshwright.mesh.string import parse_mesh
from meshwright.models import XLSTM
from meshwright.plan.costs.job_costs import PIPELINE_AXIS, JobCosts
from meshwright.plan.published_table import chip_with_runs, published_table, why_only_compared
from meshwright.plan.target import Target, parse_target

_ALWAYS = ("dp", "fsdp")  # every run splits its rows; how is a matter of communication, which plans count
_PARTS = {PIPELINE_AXIS: "a pipeline", "tp": "tp"}
_SLICES = "several slices"


def band_notes(target: Target, sizes: Mapping[str, int], profile: JobCosts) -> tuple[str, ...]:
    """Returns a note if the band of this plan's step time claims more than published runs support.

    Args:
        sizes: the size of each axis of the mesh.
    """
    chip = target.chip
    if chip is None or target.matmul_rate(profile.precision.compute.name) is None:  # without a step time
        return ()
    if not chip.rates.is_fitted and not chip.rates.is_measured:
        return (f"the shares of the peak, and the band, are {chip.rates.source}",)
    said, covered = "", _covered(chip_with_runs(chip.name))
    missing = [part for part in _parts(target, sizes, profile) if part not in covered]
    if missing:
        *others, last = missing
        listed = f"{', '.join(others)} or {last}" if others else last
        said = f"the band comes from published runs on this chip, none with {listed}, whose time it does not cover"
    if chip.rates.is_measured:
        said += "; " if said else ""
        said += _measured(chip)
    return (said,) if said else ()


def _measured(chip: Chip) -> str:
    return (
        f"shares of the peak were measured on one {chip.title.removeprefix('NVIDIA ')}, those of other chips fitted to "
        "published runs, some of older software: differences from other chips within both bands say nothing"
    )


def _parts(target: Target, sizes: Mapping[str, int], profile: JobCosts) -> list[str]:
    found = [_PARTS.get(axis, f"an axis {axis}") for axis, size in sizes.items() if size > 1 and axis not in _ALWAYS]
    if target.num_slices > 1:
        found.append(_SLICES)
    dtype = profile.precision.compute.name
    if profile.precision.fp8 is not None or dtype != "bfloat16":
        found.append(f"{dtype} matmuls" if profile.precision.fp8 is None else "fp8")
    if profile.d_model is None:
        found.append("a custom model")
    if profile.family == XLSTM.__name__:
        found.append("an xLSTM")
    if profile.frozen:
        found.append("frozen parameters")
    return found


@functools.cache
def _covered(name: str) -> frozenset[str]:
    """Returns the parts that at least one published run behind a chip's band has."""
    found = set()
    for row in published_table()["runs"]:
        target = parse_target(row["target"])
        if chip_with_runs(target.kind) != name or why_only_compared(row):
            continue
        axes = [axis.name for axis in parse_mesh(row["mesh"]).axes if axis.size > 1]
        found |= {_PARTS.get(axis, f"an axis {axis}") for axis in axes}
        if target.num_slices > 1:
            found.add(_SLICES)
    return frozenset(found)
