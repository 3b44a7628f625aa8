"""Moves layers between the devices that store them and the devices that compute them.

Parameters are stored as contiguous layers: device `d` of a pipeline has the `d`-th part of the stack, so that
checkpoints do not depend on the schedule. In an interleaved or V schedule, its virtual stages are elsewhere in the
stack. Each device then sends and receives every layer at most once, in rounds of one `ppermute` each, and the gradients
take the way back. The same happens if the stored layers would leave a device without any.

If the stages do not divide the layers and each device has one, stages are the layers as they are stored, and the last
one has fewer. Otherwise, or if a device would have none, the first stages have one layer more than the others. An empty
place holds a copy of the stage's first layer, so that a stage that computes and ignores it gets ordinary numbers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from meshwright.errors import LayoutError, PlacementError
from meshwright.mesh.axes import axis_index
from meshwright.specs import ceil_div
from meshwright.types import PyTree


class Move(NamedTuple):
    """The way of one piece of the stack."""

    source: int
    piece: int
    """Its place among the pieces that the source stores."""
    target: int
    slot: int
    """Its place among the pieces that the target computes, stage by stage."""


@dataclass(frozen=True)
class StageMoves:
    """The exchanges between the stored order of layers and the virtual stages of each device.

    Args:
        counts: `[devices][rounds]`, the number of layers of each virtual stage.
        num_slots: places for layers in each virtual stage.
        size: layers per piece.
        rounds: the moves of each exchange; each device is the source of at most one, and the target of at most one.
    """

    counts: tuple[tuple[int, ...], ...]
    num_slots: int
    size: int
    rounds: tuple[tuple[Move, ...], ...]

    @property
    def is_even(self) -> bool:
        """Whether all virtual stages have the same number of layers."""
        return all(count == self.num_slots for turns in self.counts for count in turns)

    def counts_on(self, axis: str) -> Any:
        """Returns the number of layers of each of this device's virtual stages; None if all are the same."""
        if self.is_even:
            return None
        return jnp.asarray(np.array(self.counts, np.int32))[axis_index(axis, who="pipeline")]

    def to_stages(self, layers: Any, axis: str) -> Any:
        """Returns this device's layers `[layers, ...]` as its virtual stages `[rounds, places, ...]`."""
        num_rounds, rest = len(self.counts[0]), layers.shape[1:]
        if self.rounds:
            pieces = jnp.reshape(layers, (-1, self.size, *rest))
            layers = self._exchange(pieces, num_rounds * self.num_slots // self.size, axis, back=False)
        stages = jnp.reshape(layers, (num_rounds, self.num_slots, *rest))
        counts = self.counts_on(axis)
        if counts is None:
            return stages
        used = jnp.arange(self.num_slots) < counts[:, None]
        return jnp.where(jnp.reshape(used, (*used.shape, *(1,) * len(rest))), stages, stages[:, :1])

    def from_stages(self, stages: Any, num_layers: int, axis: str) -> Any:
        """The inverse of `to_stages`, for `num_layers` stored layers."""
        rest = stages.shape[2:]
        if not self.rounds:
            return jnp.reshape(stages, (num_layers, *rest))
        pieces = self._exchange(jnp.reshape(stages, (-1, self.size, *rest)), num_layers // self.size, axis, back=True)
        return jnp.reshape(pieces, (num_layers, *rest))

    def _exchange(self, pieces: Any, num_found: int, axis: str, *, back: bool) -> Any:
        place = axis_index(axis, who="pipeline")
        # The last place takes what arrives on devices that receive nothing in a round.
        found = jnp.zeros_like(pieces, shape=(num_found + 1, *pieces.shape[1:]))
        for moves in self.rounds:
            taken, put = np.zeros(len(self.counts), np.int32), np.full(len(self.counts), num_found, np.int32)
            pairs = []
            for move in moves:
                source, piece, target, slot = (move[2:] + move[:2]) if back else move
                taken[source], put[target] = piece, slot
                pairs.append((source, target))
            piece = lax.dynamic_index_in_dim(pieces, jnp.asarray(taken)[place], keepdims=False)
            arrived = lax.ppermute(piece, axis, pairs)
            found = lax.dynamic_update_index_in_dim(found, arrived, jnp.asarray(put)[place], 0)
        return found[:-1]


def make_moves(devices: Sequence[int], num_stages: int, num_layers: int) -> StageMoves:
    """Returns the exchanges for a schedule whose virtual stage `s` runs on `devices[s]`.

    Each device stores `ceil(num_layers / num_stages)` layers, the last ones possibly fewer.

    Example:
        >>> len(make_moves((0, 1, 1, 0), 2, 8).rounds), len(make_moves((0, 1), 2, 8).rounds)
        (2, 0)
        >>> make_moves((0, 1, 1, 0), 2, 6).counts  # stages of 2, 2, 1 and 1 layers
        ((2, 1), (2, 1))
        >>> make_moves((0, 1, 2, 3), 4, 6).counts  # stored as 2, 2, 2 and 0
        ((2,), (2,), (1,), (1,))
    """
    num_virtual, stored = len(devices), ceil_div(num_layers, num_stages)
    num_rounds = num_virtual // num_stages
    if num_layers < num_virtual:
        raise LayoutError(
            f"{num_layers} layers cannot be cut into {num_stages} x {num_rounds} pipeline stages of at least one "
            "layer.",
            hint="use fewer devices along the pipeline axis, or a schedule with fewer stages per device.",
        )
    turns = [list(devices[:stage]).count(device) for stage, device in enumerate(devices)]
    if num_rounds == 1 and num_layers > (num_stages - 1) * stored:
        sizes = [min(stored, num_layers - stage * stored) for stage in range(num_virtual)]
    else:
        sizes = [num_layers // num_virtual + (stage < num_layers % num_virtual) for stage in range(num_virtual)]
    counts = [[0] * num_rounds for _ in range(num_stages)]
    for stage, device in enumerate(devices):
        counts[device][turns[stage]] = sizes[stage]
    num_slots, firsts = max(sizes), np.cumsum([0, *sizes])
    size = num_slots if num_layers == num_virtual * num_slots else 1
    moves = [
        Move(
            layer // stored, layer % stored // size, devices[stage], (turns[stage] * num_slots + layer - first) // size
        )
        for stage, first in enumerate(firsts[:-1].tolist())
        for layer in range(first, first + sizes[stage], size)
    ]
    in_place = all(move.source == move.target and move.piece == move.slot for move in moves)
    rounds = () if in_place else _in_rounds(moves, num_stages)
    return StageMoves(tuple(map(tuple, counts)), num_slots, size, rounds)


def count_layers(
    stage_fn: Callable[..., Any], layers: PyTree, num_layers: int | None, *, num_stages: int, num_rounds: int, who: str
) -> int:
    """Returns the number of layers on all devices; raises if a device cannot hold or run its own.

    Args:
        layers: this device's layers.
        num_layers: their number on all devices, or None if each holds as many as this one.
    """
    sizes = {int(leaf.shape[0]) if leaf.ndim else 0 for leaf in jax.tree.leaves(layers)}
    if len(sizes) != 1:
        raise PlacementError(
            f"{who}: the leaves of layers have different leading dims: {sorted(sizes)}.",
            hint="stack the layers along the leading dim of each leaf.",
        )
    stored, num_virtual = sizes.pop(), num_stages * num_rounds
    total = stored * num_stages if num_layers is None else num_layers
    if ceil_div(total, num_stages) != stored:
        raise LayoutError(
            f"{who}: {num_stages} devices hold {stored} layers each, which does not fit {num_layers=}.",
            hint=f"store {ceil_div(total, num_stages)} layers on each device, the last ones padded.",
        )
    if total % num_virtual and not _takes_count(stage_fn):
        raise LayoutError(
            f"{total} layers cannot be cut evenly into {num_stages} x {num_rounds} pipeline stages, and stage_fn takes "
            "no num_layers.",
            hint="let it take num_layers=, and ignore the layers after so many; or use a multiple of "
            f"{num_virtual} layers.",
        )
    return total


def _takes_count(stage_fn: Callable[..., Any]) -> bool:
    known = inspect.signature(stage_fn).parameters
    return "num_layers" in known or any(kind.kind == kind.VAR_KEYWORD for kind in known.values())


def _in_rounds(moves: Sequence[Move], num_devices: int) -> tuple[tuple[Move, ...], ...]:
    """Splits moves into rounds, as few as the busiest device needs.

    With moves of nothing, every device has equally many as a source and as a target. Then each round can take one of
    every source and target (Koenig's theorem), found by augmenting paths.
    """
    left: list[list[Move]] = [[move for move in moves if move.source == home] for home in range(num_devices)]
    arriving = [sum(move.target == device for move in moves) for device in range(num_devices)]
    most = max([*map(len, left), *arriving])
    idle = iter([device for device, count in enumerate(arriving) for _ in range(most - count)])
    for home, own in enumerate(left):
        own += [Move(home, -1, next(idle), -1) for _ in range(most - len(own))]
    rounds = []
    for _ in range(most):
        taken: dict[int, Move] = {}

        def find(home: int, seen: set[int], taken: dict[int, Move]) -> bool:
            for move in left[home]:
                if move.target in seen:
                    continue
                seen.add(move.target)
                if move.target not in taken or find(taken[move.target].source, seen, taken):
                    taken[move.target] = move
                    return True
            return False

        for home in range(num_devices):
            found = find(home, set(), taken)
            assert found
        for move in taken.values():
            left[move.source].remove(move)
        rounds.append(tuple(sorted(move for move in taken.values() if move.piece >= 0)))
    return tuple(rounds)
