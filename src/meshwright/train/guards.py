"""What stops a run before it goes wrong unseen: values that are not finite, lost states, processes that differ."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from meshwright.errors import TrainingError
from meshwright.layout import Layout
from meshwright.train.state import params_layout
from meshwright.tree import named_leaves
from meshwright.types import PyTree


def require_live_state(state: PyTree, *, donates: bool = True) -> None:
    """Raises where a state was given to a step before, which took its memory."""
    for leaf in named_leaves(state):
        if (
            isinstance(leaf.value, jax.Array)
            and not isinstance(leaf.value, jax.core.Tracer)
            and leaf.value.is_deleted()
        ):
            how = "its memory was reused by the step that it was passed to before" if donates else "it was deleted"
            raise TrainingError(
                f"`{leaf.name}` of the state no longer exists: {how}.",
                hint="go on with the state that the step returned, or make the step with donate=False.",
            )


def require_same_state(state: PyTree, layout: Layout) -> None:
    """Raises where a state's leaves differ in name, shape or dtype from those that a layout was made for."""
    leaves = named_leaves(state)
    names = [leaf.name for leaf in leaves]
    if names != [leaf.name for leaf in layout.leaves]:
        known = {leaf.name for leaf in layout.leaves}
        missing = [leaf.name for leaf in layout.leaves if leaf.name not in set(names)]
        extra = [name for name in names if name not in known]
        raise TrainingError(
            f"the state is not the one this step was made for: missing {missing[:3] or 'nothing'}, extra "
            f"{extra[:3] or 'nothing'}.",
            hint="make the layout, the state and the step with the same job and the same optimizer.",
        )
    for leaf, known_leaf in zip(leaves, layout.leaves, strict=True):
        value = leaf.value
        if value.dtype != known_leaf.dtype or np.shape(value) != known_leaf.stored_shape:
            raise TrainingError(
                f"`{leaf.name}` is {value.dtype}{list(np.shape(value))}; the step was made for "
                f"{known_leaf.dtype}{list(known_leaf.stored_shape)}.",
                hint="parameters and the optimizer's statistics keep their dtypes; precision='mixed' casts what a loss "
                "computes in.",
            )


@dataclass
class NonFiniteGuard:
    """Watches a run's metrics for skipped steps, names what was not finite, and stops after too many in a row.

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
        """Returns what to tell about a step, None if it was fine; raises `TrainingError` at the limit."""
        in_a_row = int(metrics["skipped_in_a_row"])
        if in_a_row == 0:
            return None
        bad = int(metrics["bad_leaf"])
        what = f"the gradient of `{self.leaf_names[bad]}` is not finite" if bad >= 0 else "the loss is not finite"
        where = f"step {step}" + (f" (batch {batch_id})" if batch_id is not None else "")
        told = f"{where} was skipped: {what}"
        self.events.append(told)
        if in_a_row >= self.limit:
            raise TrainingError(
                f"{in_a_row} steps in a row were skipped, the last of them step {step}; parameters are those before "
                f"them.\n{told}",
                hint="lower the learning rate, clip gradients, or look at these batches.",
            )
        return told
