"""The mLSTM cell (arXiv 2405.04517): a linear recurrence over outer products, in three forms of one function.

`mlstm_recurrent` follows time and is for generation, `mlstm_parallel` compares all pairs of tokens and is the
reference, `mlstm_chunkwise` compares the pairs within chunks, follows time between them, and is for training.

Per head, with `log f = logsigmoid(f)`, a memory C, a normaliser n and a stabiliser m:

    m_t = max(log f_t + m_{t-1}, i_t, 0)
    C_t = exp(log f_t + m_{t-1} - m_t) C_{t-1} + exp(i_t - m_t) k_t v_t^T        n_t likewise, with k_t alone
    h_t = C_t^T q_t / max(|n_t . q_t|, exp(-m_t))                                q_t divided by sqrt(K) first

h does not depend on m: C, n and exp(-m) all shrink by the same factor. Two choices follow.
- m is never below 0; in the paper it may be anything. Only what is smaller than 1e-38 is lost by that. An input
  gate of -inf then adds exactly nothing, the empty state is all zeros, and no infinity is subtracted from another.
- m gets no gradient: all of it would cancel, up to rounding.

Shapes: B rows, S positions (T again), H heads, K features of keys, V of values, N chunks of L positions (M again).
"""

from __future__ import annotations

import functools
import math
import warnings
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from meshwright.errors import MeshwrightWarning, PlacementError
from meshwright.mesh.axes import pcast_varying, varying_axes
from meshwright.mesh.current import current_mesh
from meshwright.models.attention import check_segment_ids
from meshwright.parallel.kernels.dispatch import uses_kernels
from meshwright.parallel.kernels.token_kernel import advance_memory, fits_token
from meshwright.specs import ceil_div

_ANY_DOCUMENT = -1  # in a state that has not seen segment_ids, so that any document continues it
# XLA:GPU sums 32 rows or more of 128 columns per block; two blocks for each of an H200's 132 multiprocessors.
_BLOCK_ROWS, _BLOCK_COLUMNS, _ENOUGH_BLOCKS = 32, 128, 256
# From here on, the kernel took 0.58x to 0.75x of XLA's time on an H200; else as long, or 1.04x to 1.2x.
_KERNEL_BYTES, _KERNEL_VALUES = 2**25, 512


class MLSTMState(NamedTuple):
    """The state of an mLSTM: `memory * exp(stabiliser)` and `normaliser * exp(stabiliser)`.

    Only these products matter, so the stabiliser has a gradient as an input but not as an output.
    """

    memory: Array
    """`[B, H, K, V]`, float32."""
    normaliser: Array
    """`[B, H, K]`, float32."""
    stabiliser: Array
    """`[B, H]`, float32."""
    segment: Array
    """`[B]`, int32: the document of the last token that was not padding; -1 if `segment_ids` were never given."""


def init_mlstm_state(batch_size: int, num_heads: int, *, key_dim: int, value_dim: int) -> MLSTMState:
    """Returns the initial state, with a memory of zeros.

    Example:
        >>> state = init_mlstm_state(2, 4, key_dim=8, value_dim=16)
        >>> state.memory.shape, state.normaliser.shape
        ((2, 4, 8, 16), (2, 4, 8))
    """
    return MLSTMState(
        memory=jnp.zeros((batch_size, num_heads, key_dim, value_dim), jnp.float32),
        normaliser=jnp.zeros((batch_size, num_heads, key_dim), jnp.float32),
        stabiliser=jnp.zeros((batch_size, num_heads), jnp.float32),
        segment=jnp.full((batch_size,), _ANY_DOCUMENT, jnp.int32),
    )


def mlstm_recurrent(
    q: Array,
    k: Array,
    v: Array,
    i: Array,
    f: Array,
    *,
    state: MLSTMState | None = None,
    segment_ids: Array | None = None,
    kernels: bool | None = None,
) -> tuple[Array, MLSTMState]:
    """Returns the outputs `[B, S, H, V]` and the final state, computed token by token, for generation.

    Computes in float32. Its gradient keeps the memory of every token, so train with `mlstm_chunkwise`.

    Args:
        q, k, v, i, f, state, segment_ids: as for `mlstm_chunkwise`.
        kernels: use a Pallas kernel for each token, in float32 (default: on Hopper GPUs if the memory of all rows and
            heads has 32 MiB or more, and V is at least 512). With True, sizes that are not multiples of 128 warn.

    Example:
        >>> q = k = v = jnp.ones((1, 3, 2, 4))
        >>> i = f = jnp.zeros((1, 3, 2))
        >>> h, state = mlstm_recurrent(q, k, v, i, f)
        >>> one_more, state = mlstm_recurrent(q[:, :1], k[:, :1], v[:, :1], i[:, :1], f[:, :1], state=state)
        >>> one_more.shape
        (1, 1, 2, 4)
    """
    t = prepare_cell_inputs(q, k, v, i, f, state, segment_ids, who="mlstm_recurrent")
    wide = t.i_BSH.dtype
    begins_BS = jnp.zeros(t.q_BSHK.shape[:2], bool) if t.begins_BS is None else t.begins_BS
    (num_rows, _, num_heads, num_keys), num_values = t.q_BSHK.shape, t.v_BSHV.shape[-1]
    pays = num_values >= _KERNEL_VALUES and 4 * num_rows * num_heads * num_keys * num_values >= _KERNEL_BYTES
    fits = fits_token(num_keys, num_values) and wide == jnp.float32
    if kernels and not fits:
        sizes = f"{num_keys} features of keys and {num_values} of values, in {wide}"
        warnings.warn(
            f"mlstm_recurrent: kernels=True, but XLA's form runs: heads have {sizes}.\n"
            "hint: leave kernels out, or use multiples of 128 in float32.",
            MeshwrightWarning,
            stacklevel=2,
        )
    advance = advance_memory if fits and (kernels or pays) and uses_kernels(kernels) else _advance

    def token(carry: Any, x: Any) -> tuple[Any, Any]:
        (c_BHKV, n_BHK, m_BH), (q_BHK, k_BHK, v_BHV, i_BH, logf_BH, begins_B) = carry, x
        begins_B1 = begins_B[:, None]
        kept_BH = logf_BH + jnp.where(begins_B1, 0.0, m_BH)
        m_BH = lax.stop_gradient(jnp.maximum(jnp.maximum(kept_BH, i_BH), 0.0))
        keep_BH = jnp.where(begins_B1, 0.0, jnp.exp(kept_BH - m_BH))
        gain_BH = jnp.exp(i_BH - m_BH)
        c_BHKV, n_BHK, sum_BHV, size_BH = advance(c_BHKV, n_BHK, q_BHK, k_BHK, v_BHV, keep_BH, gain_BH)
        h_BHV = normalise(sum_BHV * t.scale, size_BH * t.scale, m_BH)
        return (c_BHKV, n_BHK, m_BH), h_BHV.astype(v_BHV.dtype)

    inputs = (t.q_BSHK, t.k_BSHK, t.v_BSHV, t.i_BSH, t.logf_BSH, begins_BS)
    carry, h_SBHV = lax.scan(token, t.given, tuple(jnp.moveaxis(x, 1, 0) for x in inputs))
    return t.silence_padding(jnp.moveaxis(h_SBHV, 0, 1)), t.state_after(carry)


def _advance(
    c_BHKV: Any, n_BHK: Any, q_BHK: Any, k_BHK: Any, v_BHV: Any, keep_BH: Any, gain_BH: Any
) -> tuple[Any, Any, Any, Any]:
    """`advance_memory` in operations of XLA, in the dtype of the memory."""
    q_BHK, k_BHK, v_BHV = (x.astype(c_BHKV.dtype) for x in (q_BHK, k_BHK, v_BHV))
    k_BHK = k_BHK * gain_BH[..., None]
    c_BHKV = keep_BH[..., None, None] * c_BHKV + k_BHK[..., None] * v_BHV[..., None, :]
    n_BHK = keep_BH[..., None] * n_BHK + k_BHK
    return c_BHKV, n_BHK, _read_memory(q_BHK, c_BHKV), jnp.sum(q_BHK * n_BHK, axis=-1)


def _read_memory(q_BHK: Any, c_BHKV: Any) -> Any:
    """Returns `C^T q`."""
    # XLA:CPU takes 4 to 80 times as long for sums.
    return lax.platform_dependent(q_BHK, c_BHKV, cpu=lambda q, c: jnp.einsum("BHK,BHKV->BHV", q, c), default=_sums)


def _sums(q_BHK: Any, c_BHKV: Any) -> Any:
    """Returns `C^T q` as sums of products, which XLA:GPU fuses with the update of C: one pass over the memory.

    A few rows have too few sums to fill a GPU, and XLA would store the memory and then read it again. So they become
    more sums, over parts of the keys; the barrier keeps XLA from joining them.
    """
    rows, heads, keys, values = c_BHKV.shape
    mesh = current_mesh()
    blocks = rows * heads * ceil_div(values, _BLOCK_COLUMNS) / (1 if mesh is None else mesh.size)
    fitting = [n for n in range(1, keys // _BLOCK_ROWS + 1) if keys % (n * _BLOCK_ROWS) == 0] or [1]
    parts = next((n for n in fitting if n * blocks >= _ENOUGH_BLOCKS), fitting[-1])
    products = q_BHK[..., None] * c_BHKV
    if parts == 1:
        return jnp.sum(products, axis=-2)
    sums = jnp.sum(products.reshape(rows, heads, parts, keys // parts, values), axis=-2)
    return jnp.sum(lax.optimization_barrier(sums), axis=-2)


def mlstm_parallel(q: Array, k: Array, v: Array, i: Array, f: Array, *, segment_ids: Array | None = None) -> Array:
    """Returns the outputs `[B, S, H, V]` from all pairs of tokens at once; a reference that needs S x S memory.

    Args:
        q, k, v, i, f, segment_ids: as for `mlstm_chunkwise`.

    Example:
        >>> q = k = v = jnp.ones((1, 3, 2, 4))
        >>> mlstm_parallel(q, k, v, i=jnp.zeros((1, 3, 2)), f=jnp.zeros((1, 3, 2))).shape
        (1, 3, 2, 4)
    """
    t = prepare_cell_inputs(q, k, v, i, f, None, segment_ids, who="mlstm_parallel")
    logf_BHS, i_BHS = jnp.moveaxis(t.logf_BSH, 1, 2), jnp.moveaxis(t.i_BSH, 1, 2)
    num_tokens = logf_BHS.shape[-1]
    after_TS = jnp.tril(jnp.ones((num_tokens, num_tokens), bool), k=-1)
    # Sum the forget gates of each pair separately: a difference of two long sums would lose precision.
    decay_BHTS = jnp.cumsum(jnp.where(after_TS, logf_BHS[..., None], 0.0), axis=-2)
    log_BHTS = jnp.where(jnp.tril(jnp.ones_like(after_TS)), decay_BHTS + i_BHS[..., None, :], -jnp.inf)
    if t.begins_BS is not None:
        document_B1S = jnp.cumsum(t.begins_BS, axis=1)[:, None]
        log_BHTS = jnp.where(document_B1S[..., :, None] == document_B1S[..., None, :], log_BHTS, -jnp.inf)
    m_BHT = lax.stop_gradient(jnp.maximum(jnp.max(log_BHTS, axis=-1), 0.0))
    score_BHTS = t.dot("BTHK,BSHK->BHTS", t.q_BSHK, t.k_BSHK) * t.scale * jnp.exp(log_BHTS - m_BHT[..., None])
    sum_BHTV = t.dot("BHTS,BSHV->BHTV", score_BHTS, t.v_BSHV)
    h_BHTV = normalise(sum_BHTV, jnp.sum(score_BHTS, axis=-1), m_BHT).astype(t.v_BSHV.dtype)
    h_BSHV: Array = t.silence_padding(jnp.moveaxis(h_BHTV, 1, 2))
    return h_BSHV


# --- Operations with custom gradients ---


def normalise(sum_V: Any, size: Any, m: Any) -> Any:
    """Returns `sum / max(|size|, exp(-m))`."""
    # For gates above 87, exp(-m) would underflow to 0, and a query of zeros would give 0 / 0.
    return _divide(sum_V, jnp.maximum(jnp.abs(size), jnp.exp(-jnp.minimum(m, 80.0))))


@jax.custom_vjp
def _divide(a_V: Any, b: Any) -> Any:
    """Divides rows by numbers as small as exp(-80); the usual gradient squares them, which underflows to 0."""
    return a_V / b[..., None]


def _divide_fwd(a_V: Any, b: Any) -> tuple[Any, Any]:
    ratio_V = _divide(a_V, b)
    return ratio_V, (ratio_V, b)


def _divide_bwd(kept: Any, d_ratio_V: Any) -> tuple[Any, Any]:
    ratio_V, b = kept
    d_a_V = d_ratio_V / b[..., None]
    return d_a_V, -jnp.sum(d_a_V * ratio_V, axis=-1)


_divide.defvjp(_divide_fwd, _divide_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 3))
def _dot(dims: str, a: Any, b: Any, wide: Any) -> Any:
    """Multiplies in the dtype of `a` and `b`, also in the backward pass, where JAX would use the result's dtype."""
    return einsum(dims, a, b, wide)


def _dot_bwd(dims: str, wide: Any, kept: Any, d_out: Any) -> tuple[Any, Any]:
    (a, b), (ins, out) = kept, dims.split("->")
    in_a, in_b = ins.split(",")
    d_out = d_out.astype(a.dtype)
    d_a = einsum(f"{out},{in_b}->{in_a}", d_out, b, wide)
    d_b = einsum(f"{in_a},{out}->{in_b}", a, d_out, wide)
    return d_a.astype(a.dtype), d_b.astype(b.dtype)


_dot.defvjp(lambda dims, a, b, wide: (_dot(dims, a, b, wide), (a, b)), _dot_bwd)


def einsum(dims: str, a: Any, b: Any, wide: Any) -> Any:
    """Multiplies in the dtype of `a` and `b`, and accumulates and returns in `wide`."""

    def narrow(a: Any, b: Any) -> Any:
        return jnp.einsum(dims, a, b, preferred_element_type=wide)

    def widened(a: Any, b: Any) -> Any:
        return jnp.einsum(dims, a.astype(wide), b.astype(wide))

    if a.dtype == wide:
        return narrow(a, b)
    # XLA's CPU compiler (jax 0.10 to 0.12) rejects some layouts of 16-bit operands with a 32-bit result.
    return lax.platform_dependent(a, b, cpu=widened, default=narrow)


# --- Checked inputs, in the form that all three cells share ---


class CellInputs(NamedTuple):
    """The inputs of a cell and its initial state."""

    q_BSHK: Any
    k_BSHK: Any
    v_BSHV: Any
    i_BSH: Any  # -inf for padding
    logf_BSH: Any  # 0 for padding
    begins_BS: Any  # whether a token is the first of its document; None without documents
    real_BS: Any  # whether a token is not padding; None without documents
    given: Any  # C, n, m before the first token, as they were given
    last_segment_B: Any

    @property
    def start(self) -> Any:
        """C, n, m before the first token, where m is at least 0 and needs no gradient: C and n carry it."""
        c_BHKV, n_BHK, m_BH = self.given
        start_m_BH = lax.stop_gradient(jnp.maximum(m_BH, 0.0))
        moved_BH = jnp.exp(m_BH - start_m_BH)
        return moved_BH[..., None, None] * c_BHKV, moved_BH[..., None] * n_BHK, start_m_BH

    @property
    def scale(self) -> float:
        return 1.0 / math.sqrt(self.q_BSHK.shape[-1])

    def dot(self, dims: str, a: Any, b: Any) -> Any:
        """Multiplies in the inputs' dtype, and accumulates and returns in the gates' dtype."""
        kind = self.q_BSHK.dtype
        return _dot(dims, a.astype(kind), b.astype(kind), self.i_BSH.dtype)

    def state_after(self, carry: Any) -> MLSTMState:
        c_BHKV, n_BHK, m_BH = carry
        return MLSTMState(c_BHKV, n_BHK, m_BH, self.last_segment_B)

    def silence_padding(self, h_BSHV: Any) -> Any:
        return h_BSHV if self.real_BS is None else jnp.where(self.real_BS[..., None, None], h_BSHV, 0)


def prepare_cell_inputs(
    q: Any, k: Any, v: Any, i: Any, f: Any, state: Any, segment_ids: Any, *, who: str
) -> CellInputs:
    """Checks the inputs of a cell and returns them in the shared form; errors name `who`."""
    q, k, v, i, f = (jnp.asarray(x) for x in (q, k, v, i, f))
    _check(q, k, v, i, f, who=who)
    if state is None:
        state = init_mlstm_state(q.shape[0], q.shape[2], key_dim=q.shape[3], value_dim=v.shape[3])
    _check_state(state, q, v, who=who)
    segment_ids = None if segment_ids is None else jnp.asarray(segment_ids)
    check_segment_ids(segment_ids, q, who=who)
    # Loop carries and inputs of custom gradients must vary along the same axes as their results.
    inputs = (q, k, v, i, f, state, segment_ids)
    axes = sorted(frozenset[str]().union(*(varying_axes(x) for x in jax.tree.leaves(inputs))))
    q, k, v, i, f, state, segment_ids = pcast_varying(inputs, axes)

    wide = jnp.promote_types(jnp.result_type(q, i, f), jnp.float32)
    *given, segment_B = state
    given = tuple(x.astype(wide) for x in given)

    i_BSH, logf_BSH = i.astype(wide), jax.nn.log_sigmoid(f.astype(wide))
    if segment_ids is None:
        return CellInputs(q, k, v, i_BSH, logf_BSH, None, None, given, segment_B)
    real_BS = segment_ids != 0
    segment_ids = segment_ids.astype(segment_B.dtype)
    # The document of the last token that was not padding, because padding may lie within a document.
    known_BS = jnp.concatenate([segment_B[:, None], segment_ids], axis=1)
    known_BS = lax.associative_scan(lambda before, now: jnp.where(now != 0, now, before), known_BS, axis=1)
    before_BS = known_BS[:, :-1]
    begins_BS = real_BS & (segment_ids != before_BS) & (before_BS != _ANY_DOCUMENT)
    i_BSH = jnp.where(real_BS[..., None], i_BSH, -jnp.inf)
    logf_BSH = jnp.where(real_BS[..., None], logf_BSH, 0.0)
    return CellInputs(q, k, v, i_BSH, logf_BSH, begins_BS, real_BS, given, known_BS[:, -1])


def _check(q: Any, k: Any, v: Any, i: Any, f: Any, *, who: str) -> None:
    if q.ndim != 4 or v.ndim != 4 or q.shape != k.shape or q.shape[:3] != v.shape[:3] or 0 in q.shape:
        raise PlacementError(
            f"{who} got q of shape {q.shape}, k of {k.shape} and v of {v.shape}.",
            hint="pass q and k as [B, S, H, K], and v as [B, S, H, V].",
        )
    if i.shape != q.shape[:3] or f.shape != q.shape[:3]:
        raise PlacementError(
            f"{who} got gates of shapes {i.shape} and {f.shape} for q of shape {q.shape}.",
            hint=f"pass both with shape {q.shape[:3]}: one number per token and head.",
        )
    if len({q.dtype, k.dtype, v.dtype}) > 1 or not all(jnp.issubdtype(x.dtype, jnp.floating) for x in (q, i, f)):
        raise PlacementError(
            f"{who} got q of {q.dtype}, k of {k.dtype}, v of {v.dtype}, and gates of {i.dtype} and {f.dtype}.",
            hint="pass q, k and v with the same float dtype; gates may have another.",
        )


def _check_state(state: Any, q: Any, v: Any, *, who: str) -> None:
    (rows, _, heads, key_dim), value_dim = q.shape, v.shape[3]
    wanted = ((rows, heads, key_dim, value_dim), (rows, heads, key_dim), (rows, heads), (rows,))
    shapes = tuple(jnp.shape(x) for x in state)
    if shapes != wanted:
        raise PlacementError(
            f"{who} got a state of shapes {shapes} for q of {q.shape} and v of {v.shape}.",
            hint=f"use init_mlstm_state({rows}, {heads}, key_dim={key_dim}, value_dim={value_dim}).",
        )
