"""Random keys that belong to rows of a batch.

A row key draws the same values for row 7 of a batch whether the batch is whole, in minibatches, in microbatches or
split over devices. Each part gets a key that holds the index of its first row, and every value drawn with shape
`[rows, ...]` is a hash of the key, its row index and its position in the row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import random as prng

from meshwright.errors import PlacementError
from meshwright.mesh.axes import pcast_alike
from meshwright.types import PRNGKeyArray


def row_key(rng: PRNGKeyArray, first_row: Any = 0, *, block: int = 0, stride: int = 0) -> PRNGKeyArray:
    """Returns a random key for a part of a batch, independent of how the batch is cut.

    Use it like any key: `split` and `fold_in` keep the row. Values drawn with rows as the leading dim, including
    `flax.linen.Dropout` masks, do not depend on how the batch is cut. Draw values that all rows share, such as weight
    noise, from an ordinary key: with row keys, two parts would see shifted copies of one sequence.

    Args:
        rng: a key. If it is a row key, `first_row` is added to its row.
        first_row: index of the part's first row in the whole batch.
        block: if above 0, the part is made of blocks of this many rows instead of contiguous rows.
        stride: rows from the start of one block to the start of the next.

    Example:
        >>> key = jax.random.key(0)
        >>> whole = jax.random.normal(row_key(key), (8, 3))
        >>> second_half = jax.random.normal(row_key(key, 4), (4, 3))
        >>> bool((whole[4:] == second_half).all())
        True
    """
    first = jnp.asarray(first_row).astype(jnp.uint32)
    if jnp.issubdtype(rng.dtype, jax.dtypes.prng_key) and jax.random.key_impl(rng) == _ROW_KEYS:
        if block:
            raise PlacementError(
                "row_key got block= with a key that is already a row key.", hint="pass the original key."
            )
        data = jax.random.key_data(rng)
        words = jnp.concatenate([data[:3], (data[3] + first)[None], data[4:]])
    else:
        words = jax.random.bits(rng, (2,), jnp.uint32)  # Works for any key implementation.
        words = jnp.concatenate([words, jnp.stack([first, *(jnp.full_like(first, n) for n in (0, block, stride))])])
    key: PRNGKeyArray = jax.random.wrap_key_data(words, impl=_ROW_KEYS)
    return key


def row_keys(rng: PRNGKeyArray, num_rows: int) -> PRNGKeyArray:
    """Returns one ordinary key per row of a batch, for models that are vmapped over rows.

    If `rng` is the key that a loss gets, the keys do not depend on how the batch is cut, unlike those of
    `jax.random.split`, which repeat in each minibatch and, in the local view, on each device.

    Example:
        >>> key = jax.random.key(0)
        >>> whole = jax.random.key_data(row_keys(row_key(key), 8))
        >>> second_half = jax.random.key_data(row_keys(row_key(key, 4), 4))
        >>> bool((whole[4:] == second_half).all())
        True
    """
    data = jax.random.key_data(row_key(rng))
    rows = global_rows(data, lax.iota(jnp.uint32, num_rows))
    operands = [jnp.broadcast_to(data[0], (num_rows,)), jnp.broadcast_to(data[1], (num_rows,)), rows]
    words = prng.threefry2x32_p.bind(*pcast_alike(*operands, jnp.zeros_like(rows)))
    keys: PRNGKeyArray = jax.random.wrap_key_data(jnp.stack(words, axis=-1), impl="threefry2x32")
    return keys


def global_rows(data: Any, rows: Any) -> Any:
    """Returns the indices in the whole batch of a part's rows, given the data of its row key."""
    first, offset, block, stride = data[2], data[3], data[4], data[5]
    rows = rows + offset
    size = jnp.maximum(block, 1)
    return first + jnp.where(block > 0, rows // size * stride + rows % size, rows)


def bits_by_place(words: Any, places: Sequence[Any], sizes: Sequence[int], bit_width: int = 32) -> Any:
    """Hashes the position of each element in a larger array into random bits.

    Args:
        words: two uint32 key words.
        places: for each dim of the larger array, the elements' indices (uint32) along it, all of one shape.
        sizes: size of the larger array along each dim after the first.
        bit_width: bits per element.
    """
    if not places:
        places = (jnp.zeros((), jnp.uint32),)
    within = jnp.zeros_like(places[0])
    for place, size in zip(places[1:], sizes, strict=True):
        within = within * jnp.uint32(size) + place
    shape = np.shape(places[0])
    operands = [jnp.broadcast_to(words[0], shape), jnp.broadcast_to(words[1], shape), places[0], within]
    # The hash is one JAX primitive, whose operands must vary along the same axes.
    high, low = prng.threefry2x32_p.bind(*pcast_alike(*operands))
    if bit_width == 64:
        return (high.astype(jnp.uint64) << jnp.uint64(32)) | low.astype(jnp.uint64)
    return (high ^ low).astype(jnp.dtype(f"uint{bit_width}"))


def _threefry(data: Any) -> PRNGKeyArray:
    key: PRNGKeyArray = jax.random.wrap_key_data(data[:2], impl="threefry2x32")
    return key


def _with_row(words: Any, data: Any) -> Any:
    return jnp.concatenate([words, jnp.broadcast_to(data[2:], (*words.shape[:-1], 4))], axis=-1)


def _seed(seed: Any) -> Any:
    words = jax.random.key_data(jax.random.key(seed, impl="threefry2x32"))
    return jnp.concatenate([words, jnp.zeros((4,), words.dtype)])


def _split(data: Any, shape: tuple[int, ...]) -> Any:
    return _with_row(jax.random.key_data(jax.random.split(_threefry(data), shape)), data)


def _fold_in(data: Any, number: Any) -> Any:
    return _with_row(jax.random.key_data(jax.random.fold_in(_threefry(data), number)), data)


def _random_bits(data: Any, bit_width: int, shape: tuple[int, ...]) -> Any:
    places = [lax.broadcasted_iota(jnp.uint32, shape, dim) for dim in range(len(shape))] or [jnp.zeros((), jnp.uint32)]
    return bits_by_place(data[:2], [global_rows(data, places[0]), *places[1:]], shape[1:], bit_width)


# A threefry key with four more words for the rows; see `global_rows`.
_ROW_KEYS = prng.define_prng_impl(
    key_shape=(6,),
    seed=_seed,
    split=_split,
    random_bits=_random_bits,
    fold_in=_fold_in,
    name="meshwright_rows",
    tag="rows",
)
