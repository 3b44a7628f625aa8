"""One token of a gated linear recurrence: updates the memory of each head and reads it, in one pass over memory.

XLA needs up to five kernels for it, two of them for arrays of a few kilobytes. This one updates the memory in place. A
block of the grid has some keys of a head: it scales their rows of the memory, adds the new products, and sums the rows
times the query. The sums of all blocks of a head are added by XLA, together with what follows.

Shapes: B rows, H heads, K features of keys, V of values, P blocks of keys.
"""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
from jax import lax

from meshwright.hardware.flops import Tally, register_cost
from meshwright.mesh.axes import pcast_alike
from meshwright.parallel.kernels.dispatch import backed_by, block_index, call_kernel, fill_row, fits_row, load_row
from meshwright.specs import ceil_div

_FEWEST_KEYS, _MOST_KEYS = 16, 64  # per block
_ENOUGH_BLOCKS = 264  # two for each multiprocessor of an H200
_MOST_VALUES = 4096  # More do not fit in a warpgroup's registers.
_AT_ONCE = 4096  # elements that a block loads before it uses them


def fits_token(num_keys: int, num_values: int) -> bool:
    """Returns whether `advance_memory` supports heads of this size."""
    return fits_row(num_keys) and fits_row(num_values) and num_values <= _MOST_VALUES


def advance_memory(
    memory_BHKV: Any, normaliser_BHK: Any, q_BHK: Any, k_BHK: Any, v_BHV: Any, keep_BH: Any, gain_BH: Any
) -> tuple[Any, Any, Any, Any]:
    """Returns the memory and the normaliser after a token, and what its query reads of them, `[B, H, V]` and `[B, H]`.

    The memory becomes `keep * memory + gain * k v^T`, and the normaliser `keep * normaliser + gain * k`, in float32.
    Check `fits_token` before.

    Example:
        >>> memory, normaliser = jnp.zeros((1, 1, 128, 128)), jnp.zeros((1, 1, 128))
        >>> q = k = v = jnp.ones((1, 1, 128))
        >>> found = advance_memory(memory, normaliser, q, k, v, jnp.ones((1, 1)), jnp.full((1, 1), 0.5))
        >>> [float(x.max()) for x in found]
        [0.5, 0.5, 64.0, 64.0]
    """
    step = backed_by(_plain, _in_a_kernel)
    found: tuple[Any, Any, Any, Any] = step(
        *pcast_alike(memory_BHKV, normaliser_BHK, q_BHK, k_BHK, v_BHV, keep_BH, gain_BH)
    )
    return found


def _plain(memory: Any, normaliser: Any, q: Any, k: Any, v: Any, keep: Any, gain: Any) -> tuple[Any, Any, Any, Any]:
    q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    k = gain[..., None] * k
    memory = keep[..., None, None] * memory + k[..., None] * v[..., None, :]
    normaliser = keep[..., None] * normaliser + k
    return memory, normaliser, jnp.sum(q[..., None] * memory, axis=-2), jnp.sum(q * normaliser, axis=-1)


def _in_a_kernel(
    memory: Any, normaliser: Any, q: Any, k: Any, v: Any, keep: Any, gain: Any
) -> tuple[Any, Any, Any, Any]:
    rows, heads, num_keys, num_values = memory.shape
    count, per_block = rows * heads, _keys_per_block(rows * heads, num_keys)
    parts = num_keys // per_block
    memory, normaliser, sums, sizes = call_kernel(
        functools.partial(_kernel, per_block=per_block),
        memory.reshape(count, num_keys, num_values),
        normaliser.reshape(count, num_keys),
        q.reshape(count, num_keys),
        k.reshape(count, num_keys),
        v.reshape(count, num_values),
        keep.reshape(count),
        gain.reshape(count),
        grid=(count, parts),
        outs=[
            ((count, num_keys, num_values), jnp.float32),
            ((count, num_keys), jnp.float32),
            ((count, parts, num_values), jnp.float32),
            ((count,), jnp.float32),
        ],
        num_in_place=2,
        name="advance_memory",
    )
    shape = (rows, heads)
    read = sums.sum(axis=1).reshape(*shape, num_values)
    return (
        memory.reshape(*shape, num_keys, num_values),
        normaliser.reshape(*shape, num_keys),
        read,
        sizes.reshape(shape),
    )


def _keys_per_block(count: int, num_keys: int) -> int:
    """Returns how many keys a block has: many, but so few that the blocks fill a GPU."""
    size = _MOST_KEYS
    while size > _FEWEST_KEYS and count * ceil_div(num_keys, size) < _ENOUGH_BLOCKS:
        size //= 2
    return size


def _cost(equation: Any) -> Tally:
    rows, num_keys, num_values = equation.invars[0].aval.shape
    return Tally(other=5 * rows * num_keys * (num_values + 1))


register_cost("advance_memory", _cost)


def _kernel(
    memory_ref: Any,
    normaliser_ref: Any,
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    keep_ref: Any,
    gain_ref: Any,
    new_memory_ref: Any,
    new_normaliser_ref: Any,
    sums_ref: Any,
    sizes_ref: Any,
    *,
    per_block: int,
) -> None:
    from jax.experimental import pallas as pl

    head, part = block_index(0), block_index(1)
    num_values = v_ref.shape[1]
    keep, gain = keep_ref[head], gain_ref[head]
    value = load_row(v_ref.at[head]).astype(jnp.float32)
    together = per_block
    while together * num_values > _AT_ONCE and together > 1:
        together //= 2

    def some_keys(index: Any, total: Any) -> Any:
        keys = [part * per_block + index * together + offset for offset in range(together)]
        # All loads come before the first store, because nothing is loaded across the barrier of a store.
        rows = [load_row(memory_ref.at[head, key]) for key in keys]
        gains = [gain * k_ref[head, key].astype(jnp.float32) for key in keys]
        queries = [q_ref[head, key].astype(jnp.float32) for key in keys]
        rows = [row * keep + value * added for row, added in zip(rows, gains, strict=True)]
        for key, row in zip(keys, rows, strict=True):
            new_memory_ref.at[head, key][...] = row
        return functools.reduce(jnp.add, (row * query for row, query in zip(rows, queries, strict=True)), total)

    sums_ref.at[head, part][...] = lax.fori_loop(
        0, per_block // together, some_keys, fill_row(num_values, 0, jnp.float32)
    )

    @pl.when(part == 0)
    def _() -> None:
        added = load_row(k_ref.at[head]).astype(jnp.float32) * gain
        normaliser = load_row(normaliser_ref.at[head]) * keep + added
        new_normaliser_ref.at[head][...] = normaliser
        sizes_ref[head] = jnp.sum(normaliser * load_row(q_ref.at[head]).astype(jnp.float32))
