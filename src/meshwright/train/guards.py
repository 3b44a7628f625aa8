"""Checks of the state before a step, and a guard that stops a run after repeated non-finite steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from meshwright.errors import MeshwrightError, TrainingError
from meshwright.layout import Layout
from meshwright.train.fp8_scaling import Fp8
from meshwright.train.state import params_layout
from meshwright.tree import named_leaves
from meshwright.types import PyTree


def is_concrete(leaf: Any) -> bool:
    """Whether a leaf is a JAX array with data, not a tracer."""
    return isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer)


def require_live_state(state: PyTree, *, donates: bool = True) -> None:
    """Raises if a leaf of the state was donated to an earlier step or deleted."""
    for leaf in named_leaves(state):
        if is_concrete(leaf.value) and leaf.value.is_deleted():
            how = "donated to the step it was passed to before" if donates else "deleted"
            raise TrainingError(
                f"`{leaf.name}` of the state no longer exists: it was {how}.",
                hint="use the state returned by the step, or make the step with donate=False.",
            )


def require_same_state(state: PyTree, layout: Layout) -> None:
    """Raises if the leaves of a state and a layout differ in name, shape or dtype."""
    leaves = named_leaves(state)
    names = [leaf.name for leaf in leaves]
    if names != [leaf.name for leaf in layout.leaves]:
        known = {leaf.name for leaf in layout.leaves}
        missing = [leaf.name for leaf in layout.leaves if leaf.name not in set(names)]
        extra = [name for name in names if name not in known]
        raise TrainingError(
            f"the state does not match the step's layout: missing {missing[:3] or 'nothing'}, extra "
            f"{extra[:3] or 'nothing'}.",
            hint="make the layout, the state and the step with the same job and the same optimizer.",
        )
    for leaf, known_leaf in zip(leaves, layout.leaves, strict=True):
        value = leaf.value
        if value.dtype != known_leaf.dtype or np.shape(value) != known_leaf.stored_shape:
            raise TrainingError(
                f"`{leaf.name}` is {value.dtype}{list(np.shape(value))}, but the step's layout has "
                f"{known_leaf.dtype}{list(known_leaf.stored_shape)}.",
                hint="do not cast the state; precision='mixed' casts parameters for the loss.",
            )


def check_scaling_state(fp8: Fp8 | None, layout: Layout, *, evaluates: bool = False) -> None:
    """Raises if the layout of a state does not have the history of amaxes that fp8 matmuls need.

    Args:
        evaluates: whether the step only evaluates, which in another precision ignores a history.
    """
    if fp8 is None and evaluates:
        return
    params = params_layout(layout)
    # The step cuts the padding of parameters before it computes their amaxes.
    shapes = params.structure.unflatten([jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in params.leaves])
    wanted = None if fp8 is None else jax.eval_shape(fp8.init, shapes)
    asked = {f"fp8/{leaf.name}": tuple(leaf.value.shape) for leaf in named_leaves(wanted)}
    known = {leaf.name: leaf.shape for leaf in layout.leaves if leaf.name.startswith("fp8/")}
    if known == asked:
        return
    has = "has none" if not known else "has one" if not asked else "has another one"
    needs = "no history of amaxes" if not asked else "a history of amaxes for delayed scaling in fp8"
    name = next(name for name in sorted({**asked, **known}) if asked.get(name) != known.get(name))
    forms = [f"{list(found[name])}" if name in found else "nothing" for found in (known, asked)]
    raise MeshwrightError(
        f"the step needs {needs}, but the layout {has}: `{name}` is {forms[0]} in the layout, {forms[1]} in the step.",
        hint="pass the same precision to state_layout, init_state and make_train_step.",
    )


@dataclass
class NonFiniteGuard:
    """Reports skipped steps, names the first non-finite gradient, and raises after `limit` skipped steps in a row.

    Example:
        >>> guard = NonFiniteGuard(["embed/table", "head/kernel"], limit=2)
        >>> guard.check({"bad_leaf": -1, "skipped_in_a_row": 0}, step=1)
        >>> print(guard.check({"bad_leaf": 1, "skipped_in_a_row": 1}, step=2, batch_id=40))
        step 2 (batch 40) was skipped: the gradient of `head/kernel` is not finite
    """

    leaf_names: list[str]
    limit: int = 5
    events: list[str] = field(default_factory=list)

    @classmethod
    def for_layout(cls, layout: Layout, *, limit: int = 5) -> NonFiniteGuard:
        """Returns a guard for a run whose state has this layout."""
        return cls([leaf.name for leaf in params_layout(layout).leaves], limit)

    def check(self, metrics: Mapping[str, Any], *, step: int, batch_id: Any = None) -> str | None:
        """Returns a message if the step was skipped, else None; raises `TrainingError` at the limit."""
        in_a_row = int(metrics["skipped_in_a_row"])
        if in_a_row == 0:
            return None
        bad = int(metrics["bad_leaf"])
        what = f"the gradient of `{self.leaf_names[bad]}` is not finite" if bad >= 0 else "the loss is not finite"
        if bad < 0 and all(np.isfinite(float(metrics.get(name, np.nan))) for name in ("loss", "grad_norm")):
            what = "an input, weight or gradient of a matmul in fp8 is not finite"  # casts clip infinities
        where = f"step {step}" + (f" (batch {batch_id})" if batch_id is not None else "")
        message = f"{where} was skipped: {what}"
        self.events.append(message)
        if in_a_row >= self.limit:
            raise TrainingError(
                f"{in_a_row} steps in a row were skipped, up to step {step}; parameters did not change in these steps."
                f"\n{message}",
                hint="lower the learning rate, clip gradients, or inspect these batches.",
            )
        return message
