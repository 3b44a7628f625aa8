"""The chunkwise mLSTM cell for training: parallel within chunks, recurrent between them.

See `meshwright.models.mlstm` for the function, its other forms, and the letters in names.
"""

from __future__ import annotations

import warnings
from typing import Any, Literal, NamedTuple, TypedDict, Unpack, overload

import jax
import jax.numpy as jnp
from jax import Array, lax

from meshwright.errors import MeshwrightWarning, PlacementError
from meshwright.models.execution import on_gpu
from meshwright.models.mlstm import CellInputs, MLSTMState, einsum, normalise, prepare_cell_inputs
from meshwright.models.mlstm_hopper import gated_mlstm_on_hopper, mlstm_on_hopper, why_not_fused
from meshwright.parallel.kernels.dispatch import uses_hopper_kernels
from meshwright.parallel.kernels.head_norm_kernel import fits_heads, gated_head_norm
from meshwright.specs import ceil_div

# On an H200, twice the key size was within 3% of the fastest for keys of 128 and 256 (benchmarks/mlstm_h200.py); on
# other chips, nothing larger than 64 was measured.
_CHUNK_SIZE, _MIN_GPU_CHUNK, _MAX_GPU_CHUNK = 64, 128, 512


class _Chunking(TypedDict, total=False):
    chunk_size: int | None
    kernels: bool | None
    state: MLSTMState | None
    segment_ids: Array | None


@overload
def mlstm_chunkwise(
    q: Array,
    k: Array,
    v: Array,
    i: Array,
    f: Array,
    *,
    return_state: Literal[False] = ...,
    **options: Unpack[_Chunking],
) -> Array: ...


@overload
def mlstm_chunkwise(
    q: Array, k: Array, v: Array, i: Array, f: Array, *, return_state: Literal[True], **options: Unpack[_Chunking]
) -> tuple[Array, MLSTMState]: ...


def mlstm_chunkwise(
    q: Array,
    k: Array,
    v: Array,
    i: Array,
    f: Array,
    *,
    chunk_size: int | None = None,
    state: MLSTMState | None = None,
    segment_ids: Array | None = None,
    return_state: bool = False,
    kernels: bool | None = None,
) -> Array | tuple[Array, MLSTMState]:
    """Returns the outputs `[B, S, H, V]` of an mLSTM and optionally the final state, for training.

    Gates and states are float32; matmuls use the dtype of `q`, `k` and `v` and accumulate in float32. The gradient
    keeps one K x V memory per chunk and head, which `jax.checkpoint` recomputes.

    Args:
        q, k: `[B, S, H, K]`; `v` is `[B, S, H, V]`.
        i, f: `[B, S, H]`, the pre-activations of the exponential input gate and the sigmoid forget gate.
        chunk_size: number of tokens per chunk; does not change the result. Larger chunks keep fewer memories and use
            larger matmuls, but above about K the pairs within a chunk cost more than that saves. The default is 2 K on
            GPUs, between 128 and 512 (about half the time of 64 on an H200), and 64 on other devices.
        state: the state to continue from, returned by any form.
        segment_ids: integers `[B, S]`, one id per document, each document contiguous. A document starts from the empty
            state unless it continues the document of `state`. 0 is padding, which does not change the state and has
            outputs of 0.
        return_state: whether to return the state after the last token as well.
        kernels: whether to use Pallas kernels (default: on Hopper GPUs with jax 0.11 or newer). They take 16-bit inputs
            without `chunk_size` and states, if S is a multiple of 128, and K and V are multiples of 64 with K at most
            512. In the global view, they run only on one device. With True, other inputs warn that XLA's form runs.

    Example:
        >>> q = k = v = jnp.ones((1, 100, 2, 4))
        >>> i = f = jnp.zeros((1, 100, 2))
        >>> cell = jax.jit(mlstm_chunkwise, static_argnames=("chunk_size", "return_state"))
        >>> h, state = cell(q, k, v, i, f, chunk_size=16, return_state=True)
        >>> h.shape, state.memory.shape
        ((1, 100, 2, 4), (1, 2, 4, 4))
    """
    t = prepare_cell_inputs(q, k, v, i, f, state, segment_ids, who="mlstm_chunkwise")
    why = None if chunk_size is None else f"chunk_size is {chunk_size}"
    why = why if state is None and not return_state else "they neither take nor return a state"
    why = why or why_not_fused(q, v)
    if why is None and uses_hopper_kernels(kernels):
        fused: Array = t.silence_padding(mlstm_on_hopper(t))
        return fused
    if kernels:
        warnings.warn(
            f"mlstm_chunkwise: kernels=True, but XLA's form runs: {why or f'this is jax {jax.__version__}'}.\n"
            "hint: leave kernels out, or see the sizes in the guide to speed.",
            MeshwrightWarning,
            stacklevel=2,
        )
    if chunk_size is None:
        wide = min(max(2 * t.q_BSHK.shape[-1], _MIN_GPU_CHUNK), _MAX_GPU_CHUNK)
        chunk_size = wide if on_gpu() else _CHUNK_SIZE
    if type(chunk_size) is not int or chunk_size < 1:
        raise PlacementError(
            f"mlstm_chunkwise: chunk_size must be a positive integer; got {chunk_size!r}.", hint="pass 1 or more."
        )
    chunks = _cut(t, min(chunk_size, t.q_BSHK.shape[1]))
    # The loop over chunks computes only their states, so that the other matmuls form one large batch.
    carry, states = _states(t, chunks)
    h_NBHLV = _outputs(t, chunks, states)
    h_BNLHV = h_NBHLV.transpose(1, 0, 3, 2, 4)
    h_BSHV = h_BNLHV.reshape(h_BNLHV.shape[0], -1, *h_BNLHV.shape[3:])[:, : t.q_BSHK.shape[1]]
    h_BSHV = t.silence_padding(h_BSHV)
    return (h_BSHV, t.state_after(carry)) if return_state else h_BSHV


def gated_mlstm(
    q: Array,
    k: Array,
    v: Array,
    i: Array,
    f: Array,
    gate: Array,
    scale: Array,
    *,
    eps: float,
    chunk_size: int | None = None,
    segment_ids: Array | None = None,
    kernels: bool | None = None,
) -> Array:
    """Returns `gated_head_norm(mlstm_chunkwise(q, k, v, i, f), gate, scale)`, `[B, S, H * V]`.

    With the kernels of both, the gradient reads the cell's outputs once less. See these functions for the arguments.
    """
    if chunk_size is None and why_not_fused(q, v) is None and fits_heads(v, gate) and uses_hopper_kernels(kernels):
        t = prepare_cell_inputs(q, k, v, i, f, None, segment_ids, who="gated_mlstm")
        fused: Array = gated_mlstm_on_hopper(t, gate, scale, eps=eps)
        return fused
    h = mlstm_chunkwise(q, k, v, i, f, chunk_size=chunk_size, segment_ids=segment_ids, kernels=kernels)
    return gated_head_norm(h, gate, scale, eps=eps, kernels=kernels)


# --- The three steps of the chunkwise form ---


class _Chunks(NamedTuple):
    q_NBHLK: Any
    k_NBHLK: Any
    v_NBHLV: Any
    i_NBHL: Any
    coarse_NBHL: Any
    fine_NBHL: Any
    document_NB1L: Any  # index of each token's document in its row; None without documents
    before_NB1: Any  # the document of the last token before the chunk


def _cut(t: CellInputs, length: int) -> _Chunks:
    """Splits the inputs into chunks, heads before positions, with the cumulative sums of each chunk's log forget gates.

    Each sum has a coarse part, in eighths, which float32 adds without rounding, and a small fine part. With strong
    forgetting, one running sum grows so large that differences between neighbors lose precision.
    """
    num_chunks = ceil_div(t.q_BSHK.shape[1], length)
    missing = num_chunks * length - t.q_BSHK.shape[1]

    def cut(x_BSH: Any, fill: float = 0.0) -> Any:
        x = jnp.pad(x_BSH, [(0, 0), (0, missing)] + [(0, 0)] * (x_BSH.ndim - 2), constant_values=fill)
        return jnp.moveaxis(x.reshape(x.shape[0], num_chunks, length, *x.shape[2:]), (1, 3), (0, 2))

    # Positions past the end write nothing (-inf) and forget nothing (0), so they do not change the state.
    logf_NBHL = cut(t.logf_BSH)
    eighths_NBHL = lax.stop_gradient(jnp.round(logf_NBHL * 8.0) / 8.0)
    document_NB1L = before_NB1 = None
    if t.begins_BS is not None:
        document_BS1 = jnp.cumsum(t.begins_BS, axis=1)[..., None]
        document_NB1L = lax.cummax(cut(document_BS1), axis=3)  # positions past the end join the last document
        before_NB1 = jnp.concatenate([jnp.zeros_like(document_NB1L[:1, ..., -1]), document_NB1L[:-1, ..., -1]])
    return _Chunks(
        q_NBHLK=cut(t.q_BSHK),
        k_NBHLK=cut(t.k_BSHK),
        v_NBHLV=cut(t.v_BSHV),
        i_NBHL=cut(t.i_BSH, fill=-jnp.inf),
        coarse_NBHL=jnp.cumsum(eighths_NBHL, axis=-1),
        fine_NBHL=jnp.cumsum(logf_NBHL - eighths_NBHL, axis=-1),
        document_NB1L=document_NB1L,
        before_NB1=before_NB1,
    )


def _states(t: CellInputs, chunks: _Chunks) -> Any:
    """Returns the state after the last chunk, and the stacked initial states of the chunks."""
    coarse, fine, document = chunks.coarse_NBHL, chunks.fine_NBHL, chunks.document_NB1L
    through_NBH = coarse[..., -1] + fine[..., -1]
    to_end_NBHL = (coarse[..., -1:] - coarse) + (fine[..., -1:] - fine) + chunks.i_NBHL
    if document is not None:
        through_NBH = jnp.where(document[..., -1] == chunks.before_NB1, through_NBH, -jnp.inf)
        to_end_NBHL = jnp.where(document == document[..., -1:], to_end_NBHL, -jnp.inf)
    return _remember(through_NBH, to_end_NBHL, chunks.k_NBHLK, chunks.v_NBHLV, t.start)


def _outputs(t: CellInputs, chunks: _Chunks, states: Any) -> Any:
    """Returns each token's output, from the pairs in its chunk and from the chunk's initial state."""

    # Recompute L x L arrays in the backward pass, so that memory grows linearly with S.
    @jax.checkpoint
    def outputs(chunks: _Chunks, states: Any) -> Any:
        q, k, v, i, coarse, fine, document, before = chunks
        c_NBHKV, n_NBHK, m_NBH = states
        earlier_NBHL = coarse + fine + lax.stop_gradient(m_NBH)[..., None]
        decay_NBHLM = (coarse[..., :, None] - coarse[..., None, :]) + (fine[..., :, None] - fine[..., None, :])
        related = jnp.tril(jnp.ones((q.shape[-2], q.shape[-2]), bool))
        if document is not None:
            earlier_NBHL = jnp.where(document == before[..., None], earlier_NBHL, -jnp.inf)
            related = related & (document[..., :, None] == document[..., None, :])
        log_NBHLM = jnp.where(related, decay_NBHLM + i[..., None, :], -jnp.inf)
        m_NBHL = lax.stop_gradient(jnp.maximum(jnp.maximum(jnp.max(log_NBHLM, axis=-1), earlier_NBHL), 0.0))
        earlier_NBHL = t.scale * jnp.exp(earlier_NBHL - m_NBHL)
        score_NBHLM = t.dot("NBHLK,NBHMK->NBHLM", q, k) * t.scale * jnp.exp(log_NBHLM - m_NBHL[..., None])
        sum_NBHLV = t.dot("NBHLM,NBHMV->NBHLV", score_NBHLM, v)
        sum_NBHLV += earlier_NBHL[..., None] * t.dot("NBHLK,NBHKV->NBHLV", q, c_NBHKV)
        # In float32, because the gradient jumps where the size equals its floor, and rounding would pick a side.
        size_NBHL = jnp.sum(score_NBHLM, axis=-1) + earlier_NBHL * jnp.sum(q * n_NBHK[..., None, :], axis=-1)
        return normalise(sum_NBHLV, size_NBHL, m_NBHL).astype(v.dtype)

    return outputs(chunks, states)


@jax.custom_vjp
def _remember(through_NBH: Any, to_end_NBHL: Any, k_NBHLK: Any, v_NBHLV: Any, start: Any) -> Any:
    """Returns the state after the last chunk, and the stacked initial states of the chunks.

    The stack of memories, K x V per chunk, is the largest array. It has the dtype of the keys, in which matmuls read
    it, and the custom gradient keeps only that copy; the usual gradient would keep another one in float32.
    """

    def chunk(carry: Any, x: Any) -> tuple[Any, Any]:
        (c_BHKV, n_BHK, m_BH), (through_BH, to_end_BHL, k_BHLK, v_BHLV) = carry, x
        after_BH = jnp.maximum(jnp.maximum(through_BH + m_BH, jnp.max(to_end_BHL, axis=-1)), 0.0)
        keep_BH, write_BHL = jnp.exp(through_BH + m_BH - after_BH), jnp.exp(to_end_BHL - after_BH[..., None])
        written_BHLK = k_BHLK * write_BHL[..., None]
        added_BHKV = einsum("BHLK,BHLV->BHKV", written_BHLK.astype(k_BHLK.dtype), v_BHLV, c_BHKV.dtype)
        next_c_BHKV = keep_BH[..., None, None] * c_BHKV + added_BHKV
        next_n_BHK = keep_BH[..., None] * n_BHK + jnp.sum(written_BHLK, axis=-2)
        return (next_c_BHKV, next_n_BHK, after_BH), (c_BHKV.astype(k_BHLK.dtype), n_BHK, m_BH)

    return lax.scan(chunk, start, (through_NBH, to_end_NBHL, k_NBHLK, v_NBHLV))


def _remember_fwd(*args: Any) -> tuple[Any, Any]:
    end, stacks = _remember(*args)
    after_NBH = jnp.concatenate([stacks[2][1:], end[2][None]])
    return (end, stacks), (*args[:4], *stacks, after_NBH)


def _remember_bwd(kept: Any, d_out: Any) -> Any:
    def chunk(carry: Any, x: Any) -> tuple[Any, Any]:
        d_c_BHKV, d_n_BHK = carry
        through_BH, to_end_BHL, k_BHLK, v_BHLV, c_BHKV, n_BHK, m_BH, after_BH, d_read_BHKV, d_size_BHK = x
        kind, wide = k_BHLK.dtype, d_c_BHKV.dtype
        keep_BH, write_BHL = jnp.exp(through_BH + m_BH - after_BH), jnp.exp(to_end_BHL - after_BH[..., None])
        written_BHLK = k_BHLK * write_BHL[..., None]
        d_keep_BH = jnp.sum(c_BHKV * d_c_BHKV, axis=(-2, -1)) + jnp.sum(n_BHK * d_n_BHK, axis=-1)
        d_written_BHLK = einsum("BHLV,BHKV->BHLK", v_BHLV, d_c_BHKV.astype(kind), wide) + d_n_BHK[..., None, :]
        d_v_BHLV = einsum("BHLK,BHKV->BHLV", written_BHLK.astype(kind), d_c_BHKV.astype(kind), wide)
        d_k_BHLK = d_written_BHLK * write_BHL[..., None]
        d_to_end_BHL = jnp.sum(d_written_BHLK * written_BHLK, axis=-1)
        d_c_BHKV = keep_BH[..., None, None] * d_c_BHKV + d_read_BHKV
        d_n_BHK = keep_BH[..., None] * d_n_BHK + d_size_BHK
        return (d_c_BHKV, d_n_BHK), (d_keep_BH * keep_BH, d_to_end_BHL, d_k_BHLK.astype(kind), d_v_BHLV.astype(kind))

    (d_c_BHKV, d_n_BHK, d_m_BH), (d_c_NBHKV, d_n_NBHK, _) = d_out
    d_start, d_inputs = lax.scan(chunk, (d_c_BHKV, d_n_BHK), (*kept, d_c_NBHKV, d_n_NBHK), reverse=True)
    return (*d_inputs, (*d_start, jnp.zeros_like(d_m_BH)))


_remember.defvjp(_remember_fwd, _remember_bwd)
