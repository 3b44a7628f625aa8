"""The loops under the overlapped matmuls: pieces that arrive and are used, partial sums that are passed on.

All loops are unrolled in Python. XLA then sees each hop as its own instruction and can run it beside a matmul; in a
`fori_loop` it cannot. Left alone, XLA merges the small matmuls, starts hops too early or splits the additions off,
each of which exposes hops or costs memory. `optimization_barrier` prevents that: values that pass through one
barrier together cannot be moved across each other. Which ties are needed differs between chips (`forms`).

Shapes: rows are the second to last dim. B = leading dims, M = rows of one device's shard, K, F = features.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from meshwright.dtypes import is_float
from meshwright.mesh.axes import pcast_varying, summing_dtype, varying_axes
from meshwright.parallel.overlap.forms import Form
from meshwright.types import PyTree

tie = lax.optimization_barrier


def dot(a: Any, b: Any, dtype: Any = jnp.float32) -> Any:
    """Multiplies the last dim of `a` with the first of `b`, accumulating in float32 inside the matmul unit.

    A product that is to be narrower is asked for as such: on GPUs the cast of a float32 one is a pass of its own, and
    the gradient of that cast a matmul in float32.
    """
    return lax.dot_general(a, b, (((a.ndim - 1,), (0,)), ((), ())), preferred_element_type=dtype)


def dot_rows(a: Any, b: Any, dtype: Any = jnp.float32) -> Any:
    """Contracts all dims but the last of `a` and `b`: the gradient of a weight."""
    dims = tuple(range(a.ndim - 1))
    return lax.dot_general(a, b, ((dims, dims), ((), ())), preferred_element_type=dtype)


def take_rows(x: Any, start: Any, size: int) -> Any:
    """Returns `size` rows from a traced start."""
    return lax.dynamic_slice_in_dim(x, start, size, axis=x.ndim - 2)


def put_rows(buffer: Any, rows: Any, start: Any) -> Any:
    """Writes rows into a buffer at a traced start."""
    return lax.dynamic_update_slice_in_dim(buffer, rows.astype(buffer.dtype), start, axis=buffer.ndim - 2)


def empty_rows(like: Any, num_rows: int, num_features: int, dtype: Any) -> Any:
    """Returns an uninitialised buffer that varies as `like` does; filling it with zeros would cost a pass over it."""
    shape = (*like.shape[:-2], num_rows, num_features)
    # JAX takes what depends on nothing out of a loop that it differentiates; the buffer would be copied in each round.
    # Into a function with a rule of its own for batches, it does not look.
    kept_inside = jax.custom_batching.custom_vmap(lambda _: lax.empty(shape, dtype))
    kept_inside.def_vmap(lambda size, *_: (lax.empty((size, *shape), dtype), True))
    return pcast_varying(kept_inside(lax.stop_gradient(like)), sorted(varying_axes(like)))


def sum_scattered(x: Any, axis: str, *, dim: int = -2) -> Any:
    """Sums over devices in one collective, each device keeping its own part of one dim: the rows."""
    wide = x.astype(summing_dtype(x.dtype))
    return lax.psum_scatter(wide, axis, scatter_dimension=dim % x.ndim, tiled=True).astype(x.dtype)


def shift(x: PyTree, axis: str, size: int, *, up: bool = True) -> PyTree:
    """Sends every array one place along a ring of known size and returns what arrives."""
    pairs = [(j, (j + 1) % size if up else (j - 1) % size) for j in range(size)]
    return jax.tree.map(lambda leaf: lax.ppermute(leaf, axis, pairs), x)


def gather_pieces(x: Any, axis: str, size: int, form: Form, visit: Callable[[Any, Any, Any], Any], carry: Any) -> Any:
    """Sends shards around the ring and calls `carry = visit(carry, piece, start_row)` for each piece as it arrives.

    Every row of the gathered array is visited exactly once, this device's own first.
    """
    num_rows, place = x.shape[-2], lax.axis_index(axis)
    half = _half(num_rows, form)
    pieces = [x[..., :half, :], x[..., half:, :]] if half else [x]
    for hop in range(size):
        last = hop == size - 1
        arriving = [None if last else shift(piece, axis, size, up=way == 0) for way, piece in enumerate(pieces)]
        for way, piece in enumerate(pieces):
            first_row = lax.rem(place + hop if way else place - hop + size, size) * num_rows
            carry = visit(carry, piece, first_row + half if way else first_row)
            tied = form.tie == "next" or (form.tie == "between" and way == 0) or (not half and form.tie != "none")
            if tied and not last:
                # The next piece may be used only after this product is written: else the products are merged.
                arriving[way], carry = tie((arriving[way], carry))
        pieces = arriving
    return carry


def scatter_sums(
    products: Callable[[list[Any], Any], Any],
    operands: list[Any],
    num_rows: int,
    axis: str,
    size: int,
    form: Form,
    wire: Any,
    between: Callable[[int, Any], Any] | None = None,
) -> Any:
    """Sums row blocks over devices, each block ending on the device it belongs to.

    Args:
        products: from one block of rows of each operand, and a dtype, to their product.
        operands: the arrays whose rows are taken.
        num_rows: rows of one block.
        wire: the dtype in which partial sums travel.
        between: called after each step with its number and an accumulator; returns the accumulator, tied to whatever
            else is to be in step with the ring.
    """
    place, half = lax.axis_index(axis), _half(num_rows, form)
    rows = half or num_rows
    # Whole numbers stay whole numbers in sums: float32 has only 24 bits for them.
    wide = jnp.float32 if is_float(wire) else wire
    sums: list[Any] = [None, None] if half else [None]
    previous: Any = None
    for step in range(size):
        for chain in range(len(sums)):
            ahead, before = size - 1 - step, (chain - 1) % len(sums)
            start = lax.rem(place + (size - ahead if chain else ahead), size) * num_rows + chain * rows
            received = shift(sums[chain], axis, size, up=chain == 0) if step else None
            if received is not None and form.tie == "operand":
                operands, received, sums[before] = tie((operands, received, sums[before]))
            elif received is not None and form.tie == "late_slice":
                # Cutting it late keeps fewer slices in memory.
                start, _ = tie((start, sums[before]))
            elif received is not None and form.tie == "product":
                # On GPUs: without this tie the matmuls are merged, which makes the hop synchronous.
                start, _ = tie((start, previous))
            slices = [take_rows(operand, start, rows) for operand in operands]
            if received is None:
                total = products(slices, wire)
            elif form.tie == "product":
                # On GPUs: without the tie, the library takes the received buffer as its own accumulator.
                received, product = tie((received, products(slices, wire)))
                total = (product.astype(wide) + received.astype(wide)).astype(wire)
            else:
                if form.tie in ("slice", "late_slice"):
                    # The slice is multiplied once the partial sum is here: the addition then stays inside the matmul,
                    # and the previous chain's hop runs beside it.
                    slices, received, sums[before] = tie((slices, received, sums[before]))
                total = (products(slices, wide) + received.astype(wide)).astype(wire)
            sums[chain] = previous = total
        if between is not None:
            sums[0] = between(step, sums[0])
    return jnp.concatenate(sums, axis=-2) if half else sums[0]


def scatter_beside_gather(
    products: Callable[[list[Any], Any], Any], operands: list[Any], x: Any, axis: str, size: int, form: Form, wire: Any
) -> tuple[Any, Any]:
    """Scatters the input's gradient and, beside the same matmuls, gathers the rows that the weight's gradient needs.

    The weight's gradient is then one large matmul. Adding to it shard by shard would read and write the float32
    accumulator once per hop, which costs up to 1.5 times the matmul itself.
    """
    num_rows, place = x.shape[-2], lax.axis_index(axis)
    half = _half(num_rows, form)
    travelling = [x[..., :half, :], x[..., half:, :]] if half else [x]
    buffer = put_rows(empty_rows(x, num_rows * size, x.shape[-1], x.dtype), x, place * num_rows)
    state = {"travelling": travelling, "buffer": buffer}

    def hop(step: int, total: Any) -> Any:
        if step == size - 1:
            return total
        arrived = [shift(part, axis, size, up=way == 0) for way, part in enumerate(state["travelling"])]
        arrived, total, buffer = tie((arrived, total, state["buffer"]))
        for way, part in enumerate(arrived):
            source = lax.rem(place + (size - 1 - step if way == 0 else step + 1), size)
            buffer = put_rows(buffer, part, source * num_rows + way * half)
        state.update(travelling=arrived, buffer=buffer)
        return total

    dx = scatter_sums(products, operands, num_rows, axis, size, form, wire, between=hop)
    # The large matmul must not start between the hops: it would hold its operands for the whole ring.
    gathered, dx = tie((state["buffer"], dx))
    return dx, gathered


def _half(num_rows: int, form: Form) -> int:
    """Returns how many rows of a shard travel up; 0 where it travels whole."""
    return num_rows // 2 if form.both_ways and num_rows % 2 == 0 else 0
