"""Likely causes that the program itself shows: sums and random draws, with their source lines."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from meshwright.verify.diagnose.causes import Cause
from meshwright.verify.diagnose.program import Draw, MeshSum


def sum_of_equals(sums: Sequence[MeshSum], axis_sizes: Mapping[str, int]) -> Cause | None:
    """A sum adds values that are equal on all devices of an axis, so its result is too large by the axis size.

    Example:
        >>> print(sum_of_equals([MeshSum(("tp",), ("dp",), (8, 4), "model.py:12")], {"dp": 2, "tp": 4}).text)
        the sum at model.py:12 adds values that are already equal on all 4 devices of `tp`: its result is 4x too large.
    """
    for one in sums:
        axes = [axis for axis in one.of_equals if axis_sizes.get(axis, 1) > 1]
        if axes:
            count = math.prod(axis_sizes[axis] for axis in axes)
            return Cause(
                "reduction",
                f"the sum at {one.line} adds values that are already equal on all {count} devices of {_quoted(axes)}: "
                f"its result is {count}x too large.",
                "sum over that axis once; a psum's result is already summed, and so is a gradient that enters a psum's "
                "backward pass. Add a bias after the sum, not before it.",
            )
    return None


def sum_of_rows(sums: Sequence[MeshSum], row_axes: Sequence[str], num_rows: int) -> Cause | None:
    """A sum over an axis that splits the batch adds rows of different devices.

    Example:
        >>> print(sum_of_rows([MeshSum(("dp",), ("dp", "tp"), (8, 4), "model.py:12")], ["dp"], 8).text)
        the sum at model.py:12 runs over `dp`, which splits the batch: it adds rows of different devices.
    """
    for one in sums:
        axes = [axis for axis in one.axes if axis in row_axes and axis in one.varies]
        if axes and one.shape[:1] == (num_rows,):
            missed = [axis for axis in one.varies if axis not in (*one.axes, *row_axes)]
            return Cause(
                "wrong axis",
                f"the sum at {one.line} runs over {_quoted(axes)}, which splits the batch: it adds rows of different "
                "devices.",
                f"sum over {_quoted(missed)}, which splits its operand; the step sums the loss over rows."
                if missed
                else "sum only over axes that split features; the step sums the loss over rows.",
            )
    return None


def missing_sum(axes: Sequence[str], sums: Sequence[MeshSum]) -> Cause:
    """The loss still varies along axes that split parameters, so a sum over them is missing; `sums` are the loss's."""
    over = [one for one in sums if set(axes) & set(one.axes)]
    split = [one for one in sums if set(axes) & set(one.varies) and not set(axes) & set(one.axes)]
    text = f"a psum over {_quoted(axes)} is missing: the loss is still a partial result of each device along it."
    if split:
        text += f" The sum at {split[0].line} runs over {_quoted(split[0].axes)} instead."
    elif over:
        text += f" The loss sums over it at {over[0].line}, but not everywhere."
    else:
        text += " The loss never sums over it."
    return Cause(
        "missing sum",
        text,
        "jax.lax.psum partial products over that axis, or use row_dense of meshwright.parallel, or the global view, in "
        "which XLA communicates.",
    )


def fixed_key(draws: Sequence[Draw]) -> Cause | None:
    """The loss draws random numbers from a key that does not come from its key."""
    own = next((draw for draw in draws if not draw.has_key), None)
    if own is None:
        return None
    return Cause(
        "random numbers",
        f"the random numbers at {own.line} come from a key of their own, so every device and every step draws the same "
        "ones.",
        "draw them from the loss's key: loss(params, batch, rng).",
    )


def _quoted(axes: Sequence[str]) -> str:
    return " x ".join(f"`{axis}`" for axis in axes)
