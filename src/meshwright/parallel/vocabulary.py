"""Embedding and cross-entropy with the vocabulary split over a mesh axis.

The table `[V, D]` is split by rows, `P(axis, None)`, and the head `[D, V]` by columns, `P(None, axis)`, so no device
holds all logits. Each device looks up its own tokens and contributes zeros for the others; the sum over devices is the
embedding. The loss exchanges three numbers per token: the largest logit, the sum of exponentials and the target logit.
"""

from __future__ import annotations

import functools
from typing import Any, Unpack

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from meshwright.mesh.axes import pcast_alike, pcast_varying, summing_dtype, varying_axes
from meshwright.parallel.local_map import AxisView
from meshwright.parallel.overlap.collective_matmul import gather_matmul
from meshwright.parallel.overlap.ring_loops import dot, sum_scattered
from meshwright.parallel.tensor import GatherOptions, refuse_options


@jax.named_scope("embedding")
def vocab_embed(
    ids: jax.Array, table: jax.Array, *, axis: str | None, sequence_parallel: bool = True, vocab_size: int | None = None
) -> jax.Array:
    """Looks up token embeddings; a token outside the vocabulary gives NaN.

    Args:
        ids: `[..., rows]` integers, replicated over `axis`.
        table: `[V, D]`, split by rows over `axis`. Its gradient is summed in float32.
        sequence_parallel: return `[..., rows, D]` split by rows, for half the bytes; if False, return all rows on every
            device.
        vocab_size: number of real rows, if the table is padded (default: V).

    Example:
        >>> import meshwright as mw
        >>> ids, table = jnp.array([[3, 0, 7, 7, 1, 2, 3, 4]]), jnp.arange(8.0)[:, None]
        >>> with jax.set_mesh(mw.create_mesh("tp:8")):
        ...     jax.jit(lambda ids, table: vocab_embed(ids, table, axis="tp"))(ids, table)[0, :, 0].tolist()
        [3.0, 0.0, 7.0, 7.0, 1.0, 2.0, 3.0, 4.0]
    """
    ids, table = jnp.asarray(ids), jnp.asarray(table)
    view = AxisView.of(axis, who="vocab_embed")
    if ids.ndim < 1 or table.ndim != 2 or not jnp.issubdtype(ids.dtype, jnp.integer):
        raise view.error(
            f"got ids of shape {ids.shape} and type {ids.dtype}, and a table of shape {table.shape}.",
            hint="ids must be [..., rows] of integers and the table [V, D].",
        )
    view.check_split(table=table)
    vocab_size = checked_vocab_size(view, vocab_size, table.shape[0], "rows")
    if sequence_parallel:
        view.check_divides(ids.shape[-1], "rows")
    if view.kind == "global":
        view.check_divides(table.shape[0], "tokens of vocabulary")

    def look_up(ids: Any, table: Any, *place: Any) -> Any:
        assert axis is not None
        number = place[0][0] if place else lax.axis_index(axis)
        part = _lookup(ids, table, number * table.shape[0], vocab_size)
        # The sum is exact in any dtype, because all terms but one are zero.
        if sequence_parallel:
            return sum_scattered(part, axis)
        return lax.psum(part.astype(summing_dtype(part.dtype)), axis).astype(table.dtype)

    # In the global view, each device gets its number as an argument: XLA can refuse `axis_index` (PartitionId) in a
    # program that is manual along one axis only.
    place = (jnp.arange(view.ways, dtype=jnp.int32),) if view.kind == "global" else ()
    embedded: jax.Array = view.run(
        look_up,
        whole_numbers(ids),
        table,
        *place,
        plain=lambda ids, table: _lookup(ids, table, 0, vocab_size),
        in_specs=(P(), P(axis), *(P(axis) for _ in place)),
        out_specs=P(*([None] * (ids.ndim - 1)), axis) if sequence_parallel else P(),
    )
    return embedded


def vocab_cross_entropy(
    x: jax.Array,
    head: jax.Array,
    targets: jax.Array,
    *,
    axis: str | None,
    mask: jax.Array | None = None,
    sequence_parallel: bool = True,
    vocab_size: int | None = None,
    **overlap: Unpack[GatherOptions],
) -> jax.Array:
    """Returns each token's `-log softmax(x @ head)[target]` in float32, replicated over the axis.

    For a mean loss, sum it and divide by the number of valid tokens in the global batch; then sum over the data axes
    only, not over `axis`. The backward pass keeps the logits. If you only need the sum of the losses, use
    `linear_cross_entropy`, which never holds more than a chunk of them.

    Args:
        x: `[..., rows, D]`, split by rows over `axis`, or replicated if `sequence_parallel=False`.
        head: `[D, V]`, split by columns. With tied embeddings, pass the transposed table.
        targets: `[..., rows]`, replicated over `axis`. A target outside the vocabulary gives NaN.
        mask: `[..., rows]`. If False, the token's loss is zero, whatever its target.
        vocab_size: number of real columns, if the head is padded (default: V). Padding gets no probability.
        overlap: options of `gather_matmul`.

    Example:
        >>> import meshwright as mw
        >>> x, head = jnp.zeros((2, 8, 4)), jnp.ones((4, 16))
        >>> targets = jnp.zeros((2, 8), int)
        >>> with jax.set_mesh(mw.create_mesh("tp:8")):
        ...     loss = jax.jit(lambda *args: vocab_cross_entropy(*args, axis="tp"))(x, head, targets)
        >>> bool(jnp.allclose(loss, jnp.log(16.0)))
        True
    """
    view, targets = AxisView.of(axis, who="vocab_cross_entropy"), whole_numbers(targets)
    view.check_matmul(x, (head,))
    view.check_split(head=head)
    check_targets(view, x, sequence_parallel, targets=targets, mask=mask)
    vocab_size = checked_vocab_size(view, vocab_size, head.shape[1], "columns")
    if not sequence_parallel:
        refuse_options(view, overlap)
    if view.kind == "global":
        view.check_divides(head.shape[1], "tokens of vocabulary")
        if sequence_parallel:
            view.check_divides(x.shape[-2], "rows")

    def losses(x: Any, head: Any, targets: Any) -> Any:
        if sequence_parallel:
            logits = gather_matmul(x, head, axis=axis, out_dtype=jnp.float32, **overlap)
        else:
            logits = dot(pcast_varying(x, axis), head)
        return _cross_entropy(logits, targets, None if view.kind == "plain" else axis, vocab_size)

    rows = P(*([None] * (x.ndim - 2)), axis) if sequence_parallel else P()
    loss = view.run(losses, x, head, targets, in_specs=(rows, P(None, axis), P()), out_specs=P())
    return loss if mask is None else jnp.where(mask, loss, 0.0)


# --- The lookup and its gradient ---


def _lookup(ids: Any, table: Any, first: Any, total: int) -> jax.Array:
    """Returns the rows of ids from `first` to `first + len(table)`, zero for other ids, NaN outside the vocabulary."""
    ids, table = pcast_alike(ids, table)
    rows = _take(table.shape[0], table.dtype, table, ids - first)
    return jnp.where(((ids >= 0) & (ids < total))[..., None], rows, jnp.asarray(jnp.nan, table.dtype))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _take(num_rows: int, dtype: Any, table: Any, places: Any) -> Any:
    inside = (places >= 0) & (places < num_rows)
    rows = table.at[jnp.clip(places, 0, num_rows - 1)].get(mode="promise_in_bounds")
    return jnp.where(inside[..., None], rows, jnp.zeros_like(rows))


def _take_bwd(num_rows: int, dtype: Any, places: Any, d_rows: Any) -> tuple[Any, None]:
    # Sum in float32: a frequent token gets thousands of terms, too many for bfloat16.
    inside = (places >= 0) & (places < num_rows)
    zeros = pcast_varying(own_zeros(num_rows, d_rows.shape[-1]), sorted(varying_axes(d_rows)))
    d_rows = jnp.where(inside[..., None], d_rows, jnp.zeros_like(d_rows)).astype(jnp.float32)
    d_table = zeros.at[jnp.clip(places, 0, num_rows - 1)].add(d_rows, mode="promise_in_bounds")
    return d_table.astype(dtype), None


_take.defvjp(lambda *args: (_take(*args), args[-1]), _take_bwd)


def own_zeros(*shape: int) -> Any:
    """Returns float32 zeros that XLA does not share with other zeros of that shape.

    A shared array must be copied before it is updated in place, which for a table costs one more pass over memory.
    """
    return jnp.broadcast_to(lax.optimization_barrier(jnp.float32(0)), shape)


# --- The loss ---


def _cross_entropy(logits: Any, targets: Any, axis: str | None, vocab_size: int) -> Any:
    columns, available = jnp.arange(logits.shape[-1]), logits.shape[-1]
    if axis is not None:
        columns = columns + lax.axis_index(axis) * logits.shape[-1]
        available *= lax.axis_size(axis)
    if vocab_size < available:
        logits = jnp.where(columns < vocab_size, logits, -jnp.inf)
    # The largest logit only keeps the exponentials in range; the loss does not depend on it.
    largest = lax.stop_gradient(logits).max(axis=-1)
    largest = lax.pmax(largest, axis) if axis is not None else largest
    exponentials = jnp.exp(logits - largest[..., None]).sum(axis=-1)
    of_target = jnp.where(columns == targets[..., None], logits, 0.0).sum(axis=-1)
    if axis is not None:
        exponentials, of_target = lax.psum((exponentials, of_target), axis)
    loss = jnp.log(exponentials) + largest - of_target
    return jnp.where((targets >= 0) & (targets < vocab_size), loss, jnp.nan)


def whole_numbers(ids: Any) -> Any:
    """Widens token ids to 32 bits, so that the vocabulary size does not overflow their dtype."""
    ids = jnp.asarray(ids)
    narrow = jnp.issubdtype(ids.dtype, jnp.integer) and ids.dtype.itemsize < 4
    return ids.astype(jnp.int32) if narrow else ids


def check_targets(view: AxisView, x: Any, rows_split: bool, **of_tokens: Any) -> None:
    """Raises if per-token arrays do not match the shape of `x`, which may hold only one device's rows."""
    wanted = (*x.shape[:-2], x.shape[-2] * (view.num_slices if rows_split else 1))
    for name, value in of_tokens.items():
        if value is not None and value.shape != wanted:
            raise view.error(
                f"x of shape {x.shape} needs {name} of shape {wanted}; got {value.shape}.",
                hint=f"pass {name} for all rows on every device of axis {view.axis!r}."
                if view.axis
                else f"{name} must have the shape of x without its last dim.",
            )


def checked_vocab_size(view: AxisView, vocab_size: int | None, seen: int, what: str) -> int:
    """Returns the number of real rows or columns: `vocab_size`, or all of them (`seen` per visible slice)."""
    available = seen * view.num_slices
    if vocab_size is None:
        return available
    if not 1 <= vocab_size <= available:
        raise view.error(f"vocab_size={vocab_size} for {available} {what}.", hint=f"use 1 to {available}.")
    return vocab_size
