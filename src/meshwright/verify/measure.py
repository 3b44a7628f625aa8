"""Measurements of a job's step on a mesh and on the single reference device.

One program per view and number of minibatches gives all measurements: the train step itself. The gradients come from
the state of an `optax.trace` with decay 0, chained before the optimizer.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from meshwright.errors import MeshwrightWarning
from meshwright.layout import Layout
from meshwright.mesh.axes import varying_axes
from meshwright.models.execution import DATA_AXES, Remat
from meshwright.parallel.rows import count_rows, row_key
from meshwright.train.gradients import PIPELINE_AXES, make_gradients
from meshwright.train.precision import Precision
from meshwright.train.state import RunState, init_state, only_trainable, state_layout, trainable_leaves
from meshwright.train.step import Step, make_train_step
from meshwright.train.sync import Sync
from meshwright.train.views import View
from meshwright.tree import named_leaves
from meshwright.types import PyTree
from meshwright.verify.compare import GROWTH, Array, Comparison, Named, apart, compare, largest
from meshwright.verify.program import BATCH, RNG, Program, read_program
from meshwright.verify.rounding import SAMPLES, jitter, rounding_scales

# The smallest scale of a leaf's errors, as a fraction of the largest gradient of all leaves: gradients that cancel to
# zero still contain rounding errors of about that size.
LEAST = 1e-2


@dataclass(frozen=True)
class SharedInputs:
    """Inputs that all measurements of a report share."""

    job: Any
    optimizer: Any
    batch: PyTree
    num_steps: int
    seed: int
    precision: Precision | str
    sync: Sync | None
    remat: Remat
    data_axes: tuple[str, ...] | None

    @property
    def recording(self) -> Any:
        """The optimizer, with the last gradients in the first entry of its state."""
        return optax.chain(optax.trace(decay=0.0), self.optimizer)

    @property
    def num_rows(self) -> int:
        return count_rows(self.batch, who="verify")

    def place(self, mesh: Mesh, *, quiet: bool = True) -> Placed:
        """Initializes the job's state on a mesh; raises if its rules do not fit."""
        with warnings.catch_warnings():
            if quiet:  # the reference already printed warnings about the rules
                warnings.simplefilter("ignore", MeshwrightWarning)
            layout = state_layout(self.job, self.recording, mesh, precision=self.precision)
            key = jax.random.key(self.seed)
            return Placed(self, layout, init_state(self.job, self.recording, layout, key, precision=self.precision))


@dataclass(frozen=True)
class Measured:
    """Results of a few steps; arrays stay on the mesh, so that the copies on each device can be compared."""

    loss: Any
    grads: dict[str, Any]
    first: dict[str, Any]  # parameters after one step
    last: dict[str, Any]  # parameters after all steps


@dataclass(frozen=True)
class Placed:
    """A job on one mesh: its layout and initial state."""

    inputs: SharedInputs
    layout: Layout
    state: RunState

    @property
    def mesh(self) -> Mesh:
        mesh = self.layout.mesh
        assert isinstance(mesh, Mesh)
        return mesh

    @property
    def row_axes(self) -> tuple[str, ...]:
        return tuple(axis for axis in self.inputs.data_axes or DATA_AXES if axis in self.mesh.axis_names)

    @property
    def ways(self) -> int:
        """Number of devices that rows are split over."""
        return math.prod(self.mesh.shape[axis] for axis in self.row_axes)

    @property
    def initial(self) -> dict[str, Any]:
        return _named(self.state.params)

    def starting_from(self, params: PyTree) -> Placed:
        """Returns a copy that starts from other parameters."""
        shardings = self.layout.shardings
        placed = jax.device_put(params, shardings.params)
        learned = only_trainable(placed, trainable_leaves(self.inputs.job, placed))
        opt_state = jax.device_put(self.inputs.recording.init(learned), shardings.opt_state)
        return dataclasses.replace(self, state=dataclasses.replace(self.state, params=placed, opt_state=opt_state))

    def make_step(self, view: View, num_minibatches: int) -> Step:
        """Returns the step that `measure` takes."""
        inputs, options = self.inputs, self._options(view, num_minibatches)
        return make_train_step(inputs.job, inputs.recording, self.layout, skip_nonfinite=False, donate=False, **options)

    def measure(self, step: Step, batch: PyTree = None) -> Measured:
        """Takes `num_steps` steps, with the shared batch by default."""
        batch = self.inputs.batch if batch is None else batch
        state, metrics = step(self.state, batch)
        grads, first = _named(state.opt_state[0].trace), _named(state.params)
        for _ in range(self.inputs.num_steps - 1):
            state, _ = step(state, batch)
        return Measured(metrics["loss"], grads, first, _named(state.params))

    def gradients(self, view: View, num_minibatches: int) -> Callable[[PyTree, Any], tuple[Any, dict[str, Any]]]:
        """Returns `gradients(batch, rng) -> (loss, gradients by name)` at the initial parameters, on the host."""
        gradients = make_gradients(self.inputs.job, self.layout, **self._options(view, num_minibatches))

        @jax.jit
        def compute(params: PyTree, batch: PyTree, rng: Any) -> tuple[Any, PyTree]:
            with jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh):
                result, _ = gradients(params, batch, rng, self.state.model_state)
            return result.loss, result.grads

        def call(batch: PyTree, rng: Any) -> tuple[Any, dict[str, Any]]:
            rows = P(self.row_axes)
            here = jax.tree.map(lambda leaf: NamedSharding(self.mesh, rows if np.ndim(leaf) else P()), batch)
            loss, grads = compute(self.state.params, jax.device_put(batch, here), rng)
            return np.asarray(loss), _fetch(_named(grads))

        return call

    def program(self, num_minibatches: int, *, complete: bool = False) -> Program:
        """Returns the sums and draws of the gradients' program in the local view.

        Args:
            complete: only the forward pass, with the loss averaged over all axes, so that a loss which lacks a sum can
                be traced.
        """
        job = _Complete(self.inputs.job, self.row_axes) if complete else self.inputs.job
        options = self._options("local", num_minibatches)
        gradients = make_gradients(job, self.layout, **options, with_gradients=not complete)
        batch = self.inputs.batch
        rng = jax.random.key(0)
        with jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh):
            jaxpr = jax.make_jaxpr(gradients)(self.state.params, batch, rng, self.state.model_state)
        plain = [frozenset[str]()] * len(jax.tree.leaves(self.state.params))
        of_batch = [frozenset((BATCH,))] * len(jax.tree.leaves(batch))
        of_state = [frozenset[str]()] * len(jax.tree.leaves(self.state.model_state))
        return read_program(jaxpr, [*plain, *of_batch, frozenset((RNG,)), *of_state])

    def _options(self, view: View, num_minibatches: int) -> dict[str, Any]:
        return {
            "view": view,
            "num_minibatches": num_minibatches,
            "sync": self.inputs.sync if view == "local" else None,
            "precision": self.inputs.precision,
            "remat": self.inputs.remat,
            "data_axes": self.row_axes,
        }


class Reference:
    """Results of the step on one device, on the host."""

    def __init__(self, placed: Placed) -> None:
        self.placed, self.inputs, self.step = placed, placed.inputs, placed.make_step("global", 1)
        measured = placed.measure(self.step)
        self.params: PyTree = jax.device_get(placed.state.params)
        self.initial, self.loss = _fetch(placed.initial), np.asarray(measured.loss)
        self.grads, self.first, self.last = map(_fetch, (measured.grads, measured.first, measured.last))
        self.rng = jax.random.fold_in(placed.state.rng, placed.state.step)  # of the first step
        self._blocks: dict[Any, Any] = {}

    def changes(self, params: Named) -> dict[str, Any]:
        """Returns the change of the parameters since initialization."""
        return _changes(params, self.initial)

    # --- Comparing ---

    def compare(self, measured: Measured, tolerance: float) -> tuple[Comparison, ...]:
        """Compares loss, gradients and parameters, each with the worst copy that a device holds."""
        loss = worst_copies(measured.loss, self.loss)
        grads, last = all_worst_copies(measured.grads, self.grads), all_worst_copies(measured.last, self.last)
        return (
            *self.compare_gradients(loss, grads, tolerance, expected=(self.loss, self.grads)),
            self._compare_parameters(last, tolerance),
        )

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
        }
        samples: dict[str, list[Named]] = {what: [] for what in expected}
        for number in range(SAMPLES):
            placed = self.placed.starting_from(jitter(self.params, number, dtype=compute))
            measured = placed.measure(self.step, jitter(self.inputs.batch, number))
            start = _fetch(placed.initial)
            samples["loss"].append({"loss": np.asarray(measured.loss)})
            samples["grads"].append(_fetch(measured.grads))
            samples["first"].append(_changes(_fetch(measured.first), start))
            samples["last"].append(_changes(_fetch(measured.last), start))
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


class _Complete:
    """A job whose loss is averaged over all axes but those that split rows, and has no metrics."""

    def __init__(self, job: Any, row_axes: tuple[str, ...]) -> None:
        self._job = job

        @functools.wraps(job.loss)
        def loss(*args: Any, **options: Any) -> Any:
            value, _, *rest = job.loss(*args, **options)
            return jax.tree.map(whole, value), {}, *rest

        def whole(value: Any) -> Any:
            axes = sorted(varying_axes(value) - {*row_axes, *PIPELINE_AXES})
            return jax.lax.pmean(value, axes) if axes else value

        self.loss = loss

    def __getattr__(self, name: str) -> Any:
        return getattr(self._job, name)


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
    return float(jnp.finfo(leaf.dtype).eps) * largest(leaf)


def largest_of_all(tree: Named) -> float:
    """Returns the largest magnitude in a tree."""
    return max((largest(leaf) for leaf in tree.values()), default=0.0)


def _changes(params: Named, start: Named) -> dict[str, Any]:
    return {name: leaf.astype(np.float64) - start[name].astype(np.float64) for name, leaf in params.items()}


def _named(tree: PyTree) -> dict[str, Any]:
    return {leaf.name: leaf.value for leaf in named_leaves(tree)}


def _fetch(tree: Named) -> dict[str, Any]:
    return {name: np.asarray(leaf) for name, leaf in tree.items()}
