"""Refuses collectives over a pipeline's axis inside the user's functions.

Devices of a pipeline run these functions at different ticks, in branches of a `cond`. A collective over the pipeline's
axis would wait forever for devices that never take the branch.
"""

from __future__ import annotations

from typing import Any

from meshwright.errors import PlacementError
from meshwright.hardware.linearity import inner_jaxprs

# Other primitives with axes, such as `pvary` and `axis_index`, send nothing.
_SUMS = ("psum", "psum2", "psum_invariant", "pmax", "pmin", "reduce_scatter", "psum_scatter")
_MOVES = ("ppermute", "all_gather", "all_gather_invariant", "all_to_all", "ragged_all_to_all")


def refuse_collectives(jaxpr: Any, *, axis: str, name: str) -> None:
    """Raises if a function, given as its jaxpr, communicates over the axis of the stages."""
    for equation in jaxpr.eqns:
        axes = equation.params.get("axes", equation.params.get("axis_name", ()))
        if equation.primitive.name in (*_SUMS, *_MOVES) and axis in ((axes,) if isinstance(axes, str) else axes):
            raise PlacementError(
                f"pipeline: {name} communicates over {axis!r} ({equation.primitive.name}). Devices run {name} at "
                "different ticks, so they would wait for each other forever.",
                hint=f"communicate over {axis!r} before or after the pipeline.",
            )
        for inner in inner_jaxprs(equation.params):
            refuse_collectives(inner, axis=axis, name=name)
