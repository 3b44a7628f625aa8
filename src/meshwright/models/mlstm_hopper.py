"""The chunkwise mLSTM on Hopper GPUs: running sums between chunks, and gated pairs within them, as Pallas kernels.

See `meshwright.models.mlstm` for the function and the letters in names. XLA computes everything that has one number per
token or one vector per chunk; `state_kernel` and `pair_kernel` compute the rest, once for each of

- the memories, and their gradients in reverse;
- the outputs, and the gradients of values, queries and keys.

Decays are exp2(row_t + column_s) with one float32 running sum of log forget gates per chunk. Its rounding error, 2^-24
of the sum, stays below that of bfloat16 operands until the average log forget gate of a chunk of 256 is below -128.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from meshwright.mesh.axes import pcast_alike
from meshwright.models.mlstm import CellInputs
from meshwright.parallel.kernels.head_norm_kernel import head_norm_forward, head_norm_gradient
from meshwright.parallel.kernels.pair_kernel import gated_pairs, register_pairs
from meshwright.parallel.kernels.pair_tiles import SIDE, Pairs
from meshwright.parallel.kernels.state_kernel import running_sums

# By arithmetic: longer chunks need more pairs of tokens, shorter ones more memories (benchmarks/results/mlstm_h200.md).
_CHUNK_SIZES = 256, 128
_MOST_KEYS = 512  # More were not compared on a GPU.
_LOG2_E = math.log2(math.e)
_OUTPUTS = Pairs(name="mlstm_outputs", causal=True, normalize=True)
_OF_VALUES = Pairs(name="mlstm_value_gradients", causal=False)
_OF_QUERIES = Pairs(name="mlstm_query_gradients", causal=True, bias="row", own=True, transposed=True)
_OF_KEYS = Pairs(name="mlstm_key_gradients", causal=False, bias="column", own=True, transposed=True)
for _pairs in (_OUTPUTS, _OF_VALUES, _OF_QUERIES, _OF_KEYS):
    register_pairs(_pairs)


class _Gates(NamedTuple):
    """One number per token, `[B, H, N, L]`, or per chunk, `[B, H, N]`."""

    row: Any  # log2 of a query's share of its pairs' weights
    column: Any  # and of a key's
    floor: Any  # exp(-m)
    read: Any  # weight of the chunk's memory for a query
    write: Any  # weight of a token in the next chunk's memory
    first: Any  # first position in the chunk of a token's document
    last: Any
    keep: Any  # share of the memory that survives the chunk
    decay: Any  # [B, H, N, N]: share of the tokens written in one chunk that is left before another


def can_fuse(q: Any, v: Any) -> bool:
    """Returns whether the kernels support queries `[B, S, H, K]` and values `[B, S, H, V]`."""
    return why_not_fused(q, v) is None


def why_not_fused(q: Any, v: Any) -> str | None:
    """Returns why the kernels do not support these queries and values, or None.

    Example:
        >>> q, v = jnp.zeros((1, 128, 1, 96), jnp.bfloat16), jnp.zeros((1, 128, 1, 192), jnp.bfloat16)
        >>> why_not_fused(q, v)
        'heads have 96 features of keys and 192 of values, which should be multiples of 64, with at most 512 of keys'
    """
    keys, values = q.shape[-1], v.shape[-1]
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        return f"inputs are {q.dtype}"
    if q.shape[1] % _CHUNK_SIZES[-1]:
        return f"rows have {q.shape[1]} tokens, which is not a multiple of {_CHUNK_SIZES[-1]}"
    if keys % SIDE or values % SIDE or keys > _MOST_KEYS:
        return (
            f"heads have {keys} features of keys and {values} of values, which should be multiples of {SIDE}, with at "
            f"most {_MOST_KEYS} of keys"
        )
    return None


def mlstm_on_hopper(t: CellInputs) -> Any:
    """Returns the outputs `[B, S, H, V]` from the empty state on; check `can_fuse` before."""
    return _cell(_chunk_size(t), t.q_BSHK, t.k_BSHK, t.v_BSHV, t.i_BSH, t.logf_BSH, t.begins_BS)


def gated_mlstm_on_hopper(t: CellInputs, gate: Any, scale: Any, *, eps: float) -> Any:
    """Returns `gated_head_norm` of the outputs, `[B, S, H * V]`, 0 for padding; check `fits_heads` as well before."""
    keep = None if t.real_BS is None else t.real_BS.astype(jnp.float32)
    given = t.q_BSHK, t.k_BSHK, t.v_BSHV, t.i_BSH, t.logf_BSH, t.begins_BS, gate, scale.astype(jnp.float32), keep
    return _gated_cell(_chunk_size(t), eps, *pcast_alike(*given))


def _chunk_size(t: CellInputs) -> int:
    return next(size for size in _CHUNK_SIZES if t.q_BSHK.shape[1] % size == 0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _cell(chunk_size: int, q: Any, k: Any, v: Any, i: Any, logf: Any, begins: Any) -> Any:
    """Gates are `[B, S, H]`; `begins` is `[B, S]`, boolean, or None."""
    return _forward(chunk_size, q, k, v, i, logf, begins)[0]


def _forward(chunk_size: int, q: Any, k: Any, v: Any, i: Any, logf: Any, begins: Any) -> tuple[Any, Any]:
    gates = _gates(chunk_size, q.shape[-1], i, logf, begins)
    memories = running_sums(k, v, _flat(gates.write), gates.keep)
    normalisers = _along_chunks(gates.decay, _weighted_sums(k, gates.write))
    own_size = gates.read * _dots(q, normalisers)
    vectors = {
        "row": gates.row,
        "column": gates.column,
        "inter": gates.read,
        "bound": gates.first,
        "own_size": own_size,
        "floor": gates.floor,
    }
    h, size = gated_pairs(_OUTPUTS, q, k, v, memories, {name: _flat(x) for name, x in vectors.items()})
    return h, (q, k, v, h, size, memories, normalisers, gates)


def _backward(chunk_size: int, kept: Any, d_h: Any) -> tuple[Any, ...]:
    h = kept[3]
    return _gradients(kept, d_h, jnp.sum(d_h.astype(jnp.float32) * h.astype(jnp.float32), axis=-1))


def _gradients(kept: Any, d_h: Any, dots: Any) -> tuple[Any, ...]:
    """Returns the gradients of a cell; `dots` are the dot products of `d_h` and `h`, `[B, S, H]`."""
    q, k, v, _, size, memories, normalisers, gates = kept
    size = size.reshape(gates.floor.shape)
    # The gradient of the size, times the denominator by which the gradient of the numerator is divided as well.
    dot = _chunked(dots, gates.keep.shape[-1])
    d_size = jnp.where(jnp.abs(size) > gates.floor, -jnp.sign(size) * dot, 0.0)
    divisor = jnp.maximum(jnp.abs(size), gates.floor)
    row, read = gates.row - jnp.log2(divisor), gates.read / divisor

    d_memories = running_sums(q, d_h, _flat(read), gates.keep, reverse=True)
    d_normalisers = _along_chunks(jnp.swapaxes(gates.decay, -1, -2), _weighted_sums(q, read * d_size))
    shared = {"row": gates.column, "column": row, "inter": gates.write, "bound": gates.last}
    d_v, _ = gated_pairs(_OF_VALUES, k, q, d_h, d_memories, {name: _flat(x) for name, x in shared.items()})
    vectors = shared | {"column_bias": d_size, "vector_factor": gates.write}
    d_k, k_dot = gated_pairs(
        _OF_KEYS, v, d_h, q, d_memories, {name: _flat(x) for name, x in vectors.items()},
        own=k, chunk_vectors=d_normalisers,
    )  # fmt: skip
    vectors = {
        "row": row,
        "column": gates.column,
        "inter": read,
        "bound": gates.first,
        "row_bias": d_size,
        "vector_factor": read * d_size,
    }
    d_q, q_dot = gated_pairs(
        _OF_QUERIES, d_h, v, k, memories, {name: _flat(x) for name, x in vectors.items()},
        own=q, chunk_vectors=normalisers,
    )  # fmt: skip

    # A log forget gate scales all pairs across it. Within the chunk, those are the pairs of later queries without those
    # of later keys; the rest crosses the end of the chunk.
    across = jnp.sum(memories[:, :, 1:].astype(jnp.float32) * d_memories[:, :, :-1].astype(jnp.float32), axis=(-2, -1))
    across = across + jnp.sum(normalisers[:, :, 1:] * d_normalisers[:, :, :-1], axis=-1)
    across = jnp.pad(across, ((0, 0), (0, 0), (0, 1)))
    within = (q_dot - k_dot).reshape(gates.row.shape)
    d_logf = _running(within, reverse=True) + across[..., None]
    return d_q, d_k, d_v, _by_position(k_dot), _by_position(_flat(d_logf)), None


_cell.defvjp(_forward, _backward)


# One function with the norm, so that the kernel of the norm's gradient returns the dot products of the cell's gradient,
# for which XLA would read `h` and its gradient once more.
@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _gated_cell(chunk_size: int, eps: float, *given: Any) -> Any:
    return _gated_forward(chunk_size, eps, *given)[0]


def _gated_forward(chunk_size: int, eps: float, *given: Any) -> tuple[Any, Any]:
    *inputs, gate, scale, keep = given
    h, kept = _forward(chunk_size, *inputs)
    return head_norm_forward(eps, h, gate, scale, keep), (kept, gate, scale, keep)


def _gated_backward(chunk_size: int, eps: float, kept: Any, d_y: Any) -> tuple[Any, ...]:
    of_cell, gate, scale, keep = kept
    found = head_norm_gradient(eps, of_cell[3], gate, scale, d_y, keep)
    return *_gradients(of_cell, found.h, found.dots), found.gate, found.scale, None


_gated_cell.defvjp(_gated_forward, _gated_backward)


def _gates(chunk_size: int, keys: int, i: Any, logf: Any, begins: Any) -> _Gates:
    num_chunks = i.shape[1] // chunk_size
    i, logf = _chunked(i, num_chunks), _chunked(logf, num_chunks)
    place, last_place = jnp.arange(chunk_size), i.ndim - 1
    total = _running(logf)
    if begins is None:
        fresh, first, last = jnp.zeros((), bool), jnp.zeros((), int), jnp.full((), chunk_size - 1)
    else:
        begins = _chunked(begins[..., None], num_chunks)
        fresh = lax.cummax(begins.astype(jnp.int32), axis=last_place) > 0  # the token's document began in this chunk
        first = lax.cummax(jnp.where(begins, place, 0), axis=last_place)
        ends = jnp.where(jnp.roll(begins, -1, axis=-1) | (place == chunk_size - 1), place, chunk_size)
        last = lax.cummin(ends, axis=last_place, reverse=True)
    fresh, first, last = (jnp.broadcast_to(x, i.shape) for x in (fresh, first, last))

    # The stabilisers before and after each chunk.
    through = total[..., -1]
    to_end = jnp.where(place >= first[..., -1:], through[..., None] - total + i, -jnp.inf)
    written = jnp.maximum(jnp.max(to_end, axis=-1), 0.0)
    chunk = jnp.arange(num_chunks)
    eighths = jnp.round(through * 8.0) / 8.0
    coarse, fine = jnp.cumsum(eighths, axis=-1), jnp.cumsum(through - eighths, axis=-1)
    lasting = chunk <= chunk[:, None]
    if begins is not None:  # Nothing lasts beyond a chunk in which a document begins.
        number = jnp.cumsum(fresh[..., -1].astype(jnp.int32), axis=-1)
        lasting = lasting & (number[..., :, None] == number[..., None, :])
    log = (coarse[..., :, None] - coarse[..., None, :]) + (fine[..., :, None] - fine[..., None, :])
    after = jnp.max(jnp.where(lasting, log + written[..., None, :], -jnp.inf), axis=-1)
    before = jnp.pad(after[..., :-1], ((0, 0), (0, 0), (1, 0)))
    decay = jnp.where(lasting, jnp.exp(log + after[..., None, :] - after[..., :, None]), 0.0)
    decay = jnp.pad(decay[..., :-1, :], ((0, 0), (0, 0), (1, 0), (0, 0)))

    column = i - total
    largest = total + (lax.cummax(column, axis=last_place) if begins is None else _largest_since(begins, column))
    carried = jnp.where(fresh, -jnp.inf, total + before[..., None])
    m = jnp.maximum(jnp.maximum(largest, carried), 0.0)
    scale = 1.0 / math.sqrt(keys)
    return _Gates(
        row=(total - m) * _LOG2_E + math.log2(scale),
        column=column * _LOG2_E,
        floor=jnp.exp(-jnp.minimum(m, 80.0)),
        read=scale * jnp.exp(carried - m),
        write=jnp.exp(to_end - after[..., None]),
        first=first.astype(jnp.float32),
        last=last.astype(jnp.float32),
        keep=jnp.where(fresh[..., -1], 0.0, jnp.exp(through + before - after)),
        decay=decay,
    )


def _running(x: Any, *, reverse: bool = False) -> Any:
    """Sums of a token and all earlier (or later) ones of its chunk, `[B, H, N, L]`."""
    earlier = jnp.tri(x.shape[-1], dtype=x.dtype)
    return jnp.einsum("bhnl,lm->bhnm" if reverse else "bhnl,ml->bhnm", x, earlier, precision=lax.Precision.HIGHEST)


def _largest_since(begins: Any, x: Any) -> Any:
    """The largest number so far in each token's document."""

    def join(before: Any, after: Any) -> Any:
        (begun, high), (begins_too, number) = before, after
        return begun | begins_too, jnp.where(begins_too, number, jnp.maximum(high, number))

    return lax.associative_scan(join, (jnp.broadcast_to(begins, x.shape), x), axis=x.ndim - 1)[1]


def _chunked(x: Any, num_chunks: int) -> Any:
    """`[B, S, H]` to `[B, H, N, L]`."""
    return jnp.moveaxis(x.reshape(x.shape[0], num_chunks, -1, x.shape[2]), 3, 1)


def _flat(x: Any) -> Any:
    """`[B, H, N, L]` to `[B, H, S]`."""
    return x.reshape(*x.shape[:2], -1)


def _by_position(x: Any) -> Any:
    """`[B, H, S]` to `[B, S, H]`."""
    return jnp.swapaxes(x, 1, 2)


def _weighted_sums(x: Any, weights: Any) -> Any:
    """Sums of tokens `[B, S, H, K]` in each chunk, `[B, H, N, K]`, with weights `[B, H, N, L]`."""
    num_rows, num_heads, num_chunks, length = weights.shape
    # In two dims, so that XLA does not transpose the products before it sums them.
    x = x.reshape(num_rows * num_chunks, length, -1)
    weights = jnp.repeat(
        weights.transpose(0, 2, 3, 1).reshape(*x.shape[:2], num_heads), x.shape[2] // num_heads, axis=2
    )
    sums = jnp.sum(x * weights, axis=1)
    return jnp.moveaxis(sums.reshape(num_rows, num_chunks, num_heads, -1), 2, 1)


def _dots(x: Any, vectors: Any) -> Any:
    """Products of tokens `[B, S, H, K]` with a vector of their chunk `[B, H, N, K]`: `[B, H, N, L]`."""
    num_chunks = vectors.shape[2]
    x = x.reshape(x.shape[0], num_chunks, -1, *x.shape[2:])
    return jnp.moveaxis(jnp.sum(x * jnp.moveaxis(vectors, 1, 2)[:, :, None], axis=-1), 3, 1)


def _along_chunks(decay: Any, vectors: Any) -> Any:
    return jnp.einsum("bhnm,bhmk->bhnk", decay, vectors, precision=lax.Precision.HIGHEST)
