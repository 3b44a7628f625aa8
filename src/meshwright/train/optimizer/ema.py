"""A moving average of the trained parameters, which a train step keeps in its state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from meshwright.errors import MeshwrightError
from meshwright.layout import Layout
from meshwright.train.state import RunState, keeps_ema, only_trainable, with_frozen
from meshwright.types import PyTree


def moved(average: PyTree, params: PyTree, *, decay: float) -> PyTree:
    """Returns `decay * average + (1 - decay) * params`, in the average's dtype.

    Example:
        >>> import jax.numpy as jnp
        >>> float(moved({"w": jnp.float32(1.0)}, {"w": jnp.bfloat16(3.0)}, decay=0.75)["w"])
        1.5
    """

    def move(old: Any, new: Any) -> Any:
        return old + (1 - decay) * (new.astype(old.dtype) - old)

    return jax.tree.map(move, average, params)


def averaged_params(state: RunState, trainable: Sequence[bool]) -> PyTree:
    """Returns the parameters of a state with the moving average in place of the trained ones, in their dtypes."""
    learned = only_trainable(state.params, trainable)
    averages = jax.tree.map(lambda average, leaf: average.astype(leaf.dtype), state.ema, learned)
    return with_frozen(averages, state.params, trainable)


def check_ema(ema: float | None, layout: Layout) -> None:
    """Raises if a decay is out of range, or does not fit the layout of the state."""
    if ema is not None and not 0 < ema < 1:
        raise MeshwrightError(f"ema must be above 0 and below 1; got {ema}.", hint="pass a decay such as 0.999.")
    if (ema is not None) != keeps_ema(layout):
        has = "has no" if ema is not None else "has an"
        raise MeshwrightError(
            f"the layout {has} average of the parameters, but the step has ema={ema}.",
            hint="pass the same ema to state_layout and make_train_step.",
        )


def require_ema(layout: Layout) -> None:
    """Raises if the states of a layout have no average."""
    if not keeps_ema(layout):
        raise MeshwrightError("the state has no average to evaluate.", hint="train with ema=0.999 (--ema 0.999).")
