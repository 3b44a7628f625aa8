"""Dropout with the same mask on one device, on any mesh and for any number of minibatches."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from meshwright.errors import PlacementError
from meshwright.mesh.axes import axis_index, axis_size
from meshwright.parallel.row_keys import bits_by_place, global_rows, row_key
from meshwright.specs import dim_axes, format_spec, spec_axes
from meshwright.types import PRNGKeyArray


def dropout(x: Any, rate: float, key: PRNGKeyArray, *, spec: P | None = None) -> Any:
    """Zeroes each element with probability `rate` and divides the others by `1 - rate`.

    The mask is a hash of the key and each element's position in the global array, so it does not depend on the mesh.
    Each device computes only its slice of the mask, without communication.

    Args:
        key: a key that is the same on all devices. A `row_key` shifts the row positions.
        spec: how the manual axes split `x`. Leave out automatic axes.

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
        raise PlacementError(f"dropout got rate={rate}.", hint="use a probability from 0 (keep all) to 1 (drop all).")
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
    # float32 holds 24 bits exactly, so the comparison is exact.
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
