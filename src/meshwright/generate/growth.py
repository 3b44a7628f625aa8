"""How a cache grows with its texts.

Every new token reads the whole cache, also the slots without a token. If that costs time beside reading the weights, a
cache starts small and doubles when it is full; each size is a program of its own.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from meshwright.generate.cache import KeyValues
from meshwright.generate.limits import cache_bytes
from meshwright.generate.loaded_weights import Weights
from meshwright.generate.passes import Cache
from meshwright.generate.spread import Spread
from meshwright.models.language import LanguageModel
from meshwright.train.precision import Precision

_LEAST = 256
# One more program takes seconds to compile, so small caches are not worth it.
_WORTHWHILE = 1 / 8


def rooms_of(
    model: LanguageModel, num_rows: int, length: int, precision: Precision, weights: Weights
) -> tuple[int, ...]:
    """Returns the sizes of a growing cache, in tokens per row; the last is `length`."""
    sizes = [_LEAST << power for power in range(32) if _LEAST << power < length]
    if not sizes:
        return (length,)
    saved = cache_bytes(model, num_rows, length, precision) - cache_bytes(model, num_rows, sizes[0], precision)
    read = sum(leaf.nbytes for leaf in jax.tree.leaves(weights.tree))
    return (*sizes, length) if saved > _WORTHWHILE * read else (length,)


def room_for(rooms: tuple[int, ...], num_tokens: int) -> int:
    """Returns the smallest size of a cache that holds a number of tokens per row.

    Example:
        >>> room_for((256, 512, 600), 300), room_for((256, 512, 600), 1000)
        (512, 600)
    """
    return next((room for room in rooms if room >= num_tokens), rooms[-1])


def grown(layers: list[tuple[Any, ...]], targets: Cache, *, spread: Spread) -> Cache:
    """Returns the caches of layers with the shapes of `targets`; tokens keep their slots.

    Empties the list layer by layer, so that only one of them is in memory twice.
    """
    found = list[tuple[Any, ...]]()
    for target in targets:
        caches = zip(layers.pop(0), target, strict=True)
        found.append(tuple(_fitted(cache, wanted, spread) for cache, wanted in caches))
    return tuple(found)


def _fitted(cache: Any, target: Any, spread: Spread) -> Any:
    if not isinstance(cache, KeyValues) or cache.keys.shape == target.keys.shape:
        return cache
    return _padded(cache, slots=target.keys.shape[2], spread=spread)


@functools.partial(jax.jit, static_argnames=("slots", "spread"))
def _padded(part: KeyValues, *, slots: int, spread: Spread) -> KeyValues:
    def pad(x: Any) -> Any:
        return spread.split_heads(jnp.pad(x, ((0, 0), (0, 0), (0, slots - x.shape[2]), (0, 0))), dim=1)

    return KeyValues(*map(pad, part))
