"""What stops a run before it goes wrong unseen: values that are not finite, lost states, processes that differ."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from meshwright.errors import MeshwrightError, TrainingError
from meshwright.layout import Layout
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
        from meshwright.train.state import params_layout

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


def fingerprint(*things: Any) -> str:
    """Returns a hash of what must be the same on all processes: configurations, seeds, shapes.

    Example:
        >>> fingerprint({"seed": 1}) == fingerprint({"seed": 1}), fingerprint({"seed": 1}) == fingerprint({"seed": 2})
        (True, False)
    """
    text = json.dumps([_plain(thing) for thing in things], sort_keys=True, default=repr)
    return hashlib.sha256(text.encode()).hexdigest()


def require_agreement(facts: Mapping[str, Any]) -> None:
    """Raises, on every process, where processes differ in one of these facts; names the fact and the ranks.

    Call it at the start of a run, with the configuration, the seed and the shapes of a batch.
    """
    if jax.process_count() == 1:
        return
    from jax.experimental import multihost_utils

    names = sorted(facts)
    digests = np.stack([np.frombuffer(bytes.fromhex(fingerprint(facts[name])), np.uint8) for name in names])
    everywhere = np.asarray(multihost_utils.process_allgather(digests))
    report_disagreement(names, everywhere, {name: repr(facts[name])[:200] for name in names}, jax.process_index())


def report_disagreement(names: list[str], digests: np.ndarray, own: Mapping[str, str], rank: int) -> None:
    """Raises for the first fact whose digests `[process, fact, byte]` are not all those of the majority."""
    for place, name in enumerate(names):
        rows = [bytes(row) for row in digests[:, place]]
        usual = max(dict.fromkeys(rows), key=rows.count)
        others = [str(index) for index, row in enumerate(rows) if row != usual]
        if others:
            raise MeshwrightError(
                f"the processes of this run differ in `{name}`: rank {', '.join(others)} of {len(rows)} has another "
                f"value than the rest. Here, on rank {rank}, it is {own[name]}.",
                hint="start every process with the same configuration, seed and code.",
            )


def _plain(thing: Any) -> Any:
    if isinstance(thing, Mapping):
        return {str(key): _plain(value) for key, value in thing.items()}
    if isinstance(thing, (list, tuple)):
        return [_plain(item) for item in thing]
    if hasattr(thing, "shape") and hasattr(thing, "dtype"):
        return [str(thing.dtype), list(thing.shape)]
    return thing
