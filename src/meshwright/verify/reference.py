"""The step on the single reference device, and the comparison of other measurements with it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshwright.dtypes import is_float
from meshwright.parallel.row_keys import row_key
from meshwright.parallel.rows import count_rows
from meshwright.train.precision import Precision
from meshwright.train.views import View
from meshwright.types import PyTree
from meshwright.verify.compare import GROWTH, Array, Comparison, Named, apart, compare, largest
from meshwright.verify.measure import Measured, Placed, fetch
from meshwright.verify.rounding import SAMPLES, jitter, rounding_scales

# The smallest scale of a leaf's errors, as a fraction of the largest gradient of all leaves: gradients that cancel to
# zero still contain rounding errors of about that size.
LEAST = 1e-2


class Reference:
    """Results of the step on one device, on the host.

    Args:
        num_minibatches: number of minibatches. More than one only if the job has a model state, whose statistics depend
            on the rows of a minibatch.
    """

    def __init__(self, placed: Placed, num_minibatches: int = 1) -> None:
        self.placed, self.inputs, self.step = placed, placed.inputs, placed.make_step("global", num_minibatches)
        measured = placed.measure(self.step)
        self.params: PyTree = jax.device_get(placed.state.params)
        self.initial, self.loss = fetch(placed.initial), np.asarray(measured.loss)
        self.grads, self.first, self.last = map(fetch, (measured.grads, measured.first, measured.last))
        self.metrics, self.model_state = map(fetch, (measured.metrics, measured.model_state))
        self.rng = jax.random.fold_in(placed.state.rng, placed.state.step)  # of the first step
        self._blocks: dict[Any, Any] = {}

    def changes(self, params: Named) -> dict[str, Any]:
        """Returns the change of the parameters since initialization."""
        return _changes(params, self.initial)

    # --- Comparing ---

    def compare(self, measured: Measured, tolerance: float) -> tuple[Comparison, ...]:
        """Compares all results, each with the worst copy that a device holds; metrics and model state if there are."""
        loss = worst_copies(measured.loss, self.loss)
        grads, last = all_worst_copies(measured.grads, self.grads), all_worst_copies(measured.last, self.last)
        found = [
            *self.compare_gradients(loss, grads, tolerance, expected=(self.loss, self.grads)),
            self._compare_parameters(last, tolerance),
        ]
        if self.metrics or measured.metrics:
            found.append(self._compare_values("metrics", self.metrics, measured.metrics, tolerance))
        if self.model_state:
            after = tolerance if self.inputs.num_steps == 1 else GROWTH * tolerance
            found.append(self._compare_values("model state", self.model_state, measured.model_state, after))
        return tuple(found)

    def _compare_values(self, what: str, expected: Named, measured: Named, tolerance: float) -> Comparison:
        """Compares values of any dtype; whole numbers must be equal, because counts do not round."""
        got = {name: worst_copies(leaf, expected[name]) for name, leaf in measured.items() if name in expected}
        scales = {
            name: max(largest(leaf), float(jnp.finfo(jnp.float32).tiny)) if is_float(leaf.dtype) else 0.0
            for name, leaf in expected.items()
        }

        def compared(rounding: Named | None) -> Comparison:
            return compare(what, expected, got, tolerance=tolerance, scales=scales, rounding=rounding)

        return self._beyond_rounding(compared, what)

    def compare_gradients(
        self, loss: Any, grads: Named, tolerance: float, *, expected: tuple[Any, Named]
    ) -> tuple[Comparison, Comparison]:
        least = LEAST * largest_of_all(expected[1])

        def compare_loss(rounding: Named | None) -> Comparison:
            one, other = {"loss": expected[0]}, {"loss": loss}
            return compare("loss", one, other, tolerance=tolerance, least_scale=LEAST, rounding=rounding)

        def compare_grads(rounding: Named | None) -> Comparison:
            return compare("gradients", expected[1], grads, tolerance=tolerance, least_scale=least, rounding=rounding)

        return self._beyond_rounding(compare_loss, "loss"), self._beyond_rounding(compare_grads, "grads")

    def _compare_parameters(self, last: Named, tolerance: float) -> Comparison:
        # Each step rounds parameters once, and rounding errors grow over the steps.
        num_steps = self.inputs.num_steps
        after = tolerance if num_steps == 1 else GROWTH * tolerance
        scales = {
            name: max(largest(change), num_steps * rounding(self.last[name]) / after)
            for name, change in self.changes(self.last).items()
        }

        def compare_last(rounding: Named | None) -> Comparison:
            return compare("parameters", self.last, last, tolerance=after, scales=scales, rounding=rounding)

        return self._beyond_rounding(compare_last, "last")

    def _beyond_rounding(self, compared: Callable[[Named | None], Comparison], what: str) -> Comparison:
        """Compares again with the leaves' rounding errors if there is a difference; they cost a few more steps."""
        found = compared(None)
        return found if found.ok else compared(self.rounding_errors[what])

    @cached_property
    def rounding_errors(self) -> dict[str, dict[str, float]]:
        """The rounding errors of the loss, the gradients, and the parameters' changes in the first and in all steps.

        They come from repetitions on one device with jittered parameters and batches; see `verify.rounding`.
        """
        compute = Precision.named(self.inputs.precision).compute
        expected = {
            "loss": {"loss": self.loss},
            "grads": self.grads,
            "first": self.changes(self.first),
            "last": self.changes(self.last),
            "metrics": self.metrics,
            "model state": self.model_state,
        }
        samples: dict[str, list[Named]] = {what: [] for what in expected}
        for number in range(SAMPLES):
            placed = self.placed.starting_from(jitter(self.params, number, dtype=compute))
            measured = placed.measure(self.step, jitter(self.inputs.batch, number))
            start = fetch(placed.initial)
            samples["loss"].append({"loss": np.asarray(measured.loss)})
            samples["grads"].append(fetch(measured.grads))
            samples["first"].append(_changes(fetch(measured.first), start))
            samples["last"].append(_changes(fetch(measured.last), start))
            samples["metrics"].append(fetch(measured.metrics))
            samples["model state"].append(fetch(measured.model_state))
        return {what: rounding_scales(tree, samples[what]) for what, tree in expected.items()}

    # --- Computed only if a case differs ---

    @cached_property
    def gradients(self) -> Callable[[PyTree, Any], tuple[Any, dict[str, Any]]]:
        """`gradients(batch, rng) -> (loss, gradients)` on one device."""
        return self.placed.gradients("global", 1)

    @cached_property
    def without_rng(self) -> tuple[Any, dict[str, Any]] | None:
        """Loss and gradients without a random key; None if they do not change or the loss needs a key."""
        try:
            loss, grads = self.gradients(self.inputs.batch, None)
        except Exception:  # the loss needs a key
            return None
        same = np.array_equal(loss, self.loss) and all(np.array_equal(grads[name], self.grads[name]) for name in grads)
        return None if same else (loss, grads)

    @cached_property
    def is_repeatable(self) -> bool:
        """Whether `init` gives the same bits when it is compiled again."""
        again = self.inputs.place(self.placed.mesh).initial
        return all(np.array_equal(again[name], leaf) for name, leaf in self.initial.items())

    def by_block(
        self, view: View, ways: int, num_minibatches: int, *, same_key: bool = False
    ) -> tuple[list[Any], list[dict[str, Any]]]:
        """Returns loss and gradients, on one device, of each block of rows that a mesh computes at once.

        With `same_key`, every block draws the random numbers of the first.
        """
        known = (view if num_minibatches > 1 else "any", ways, num_minibatches, same_key)
        if known not in self._blocks:
            parts = row_blocks(self.inputs.batch, self.rng, view, ways, num_minibatches)
            if same_key:
                parts = [(batch, parts[0][1]) for batch, _ in parts]
            results = [self.gradients(batch, rng) for batch, rng in parts]
            self._blocks[known] = [loss for loss, _ in results], [grads for _, grads in results]
        blocks: tuple[list[Any], list[dict[str, Any]]] = self._blocks[known]
        return blocks


def row_blocks(batch: PyTree, rng: Any, view: View, ways: int, num_minibatches: int) -> list[tuple[PyTree, Any]]:
    """Returns the blocks of rows that are computed together (a device's rows or a minibatch), with their keys."""
    rows = count_rows(batch, who="verify")
    size = rows // (ways * num_minibatches)
    numbers = np.arange(rows).reshape(ways, num_minibatches, size)
    if view == "global" and num_minibatches > 1 and ways > 1:
        # A minibatch takes a slice of each device's rows.
        blocks = {"block": size, "stride": size * num_minibatches}
        parts = [(numbers[:, index].ravel(), blocks) for index in range(num_minibatches)]
    else:
        parts = [(part, {}) for part in numbers.reshape(-1, size)]

    def take(part: Any) -> PyTree:
        return jax.tree.map(lambda leaf: np.asarray(leaf)[part] if np.ndim(leaf) else leaf, batch)

    return [(take(part), row_key(rng, int(part[0]), **blocks)) for part, blocks in parts]


def worst_copies(array: Any, reference: Any) -> Array:
    """Returns an array on the host; of each replicated shard, the copy furthest from the reference."""
    whole = np.empty(array.shape, array.dtype)
    furthest: dict[str, float] = {}
    for shard in array.addressable_shards:
        data, part = np.asarray(shard.data), repr(shard.index)
        distance = float(apart(np.asarray(reference)[shard.index], data).max(initial=0.0))
        if part not in furthest or distance > furthest[part]:
            furthest[part], whole[shard.index] = distance, data
    return whole


def all_worst_copies(arrays: Named, reference: Named) -> dict[str, Array]:
    """Returns `worst_copies` of each leaf."""
    return {name: worst_copies(leaf, reference[name]) for name, leaf in arrays.items()}


def rounding(leaf: Any) -> float:
    """Returns the rounding error of a leaf: one unit in the last place of its largest element."""
    return float(jnp.finfo(leaf.dtype).eps) * largest(leaf) if is_float(leaf.dtype) else 0.0  # integers are frozen


def largest_of_all(tree: Named) -> float:
    """Returns the largest magnitude in a tree."""
    return max((largest(leaf) for leaf in tree.values()), default=0.0)


def _changes(params: Named, start: Named) -> dict[str, Any]:
    return {name: leaf.astype(np.float64) - start[name].astype(np.float64) for name, leaf in params.items()}
