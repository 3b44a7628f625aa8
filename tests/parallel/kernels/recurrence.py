"""Plain versions of the recurrence kernels, for comparison and as stand-ins. Imported by tests."""

import jax
import jax.numpy as jnp


def plain_sums(a, c, weights, keep, *, reverse=False):
    """`running_sums` in float32 operations."""
    (num_rows, length, num_heads, _), num_chunks = a.shape, keep.shape[-1]
    size = length // num_chunks

    def by_chunk(x):
        return x.astype(jnp.float32).reshape(num_rows, num_chunks, size, num_heads, -1)

    weights = weights.reshape(num_rows, num_heads, num_chunks, size)
    added = jnp.einsum("bnlhk,bhnl,bnlhv->nbhkv", by_chunk(a), weights, by_chunk(c))

    def step(total, x):
        kept, more = x
        return total * kept[..., None, None] + more, total

    _, sums = jax.lax.scan(step, jnp.zeros_like(added[0]), (jnp.moveaxis(keep, 2, 0), added), reverse=reverse)
    return jnp.moveaxis(sums, 0, 2).astype(a.dtype)


def plain_pairs(pairs, x, y, z, memory, vectors, *, own=None, chunk_vectors=None):
    """`gated_pairs` in float32 operations."""
    (num_rows, length, num_heads, _), num_chunks = x.shape, memory.shape[2]
    size = length // num_chunks

    def by_chunk(t):
        return t.astype(jnp.float32).reshape(num_rows, num_chunks, size, num_heads, -1).transpose(0, 3, 1, 2, 4)

    vectors = {name: v.reshape(num_rows, num_heads, num_chunks, size) for name, v in vectors.items()}
    scores = jnp.einsum("bhntx,bhnsx->bhnts", by_chunk(x), by_chunk(y))
    if pairs.bias == "row":
        scores = scores + vectors["row_bias"][..., None]
    if pairs.bias == "column":
        scores = scores + vectors["column_bias"][..., None, :]
    t, s, bound = jnp.arange(size)[:, None], jnp.arange(size), vectors["bound"][..., None]
    counts = (s <= t) & (s >= bound) if pairs.causal else (s >= t) & (s <= bound)
    log = jnp.where(counts, vectors["row"][..., None] + vectors["column"][..., None, :], -jnp.inf)
    weighted = scores * jnp.exp2(log)
    read = "bhntx,bhnzx->bhntz" if pairs.transposed else "bhntx,bhnxz->bhntz"
    out = vectors["inter"][..., None] * jnp.einsum(read, by_chunk(x), memory.astype(jnp.float32))
    out = out + jnp.einsum("bhnts,bhnsz->bhntz", weighted, by_chunk(z))
    numbers = None
    if pairs.normalize:
        numbers = weighted.sum(axis=-1) + vectors["own_size"]
        out = out / jnp.maximum(jnp.abs(numbers), vectors["floor"])[..., None]
    if pairs.own:
        out = out + vectors["vector_factor"][..., None] * chunk_vectors[:, :, :, None]
        numbers = (out * by_chunk(own)).sum(axis=-1)
    out = out.transpose(0, 2, 3, 1, 4).reshape(*x.shape[:3], -1).astype(x.dtype)
    return out, None if numbers is None else numbers.reshape(num_rows, num_heads, length)
