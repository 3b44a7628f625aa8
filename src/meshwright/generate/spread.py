"""How generation uses the axes of a mesh.

Rows and their caches are split over the data axes, heads over `tp`. Weights stay where they are: a token needs every
weight once, so gathering them would cost as much as the whole pass. Instead, the axes that split the features of
weights (`fsdp`, and `pp`, which splits layers in training) split those of activations, whose sums are small.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from meshwright.models.execution import DATA_AXES

TENSOR_AXIS, PIPELINE_AXIS, FEATURE_AXIS = "tp", "pp", "fsdp"


@dataclass(frozen=True)
class Spread:
    """The mesh of a generation and its axes; without a mesh, constraints do nothing.

    Args:
        rows: axes that split rows and caches.
    """

    mesh: Mesh | None = None
    rows: tuple[str, ...] = ()

    @classmethod
    def of(cls, mesh: Mesh | None, num_rows: int) -> Spread:
        """Returns the axes for a number of rows: data axes as long as each device has a row.

        Example:
            >>> import meshwright as mw
            >>> Spread.of(mw.create_mesh("dp:2,fsdp:4"), num_rows=6).rows
            ('dp',)
        """
        rows: list[str] = []
        for axis in mesh.axis_names if mesh is not None else ():
            assert mesh is not None
            ways = math.prod(mesh.shape[name] for name in [*rows, axis])
            if axis in DATA_AXES and num_rows >= ways:
                rows.append(axis)
        return cls(mesh, tuple(rows))

    @property
    def row_ways(self) -> int:
        """Number of parts of a batch."""
        return math.prod(self.mesh.shape[axis] for axis in self.rows) if self.mesh is not None else 1

    def split_heads(self, x: Any, *, dim: int) -> Any:
        """Splits rows, and the heads in dim `dim` if the tensor axis divides them."""
        ways = 1 if self.mesh is None else self.mesh.shape.get(TENSOR_AXIS, 1)
        heads = TENSOR_AXIS if ways > 1 and x.shape[dim] % ways == 0 else None
        return self._constrained(x, P(self.rows, *[None] * (dim - 1), heads))

    def split_state(self, state: Any) -> Any:
        """Splits the state of an mLSTM, whose arrays have rows and heads first."""
        return jax.tree.map(lambda x: self.split_heads(x, dim=1) if x.ndim > 1 else self.split_rows(x), state)

    def split_rows(self, x: Any) -> Any:
        return self._constrained(x, P(self.rows))

    def split_features(self, h: Any) -> Any:
        """Splits the features of `[B, S, D]` like those of the weights, and rows over the other data axes."""
        features = self.feature_axes(h.shape[-1])
        rows = tuple(axis for axis in self.rows if axis not in features)
        return self._constrained(h, P(rows, None, features or None))

    def feature_axes(self, size: int) -> tuple[str, ...]:
        """Returns the axes that split features of a weight, if they divide its size."""
        if self.mesh is None:
            return ()
        axes = tuple(axis for axis in (FEATURE_AXIS, PIPELINE_AXIS) if self.mesh.shape.get(axis, 1) > 1)
        return axes if size % math.prod(self.mesh.shape[axis] for axis in axes) == 0 else ()

    def everywhere(self, x: Any) -> Any:
        """Replicates an array."""
        return self._constrained(x, P())

    def _constrained(self, x: Any, spec: P) -> Any:
        if self.mesh is None:
            return x
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, spec))
