"""Overlapped matmuls on activations that are split by features, the form of the older toolkit.

Each device holds all rows and some of the features. Gathering then means adding up products of feature slices, and
scattering means that each device keeps some columns of the result. Compilers overlap this form less well than the one
by rows (`collective_matmul`; benchmarks/RESULTS.md has both), so it is there for models that keep their activations
split this way. Gradients come from the rings themselves: the gradient of a ring gather is a ring scatter.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from meshwright.linen.rings import async_gather, async_gather_bidirectional, async_scatter, async_scatter_split
from meshwright.parallel.local_map import AxisView
from meshwright.parallel.overlap.loops import dot


def gather_matmul_by_features(x: jax.Array, w: jax.Array, *, axis: str, both_ways: bool = True) -> jax.Array:
    """Returns `gather(x) @ w` where `x` is split by its last dim and `w` by its columns.

    The result is split by its last dim. In a plain `jit` program the ring runs as an island; without the axis this is
    an ordinary matmul.

    Example:
        >>> import meshwright as mw
        >>> x, w = jnp.ones((3, 16)), jnp.ones((16, 8))
        >>> with jax.set_mesh(mw.create_mesh("tp:8")):
        ...     float(jax.jit(lambda x, w: gather_matmul_by_features(x, w, axis="tp"))(x, w)[0, 0])
        16.0
    """
    view = AxisView.of(axis, who="gather_matmul_by_features")
    whole = x.shape[-1] * view.num_slices
    if w.shape[0] != whole:
        raise view.error(
            f"{view.num_slices} slices of {x.shape[-1]} features cannot multiply a weight of shape {w.shape}.",
            hint=f"the weight must be [{whole}, columns].",
        )

    def ring(x: Any, w: Any) -> Any:
        width, place = x.shape[-1], lax.axis_index(axis)
        entries = (async_gather_bidirectional if both_ways else async_gather)(x, axis)
        total: Any = 0.0
        for k, entry in enumerate(entries):  # entry k came from the device k places back
            start = lax.rem(place - k + view.ways, view.ways) * width
            total = total + dot(entry, lax.dynamic_slice_in_dim(w, start, width, axis=0))
        return _finish(total, x, w)

    features = P(*([None] * (x.ndim - 1)), axis)
    gathered: jax.Array = view.run(ring, x, w, plain=_multiply, in_specs=(features, P(None, axis)), out_specs=features)
    return gathered


def matmul_scatter_by_features(x: jax.Array, w: jax.Array, *, axis: str, both_ways: bool = False) -> jax.Array:
    """Returns this device's columns of the sum over devices of `x @ w`, `x` split by its last dim and `w` by rows.

    In a plain `jit` program the ring runs as an island; without the axis this is an ordinary matmul.

    Example:
        >>> import meshwright as mw
        >>> x, w = jnp.ones((3, 16)), jnp.ones((16, 8))
        >>> with jax.set_mesh(mw.create_mesh("tp:8")):
        ...     jax.jit(lambda x, w: matmul_scatter_by_features(x, w, axis="tp"))(x, w).shape
        (3, 8)
    """
    view = AxisView.of(axis, who="matmul_scatter_by_features")
    view.check_divides(w.shape[-1], "columns")

    def ring(x: Any, w: Any) -> Any:
        size, place = view.ways, lax.axis_index(axis)
        width = w.shape[-1] // size
        parts = []
        for k in range(size):  # entry k is destined to the device size - 1 - k places on
            start = lax.rem(place + size - 1 - k, size) * width
            parts.append(_multiply(x, lax.dynamic_slice_in_dim(w, start, width, axis=1)))
        return (async_scatter_split if both_ways and width > 1 else async_scatter)(parts, axis)

    features = P(*([None] * (x.ndim - 1)), axis)
    summed: jax.Array = view.run(ring, x, w, plain=_multiply, in_specs=(features, P(axis, None)), out_specs=features)
    return summed


def _multiply(x: Any, w: Any) -> jax.Array:
    return _finish(dot(x, w), x, w)


def _finish(product: Any, x: Any, w: Any) -> jax.Array:
    finished: jax.Array = product.astype(jnp.result_type(x.dtype, w.dtype))
    return finished
