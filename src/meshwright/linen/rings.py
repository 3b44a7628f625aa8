"""Ring collectives that give their pieces one by one, so that each piece can be computed on while the next travels.

Entry `k` of a gather on device `i` is the shard of device `(i - k) mod n` when shifting up (device j sends to j + 1),
of `(i + k) mod n` when shifting down. A scatter sums, over devices, the entries destined to each of them. Gradients
are the dual: that of a gather is a scatter over the same ring in the other direction, and the reverse.

Matmuls on activations that are split by features are made of these rings. Each device holds all rows and some of the
features: gathering means adding up products of feature slices, and scattering that each device keeps some columns of
the result. Compilers overlap this form less well than the one by rows (`meshwright.parallel.gather_matmul`;
benchmarks/RESULTS.md has both), so it is there for models that keep their activations split this way.
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
    """Gathers shards around a ring; returns one entry per device, this device's own first.

    Example:
        >>> import meshwright as mw
        >>> from jax.sharding import PartitionSpec as P
        >>> ring = lambda x: jnp.stack(async_gather(x, "tp"))
        >>> gathered = mw.parallel.local_map(
        ...     ring, mesh=mw.create_mesh("tp:8"), in_specs=P("tp"), out_specs=P(None, "tp")
        ... )
        >>> gathered(jnp.arange(8))[1].tolist()  # entry 1: every device has its lower neighbour's shard
        [7, 0, 1, 2, 3, 4, 5, 6]
    """
    size = axis_size(axis_name, who="async_gather")
    entries = [pcast_varying(x, axis_name)]
    for _ in range(size - 1):
        entries.append(shift(entries[-1], axis_name, size, up=shift_up))
    return entries


def async_gather_bidirectional(x: PyTree, axis_name: str, shift_up: bool = True) -> list[PyTree]:
    """Gathers shards around a ring both ways at once: the entries of `async_gather`, in half as many hops."""
    size = axis_size(axis_name, who="async_gather_bidirectional")
    entries: list[PyTree] = [pcast_varying(x, axis_name)] * size
    # Entry k came k hops one way; entry size - k the same number the other way.
    for hop in range(1, size // 2 + 1):
        entries[hop] = shift(entries[hop - 1], axis_name, size, up=shift_up)
        if size - hop > hop:
            entries[size - hop] = shift(entries[(size - hop + 1) % size], axis_name, size, up=not shift_up)
    return entries


def async_gather_split(x: PyTree, axis_name: str) -> list[PyTree]:
    """Gathers the two halves of each shard's last dim around opposite ways of the ring.

    Returns `2 * n` entries for `n` devices: the left halves in the order of `async_gather` shifting up, then the right
    halves in the order of shifting down. (The document this API comes from says `2 * n - 1`; two rings of `n` entries
    make `2 * n`.) Where the width is odd, the left half is the wider one.
    """
    left, right = _halves(x, who="async_gather_split")
    return async_gather(left, axis_name, shift_up=True) + async_gather(right, axis_name, shift_up=False)


def async_scatter(xs: Sequence[PyTree], axis_name: str, shift_up: bool = True) -> PyTree:
    """Sums around a ring: starts with `xs[0]`, passes it on, adds `xs[k]` at hop `k`.

    Shifting up, entry `k` on device `i` is destined to device `(i + n - 1 - k) mod n`; shifting down, to
    `(i - (n - 1 - k)) mod n`. The last entry is the device's own.

    Example:
        >>> import meshwright as mw
        >>> from jax.sharding import PartitionSpec as P
        >>> ring = lambda x: async_scatter([x * (k == 0) for k in range(8)], "tp")
        >>> moved = mw.parallel.local_map(ring, mesh=mw.create_mesh("tp:8"), in_specs=P("tp"), out_specs=P("tp"))
        >>> moved(jnp.arange(8)).tolist()  # entry 0 goes seven places up, that is, one down
        [1, 2, 3, 4, 5, 6, 7, 0]
    """
    size = _checked_count(xs, axis_name, who="async_scatter")
    total = pcast_varying(xs[0], axis_name)
    for entry in xs[1:]:
        total = jax.tree.map(jnp.add, shift(total, axis_name, size, up=shift_up), entry)
    return total


def async_scatter_split(xs: Sequence[PyTree], axis_name: str) -> PyTree:
    """Sums the two halves of the last dim around opposite ways of the ring.

    The result is that of `async_scatter(xs, axis_name)`: the entries mean the same whichever way they travel.
    """
    size = _checked_count(xs, axis_name, who="async_scatter_split")
    halves = [_halves(entry, who="async_scatter_split") for entry in xs]
    left = async_scatter([half for half, _ in halves], axis_name, shift_up=True)
    # Travelling down, the entry at hop k must be the one destined to device i - (n - 1 - k).
    order = [(size - 2 - hop) % size for hop in range(size)]
    right = async_scatter([halves[k][1] for k in order], axis_name, shift_up=False)
    return jax.tree.map(lambda a, b: jnp.concatenate([a, b], axis=-1), left, right)


# --- Matmuls by features ---


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


# --- Checks and halves ---


def _checked_count(xs: Sequence[PyTree], axis: str, *, who: str) -> int:
    size = axis_size(axis, who=who)
    if len(xs) != size:
        raise PlacementError(
            f"{who} got {len(xs)} entries for axis {axis!r} of {size} devices.",
            hint=f"give one entry per device: {size}.",
        )
    return size


def _halves(tree: PyTree, *, who: str) -> tuple[PyTree, PyTree]:
    for leaf in jax.tree.leaves(tree):
        if jnp.ndim(leaf) == 0 or leaf.shape[-1] < 2:
            raise PlacementError(
                f"{who} cannot halve the last dim of an array of shape {jnp.shape(leaf)}.",
                hint="use the form without _split, which sends whole arrays one way.",
            )

    def half(take: Callable[[Any, int], Any]) -> PyTree:
        return jax.tree.map(lambda leaf: take(leaf, ceil_div(leaf.shape[-1], 2)), tree)

    return half(lambda leaf, cut: leaf[..., :cut]), half(lambda leaf, cut: leaf[..., cut:])
