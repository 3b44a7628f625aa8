"""One leaf of a layout: what it is, how it is split, and what it costs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import PartitionSpec as P

from meshwright.dtypes import dtype_bits
from meshwright.specs import format_spec, shard_shape


class LeafLayout(NamedTuple):
    """A leaf's place; `stored_shape` differs from `shape` only where padding was asked for."""

    name: str
    shape: tuple[int, ...]
    dtype: Any
    spec: P
    rule: int | None
    pattern: str
    reason: str
    stored_shape: tuple[int, ...]
    shard_shape: tuple[int, ...]

    @property
    def is_padded(self) -> bool:
        return self.stored_shape != self.shape

    @property
    def is_replicated(self) -> bool:
        return self.shard_shape == self.stored_shape

    @property
    def bytes_total(self) -> int:
        """Bytes of one whole copy, padding included."""
        return num_bytes(self.stored_shape, self.dtype)

    @property
    def bytes_per_device(self) -> int:
        return num_bytes(self.shard_shape, self.dtype)

    @property
    def why(self) -> str:
        """The rule that decided, and any remark, for tables."""
        decided = "" if self.rule is None else f"{self.rule} `{self.pattern}`"
        return ", ".join(filter(None, [decided, self.reason]))

    def __str__(self) -> str:
        return f"{self.name} {self.shape} {self.dtype} {format_spec(self.spec)}"


def make_leaf(
    name: str,
    shape: tuple[int, ...],
    dtype: Any,
    spec: P,
    axis_sizes: Mapping[str, int],
    *,
    rule: int | None = None,
    pattern: str = "",
    reason: str = "",
    stored_shape: tuple[int, ...] | None = None,
) -> LeafLayout:
    """Builds a leaf whose spec is known to fit."""
    stored = shape if stored_shape is None else stored_shape
    return LeafLayout(name, shape, dtype, spec, rule, pattern, reason, stored, shard_shape(spec, stored, axis_sizes))


def num_bytes(shape: tuple[int, ...], dtype: Any) -> int:
    """Returns the bytes an array takes; sub-byte dtypes are rounded up to whole bytes per array."""
    elements = 1
    for dim in shape:
        elements *= dim
    return -(-elements * dtype_bits(dtype) // 8)


def format_bytes(count: float) -> str:
    """Returns a count of bytes for people.

    >>> format_bytes(3 * 2**20), format_bytes(500)
    ('3.0 MiB', '500 B')
    """
    if count < 1024:
        return f"{int(count)} B"
    power = min(int(np.log2(count) // 10), 5)
    return f"{count / 1024**power:.1f} {('B', 'KiB', 'MiB', 'GiB', 'TiB', 'PiB')[power]}"


def count_leaves(count: int) -> str:
    """Returns the number with its noun."""
    return f"{count} leaf" if count == 1 else f"{count} leaves"
