"""Ring collectives that return their shards one by one, so that computation overlaps with the next transfer.

Entry `k` of a gather on device `i` is the shard of device `(i - k) mod n` when shifting up (device j sends to j + 1),
and of `(i + k) mod n` when shifting down. A scatter sums the entries for each device over all devices. The gradient of
a gather is a scatter around the same ring in the other direction, and vice versa.

The matmuls below use these rings for activations that are split by features. Compilers overlap them less well than
matmuls on rows (`meshwright.parallel.gather_matmul`; both are in benchmarks/results/overlap.md), so use them only for
models whose activations are split this way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from meshwright.errors import PlacementError
from meshwright.mesh.axes import axis_size, pcast_varying
from meshwright.parallel.local_map import AxisView
from meshwright.parallel.overlap.ring_loops import dot, shift
from meshwright.specs import ceil_div
from meshwright.types import PyTree


def async_gather(x: PyTree, axis_name: str, shift_up: bool = True) -> list[PyTree]:
    """Gathers shards around a ring and returns one entry per device, this device's own first.

    Example:
        >>> import meshwright as mw
        >>> ring = lambda x: jnp.stack(async_gather(x, "tp"))
        >>> with jax.set_mesh(mw.create_mesh("tp:8")):
        ...     gathered = jax.shard_map(ring, in_specs=P("tp"), out_specs=P(None, "tp"))(jnp.arange(8))
        >>> gathered[1].tolist()  # entry 1 is the shard of the device below
        [7, 0, 1, 2, 3, 4, 5, 6]
    """
    size = axis_size(axis_name, who="async_gather")
    entries = [pcast_varying(x, axis_name)]
    for _ in range(size - 1):
        entries.append(shift(entries[-1], axis_name, size, up=shift_up))
    return entries


def async_gather_bidirectional(x: PyTree, axis_name: str, shift_up: bool = True) -> list[PyTree]:
    """Gathers shards both ways around a ring: the entries of `async_gather`, in half as many hops.

    Example:
        >>> import meshwright as mw
        >>> ring = lambda x: jnp.stack(async_gather_bidirectional(x, "tp"))
        >>> with jax.set_mesh(mw.create_mesh("tp:8")):
        ...     gathered = jax.shard_map(ring, in_specs=P("tp"), out_specs=P(None, "tp"))(jnp.arange(8))
        >>> gathered[:, 0].tolist()  # the entries of device 0
        [0, 7, 6, 5, 4, 3, 2, 1]
    """
    size = axis_size(axis_name, who="async_gather_bidirectional")
    entries: list[PyTree] = [pcast_varying(x, axis_name)] * size
    # Entry k takes k hops one way, and entry size - k takes k hops the other way.
    for hop in range(1, size // 2 + 1):
        entries[hop] = shift(entries[hop - 1], axis_name, size, up=shift_up)
        if size - hop > hop:
            entries[size - hop] = shift(entries[(size - hop + 1) % size], axis_name, size, up=not shift_up)
    return entries


def async_gather_split(x: PyTree, axis_name: str) -> list[PyTree]:
    """Gathers the two halves of each shard's last dim in opposite directions around the ring.

    Returns `2 * n` entries for `n` devices: the left halves in the order of `async_gather` shifting up, then the right
    halves in the order of shifting down. (The xlstm_jax docs say `2 * n - 1`, but two rings have `2 * n` entries.) If
    the width is odd, the left half is the wider one.

    Example:
        >>> import meshwright as mw
        >>> ring = lambda x: jnp.concatenate(async_gather_split(x, "tp"))
        >>> with jax.set_mesh(mw.create_mesh("tp:8")):
        ...     gathered = jax.shard_map(ring, in_specs=P("tp"), out_specs=P("tp"))(jnp.arange(16))
        >>> gathered[:16].tolist()  # on device 0: left halves from below, right halves from above
        [0, 14, 12, 10, 8, 6, 4, 2, 1, 3, 5, 7, 9, 11, 13, 15]
    """
    left, right = _halves(x, who="async_gather_split")
    return async_gather(left, axis_name, shift_up=True) + async_gather(right, axis_name, shift_up=False)


def async_scatter(xs: Sequence[PyTree], axis_name: str, shift_up: bool = True) -> PyTree:
    """Sums around a ring: sends `xs[0]` on and adds `xs[k]` at hop `k`.

    Shifting up, entry `k` on device `i` goes to device `(i + n - 1 - k) mod n`; shifting down, to
    `(i - (n - 1 - k)) mod n`. The last entry is the device's own.

    Example:
        >>> import meshwright as mw
        >>> ring = lambda x: async_scatter([x * (k == 0) for k in range(8)], "tp")
        >>> with jax.set_mesh(mw.create_mesh("tp:8")):  # entry 0 goes seven devices up, which is one device down
        ...     jax.shard_map(ring, in_specs=P("tp"), out_specs=P("tp"))(jnp.arange(8)).tolist()
        [1, 2, 3, 4, 5, 6, 7, 0]
    """
    size = _checked_count(xs, axis_name, who="async_scatter")
    total = pcast_varying(xs[0], axis_name)
    for entry in xs[1:]:
        total = jax.tree.map(jnp.add, shift(total, axis_name, size, up=shift_up), entry)
    return total


def async_scatter_split(xs: Sequence[PyTree], axis_name: str) -> PyTree:
    """Sums the two halves of the last dim in opposite directions around the ring; same result as `async_scatter`.

    Example:
        >>> import meshwright as mw
        >>> ring = lambda x: async_scatter_split([x * (k == 0) for k in range(8)], "tp")
        >>> with jax.set_mesh(mw.create_mesh("tp:8")):  # entry 0 goes seven devices up, which is one device down
        ...     jax.shard_map(ring, in_specs=P("tp"), out_specs=P("tp"))(jnp.arange(16)).tolist()
        [2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1]
    """
    size = _checked_count(xs, axis_name, who="async_scatter_split")
    halves = [_halves(entry, who="async_scatter_split") for entry in xs]
    left = async_scatter([half for half, _ in halves], axis_name, shift_up=True)
    # Going down, the entry at hop k must be the one for device i - (n - 1 - k).
    order = [(size - 2 - hop) % size for hop in range(size)]
    right = async_scatter([halves[k][1] for k in order], axis_name, shift_up=False)
    return jax.tree.map(lambda a, b: jnp.concatenate([a, b], axis=-1), left, right)


# --- Matmuls by features ---


def gather_matmul_by_features(x: jax.Array, w: jax.Array, *, axis: str, both_ways: bool = True) -> jax.Array:
    """Returns `gather(x) @ w` for `x` split by its last dim and `w` split by columns.

    The result is split by its last dim. Outside of `shard_map` the ring runs in its own `shard_map`; without a
    mesh this is an ordinary matmul.

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
            f"{view.num_slices} slices of {x.shape[-1]} features do not fit a weight of shape {w.shape}.",
            hint=f"pass a weight of shape [{whole}, columns].",
        )

    def ring(x: Any, w: Any) -> Any:
        width, place = x.shape[-1], lax.axis_index(axis)
        entries = (async_gather_bidirectional if both_ways else async_gather)(x, axis)
        total: Any = 0.0
        for k, entry in enumerate(entries):  # entry k is from the device k positions below
            start = lax.rem(place - k + view.ways, view.ways) * width
            total = total + dot(entry, lax.dynamic_slice_in_dim(w, start, width, axis=0))
        return _finish(total, x, w)

    features = P(*([None] * (x.ndim - 1)), axis)
    gathered: jax.Array = view.run(ring, x, w, plain=_multiply, in_specs=(features, P(None, axis)), out_specs=features)
    return gathered


def matmul_scatter_by_features(x: jax.Array, w: jax.Array, *, axis: str, both_ways: bool = False) -> jax.Array:
    """Returns this device's columns of the sum of `x @ w` over devices, for `x` split by its last dim and `w` by rows.

    Outside of `shard_map` the ring runs in its own `shard_map`; without a mesh this is an ordinary matmul.

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
        for k in range(size):  # entry k goes to the device size - 1 - k positions above
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


# --- Checks and halves ---


def _checked_count(xs: Sequence[PyTree], axis: str, *, who: str) -> int:
    size = axis_size(axis, who=who)
    if len(xs) != size:
        raise PlacementError(
            f"{who} got {len(xs)} entries for axis {axis!r} of {size} devices.",
            hint=f"pass one entry per device: {size}.",
        )
    return size


def _halves(tree: PyTree, *, who: str) -> tuple[PyTree, PyTree]:
    for leaf in jax.tree.leaves(tree):
        if jnp.ndim(leaf) == 0 or leaf.shape[-1] < 2:
            raise PlacementError(
                f"{who} cannot halve the last dim of an array of shape {jnp.shape(leaf)}.",
                hint="use the function without _split, which sends full arrays one way.",
            )

    def half(take: Callable[[Any, int], Any]) -> PyTree:
        return jax.tree.map(lambda leaf: take(leaf, ceil_div(leaf.shape[-1], 2)), tree)

    return half(lambda leaf, cut: leaf[..., :cut]), half(lambda leaf, cut: leaf[..., cut:])
