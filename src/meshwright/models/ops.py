"""The parts of a decoder between its matmuls, written so that each is one pass over memory, forwards and backwards.

Between matmuls a GPU only moves bytes, so what counts is how often each activation is read and written. A gradient of
its own says what is kept for the backward pass (the inputs, which some matmul keeps anyway) and what is computed again.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from meshwright.errors import PlacementError
from meshwright.mesh.axes import pcast_alike
from meshwright.parallel.kernels.copy_kernels import stack
from meshwright.types import PyTree

# --- Rotary positions ---


def rotary_tables(positions: jax.Array, head_dim: int, theta: float = 10000.0) -> tuple[jax.Array, jax.Array]:
    """Returns the cosines and sines by which `rotate` turns queries and keys; one pair serves all layers.

    Args:
        positions: `[S]`, or `[B, S]` where rows differ, as with packed documents.

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
            hint="positions must be [S] or [B, S], and the head dim even.",
        )
    rates = 1.0 / theta ** (jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    angles = positions.astype(jnp.float32).reshape(-1, positions.shape[-1], 1, 1) * rates
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Turns each pair (i, i + K / 2) of a head's features by its position's angle; computes in float32.

    Args:
        x: `[B, S, H, K]`, queries or keys.
        cos, sin: `[1 or B, S, 1, K / 2]`, from `rotary_tables`; they get no gradient.

    Example:
        >>> x = jnp.ones((1, 3, 2, 4))
        >>> turned = rotate(x, *rotary_tables(jnp.arange(3), head_dim=4))
        >>> bool(jnp.allclose(jnp.linalg.norm(turned, axis=-1), 2.0))
        True
    """
    wanted = (x.shape[1], 1, x.shape[-1] // 2) if x.ndim == 4 else None
    fits = all(table.shape[1:] == wanted and table.shape[0] in (1, x.shape[0]) for table in (cos, sin))
    if not fits or x.shape[-1] % 2:
        raise PlacementError(
            f"rotate got x of shape {x.shape}, cos of {cos.shape} and sin of {sin.shape}.",
            hint="x must be [B, S, H, K], cos and sin [1 or B, S, 1, K / 2]: see rotary_tables.",
        )
    turned: jax.Array = _rotate(*pcast_alike(x, cos, sin))
    return turned


@jax.custom_vjp
def _rotate(x: Any, cos: Any, sin: Any) -> Any:
    halves = x.reshape(*x.shape[:-1], 2, x.shape[-1] // 2).astype(jnp.float32)
    signs = jnp.array([[-1.0], [1.0]])
    # Reversing the pair of halves is mere indexing, which fuses with what is before and after. Halves that are split
    # and joined again cost the backward pass of q, k and v 302 us per layer on an H200, where all bytes take 190.
    turned = halves * cos[..., None, :] + lax.rev(halves, (halves.ndim - 2,)) * (signs * sin[..., None, :])
    return turned.astype(x.dtype).reshape(x.shape)


def _rotate_bwd(tables: Any, d_turned: Any) -> tuple[Any, None, None]:
    cos, sin = tables
    return _rotate(d_turned, cos, -sin), None, None  # the gradient of a rotation is the rotation back


_rotate.defvjp(lambda x, cos, sin: (_rotate(x, cos, sin), (cos, sin)), _rotate_bwd)


# --- Gated feed-forward ---


def swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    """Returns `silu(gate) * up`, computed in float32; keeps nothing but its inputs for the backward pass.

    Example:
        >>> swiglu(jnp.array([0.0, 100.0]), jnp.array([3.0, 3.0])).tolist()
        [0.0, 300.0]
    """
    if gate.shape != up.shape or gate.dtype != up.dtype:
        raise PlacementError(
            f"swiglu got a gate of {gate.shape} {gate.dtype} and an up of {up.shape} {up.dtype}.",
            hint="both must have one shape and dtype.",
        )
    product: jax.Array = _swiglu(*pcast_alike(gate, up))
    return product


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


# --- Stacked layers ---


def unstack(tree: PyTree, num_layers: int, *, kernels: bool | None = None) -> list[PyTree]:
    """Returns the layers of a tree whose leaves are stacked along dim 0; the gradient is one stack of all layers'.

    The gradient of plain indexing is one padded array per layer and the sum of them all.

    Args:
        kernels: whether a kernel of ours makes that stack; by default where that is possible and faster.

    Example:
        >>> [layer["w"].tolist() for layer in unstack({"w": jnp.arange(4.0).reshape(2, 2)}, 2)]
        [[0.0, 1.0], [2.0, 3.0]]
    """
    leaves, treedef = jax.tree.flatten(tree)
    for leaf in leaves:
        if leaf.ndim < 1 or leaf.shape[0] != num_layers:
            raise PlacementError(
                f"unstack of {num_layers} layers got a leaf of shape {leaf.shape}.",
                hint="every leaf must have its layers along dim 0.",
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
