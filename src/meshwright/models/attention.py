"""Causal attention over packed or unpacked rows: cuDNN on GPUs, splash kernels on TPUs, or XLA.

Shapes: B rows, S positions, H query heads, G key and value heads (H a multiple of G), K features per head. A row's
*pieces* are its runs of equal segment ids: documents, and the padding between or after them.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np

from meshwright.errors import MeshwrightWarning, PlacementError
from meshwright.hardware.flops import CAUSAL_SCOPE
from meshwright.mesh.axes import pcast_alike
from meshwright.models.execution import Attention, on_gpu
from meshwright.models.splash import splash_attention, suits_splash


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    segment_ids: jax.Array | None = None,
    soft_cap: float | None = None,
    scale: float | None = None,
    window: int | None = None,
    is_windowed: Any = None,
    max_segments: int | None = None,
    implementation: Attention | None = None,
) -> jax.Array:
    """Returns causal attention `[B, S, H, K]`; with `segment_ids`, each document of a row attends only to itself.

    Args:
        q, k, v: queries `[B, S, H, K]`, keys and values `[B, S, G, K]`; each key head serves H / G query heads.
        segment_ids: integers `[B, S]`, one id per document, each document contiguous. 0 is padding, which attends to
            padding.
        soft_cap: if given, logits become `soft_cap * tanh(logits / soft_cap)`.
        scale: factor of the logits (default: `K ** -0.5`).
        window: if given, a position attends to itself and the `window - 1` positions before it.
        is_windowed: a traced bool that says whether `window` applies, for layers that share one program (default: it
            does).
        max_segments: the largest number of pieces (documents or padding) in a row; rows with more become NaN. With it,
            cuDNN skips other documents instead of reading a mask: 2.7 times as fast at 2048 tokens and four documents,
            4.1 times at 8192. The backward pass keeps `B * max_segments * H * S` float32 numbers.
        implementation: "cudnn", "splash" or "xla" (default: cuDNN if installed, on GPUs, for 16-bit floats without a
            soft cap; JAX's splash kernels on TPUs, for multiples of 128 positions, in the local view or on one device;
            else XLA). For cuDNN, an odd number of positions is padded to an even one, with one warning.

    Example:
        >>> q = k = v = jnp.ones((1, 4, 2, 8))
        >>> attention(q, k, v, segment_ids=jnp.array([[1, 1, 2, 2]])).shape
        (1, 4, 2, 8)
    """
    q, k, v = jnp.asarray(q), jnp.asarray(k), jnp.asarray(v)
    _check(q, k, v, segment_ids, window, max_segments)
    if implementation not in (None, *get_args(Attention)):
        raise PlacementError(
            f"attention has no implementation {implementation!r}.", hint="use xla, cudnn, splash or None."
        )
    if implementation == "splash" and not suits_splash(q):
        raise PlacementError(
            f"splash attention cannot run here on {q.dtype} queries of shape {q.shape}.",
            hint="it needs TPUs, the local view or one device, and a multiple of 128 positions; or leave it out.",
        )
    if implementation == "cudnn" and soft_cap is not None:
        raise PlacementError("cuDNN attention has no soft cap.", hint='use implementation="xla", or leave it out.')
    pieces = _pieces(segment_ids) if segment_ids is not None else None
    if pieces is not None and max_segments is not None:
        # Adding NaN to q fuses with the rotation before it; on the output it would be one more pass over memory.
        too_many = pieces[:, -1] >= max_segments
        q = q + jnp.where(too_many, jnp.nan, 0.0).astype(q.dtype)[:, None, None, None]
    q, k, v = pcast_alike(q, k, v)
    if implementation is None:
        by_cudnn = soft_cap is None and _suits_cudnn(q)
        implementation = "cudnn" if by_cudnn else "splash" if suits_splash(q) else "xla"
    if window is not None and window >= q.shape[1]:
        window = None  # no position has so many before it
    if implementation != "xla":
        if implementation == "cudnn":
            fused = functools.partial(_by_cudnn, pieces=pieces, max_segments=max_segments, scale=scale)
        else:
            fused = functools.partial(splash_attention, pieces=pieces, scale=scale, soft_cap=soft_cap)
        if window is None or is_windowed is None:
            return fused(q, k, v, window=window)
        # Kernels take the window when compiling; neither branch communicates, so devices may take different ones.
        branches = (functools.partial(fused, window=window), functools.partial(fused, window=None))
        attended: jax.Array = jax.lax.cond(is_windowed, *branches, q, k, v)
        return attended
    mask = _mask(pieces)
    if window is not None:
        places = jnp.arange(q.shape[1])
        near = (places[:, None] - places < window)[None, None]
        near = near if is_windowed is None else near | ~is_windowed
        mask = near if mask is None else mask & near
    with jax.named_scope(CAUSAL_SCOPE):
        if soft_cap is not None:
            return _capped(q, k, v, mask, soft_cap, scale)
        return jax.nn.dot_product_attention(q, k, v, mask=mask, scale=scale, is_causal=True, implementation="xla")


def _pieces(segment_ids: Any) -> Any:
    """Returns the index of each position's piece in its row."""
    changes = segment_ids[:, 1:] != segment_ids[:, :-1]
    return jnp.cumsum(jnp.pad(changes, ((0, 0), (1, 0))).astype(jnp.int32), axis=1)


def _mask(pieces: Any) -> Any:
    return None if pieces is None else pieces[:, None, :, None] == pieces[:, None, None, :]


def _by_cudnn(
    q: Any, k: Any, v: Any, *, pieces: Any, max_segments: int | None, scale: float | None, window: int | None
) -> jax.Array:
    length = q.shape[1]
    if length % 2:
        # The extra position joins the last piece; as the last position, no other attends to it.
        _warn_of_padding(length)
        q, k, v = (jnp.pad(x, ((0, 0), (0, 1), (0, 0), (0, 0))) for x in (q, k, v))
        pieces = None if pieces is None else jnp.pad(pieces, ((0, 0), (0, 1)), mode="edge")
    try:
        if pieces is not None and max_segments is not None and _can_pack():
            attended = _packed(q, k, v, pieces, max_segments, scale, window)
        else:
            options: Any = {} if window is None else {"local_window_size": (window - 1, 0)}
            attended = jax.nn.dot_product_attention(
                q, k, v, mask=_mask(pieces), scale=scale, is_causal=True, implementation="cudnn", **options
            )
    except RuntimeError as error:
        if "cudnn" not in str(error).lower():
            raise
        raise PlacementError(
            f"cuDNN attention cannot run here on {q.dtype} queries of shape {q.shape}: {error}",
            hint="it needs a GPU with cuDNN; or leave the implementation out.",
        ) from error
    return attended[:, :length] if length % 2 else attended


@functools.cache  # warn once per length
def _warn_of_padding(length: int) -> None:
    warnings.warn(
        f"attention pads {length} positions to {length + 1}: the gradient of cuDNN attention needs an even number.\n"
        "hint: use an even number of tokens per row, to avoid copies of queries, keys and values.",
        MeshwrightWarning,
        stacklevel=4,
    )


def _packed(
    q: Any, k: Any, v: Any, pieces: Any, max_segments: int, scale: float | None, window: int | None
) -> jax.Array:
    """Returns cuDNN attention over pieces given by their offsets and lengths."""
    from jax._src.cudnn.fused_attention_stablehlo import MaskType, dot_product_attention

    if jax.__version_info__ < (0, 11) and q.shape[2] != k.shape[2]:
        # Before 0.11, JAX computes key offsets with the number of query heads.
        k, v = (jnp.repeat(x, q.shape[2] // k.shape[2], axis=2) for x in (k, v))
    # JAX treats a single piece as unpacked, so reserve at least two.
    numbers = jnp.arange(max(max_segments, 2), dtype=jnp.int32)
    lengths = (pieces[:, :, None] == numbers).sum(axis=1, dtype=jnp.int32)
    ends = jnp.cumsum(lengths, axis=1)
    unused = lengths == 0
    offsets = jnp.pad(jnp.where(unused, -1, ends - lengths), ((0, 0), (0, 1)), constant_values=-1)
    lengths = jnp.where(unused, -1, lengths)
    attended: jax.Array = dot_product_attention(
        q,
        k,
        v,
        q_seqlen=lengths,
        kv_seqlen=lengths,
        q_offsets=offsets,
        kv_offsets=offsets,
        scale=q.shape[-1] ** -0.5 if scale is None else scale,
        mask_type=MaskType.PADDING_CAUSAL,
        qkv_layout="BTNH",
        sliding_window_length=window,
    )
    return attended


def _capped(q: Any, k: Any, v: Any, mask: Any, soft_cap: float, scale: float | None) -> jax.Array:
    b, s, heads, dim = q.shape
    q = q.reshape(b, s, k.shape[2], heads // k.shape[2], dim)
    logits = jnp.einsum("BTGNK,BSGK->BGNTS", q, k, preferred_element_type=jnp.float32)
    logits = logits / np.sqrt(dim) if scale is None else logits * scale
    logits = soft_cap * jnp.tanh(logits / soft_cap)
    allowed = jnp.tril(jnp.ones((s, s), bool))
    if mask is not None:
        allowed = allowed & mask[:, :, None]
    weights = jax.nn.softmax(jnp.where(allowed, logits, jnp.finfo(jnp.float32).min), axis=-1).astype(v.dtype)
    attended: jax.Array = jnp.einsum("BGNTS,BSGK->BTGNK", weights, v).reshape(b, s, heads, dim)
    return attended


def _suits_cudnn(q: Any) -> bool:
    from jax._src.cudnn.fused_attention_stablehlo import check_cudnn_version

    # These limits of cuDNN hold on every GPU generation.
    if q.dtype not in (jnp.bfloat16, jnp.float16) or q.shape[-1] % 8 or q.shape[-1] > 128 or not on_gpu():
        return False
    try:
        check_cudnn_version()
    except RuntimeError:  # compiling for GPUs on a machine without them
        return False
    return True


def _can_pack() -> bool:
    from jax._src.cudnn.fused_attention_stablehlo import check_compute_capability

    return bool(check_compute_capability("9.0"))


def _check(q: Any, k: Any, v: Any, segment_ids: Any, window: int | None, max_segments: int | None) -> None:
    if q.ndim != 4 or k.ndim != 4 or k.shape != v.shape or (*q.shape[:2], q.shape[3]) != (*k.shape[:2], k.shape[3]):
        raise PlacementError(
            f"attention got q of shape {q.shape}, k of {k.shape} and v of {v.shape}.",
            hint="pass q as [B, S, H, K], and k and v as [B, S, G, K].",
        )
    if q.shape[2] % k.shape[2]:
        raise PlacementError(
            f"attention got {q.shape[2]} query heads for {k.shape[2]} key heads.",
            hint="use a number of query heads that is a multiple of the number of key heads.",
        )
    check_segment_ids(segment_ids, q, who="attention")
    if window is not None and window < 1:
        raise PlacementError(f"window must be at least 1; got {window}.", hint="pass None for no window.")
    if max_segments is not None and max_segments < 1:
        raise PlacementError(f"max_segments must be at least 1; got {max_segments}.", hint="pass None for no limit.")


def check_segment_ids(segment_ids: Any, q: Any, *, who: str) -> None:
    """Raises unless `segment_ids` is None or has one integer per position of `q`."""
    if segment_ids is None or (segment_ids.shape == q.shape[:2] and jnp.issubdtype(segment_ids.dtype, jnp.integer)):
        return
    raise PlacementError(
        f"{who} got segment_ids of shape {segment_ids.shape} and dtype {segment_ids.dtype} for q of shape {q.shape}.",
        hint=f"pass integers of shape {q.shape[:2]}.",
    )
