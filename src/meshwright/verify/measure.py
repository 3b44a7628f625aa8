"""What is measured on a mesh: initial parameters, and loss, gradients and parameters of a few steps.

One program per view and number of minibatches gives all of it: the step itself. Its gradients are read from the state
of `optax.trace` with no memory, which stands before the optimizer and keeps what goes through it.
"""

from __future__ import annotations

import dataclasses
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
from meshwright.models.execution import DATA_AXES, Remat
from meshwright.train.gradients import View, make_gradients
from meshwright.train.precision import Precision
from meshwright.train.state import RunState, init_state, state_layout
from meshwright.train.step import make_train_step
from meshwright.train.sync import Sync
from meshwright.tree import named_leaves
from meshwright.types import PyTree


@dataclass(frozen=True)
class SharedInputs:
    """What all measurements of a report share."""

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
        """The optimizer, with the last gradients kept in the first part of its state."""
        return optax.chain(optax.trace(decay=0.0), self.optimizer)

    @property
    def key(self) -> Any:
        return jax.random.key(self.seed)

    def row_axes(self, mesh: Mesh) -> tuple[str, ...]:
        return tuple(axis for axis in self.data_axes or DATA_AXES if axis in mesh.axis_names)

    def options(self, view: View, mesh: Mesh) -> dict[str, Any]:
        return {
            "view": view,
            "sync": self.sync if view == "local" else None,
            "precision": self.precision,
            "remat": self.remat,
            "data_axes": self.row_axes(mesh),
        }


@dataclass(frozen=True)
class Placed:
    """A job on one mesh: its layout and its first state."""

    layout: Layout
    state: RunState

    @property
    def mesh(self) -> Mesh:
        mesh = self.layout.mesh
        assert isinstance(mesh, Mesh)
        return mesh

    @property
    def initial(self) -> dict[str, Any]:
        return named(self.state.params)

    def starting_from(self, params: PyTree, setup: SharedInputs) -> Placed:
        """Returns the same with other parameters."""
        shardings = self.layout.shardings
        placed = jax.device_put(params, shardings.params)
        opt_state = jax.device_put(setup.recording.init(placed), shardings.opt_state)
        return Placed(self.layout, dataclasses.replace(self.state, params=placed, opt_state=opt_state))


@dataclass(frozen=True)
class Measured:
    """What a few steps gave; arrays are on the mesh, so that copies can be told apart."""

    loss: Any
    grads: dict[str, Any]
    first: dict[str, Any]
    """Parameters after one step."""
    last: dict[str, Any]
    """Parameters after all steps."""


def place(setup: SharedInputs, mesh: Mesh, *, quiet: bool = True) -> Placed:
    """Makes a job's first state on a mesh; raises where its rules do not fit it."""
    with warnings.catch_warnings():
        if quiet:  # what there is to say about the rules was said for the reference
            warnings.simplefilter("ignore", MeshwrightWarning)
        layout = state_layout(setup.job, setup.recording, mesh, precision=setup.precision)
        return Placed(layout, init_state(setup.job, setup.recording, layout, setup.key, precision=setup.precision))


def measure(setup: SharedInputs, placed: Placed, *, view: View, num_minibatches: int) -> Measured:
    """Takes a few steps on a mesh."""
    step = make_train_step(
        setup.job,
        setup.recording,
        placed.layout,
        num_minibatches=num_minibatches,
        skip_nonfinite=False,
        donate=False,
        **setup.options(view, placed.mesh),
    )
    state, metrics = step(placed.state, setup.batch)
    grads, first = named(state.opt_state[0].trace), named(state.params)
    for _ in range(setup.num_steps - 1):
        state, _ = step(state, setup.batch)
    return Measured(metrics["loss"], grads, first, named(state.params))


def gradient_function(
    setup: SharedInputs, placed: Placed, *, view: View, num_minibatches: int
) -> Callable[[PyTree, Any], tuple[Any, dict[str, Any]]]:
    """Returns `gradients(batch, rng) -> (loss, gradients by name)` at a placed job's first parameters."""
    gradients = make_gradients(
        setup.job, placed.layout, num_minibatches=num_minibatches, **setup.options(view, placed.mesh)
    )
    mesh, rows = placed.mesh, P(setup.row_axes(placed.mesh))

    @jax.jit
    def compute(params: PyTree, batch: PyTree, rng: Any) -> tuple[Any, PyTree]:
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            result, _ = gradients(params, batch, rng)
        return result.loss, result.grads

    def call(batch: PyTree, rng: Any) -> tuple[Any, dict[str, Any]]:
        here = jax.tree.map(lambda leaf: NamedSharding(mesh, rows if np.ndim(leaf) else P()), batch)
        loss, grads = compute(placed.state.params, jax.device_put(batch, here), rng)
        return loss, named(grads)

    return call


def named(tree: PyTree) -> dict[str, Any]:
    """Returns a tree as a dict from leaf name to leaf."""
    return {leaf.name: leaf.value for leaf in named_leaves(tree)}


def worst_copies(array: Any, reference: Any) -> np.ndarray[Any, Any]:
    """Returns an array on the host; of parts that several devices hold, the copy that is furthest from a reference."""
    if array.is_fully_replicated and len(array.sharding.device_set) == 1:
        return np.asarray(array)
    expected = np.asarray(reference, np.float64)
    whole = np.empty(array.shape, array.dtype)
    furthest: dict[str, float] = {}
    for shard in array.addressable_shards:
        data = np.asarray(shard.data)
        with np.errstate(invalid="ignore"):
            apart = np.abs(data.astype(np.float64) - expected[shard.index])
        distance = float(np.where(np.isnan(apart), np.inf, apart).max(initial=0.0))
        part = repr(shard.index)
        if part not in furthest or distance > furthest[part]:
            furthest[part], whole[shard.index] = distance, data
    return whole
