"""Types based on flax classes; import them from `meshwright` or `meshwright.types`."""

from __future__ import annotations

from typing import Any, TypeAlias

import jax
from flax import linen as nn
from flax import struct
from flax.training import train_state

Parameter: TypeAlias = jax.Array | nn.Partitioned[Any]
"""A leaf of an xlstm_jax-style parameter tree: an array, or a box that names the mesh axes that split it."""


class TrainState(train_state.TrainState):
    """Flax's train state with two more fields: non-parameter collections and a random key.

    Example:
        >>> import jax, optax
        >>> state = TrainState.create(apply_fn=None, params={"w": jax.numpy.ones(3)}, tx=optax.sgd(0.1))
        >>> state.rng is None, state.mutable_variables is None
        (True, True)
    """

    mutable_variables: Any = None
    rng: Any = None


@struct.dataclass
class Batch:
    """Inputs and targets whose arrays share their leading dim; indexing slices every array.

    Example:
        >>> import numpy as np
        >>> batch = Batch(inputs=np.arange(6).reshape(3, 2), targets=np.arange(3))
        >>> batch[:2].inputs.shape, batch[:2].targets.tolist()
        ((2, 2), [0, 1])
    """

    inputs: Any
    targets: Any

    def __getitem__(self, key: Any) -> Batch:
        sliced: Batch = jax.tree.map(lambda leaf: leaf[key], self)
        return sliced
