"""Moves layers between the devices that store them and the devices that compute them.

Parameters are stored as contiguous layers: device `d` of a pipeline has the `d`-th part of the stack, so that
checkpoints do not depend on the schedule. In an interleaved or V schedule, its virtual stages are elsewhere in the
stack. Each device then sends and receives every layer at most once, in rounds of one `ppermute` each, and the gradients
take the way back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from meshwright.errors import LayoutError
from meshwright.mesh.axes import axis_index
from meshwright.specs import round_up


@dataclass(frozen=True)
class Round:
    """One exchange: each device sends one piece of what it has, and receives one."""

    sends: tuple[int, ...]
    """The device to which each device sends."""
    taken: tuple[int, ...]
    """The piece that each device sends, by its place in the stack."""
    put: tuple[int, ...]
    """The place of the piece that each device receives, by its turn among the device's virtual stages."""


@dataclass(frozen=True)
class StageMoves:
    """The exchanges between the stored order of layers and virtual stages on `devices`."""

    devices: tuple[int, ...]
    num_rounds: int
    rounds: tuple[Round, ...]

    def to_stages(self, layers: Any, axis: str) -> Any:
        """Returns this device's layers `[layers, ...]` as its virtual stages `[rounds, layers per stage, ...]`."""
        pieces = jnp.reshape(layers, (self.num_rounds, -1, *layers.shape[1:]))
        return self._exchange(pieces, axis, back=False)

    def from_stages(self, stages: Any, axis: str) -> Any:
        """The inverse of `to_stages`."""
        pieces = self._exchange(stages, axis, back=True)
        return jnp.reshape(pieces, (-1, *pieces.shape[2:]))

    def _exchange(self, pieces: Any, axis: str, *, back: bool) -> Any:
        if not self.rounds:
            return pieces
        place, found = axis_index(axis, who="pipeline"), jnp.zeros_like(pieces)
        for one in self.rounds:
            pairs = [(target, source) if back else (source, target) for source, target in enumerate(one.sends)]
            taken, put = (np.array(places, np.int32) for places in (one.taken, one.put))
            taken, put = (put, taken) if back else (taken, put)
            piece = lax.dynamic_index_in_dim(pieces, jnp.asarray(taken)[place], keepdims=False)
            arrived = lax.ppermute(piece, axis, pairs)
            found = lax.dynamic_update_index_in_dim(found, arrived, jnp.asarray(put)[place], 0)
        return found


def make_moves(devices: Sequence[int], num_stages: int) -> StageMoves:
    """Returns the exchanges for a schedule whose virtual stage `s` runs on `devices[s]`.

    Example:
        >>> len(make_moves((0, 1, 1, 0), 2).rounds), len(make_moves((0, 1), 2).rounds)
        (2, 0)
    """
    num_rounds = len(devices) // num_stages
    turns = [devices[:stage].count(device) for stage, device in enumerate(tuple(devices))]
    left = [[*range(home * num_rounds, (home + 1) * num_rounds)] for home in range(num_stages)]
    if all(devices[stage] == home for home, stages in enumerate(left) for stage in stages):
        return StageMoves(tuple(devices), num_rounds, ())
    rounds = []
    for _ in range(num_rounds):
        chosen = _one_each(left, devices)
        for home, stage in enumerate(chosen):
            left[home].remove(stage)
        put = [0] * num_stages
        for stage in chosen:
            put[devices[stage]] = turns[stage]
        taken = [stage - home * num_rounds for home, stage in enumerate(chosen)]
        rounds.append(Round(tuple(devices[stage] for stage in chosen), tuple(taken), tuple(put)))
    return StageMoves(tuple(devices), num_rounds, tuple(rounds))


def _one_each(left: list[list[int]], devices: Sequence[int]) -> list[int]:
    """Returns a stage of each home such that no two run on one device, by augmenting paths.

    One exists, because every home has as many stages left as every device is still to receive (Koenig's theorem).
    """
    taken_by: dict[int, tuple[int, int]] = {}  # device: home and stage

    def find(home: int, seen: set[int]) -> bool:
        for stage in left[home]:
            device = devices[stage]
            if device in seen:
                continue
            seen.add(device)
            if device not in taken_by or find(taken_by[device][0], seen):
                taken_by[device] = (home, stage)
                return True
        return False

    for home in range(len(left)):
        assert find(home, set())
    chosen = dict(taken_by.values())
    return [chosen[home] for home in range(len(left))]


def check_layers(num_layers: int, schedule_name: str, *, num_stages: int, num_rounds: int) -> None:
    """Raises if the virtual stages of a schedule do not divide the layers."""
    chunks = num_stages * num_rounds
    if num_layers % chunks:
        near = sorted({max(num_layers // chunks, 1) * chunks, round_up(num_layers, chunks)})
        raise LayoutError(
            f"{num_layers} layers cannot be cut into the {num_stages} x {num_rounds} stages of the pipeline schedule "
            f"{schedule_name!r}: {num_layers} % {chunks} = {num_layers % chunks}.",
            hint=f"use {' or '.join(map(str, near))} layers, or another schedule.",
        )
