"""The loop over the ticks of a training schedule, in which devices compute losses and gradients."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from meshwright.dtypes import is_float
from meshwright.errors import PlacementError
from meshwright.mesh.axes import axis_index, pcast_varying, varying_axes
from meshwright.parallel.pipeline.flow import Functions, flow, in_mesh_order, mark, traced_types, zeros
from meshwright.parallel.pipeline.schedule import IDLE, MESSAGES_SCOPE
from meshwright.parallel.pipeline.slots import Slots, assign_slots
from meshwright.parallel.pipeline.stage_backward import StageBackward, split_stage
from meshwright.parallel.pipeline.stage_moves import make_moves
from meshwright.parallel.pipeline.training_schedule import TrainingSchedule, Work
from meshwright.types import PyTree


@dataclass(frozen=True)
class TrainingLoop:
    """A training schedule with the functions that it runs.

    Args:
        learned_layers, learned_ends: whether each leaf of the layers, and each array of the ends, has a gradient.
        unpack: returns the parameters of `first` and `last` from the arrays of both.
        places: the places of the parameters of `first` and of `last` among these arrays.
        remat, num_layers: see `pipeline_loss`.
    """

    functions: Functions
    schedule: TrainingSchedule
    axis: str
    learned_layers: Sequence[bool]
    learned_ends: Sequence[bool]
    unpack: Callable[[Sequence[Any]], tuple[PyTree, PyTree]]
    places: tuple[Sequence[int], Sequence[int]]
    remat: bool
    num_layers: int

    def run(self, layers: PyTree, ends: Sequence[Any]) -> tuple[tuple[Any, PyTree], tuple[PyTree, list[Any]]]:
        """Returns the loss and the other sums, on the last device, and the gradients of layers and ends."""
        schedule, axis = self.schedule, self.axis
        moves = make_moves(schedule.devices, schedule.num_stages, self.num_layers)
        leaves: list[Any]
        structure: Any
        leaves, structure = jax.tree.flatten(layers)
        stages = [moves.to_stages(leaf, axis) for leaf in leaves]
        cells = Cells(self, stages, structure, ends, moves.counts_on(axis))
        (result, stage_grads, end_grads) = cells.run_all()
        found = iter(stage_grads)
        grads = [
            moves.from_stages(next(found).astype(leaf.dtype), leaf.shape[0], axis) if learns else None
            for leaf, learns in zip(leaves, self.learned_layers, strict=True)
        ]
        home, last = schedule.devices[-1], schedule.num_stages - 1
        if home != last:
            result = jax.tree.map(lambda leaf: lax.ppermute(leaf, axis, [(home, last)]), result)
        found = iter(end_grads)
        of_ends = [
            next(found).astype(leaf.dtype) if learns else None
            for leaf, learns in zip(ends, self.learned_ends, strict=True)
        ]
        return result, (structure.unflatten(grads), of_ends)


class Cells:
    """The work of one device at each tick."""

    def __init__(
        self,
        loop: TrainingLoop,
        stages: list[Any],
        structure: Any,
        ends: Sequence[Any],
        counts: Any,
    ) -> None:
        self.loop, self.stages, self.structure, self.ends = loop, stages, structure, ends
        self.f, schedule = loop.functions, loop.schedule
        # The number of layers of each of this device's stages, if they differ
        self.counts = counts
        zero = pcast_varying(jnp.int32(0), loop.axis)
        first_params, last_params = loop.unpack(ends)
        own = structure.unflatten(self._own(zero))
        given = replace(self.f, stage_fn=functools.partial(self.f.stage_fn, **self._count(zero)))
        self.h_type, self.out_type = flow(given, (own, first_params, last_params), loop.axis)
        self._check()
        self.stage = self._traced(zero)
        self.slots = assign_slots(schedule, saves=not loop.remat)
        h = zeros(self.h_type)
        saved = self._types(lambda: self._forward(zero, zero, h)[1])
        kept = self._types(lambda: self._backward(zero, zero, h, [zeros(t) for t in saved], h)[2])
        self.stored_types = [*saved, *kept]

    def run_all(self) -> tuple[Any, list[Any], list[Any]]:
        """Runs all ticks; returns the sums, and the gradients of stages and ends."""
        schedule, axis, slots = self.loop.schedule, self.loop.axis, self.slots
        table = _columns(schedule, slots)
        place = axis_index(axis, who="pipeline_loss")
        kinds = [IDLE, *sorted({int(work) for work in schedule.work[schedule.work != IDLE]})]
        branches = {
            IDLE: self._idle,
            Work.FORWARD: self._forward_cell,
            Work.BACKWARD: self._backward_cell,
            Work.WEIGHTS: self._weights_cell,
        }
        order = np.array([kinds.index(work) for work in range(IDLE, max(kinds) + 1)], np.int32)
        num_stages = schedule.num_stages

        def tick(carry: Any, row: Any) -> tuple[Any, None]:
            inbox, state = carry
            at = {name: column[place] for name, column in row.items()}
            calls = [functools.partial(branches[kind], at, inbox) for kind in kinds]
            message, state = lax.switch(jnp.asarray(order)[at["work"] + 1], calls, state)
            for by in slots.arrivals:
                pairs = _pairs(schedule, by)
                with jax.named_scope(MESSAGES_SCOPE):
                    arrived = jax.tree.map(lambda leaf: lax.ppermute(leaf, axis, pairs), message) if by else message  # noqa: B023
                # The slot after the last one takes what nobody waits for.
                inbox = _put(inbox, arrived, at[f"from_{by}"])
            return (inbox, state), None

        assert num_stages > 1
        inbox = _buffers(self.h_type, slots.num_inbox + 1)
        state = (
            _buffers(self.stored_types, max(slots.num_stored, 1)),
            [_accumulator(leaf) for leaf, learns in zip(self.stages, self.loop.learned_layers, strict=True) if learns],
            [_accumulator(leaf) for leaf, learns in zip(self.ends, self.loop.learned_ends, strict=True) if learns],
            zeros(self.out_type),
        )
        (_, (_, stage_grads, end_grads, sums)), _ = lax.scan(tick, (inbox, state), table)
        return sums, stage_grads, end_grads

    # --- Cells, as branches: `(at, inbox, state) -> (message, state)` ---

    def _idle(self, at: Any, inbox: PyTree, state: Any) -> tuple[PyTree, Any]:
        return zeros(self.h_type), state

    def _forward_cell(self, at: Any, inbox: PyTree, state: Any) -> tuple[PyTree, Any]:
        store, stage_grads, end_grads, sums = state
        x = self._input(at, inbox)
        y, saved = self._forward(at["turn"], at["microbatch"], x)
        store = [*_put(store[: len(saved)], saved, at["stored"]), *store[len(saved) :]]

        def finish(y: PyTree, end_grads: list[Any], sums: Any) -> tuple[PyTree, list[Any], Any]:
            own = [self.ends[place] for place in self._learned_ends(1)]

            def loss(own: list[Any], y: PyTree) -> tuple[Any, Any]:
                out = mark(self.f.leave(self._ends_with(own, 1), y, at["microbatch"]), self.out_type)
                return out[0], out

            value, pull, out = jax.vjp(loss, own, y, has_aux=True)
            grads, dy = pull(jnp.ones_like(value))
            return mark(dy, self.h_type), self._added_ends(end_grads, grads, 1), jax.tree.map(jnp.add, sums, out)

        is_last = at["stage"] == self.loop.schedule.num_virtual_stages - 1
        message, end_grads, sums = lax.cond(is_last, finish, lambda y, *others: (y, *others), y, end_grads, sums)
        return message, (store, stage_grads, end_grads, sums)

    def _backward_cell(self, at: Any, inbox: PyTree, state: Any) -> tuple[PyTree, Any]:
        store, stage_grads, end_grads, sums = state
        num_saved = len(self.stage.saved)
        x = self._input(at, inbox) if self.loop.remat else zeros(self.h_type)
        dy, saved = _take(inbox, at["gradient"]), _take(store[:num_saved], at["stored"])
        dx, grads, kept = self._backward(at["turn"], at["microbatch"], x, saved, dy)
        store = [*store[:num_saved], *_put(store[num_saved:], kept, at["stored"])]
        stage_grads = _added(stage_grads, grads, at["turn"])
        learned = self._learned_ends(0)
        if self.f.first is not None and learned:

            def embed(end_grads: list[Any], dx: PyTree) -> list[Any]:
                def enter(own: list[Any]) -> PyTree:
                    return mark(self.f.enter(self._ends_with(own, 0), at["microbatch"]), self.h_type)

                _, pull = jax.vjp(enter, [self.ends[place] for place in learned])
                return self._added_ends(end_grads, pull(dx)[0], 0)

            end_grads = lax.cond(at["stage"] == 0, embed, lambda grads, _: grads, end_grads, dx)
        return dx, (store, stage_grads, end_grads, sums)

    def _weights_cell(self, at: Any, inbox: PyTree, state: Any) -> tuple[PyTree, Any]:
        store, stage_grads, *others = state
        env = self.stage.start(self._free(at["turn"], at["microbatch"]))
        stored = _take(store, at["stored"])
        env.update(zip([*self.stage.saved, *self.stage.kept], stored, strict=True))
        stage_grads = _added(stage_grads, self.stage.run_weights(env), at["turn"])
        return zeros(self.h_type), (store, stage_grads, *others)

    # --- One stage ---

    def _input(self, at: Any, inbox: PyTree) -> PyTree:
        def enter() -> PyTree:
            return mark(self.f.enter(self.loop.unpack(self.ends)[0], at["microbatch"]), self.h_type)

        return lax.cond(at["stage"] == 0, enter, lambda: _take(inbox, at["input"]))

    def _forward(self, turn: Any, microbatch: Any, x: PyTree) -> tuple[PyTree, list[Any]]:
        """Returns the output of a stage, and what its backward pass needs."""
        if self.loop.remat:
            own, extras = self.structure.unflatten(self._own(turn)), self.f.rows(microbatch)[1]
            return mark(self.f.stage(own, x, extras, self._keywords(turn, microbatch)), self.h_type), []
        env = self.stage.start(self._free(turn, microbatch), jax.tree.leaves(x))
        y = self.stage.run_forward(env)
        return self._h(y), [env[var] for var in self.stage.saved]

    def _backward(
        self, turn: Any, microbatch: Any, x: PyTree, saved: Sequence[Any], dy: PyTree
    ) -> tuple[PyTree, list[Any], list[Any]]:
        """Returns `dx`, the gradients of parameters that come with it, and what the others need."""
        free = self._free(turn, microbatch)
        if self.loop.remat:
            env = self.stage.start(free, jax.tree.leaves(x))
            self.stage.run_forward(env)
        else:
            env = self.stage.start(free)
            env.update(zip(self.stage.saved, saved, strict=True))
        dx, grads = self.stage.run_inputs(env, jax.tree.leaves(dy))
        return self._h(dx), grads, [env[var] for var in self.stage.kept]

    def _own(self, turn: Any) -> list[Any]:
        if self.loop.schedule.num_rounds == 1:
            return [leaf[0] for leaf in self.stages]
        return [lax.dynamic_index_in_dim(leaf, turn, keepdims=False) for leaf in self.stages]

    def _free(self, turn: Any, microbatch: Any) -> list[Any]:
        return jax.tree.leaves((self._own(turn), self.f.rows(microbatch)[1], self._keywords(turn, microbatch)))

    def _keywords(self, turn: Any, microbatch: Any) -> dict[str, Any]:
        return self.f.keys(microbatch) | self._count(turn)

    def _count(self, turn: Any) -> dict[str, Any]:
        return {} if self.counts is None else {"num_layers": self.counts[turn]}

    def _traced(self, zero: Any) -> StageBackward:
        given = (self._own(zero), self.f.rows(zero)[1], self._keywords(zero, zero))
        structure: Any = jax.tree.structure(given)
        learns = self.loop.learned_layers

        def both(free: list[Any], x: list[Any], dy: list[Any]) -> list[Any]:
            leaves, extras, keywords = structure.unflatten(free)

            def call(learned: list[Any], x: list[Any]) -> list[Any]:
                rest = iter(learned)
                whole = [next(rest) if learn else leaf for leaf, learn in zip(leaves, learns, strict=True)]
                y = self.f.stage(self.structure.unflatten(whole), self._h(x), extras, keywords)
                return jax.tree.leaves(mark(y, self.h_type))

            learned = [leaf for leaf, learn in zip(leaves, learns, strict=True) if learn]
            with self.f.in_branch():
                y, pull = jax.vjp(call, learned, x)
                grads, dx = pull(dy)
            return [*y, *dx, *grads]

        h = jax.tree.leaves(zeros(self.h_type))
        splits, saves = self.loop.schedule.splits_backward, not self.loop.remat
        return split_stage(both, jax.tree.leaves(given), h, h, splits=splits, saves=saves)

    def _h(self, leaves: Sequence[Any]) -> PyTree:
        return jax.tree.unflatten(jax.tree.structure(self.h_type), leaves)

    # --- Ends ---

    def _learned_ends(self, end: int) -> list[int]:
        """Returns the places of the parameters of one end that have a gradient, each once."""
        return [place for place in dict.fromkeys(self.loop.places[end]) if self.loop.learned_ends[place]]

    def _ends_with(self, own: Sequence[Any], end: int) -> PyTree:
        ends = list(self.ends)
        for place, value in zip(self._learned_ends(end), own, strict=True):
            ends[place] = value
        return self.loop.unpack(ends)[end]

    def _added_ends(self, sums: list[Any], grads: Sequence[Any], end: int) -> list[Any]:
        among = [place for place, learns in enumerate(self.loop.learned_ends) if learns]
        sums = list(sums)
        for place, grad in zip(self._learned_ends(end), grads, strict=True):
            at = among.index(place)
            sums[at] = sums[at] + grad.astype(sums[at].dtype)
        return sums

    # --- Checks ---

    def _types(self, call: Callable[[], Any]) -> list[Any]:
        return list(traced_types(call, self.loop.axis, name="stage_fn"))

    def _check(self) -> None:
        whole = [t for t in jax.tree.leaves(self.h_type) if not is_float(t.dtype)]
        if whole:
            raise PlacementError(
                f"pipeline_loss: a stage passes {whole[0]} on, which has no gradient.",
                hint="pass arrays of integers as extras.",
            )
        out = self.out_type
        loss = out[0] if isinstance(out, tuple) and len(out) == 2 else None
        if not hasattr(loss, "dtype") or loss.shape or not is_float(loss.dtype):  # type: ignore[union-attr]
            raise PlacementError(
                f"pipeline_loss: last returned {jax.tree.map(str, out)}; it must return a scalar loss and a tree of "
                "sums.",
                hint="return (loss, {}) if there are no other sums.",
            )


# --- Tables and buffers ---


def _columns(schedule: TrainingSchedule, slots: Slots) -> dict[str, Any]:
    """Returns the tables that the loop reads, `[ticks, devices]` each."""
    devices = schedule.devices
    turns = np.array([devices[:stage].count(device) for stage, device in enumerate(devices)] + [0], np.int32)
    columns = {
        "work": schedule.work,
        "stage": schedule.stages,
        "microbatch": np.maximum(schedule.microbatches, 0),
        "turn": turns[schedule.stages],
        "input": np.maximum(slots.inputs, 0),
        "gradient": np.maximum(slots.gradients, 0),
        "stored": np.maximum(slots.stored, 0),
    }
    for by, arrivals in slots.arrivals.items():
        columns[f"from_{by}"] = np.where(arrivals == IDLE, slots.num_inbox, arrivals)
    return {name: jnp.asarray(column, jnp.int32) for name, column in columns.items()}


def _pairs(schedule: TrainingSchedule, by: int) -> list[tuple[int, int]]:
    """Returns the senders and receivers of the messages in one direction."""
    steps = zip(schedule.devices, schedule.devices[1:], strict=False)
    both = {pair for one, other in steps for pair in ((one, other), (other, one))}
    return sorted(pair for pair in both if (pair[1] - pair[0]) % schedule.num_stages == by)


def _buffers(types: PyTree, count: int) -> PyTree:
    return jax.tree.map(lambda t: pcast_varying(jnp.zeros((count, *t.shape), t.dtype), t.axes), types)


def _take(buffers: PyTree, slot: Any) -> PyTree:
    return jax.tree.map(lambda buffer: lax.dynamic_index_in_dim(buffer, slot, keepdims=False), buffers)


def _put(buffers: PyTree, values: PyTree, slot: Any) -> PyTree:
    return jax.tree.map(lambda buffer, value: lax.dynamic_update_index_in_dim(buffer, value, slot, 0), buffers, values)


def _accumulator(leaf: Any) -> Any:
    axes = in_mesh_order(varying_axes(leaf))
    return pcast_varying(jnp.zeros(leaf.shape, jnp.promote_types(leaf.dtype, jnp.float32)), axes)


def _added(sums: list[Any], grads: Sequence[Any], turn: Any) -> list[Any]:
    """Adds the gradients of one virtual stage, except those that are None, to the sums of all."""

    def add(total: Any, grad: Any) -> Any:
        if grad is None:
            return total
        if total.shape[0] == 1:
            return total + grad[None].astype(total.dtype)
        own = lax.dynamic_index_in_dim(total, turn, keepdims=False) + grad.astype(total.dtype)
        return lax.dynamic_update_index_in_dim(total, own, turn, 0)

    return [add(total, grad) for total, grad in zip(sums, grads, strict=True)]
