"""Layers as they are stored, and as the stages of a pipeline need them.

Parameters are stored as `[num_layers, ...]` in the order of the layers, whatever the mesh. For one round, `P(axis)`
gives each device its stage. When microbatches pass the devices several times, device `d` of `n` needs the slices `d`,
`d + n`, `d + 2n`, ...; as `[num_rounds, num_layers / num_rounds, ...]`, split by `P(None, axis)`, it has just these.
That is a reshape: it keeps the order of layers, and does not depend on the mesh.

What it costs depends on where it happens. Inside a step whose state is split by `P(axis)`, XLA moves the weights to
their stages and the gradients back, once per step. A run that wants to save this keeps its state in the second form,
and calls `unstage_layers` where it writes a checkpoint.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from meshwright.errors import LayoutError
from meshwright.tree import named_leaves
from meshwright.types import PyTree


def stage_layers(params: PyTree, *, num_stages: int, num_rounds: int = 1) -> PyTree:
    """Returns stacked layers in the form that a pipeline splits over its axis; checks that they divide.

    For one round that is how they are stored, split by `P(axis)`. For several it is `[num_rounds, layers per round,
    ...]`, split by `P(None, axis)`. Call it in the global view, before `local_map`; see the top of this file.

    Example:
        >>> stage_layers({"w": jnp.zeros((12, 5))}, num_stages=2, num_rounds=3)["w"].shape
        (3, 4, 5)
    """
    chunks = num_stages * num_rounds
    for leaf in named_leaves(params):
        layers = np.shape(leaf.value)[0] if np.ndim(leaf.value) else None
        if layers is None:
            raise LayoutError(f"`{leaf.name}` is a scalar: it has no leading dim of layers to split over stages.")
        if layers % chunks or not layers:
            rounds = f" x {num_rounds} rounds" if num_rounds > 1 else ""
            near = sorted({max(layers // chunks, 1) * chunks, -(-layers // chunks) * chunks} - {0})
            raise LayoutError(
                f"`{leaf.name}` has {layers} layers; {num_stages} stages{rounds} do not divide them: "
                f"{layers} % {chunks} = {layers % chunks}.",
                hint=f"use {' or '.join(map(str, near))} layers, or another number of stages"
                + (" or rounds." if num_rounds > 1 else "."),
            )
    if num_rounds == 1:
        return params
    return jax.tree.map(lambda leaf: jnp.reshape(leaf, (num_rounds, -1, *leaf.shape[1:])), params)


def unstage_layers(params: PyTree, *, num_rounds: int = 1) -> PyTree:
    """Returns layers in the form they are stored in, `[num_layers, ...]`: the inverse of `stage_layers`.

    Example:
        >>> unstage_layers({"w": jnp.zeros((3, 4, 5))}, num_rounds=3)["w"].shape
        (12, 5)
    """
    if num_rounds == 1:
        return params
    return jax.tree.map(lambda leaf: jnp.reshape(leaf, (-1, *leaf.shape[2:])), params)


def count_rounds(stage_params: PyTree, rounds: int | None = None) -> int:
    """Returns the leading dim that staged layers share: the rounds. Raises where they differ, or from `rounds`."""
    for leaf in named_leaves(stage_params):
        found = int(np.shape(leaf.value)[0]) if np.ndim(leaf.value) else 0
        rounds = found if rounds is None else rounds
        if found != rounds or not found:
            raise LayoutError(
                f"`{leaf.name}` has shape {np.shape(leaf.value)}; under a circular schedule its leading dim is the "
                f"rounds{f', of which there are {rounds}' if rounds else ''}.",
                hint="stage_layers(params, num_stages=..., num_rounds=...), split by P(None, axis), gives that form.",
            )
    return rounds or 1
