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
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from meshwright.errors import MeshwrightWarning
from meshwright.layout import Layout
from meshwright.layout.report import PadPolicy
from meshwright.mesh.axes import varying_axes
from meshwright.models.execution import DATA_AXES, Remat
from meshwright.parallel.rows import count_rows
from meshwright.train.gradients import make_gradients
from meshwright.train.padding import cut, fill, padding_suggested, part_leaves
from meshwright.train.precision import Precision
from meshwright.train.state import RunState, init_state, only_trainable, state_layout, trainable_leaves
from meshwright.train.step import Step, make_train_step
from meshwright.train.sync import Sync
from meshwright.train.views import PIPELINE_AXES, View
from meshwright.tree import named_leaves
from meshwright.types import PyTree
from meshwright.verify.compare import Named
from meshwright.verify.diagnose.program import BATCH, RNG, TracedProgram, read_program

# Metrics of the step itself, which say nothing about the job's.
_OWN_METRICS = ("loss", "grad_norm", "skipped", "skipped_in_a_row", "bad_leaf")


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
    pad: PadPolicy = False

    @property
    def keeps_state(self) -> bool:
        """Whether the job has a model state."""
        return getattr(self.job, "model_state", None) is not None

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
            with padding_suggested(self.job):
                layout = state_layout(self.job, self.recording, mesh, precision=self.precision, pad=self.pad)
            key = jax.random.key(self.seed)
            return Placed(self, layout, init_state(self.job, self.recording, layout, key, precision=self.precision))


@dataclass(frozen=True)
class Measured:
    """Results of a few steps; arrays stay on the mesh, so that the copies on each device can be compared."""

    loss: Any
    grads: dict[str, Any]
    metrics: dict[str, Any]  # the job's metrics of the first step
    first: dict[str, Any]  # parameters after one step
    last: dict[str, Any]  # parameters after all steps
    model_state: dict[str, Any]  # after all steps


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
        return named(self._cut(self.state).params)

    def _cut(self, state: RunState) -> RunState:
        """Returns a state without padding, to compare it with that of one device."""
        cut_state: RunState = cut(state, self.layout.leaves)
        return cut_state

    def starting_from(self, params: PyTree) -> Placed:
        """Returns a copy that starts from other parameters."""
        shardings = self.layout.shardings
        placed = jax.device_put(fill(params, part_leaves(self.layout, "params")), shardings.params)
        learned = only_trainable(placed, trainable_leaves(self.inputs.job, placed))
        opt_state = jax.device_put(self.inputs.recording.init(learned), shardings.opt_state)
        return dataclasses.replace(self, state=dataclasses.replace(self.state, params=placed, opt_state=opt_state))

    def make_step(self, view: View, num_minibatches: int) -> Step:
        """Returns the step that `measure` takes."""
        inputs, options = self.inputs, self._options(view, num_minibatches)
        return make_train_step(inputs.job, inputs.recording, self.layout, skip_nonfinite=False, donate=False, **options)

    def measure(self, step: Callable[..., Any], batch: PyTree = None) -> Measured:
        """Takes `num_steps` steps, with the shared batch by default."""
        batch = self.inputs.batch if batch is None else batch
        state, metrics = step(self.state, batch)
        seen = self._cut(state)
        grads, first = named(seen.opt_state[0].trace), named(seen.params)
        own = {name: value for name, value in metrics.items() if name not in _OWN_METRICS}
        for _ in range(self.inputs.num_steps - 1):
            state, _ = step(state, batch)
        state = self._cut(state)
        return Measured(metrics["loss"], grads, named(own), first, named(state.params), named(state.model_state))

    def gradients(self, view: View, num_minibatches: int) -> Callable[[PyTree, Any], tuple[Any, dict[str, Any]]]:
        """Returns `gradients(batch, rng) -> (loss, gradients by name)` at the initial parameters, on the host."""
        gradients = make_gradients(self.inputs.job, self.layout, **self._options(view, num_minibatches))
        params = part_leaves(self.layout, "params")

        @jax.jit
        def compute(params: PyTree, batch: PyTree, rng: Any) -> tuple[Any, PyTree]:
            with jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh):
                result, _ = gradients(params, batch, rng, self.state.model_state)
            return result.loss, result.grads

        def call(batch: PyTree, rng: Any) -> tuple[Any, dict[str, Any]]:
            rows = P(self.row_axes)
            here = jax.tree.map(lambda leaf: NamedSharding(self.mesh, rows if np.ndim(leaf) else P()), batch)
            loss, grads = compute(self.state.params, jax.device_put(batch, here), rng)
            grads = cut(grads, [leaf for leaf, keep in zip(params, gradients.trainable, strict=True) if keep])
            return np.asarray(loss), fetch(named(grads))

        return call

    def program(self, num_minibatches: int, *, complete: bool = False) -> TracedProgram:
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


def named(tree: PyTree) -> dict[str, Any]:
    """Returns the leaves of a tree by name."""
    return {leaf.name: leaf.value for leaf in named_leaves(tree)}


def fetch(tree: Named) -> dict[str, Any]:
    """Returns arrays on the host."""
    return {name: np.asarray(leaf) for name, leaf in tree.items()}
