"""Refuses slices of parameters in a pipeline's first or last function, as its parameters or closed over.

A rule that splits an embedding over the axis of the stages gives each of them a slice. Its first stage would look up
tokens in that slice alone, without an error if indices are clamped. Types do not tell a slice from a gathered array, as
both vary between devices, so a step names the arrays that it passes to a loss.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

import jax

from meshwright.errors import PlacementError
from meshwright.types import PyTree


class RawSlice(NamedTuple):
    """An array that a loss gets as a slice: its name, and the dim and axis along which it was cut."""

    value: Any
    name: str
    dim: int
    axis: str


_SLICES: ContextVar[tuple[RawSlice, ...]] = ContextVar("slices", default=())


@contextlib.contextmanager
def named_slices(slices: Sequence[RawSlice]) -> Iterator[None]:
    """Names the slices that a loss gets while it is traced."""
    token = _SLICES.set(tuple(slices))
    try:
        yield
    finally:
        _SLICES.reset(token)


def refuse_slices(params: PyTree, *, axis: str, who: str) -> None:
    """Raises if one of the arrays is a slice that was cut along the axis of the stages."""
    for leaf in jax.tree.leaves(params):
        for known in _SLICES.get():
            if leaf is known.value and known.axis == axis:
                raise PlacementError(
                    f"{who}: `{known.name}` is split over {axis!r} along dim {known.dim}, so its stage would use only "
                    "a slice of it.",
                    hint=f"gather it before the pipeline, by gather_array(x, dim={known.dim}, axis={axis!r}), or write "
                    "a rule that does not split it over this axis.",
                )
