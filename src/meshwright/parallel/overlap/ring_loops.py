"""Ring loops of the overlapped matmuls: gather pieces around a ring, or pass partial sums around it.

All loops are unrolled in Python, because XLA overlaps hops with matmuls only if each hop is a separate instruction, not
in a `fori_loop`. By default XLA merges the small matmuls, starts hops too early or splits off the additions, each of
which exposes hops or costs memory. An `optimization_barrier` (a tie) prevents that: XLA cannot reorder values that pass
through one barrier together. Which ties are needed depends on the chip (`forms`).

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
    """Contracts the last dim of `a` with the first of `b`, accumulating in float32.

    Ask for the dtype you need: on GPUs, casting a float32 product costs a pass, and its gradient a float32 matmul.
    """
    return lax.dot_general(a, b, (((a.ndim - 1,), (0,)), ((), ())), preferred_element_type=dtype)


def dot_rows(a: Any, b: Any, dtype: Any = jnp.float32) -> Any:
    """Contracts all dims but the last of `a` and `b`, as for the gradient of a weight."""
    dims = tuple(range(a.ndim - 1))
    return lax.dot_general(a, b, ((dims, dims), ((), ())), preferred_element_type=dtype)


def put_rows(buffer: Any, rows: Any, start: Any) -> Any:
    """Writes rows into a buffer at a traced start."""
    return lax.dynamic_update_slice_in_dim(buffer, rows.astype(buffer.dtype), start, axis=buffer.ndim - 2)


def empty_rows(like: Any, num_rows: int, num_features: int, dtype: Any) -> Any:
    """Returns an uninitialized buffer that varies like `like`; zeroing it would cost a pass over it."""
    shape = (*like.shape[:-2], num_rows, num_features)
    # JAX hoists constants out of loops that it differentiates, which would copy the buffer in every iteration. It does
    # not look into functions with a custom vmap rule.
    kept_inside = jax.custom_batching.custom_vmap(lambda _: lax.empty(shape, dtype))
    kept_inside.def_vmap(lambda size, *_: (lax.empty((size, *shape), dtype), True))
    return pcast_varying(kept_inside(lax.stop_gradient(like)), sorted(varying_axes(like)))


def sum_scattered(x: Any, axis: str, *, dim: int = -2) -> Any:
    """Reduce-scatters one dim over an axis, the rows by default."""
    wide = x.astype(summing_dtype(x.dtype))
    return lax.psum_scatter(wide, axis, scatter_dimension=dim % x.ndim, tiled=True).astype(x.dtype)


def shift(x: PyTree, axis: str, size: int, *, up: bool = True) -> PyTree:
    """Sends every array to the next device of a ring and returns the arrays received."""
    pairs = [(j, (j + 1) % size if up else (j - 1) % size) for j in range(size)]
    return jax.tree.map(lambda leaf: lax.ppermute(leaf, axis, pairs), x)


def gather_pieces(x: Any, axis: str, size: int, form: Form, visit: Callable[[Any, Any, Any], Any], carry: Any) -> Any:
    """Sends shards around the ring and calls `carry = visit(carry, piece, start_row)` on each, this device's first."""
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
                # Use the next piece only after this product is written; otherwise XLA merges the products.
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
    """Reduce-scatters row blocks around the ring; each block ends on the device that owns it.

    Args:
        products: maps one block of rows of each operand, and a dtype, to their product.
        operands: the arrays whose rows are multiplied.
        num_rows: rows in one block.
        wire: dtype in which partial sums are sent.
        between: called after each step with its index and an accumulator; returns the accumulator, tied to other work
            that should keep pace with the ring.
    """
    place, half = lax.axis_index(axis), _half(num_rows, form)
    rows = half or num_rows
    # Integers are summed as integers, because float32 holds only 24 bits exactly.
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
                # Slicing late keeps fewer slices in memory.
                start, _ = tie((start, sums[before]))
            elif received is not None and form.tie == "product":
                # On GPUs, XLA would otherwise merge the matmuls, which makes the hop synchronous.
                start, _ = tie((start, previous))
            slices = [lax.dynamic_slice_in_dim(operand, start, rows, axis=operand.ndim - 2) for operand in operands]
            if received is None:
                total = products(slices, wire)
            elif form.tie == "product":
                # On GPUs, cuBLAS would otherwise use the received buffer as its accumulator.
                received, product = tie((received, products(slices, wire)))
                total = (product.astype(wide) + received.astype(wide)).astype(wire)
            else:
                if form.tie in ("slice", "late_slice"):
                    # Multiply after the partial sum arrives: the addition then stays inside the matmul, which overlaps
                    # with the other direction's hop.
                    slices, received, sums[before] = tie((slices, received, sums[before]))
                total = (products(slices, wide) + received.astype(wide)).astype(wire)
            sums[chain] = previous = total
        if between is not None:
            sums[0] = between(step, sums[0])
    return jnp.concatenate(sums, axis=-2) if half else sums[0]


def scatter_beside_gather(
    products: Callable[[list[Any], Any], Any], operands: list[Any], x: Any, axis: str, size: int, form: Form, wire: Any
) -> tuple[Any, Any]:
    """Scatters the input's gradient and gathers the rows for the weight's gradient, overlapped with the same matmuls.

    The weight's gradient is then one large matmul. Accumulating it shard by shard would read and write the float32
    accumulator at every hop, which costs up to 1.5 times the matmul.
    """
    num_rows, place = x.shape[-2], lax.axis_index(axis)
    half = _half(num_rows, form)
    traveling = [x[..., :half, :], x[..., half:, :]] if half else [x]
    buffer = put_rows(empty_rows(x, num_rows * size, x.shape[-1], x.dtype), x, place * num_rows)
    state = {"traveling": traveling, "buffer": buffer}

    def hop(step: int, total: Any) -> Any:
        if step == size - 1:
            return total
        arrived = [shift(part, axis, size, up=way == 0) for way, part in enumerate(state["traveling"])]
        arrived, total, buffer = tie((arrived, total, state["buffer"]))
        for way, part in enumerate(arrived):
            source = lax.rem(place + (size - 1 - step if way == 0 else step + 1), size)
            buffer = put_rows(buffer, part, source * num_rows + way * half)
        state.update(traveling=arrived, buffer=buffer)
        return total

    dx = scatter_sums(products, operands, num_rows, axis, size, form, wire, between=hop)
    # If the large matmul started between hops, it would hold its operands for the whole ring.
    gathered, dx = tie((state["buffer"], dx))
    return dx, gathered


def _half(num_rows: int, form: Form) -> int:
    """Returns the number of rows of a shard that travel up, or 0 if the shard is not split."""
    return num_rows // 2 if form.both_ways and num_rows % 2 == 0 else 0
