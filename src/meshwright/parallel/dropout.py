"""Dropout whose mask belongs to the global array: the same on one device, on any mesh, in any number of minibatches."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from meshwright.errors import PlacementError
from meshwright.mesh.axes import axis_index, axis_size
from meshwright.parallel.rows import bits_by_place, global_rows, row_key
from meshwright.specs import dim_axes, format_spec, spec_axes
from meshwright.types import PRNGKeyArray


def dropout(x: Any, rate: float, key: PRNGKeyArray, *, spec: P | None = None) -> Any:
    """Zeroes each element with probability `rate`, and divides the others by `1 - rate`.

    Every element's fate is a hash of the key and its place in the global array, so slices of an array on different
    devices are treated as the whole array would be on one; nothing is communicated, and only the slice's own part of
    the mask is computed.

    Args:
        key: a key that is the same on all devices; from a `row_key`, rows count from its row on.
        spec: how the manual axes split `x`. Axes of the global view need no mention: there `x` is whole.

    Example:
        >>> import meshwright as mw
        >>> x, key = jnp.ones((4, 16)), jax.random.key(0)
        >>> drop = mw.parallel.local_map(
        ...     lambda x: dropout(x, 0.5, key, spec=P("dp", "tp")),
        ...     mesh=mw.create_mesh("dp:2,tp:4"),
        ...     in_specs=P("dp", "tp"),
        ...     out_specs=P("dp", "tp"),
        ... )
        >>> bool((jax.jit(drop)(x) == dropout(x, 0.5, key)).all())
        True
    """
    if not 0 <= rate <= 1:
        raise PlacementError(f"dropout got rate={rate}.", hint="a probability, from 0 (keep all) to 1 (drop all).")
    if rate == 0:
        return x
    if rate == 1:
        return jnp.zeros_like(x)
    kept = 1.0 - rate
    data = jax.random.key_data(row_key(key))
    places, sizes = _global_places(x, spec or P())
    if places:
        places[0] = global_rows(data, places[0])
    bits = bits_by_place(data[:2], places, sizes[1:])
    # The upper 24 bits: a float32 holds their whole range, so that the comparison is exact.
    uniform = (bits >> 8).astype(jnp.float32) * jnp.float32(2**-24)
    return jnp.where(uniform < kept, x / jnp.asarray(kept, x.dtype), jnp.zeros_like(x))


def _global_places(x: Any, spec: P) -> tuple[list[Any], list[int]]:
    if len(spec) > x.ndim:
        raise PlacementError(
            f"dropout got spec {format_spec(spec)} for an array of shape {x.shape}.",
            hint=f"use at most {x.ndim} entries.",
        )
    ways = {axis: axis_size(axis, who="dropout") for axis in spec_axes(spec)}
    places, sizes = [], []
    for dim, length in enumerate(x.shape):
        first, size = jnp.uint32(0), int(length)
        for axis in dim_axes(spec[dim]) if dim < len(spec) else ():
            first = first * jnp.uint32(ways[axis]) + jnp.asarray(axis_index(axis, who="dropout")).astype(jnp.uint32)
            size *= ways[axis]
        places.append(lax.broadcasted_iota(jnp.uint32, x.shape, dim) + first * jnp.uint32(length))
        sizes.append(size)
    return places, sizes
