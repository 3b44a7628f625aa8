"""The single-device step that all meshes of a report are compared with, and what else is computed with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshwright.parallel.rows import count_rows, row_key
from meshwright.train.gradients import View
from meshwright.types import PyTree
from meshwright.verify.compare import GROWTH, Comparison, Named, compare, largest
from meshwright.verify.measure import Measured, Placed, SharedInputs, gradient_function, place, worst_copies

# A gradient that should be zero is the rounding of what cancels, which is about as large as other gradients. So errors
# are relative to a leaf's largest gradient, or to this part of the largest of all leaves where that is more.
LEAST = 1e-2


@dataclass(frozen=True)
class Reference:
    """The step on one device."""

    setup: SharedInputs
    placed: Placed
    measured: Measured
    _blocks: dict[Any, Any] = field(default_factory=dict)

    @cached_property
    def params(self) -> PyTree:
        """Initial parameters, as a tree."""
        return jax.device_get(self.placed.state.params)

    @cached_property
    def initial(self) -> dict[str, Any]:
        return _fetch(self.placed.initial)

    @cached_property
    def loss(self) -> Any:
        return np.asarray(self.measured.loss)

    @cached_property
    def grads(self) -> dict[str, Any]:
        return _fetch(self.measured.grads)

    @cached_property
    def first(self) -> dict[str, Any]:
        return _fetch(self.measured.first)

    @cached_property
    def last(self) -> dict[str, Any]:
        return _fetch(self.measured.last)

    @cached_property
    def largest_gradient(self) -> float:
        return largest_of_all(self.grads)

    @cached_property
    def rng(self) -> Any:
        """The key of the first step."""
        state = self.placed.state
        return jax.random.fold_in(state.rng, state.step)

    def changes(self, params: Named) -> dict[str, Any]:
        """Returns by how much parameters changed since the start."""
        return {name: _wide(leaf) - _wide(self.initial[name]) for name, leaf in params.items()}

    # --- Comparing ---

    def compare(self, measured: Measured, tolerance: float) -> tuple[Comparison, ...]:
        """Compares loss, gradients and parameters; of copies that devices hold, the worst counts."""
        loss = worst_copies(measured.loss, self.loss)
        grads = {name: worst_copies(leaf, self.grads[name]) for name, leaf in measured.grads.items()}
        last = {name: worst_copies(leaf, self.last[name]) for name, leaf in measured.last.items()}
        # Parameters cannot be closer than they are rounded, once a step; and what differs by rounding grows with steps.
        after = tolerance if self.setup.num_steps == 1 else GROWTH * tolerance
        scales = {
            name: max(largest(change), self.setup.num_steps * rounding(self.last[name]) / after)
            for name, change in self.changes(self.last).items()
        }
        return (
            *self.compare_gradients(loss, grads, tolerance, expected=(self.loss, self.grads)),
            compare("parameters", self.last, last, tolerance=after, scales=scales),
        )

    def compare_gradients(
        self, loss: Any, grads: Named, tolerance: float, *, expected: tuple[Any, Named]
    ) -> tuple[Comparison, Comparison]:
        """Compares loss and gradients."""
        least = LEAST * largest_of_all(expected[1])
        return (
            compare("loss", {"loss": expected[0]}, {"loss": loss}, tolerance=tolerance, least_scale=LEAST),
            compare("gradients", expected[1], grads, tolerance=tolerance, least_scale=least),
        )

    # --- Computed only when something differs ---

    @cached_property
    def gradients(self) -> Callable[[PyTree, Any], tuple[Any, dict[str, Any]]]:
        """`gradients(batch, rng) -> (loss, gradients)` on one device."""
        return gradient_function(self.setup, self.placed, view="global", num_minibatches=1)

    @cached_property
    def without_rng(self) -> tuple[Any, dict[str, Any]] | None:
        """Loss and gradients without a random key; None where that changes nothing, or the loss needs a key."""
        try:
            loss, grads = self.gradients(self.setup.batch, None)
        except Exception:  # a loss that cannot do without its key
            return None
        plain, grads = np.asarray(loss), _fetch(grads)
        same = np.array_equal(plain, self.loss) and all(np.array_equal(grads[name], self.grads[name]) for name in grads)
        return None if same else (plain, grads)

    @cached_property
    def is_repeatable(self) -> bool:
        """Whether `init` gives the same bits when it is compiled again."""
        again = _fetch(place(self.setup, self.placed.mesh).initial)
        return all(np.array_equal(again[name], leaf) for name, leaf in self.initial.items())

    def by_block(self, view: View, ways: int, num_minibatches: int) -> tuple[list[Any], list[dict[str, Any]]]:
        """Returns loss and gradients of each block of rows that a mesh computes at once, computed on one device."""
        known = (view if num_minibatches > 1 else "any", ways, num_minibatches)
        if known not in self._blocks:
            parts = row_blocks(self.setup.batch, self.rng, view, ways, num_minibatches)
            results = [self.gradients(batch, rng) for batch, rng in parts]
            self._blocks[known] = [np.asarray(loss) for loss, _ in results], [_fetch(grads) for _, grads in results]
        blocks: tuple[list[Any], list[dict[str, Any]]] = self._blocks[known]
        return blocks


def row_blocks(batch: PyTree, rng: Any, view: View, ways: int, num_minibatches: int) -> list[tuple[PyTree, Any]]:
    """Returns the rows that are computed together, with their keys: a device's rows, or those of a minibatch."""
    rows = count_rows(batch, who="verify")
    size = rows // (ways * num_minibatches)
    numbers = np.arange(rows).reshape(ways, num_minibatches, size)
    if view == "global" and num_minibatches > 1 and ways > 1:
        # A minibatch is a slice out of each device's rows.
        blocks = {"block": size, "stride": size * num_minibatches}
        parts = [(numbers[:, index].ravel(), blocks) for index in range(num_minibatches)]
    else:
        parts = [(part, {}) for part in numbers.reshape(-1, size)]

    def take(part: Any) -> PyTree:
        return jax.tree.map(lambda leaf: np.asarray(leaf)[part] if np.ndim(leaf) else leaf, batch)

    return [(take(part), row_key(rng, int(part[0]), **blocks)) for part, blocks in parts]


def rounding(leaf: Any) -> float:
    """Returns how far apart two roundings of a leaf can be: one unit in the last place of its largest element."""
    return float(jnp.finfo(leaf.dtype).eps) * largest(leaf)


def largest_of_all(tree: Named) -> float:
    """Returns the largest magnitude in a tree."""
    return max((largest(leaf) for leaf in tree.values()), default=0.0)


def _fetch(tree: Named) -> dict[str, Any]:
    return {name: np.asarray(leaf) for name, leaf in tree.items()}


def _wide(leaf: Any) -> Any:
    return np.asarray(leaf).astype(np.float64)
