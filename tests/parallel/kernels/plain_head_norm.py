"""A plain version of the kernels of a head norm, as a stand-in on several devices. Imported by tests."""

import jax
import jax.numpy as jnp


def in_plain_jax(kernel, h, gate, *rest, name, outs, **_):
    """`call_kernel` of the head norm's kernels in plain JAX."""
    d_y, scale = rest[:2] if name.endswith("gradient") else (None, rest[0])
    keep = rest[2:] if name.endswith("gradient") else rest[1:]
    eps, features = kernel.keywords["eps"], kernel.keywords["features"]
    split = (*h.shape[:1], h.shape[1] // features, features)
    wide = h.reshape(split).astype(jnp.float32)
    opening = jax.nn.sigmoid(gate.astype(jnp.float32))
    if keep:
        counts = keep[0][:, None] != 0
        wide, opening = jnp.where(counts[..., None], wide, 0), jnp.where(counts, opening, 0)
    inverse = jax.lax.rsqrt((wide * wide).mean(-1, keepdims=True) + eps)
    unit = (wide * inverse).reshape(h.shape)
    if d_y is None:
        return [(unit * scale * opening).astype(gate.dtype)]
    d_normed = d_y.astype(jnp.float32) * opening
    d_unit = d_normed * scale
    along = (d_unit * unit).reshape(split).mean(-1, keepdims=True)
    d_h = ((d_unit.reshape(split) - unit.reshape(split) * along) * inverse).reshape(h.shape)
    dots = (along * inverse**2 * features * eps)[..., 0].T
    partial = jnp.zeros_like((d_normed * unit)[:1]).repeat(outs[2][0][0], axis=0)
    partial = partial.at[0].set((d_normed * unit).sum(axis=0))
    return [d_h.astype(h.dtype), (d_unit * unit * (1 - opening)).astype(gate.dtype), partial, dots]
