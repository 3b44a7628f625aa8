"""The cache of a layer: keys and values of attention, the state of an mLSTM.

A layer mixes tokens only through its `Context`. While a prompt is read, `PromptContext` keeps what later tokens need;
while tokens are generated, `TokenContext` reads and updates it. Token t of a row is in slot `t mod L` of the cache,
whatever the lengths of the other rows are. The cache of a layer with a sliding window has at most as many slots as the
window, so that a new token replaces the one that left the window; other caches have a slot for every token.

Shapes: B rows, S tokens, L slots of the cache, H query heads, G key and value heads, N = H / G, K features per head.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from meshwright.generate.spread import Spread
from meshwright.models.layer_context import Context
from meshwright.models.mlstm import mlstm_recurrent
from meshwright.models.mlstm_chunks import mlstm_chunkwise
from meshwright.parallel.kernels.head_norm_kernel import gated_head_norm


class KeyValues(NamedTuple):
    """Keys and values of the last tokens, `[B, G, L, K]`: heads first, so that attention needs no transposed copy."""

    keys: Any
    values: Any


class _CachingContext(Context):
    """A context that keeps the states of mLSTMs, so that `remember` sees the cell alone."""

    def remember_gated(
        self, q: Any, k: Any, v: Any, i: Any, f: Any, gate: Any, scale: Any, *, chunk_size: int | None
    ) -> Any:
        h = self.remember(q, k, v, i, f, chunk_size=chunk_size)
        return gated_head_norm(h, gate, scale, eps=self.norm_eps, kernels=False)


@dataclass(frozen=True, kw_only=True)
class PromptContext(_CachingContext):
    """The context of a layer that reads prompts `[B, S]` and keeps a cache with room for `length` tokens.

    Args:
        real: `[B, S]`, whether a token belongs to the prompt; padding follows the prompt.
        lengths: `[B]`, the number of tokens of each prompt.
        kept: receives the caches of the layer, in the order of its calls.
    """

    length: int
    spread: Spread
    real: Any
    lengths: Any
    kept: list[Any] = field(default_factory=list)

    def attend(self, q: Any, k: Any, v: Any, **options: Any) -> Any:
        q, k, v = (self.spread.split_heads(x, dim=2) for x in (q, k, v))
        slots = slots_of(self.length, options.get("window"), options.get("is_windowed"))
        placed = (jnp.moveaxis(self._placed(x, slots), 1, 2) for x in (k, v))
        self.kept.append(KeyValues(*(self.spread.split_heads(x, dim=1) for x in placed)))
        return super().attend(q, k, v, **options)

    def _placed(self, x_BSGK: Any, slots: int) -> Any:
        """Returns the tokens of a prompt in their slots, `[B, L, G, K]`."""
        num_tokens = x_BSGK.shape[1]
        if num_tokens <= slots:
            return jnp.pad(x_BSGK, ((0, 0), (0, slots - num_tokens), (0, 0), (0, 0)))
        # Each slot gets its last token of the prompt. Slots of a shorter prompt get any token: nothing reads them.
        places_BL = jnp.maximum(in_slots(self.lengths - 1, slots), 0)
        return jnp.take_along_axis(x_BSGK, places_BL[:, :, None, None], axis=1)

    def remember(self, q: Any, k: Any, v: Any, i: Any, f: Any, *, chunk_size: int | None) -> Any:
        # Padding has segment 0, which does not change the state.
        segment_ids = self.real.astype(jnp.int32)
        y, state = mlstm_chunkwise(
            q, k, v, i, f, chunk_size=chunk_size, segment_ids=segment_ids, return_state=True, kernels=False
        )
        self.kept.append(self.spread.split_state(state))
        return y


@dataclass(frozen=True, kw_only=True)
class TokenContext(_CachingContext):
    """The context of a layer that reads one new token per row.

    Args:
        places: `[B]`, the place of each row's token.
        caches: the caches of the layer, in the order of its calls.
        kept: receives the updated caches.
    """

    places: Any
    spread: Spread
    caches: tuple[Any, ...]
    kept: list[Any] = field(default_factory=list)

    def attend(  # type: ignore[override]  # the options of a layer, without those of packed rows
        self,
        q: Any,
        k: Any,
        v: Any,
        *,
        soft_cap: float | None = None,
        scale: float | None = None,
        window: int | None = None,
        is_windowed: Any = None,
    ) -> Any:
        before: KeyValues = self.caches[len(self.kept)]
        cache = KeyValues(*(self._written(old, new) for old, new in zip(before, (k, v), strict=True)))
        self.kept.append(cache)
        rows, heads, length, dim = cache.keys.shape
        q_BGNK = self.spread.split_heads(q.reshape(rows, heads, -1, dim), dim=1)
        logits_BGNL = jnp.einsum("BGNK,BGLK->BGNL", q_BGNK, cache.keys, preferred_element_type=jnp.float32)
        logits_BGNL = logits_BGNL * (1 / np.sqrt(dim) if scale is None else scale)
        if soft_cap is not None:
            logits_BGNL = soft_cap * jnp.tanh(logits_BGNL / soft_cap)
        there_BL = in_slots(self.places, length)
        seen_BL = there_BL >= 0
        if window is not None and window < length:
            near_BL = self.places[:, None] - there_BL < window
            seen_BL &= near_BL if is_windowed is None else near_BL | ~is_windowed
        logits_BGNL = jnp.where(seen_BL[:, None, None], logits_BGNL, jnp.finfo(jnp.float32).min)
        weights_BGNL = jax.nn.softmax(logits_BGNL, axis=-1).astype(v.dtype)
        y_BGNK = jnp.einsum("BGNL,BGLK->BGNK", weights_BGNL, cache.values)
        return self.spread.split_heads(y_BGNK, dim=1).reshape(q.shape)

    def _written(self, cache: Any, new: Any) -> Any:
        """Returns the cache with the new token of each row in its slot."""
        new_BG1K = self.spread.split_heads(jnp.moveaxis(new, 1, 2), dim=1)
        slots = self.places % cache.shape[2]
        if len(new) == 1:  # a slice is faster than the scatter below
            return jax.lax.dynamic_update_slice_in_dim(cache, new_BG1K, slots[0], axis=2)
        write = jax.vmap(lambda row, x, slot: jax.lax.dynamic_update_slice_in_dim(row, x, slot, axis=1))
        return self.spread.split_heads(write(cache, new_BG1K, slots), dim=1)

    def remember(self, q: Any, k: Any, v: Any, i: Any, f: Any, *, chunk_size: int | None) -> Any:
        y, state = mlstm_recurrent(q, k, v, i, f, state=self.caches[len(self.kept)])
        self.kept.append(self.spread.split_state(state))
        return y


def slots_of(length: int, window: int | None, is_windowed: Any = None) -> int:
    """Returns the number of slots of a layer's cache; layers that share a program with global ones need all.

    Example:
        >>> slots_of(4096, None), slots_of(4096, 1024), slots_of(512, 1024)
        (4096, 1024, 512)
    """
    return length if window is None or is_windowed is not None else min(window, length)


def in_slots(places: Any, slots: int) -> Any:
    """Returns the place of the token in each slot, `[B, L]`, after the tokens at `places`; below 0 for an empty slot.

    Example:
        >>> in_slots(jnp.array([1, 5]), 4).tolist()
        [[0, 1, -2, -1], [4, 5, 2, 3]]
    """
    return places[:, None] - (places[:, None] - jnp.arange(slots)) % slots
