"""Model state: arrays that a loss updates without gradients, such as BatchNorm statistics, averages and counters.

`loss(params, model_state, batch, rng) -> (loss, metrics, model_state)`. In the global view the loss sees the whole
batch, so its updates are those of one device. In the local view each device updates a copy from its own rows, and the
copies are then combined, each leaf by its reduction.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from meshwright.dtypes import is_float
from meshwright.errors import JobError, PlacementError, did_you_mean
from meshwright.mesh.axes import axis_size, pcast_varying, summing_dtype, varying_axes
from meshwright.rules.rule_set import compile_pattern
from meshwright.tree import named_leaves
from meshwright.types import PyTree

Reduction = Literal["mean", "sum", "max", "min"]
StateReduce = Reduction | Sequence[tuple[str, Reduction]]


def state_reductions(model_state: PyTree, reduce: StateReduce) -> list[Reduction]:
    """Returns the reduction of each leaf of a model state.

    Floats are averaged and other dtypes take the maximum, unless `reduce` names another reduction.

    Args:
        reduce: one reduction for all floats, or `(regex, reduction)` pairs, of which the first match wins.

    Example:
        >>> state = {"bn": {"mean": jnp.zeros(4), "seen": jnp.int32(0)}}
        >>> state_reductions(state, "mean"), state_reductions(state, [("seen", "sum")])
        (['mean', 'max'], ['mean', 'sum'])
    """
    pairs = [("", reduce)] if isinstance(reduce, str) else list(reduce)
    known = get_args(Reduction)
    for _, how in pairs:
        if how not in known:
            hint = did_you_mean(str(how), known) or f"use one of: {', '.join(known)}."
            raise JobError(f"model_state_reduce: unknown reduction {how!r}.", hint=hint)
    patterns = [(compile_pattern(text), how) for text, how in pairs if text]
    found: list[Reduction] = []
    for leaf in named_leaves(model_state):
        named = next((how for pattern, how in patterns if pattern.matches(leaf.name)), None)
        floating = is_float(leaf.value.dtype)
        default: Reduction = pairs[0][1] if isinstance(reduce, str) and floating else "mean" if floating else "max"
        how = named or default
        if how == "mean" and not floating:
            raise JobError(
                f"model_state_reduce: `{leaf.name}` is {leaf.value.dtype}, which has no mean.",
                hint=f'use ("{re.escape(leaf.name)}", "max"), "min" or "sum".',
            )
        found.append(how)
    return found


def reduce_state(model_state: PyTree, before: PyTree, reduce: StateReduce, axes: Sequence[str]) -> PyTree:
    """Combines the copies of a model state along manual axes, in the dtype of each leaf.

    Args:
        before: the state that the devices started from. A sum adds their changes to it, so that counters count every
            row once.
    """
    if not axes:
        return model_state
    num_devices = int(np.prod([axis_size(axis) for axis in axes]))

    def combine(how: Reduction, leaf: Any, old: Any) -> Any:
        value, wide = pcast_varying(leaf, axes), summing_dtype(leaf.dtype)
        if how in ("max", "min"):
            return (lax.pmax if how == "max" else lax.pmin)(value, tuple(axes))
        if how == "sum":
            changes = lax.psum(value.astype(wide) - pcast_varying(old, axes).astype(wide), tuple(axes))
            return (old.astype(wide) + changes).astype(leaf.dtype)
        return (lax.psum(value.astype(wide), tuple(axes)) / num_devices).astype(leaf.dtype)

    structure: Any = jax.tree.structure(model_state)
    leaves, starts = jax.tree.leaves(model_state), map(jnp.asarray, jax.tree.leaves(before))
    reductions = state_reductions(model_state, reduce)
    return structure.unflatten([combine(*found) for found in zip(reductions, leaves, starts, strict=True)])


def check_same_state(new: PyTree, old: PyTree, *, axes: Sequence[str]) -> None:
    """Raises if a loss returned a model state of another structure, shape or dtype, or one that differs along `tp`."""
    before = {leaf.name: jnp.asarray(leaf.value) for leaf in named_leaves(old)}
    after = {leaf.name: jnp.asarray(leaf.value) for leaf in named_leaves(new)}
    structures: list[Any] = [jax.tree.structure(tree) for tree in (old, new)]
    if list(before) != list(after) or structures[0] != structures[1]:
        missing = [name for name in before if name not in after]
        extra = [name for name in after if name not in before]
        raise JobError(
            f"the loss returned a model state of another structure: missing {missing[:3] or 'nothing'}, extra "
            f"{extra[:3] or 'nothing'}.",
            hint="return (loss, metrics, model_state) with every leaf of the model state that it got.",
        )
    for name, leaf in after.items():
        was = before[name]
        if leaf.shape != was.shape or leaf.dtype != was.dtype:
            raise JobError(
                f"the loss returned `{name}` of the model state as {leaf.dtype}{list(leaf.shape)}; it got "
                f"{was.dtype}{list(was.shape)}.",
                hint="keep shape and dtype, for example with .astype(old.dtype).",
            )
        others = sorted(varying_axes(leaf) - set(axes))
        if others:
            raise PlacementError(
                f"the loss returned `{name}` of the model state with values that differ along {others[0]!r}.",
                hint=f"combine it over {others[0]!r} in the loss, e.g. with jax.lax.pmean, or use view='global'.",
            )
