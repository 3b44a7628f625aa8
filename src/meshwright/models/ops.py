"""Decoder operations between matmuls, each one pass over memory in the forward and the backward pass.

Between matmuls a GPU is limited by memory bandwidth. The custom gradients keep only inputs that a matmul keeps anyway
and recompute the rest.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from meshwright.errors import PlacementError
from meshwright.mesh.axes import pcast_alike
from meshwright.models.rope import scaled_rates
from meshwright.parallel.kernels.copy_kernels import stack
from meshwright.types import PyTree

# --- Rotary positions ---


def rotary_tables(
    positions: jax.Array, head_dim: int, theta: float = 10000.0, scaling: str | None = None
) -> tuple[jax.Array, jax.Array]:
    """Returns the cosines and sines for `rotate`; all layers share them.

    Args:
        positions: `[S]`, or `[B, S]` if rows differ, as with packed documents.
        scaling: scaling of the positions, e.g. "linear:factor=4"; see `meshwright.models.rope`.

    Returns:
        Two float32 arrays `[1 or B, S, 1, head_dim / 2]`.

    Example:
        >>> cos, sin = rotary_tables(jnp.arange(6), head_dim=8)
        >>> cos.shape, float(sin[0, 0].max())
        ((1, 6, 1, 4), 0.0)
    """
    positions = jnp.asarray(positions)
    if positions.ndim not in (1, 2) or head_dim < 2 or head_dim % 2:
        raise PlacementError(
            f"rotary_tables got positions of shape {positions.shape} and head_dim={head_dim}.",
            hint="pass positions as [S] or [B, S], and an even head_dim.",
        )
    factor = 1.0
    if scaling is None:
        rates = 1.0 / theta ** (jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    else:
        exact, factor = scaled_rates(scaling, head_dim, theta, positions.shape[-1])
        rates = jnp.asarray(exact, jnp.float32)
    angles = positions.astype(jnp.float32).reshape(-1, positions.shape[-1], 1, 1) * rates
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return (cos, sin) if factor == 1.0 else (factor * cos, factor * sin)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates each pair (i, i + K / 2) of a head's features by the angle of its position, in float32.

    Args:
        x: queries or keys, `[B, S, H, K]`.
        cos, sin: `[1 or B, S, 1, K / 2]`, from `rotary_tables`; they get no gradient. Smaller tables rotate only the
            first features of each head.

    Example:
        >>> x = jnp.ones((1, 3, 2, 4))
        >>> turned = rotate(x, *rotary_tables(jnp.arange(3), head_dim=4))
        >>> bool(jnp.allclose(jnp.linalg.norm(turned, axis=-1), 2.0))
        True
    """
    if x.ndim == 4 and 0 < 2 * cos.shape[-1] < x.shape[-1]:
        first, rest = jnp.split(x, [2 * cos.shape[-1]], axis=-1)
        return jnp.concatenate([rotate(first, cos, sin), rest], axis=-1)
    wanted = (x.shape[1], 1, x.shape[-1] // 2) if x.ndim == 4 else None
    fits = all(table.shape[1:] == wanted and table.shape[0] in (1, x.shape[0]) for table in (cos, sin))
    if not fits or x.shape[-1] % 2:
        raise PlacementError(
            f"rotate got x of shape {x.shape}, cos of {cos.shape} and sin of {sin.shape}.",
            hint="pass x as [B, S, H, K], and cos and sin from rotary_tables, [1 or B, S, 1, K / 2].",
        )
    turned: jax.Array = _rotate(*pcast_alike(x, cos, sin))
    return turned


@jax.custom_vjp
def _rotate(x: Any, cos: Any, sin: Any) -> Any:
    halves = x.reshape(*x.shape[:-1], 2, x.shape[-1] // 2).astype(jnp.float32)
    signs = jnp.array([[-1.0], [1.0]])
    # lax.rev fuses with its neighbors. Splitting and concatenating halves takes 302 us per layer in the backward pass
    # of q, k and v on an H200; moving all bytes takes 190 us.
    turned = halves * cos[..., None, :] + lax.rev(halves, (halves.ndim - 2,)) * (signs * sin[..., None, :])
    return turned.astype(x.dtype).reshape(x.shape)


_rotate.defvjp(
    lambda x, cos, sin: (_rotate(x, cos, sin), (cos, sin)),
    lambda tables, d_turned: (_rotate(d_turned, tables[0], -tables[1]), None, None),  # rotates back
)


# --- Gated feed-forward ---


def swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    """Returns `silu(gate) * up`, computed in float32; keeps only its inputs for the backward pass.

    Example:
        >>> swiglu(jnp.array([0.0, 100.0]), jnp.array([3.0, 3.0])).tolist()
        [0.0, 300.0]
    """
    _check_gate(gate, up, who="swiglu")
    product: jax.Array = _swiglu(*pcast_alike(gate, up))
    return product


def geglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    """Returns `gelu(gate) * up` with the tanh form of GELU, in float32; keeps only its inputs for the backward pass.

    Example:
        >>> geglu(jnp.array([0.0, 100.0]), jnp.array([3.0, 3.0])).tolist()
        [0.0, 300.0]
    """
    _check_gate(gate, up, who="geglu")
    product: jax.Array = _geglu(*pcast_alike(gate, up))
    return product


def _check_gate(gate: Any, up: Any, *, who: str) -> None:
    if gate.shape != up.shape or gate.dtype != up.dtype:
        raise PlacementError(
            f"{who} got a gate of {gate.shape} {gate.dtype} and an up of {up.shape} {up.dtype}.",
            hint="pass both with the same shape and dtype.",
        )


@jax.custom_vjp
def _swiglu(gate: Any, up: Any) -> Any:
    gate32 = gate.astype(jnp.float32)
    return (gate32 * jax.nn.sigmoid(gate32) * up.astype(jnp.float32)).astype(gate.dtype)


def _swiglu_bwd(kept: Any, d_out: Any) -> tuple[Any, Any]:
    gate, up, d_out = (t.astype(jnp.float32) for t in (*kept, d_out))
    sigmoid = jax.nn.sigmoid(gate)
    silu = gate * sigmoid
    d_gate = d_out * up * (sigmoid + silu * (1.0 - sigmoid))
    return d_gate.astype(kept[0].dtype), (d_out * silu).astype(kept[1].dtype)


_swiglu.defvjp(lambda gate, up: (_swiglu(gate, up), (gate, up)), _swiglu_bwd)


def _geglu_plain(gate: Any, up: Any) -> Any:
    product = jax.nn.gelu(gate.astype(jnp.float32), approximate=True) * up.astype(jnp.float32)
    return product.astype(gate.dtype)


_geglu = jax.custom_vjp(_geglu_plain)
_geglu.defvjp(
    lambda gate, up: (_geglu_plain(gate, up), (gate, up)),
    lambda kept, d_out: jax.vjp(_geglu_plain, *kept)[1](d_out),
)


# --- Stacked layers ---


def unstack(tree: PyTree, num_layers: int, *, kernels: bool | None = None) -> list[PyTree]:
    """Splits a tree whose leaves are stacked along dim 0 into layers; the gradient stacks the layers' gradients.

    The gradient of plain indexing would pad each layer to a full array and sum them all.

    Args:
        kernels: whether a Pallas kernel stacks the gradients (default: if possible and faster).

    Example:
        >>> [layer["w"].tolist() for layer in unstack({"w": jnp.arange(4.0).reshape(2, 2)}, 2)]
        [[0.0, 1.0], [2.0, 3.0]]
    """
    leaves, treedef = jax.tree.flatten(tree)
    for leaf in leaves:
        if leaf.ndim < 1 or leaf.shape[0] != num_layers:
            raise PlacementError(
                f"unstack of {num_layers} layers got a leaf of shape {leaf.shape}.",
                hint="stack the layers of every leaf along dim 0.",
            )
    columns = [_unstack(kernels, leaf) for leaf in leaves]
    return [jax.tree.unflatten(treedef, [column[i] for column in columns]) for i in range(num_layers)]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _unstack(kernels: bool | None, stacked: Any) -> Any:
    return [lax.index_in_dim(stacked, i, keepdims=False) for i in range(stacked.shape[0])]


_unstack.defvjp(
    lambda kernels, stacked: (_unstack(kernels, stacked), None),
    lambda kernels, _, d_layers: (stack(d_layers, kernels=kernels),),
)
