"""Blockwise 8-bit and 4-bit storage of frozen weights.

A block is a run of `block` rows of one column of `[..., inputs, outputs]`, and has one float32 scale: its largest
magnitude. So the scales are an array `[..., inputs / block, outputs]`, and a mesh that splits the weight splits its
scales alike: each device can restore its slice alone.

    int8   one byte per weight, `round(127 * w / scale)`
    nf4    two weights per byte, the index of the nearest of 16 levels: the first half of a block in the low bits

The levels of nf4 are quantiles of a normal distribution, scaled to [-1, 1], with an exact zero (Dettmers et al., QLoRA,
2023).
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import jax.numpy as jnp
import numpy as np

from meshwright.errors import MeshwrightError, did_you_mean

Blocks = Literal["int8", "nf4"]

NF4_LEVELS = np.array(
    [
        -1.0, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343, -0.091050036, 0.0,
        0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0,
    ],
    np.float32,
)  # fmt: skip


def quantize_blocks(w: Any, kind: Blocks, *, block: int = 64) -> tuple[Any, Any]:
    """Returns a weight `[..., inputs, outputs]` in 8 or 4 bits, and the scales of its blocks.

    Args:
        kind: "int8" or "nf4".
        block: number of inputs that share a scale; it must divide their number, and be even for nf4.

    Example:
        >>> w = jnp.array([[0.5], [-1.0], [0.25], [2.0]])
        >>> stored, scales = quantize_blocks(w, "int8", block=2)
        >>> stored.ravel().tolist(), scales.ravel().tolist()
        ([64, -127, 16, 127], [1.0, 2.0])
        >>> quantize_blocks(w, "nf4", block=2)[0].shape
        (2, 1)
    """
    check_blocks(w.shape, kind, block=block)
    *lead, inputs, outputs = w.shape
    parts = w.astype(jnp.float32).reshape(*lead, inputs // block, block, outputs)
    scales = jnp.max(jnp.abs(parts), axis=-2)
    unit = parts / jnp.where(scales == 0, 1.0, scales)[..., None, :]
    if kind == "int8":
        return jnp.round(127 * unit).astype(jnp.int8).reshape(w.shape), scales
    # The nearest level is the number of midpoints below the value; a sum over them needs no array of 16 times the size.
    middles = (NF4_LEVELS[1:] + NF4_LEVELS[:-1]) / 2
    index = sum((unit > middle).astype(jnp.uint8) for middle in middles)
    low, high = jnp.split(index, 2, axis=-2)
    return (low | high << 4).reshape(*lead, inputs // 2, outputs), scales


def dequantize_blocks(stored: Any, scales: Any, dtype: Any = jnp.float32) -> Any:
    """Returns the weight that `quantize_blocks` stored, up to rounding; also works on one device's slices.

    Example:
        >>> w = jnp.array([[0.5], [-1.0], [0.25], [2.0]])
        >>> dequantize_blocks(*quantize_blocks(w, "int8", block=2)).round(3).ravel().tolist()
        [0.5040000081062317, -1.0, 0.25200000405311584, 2.0]
    """
    *lead, rows, outputs = stored.shape
    num_blocks = scales.shape[-2]
    parts = stored.reshape(*lead, num_blocks, rows // num_blocks, outputs)
    if stored.dtype == jnp.uint8:
        index = jnp.concatenate([parts & 15, parts >> 4], axis=-2)
        unit = jnp.asarray(NF4_LEVELS)[index]
    else:
        unit = parts.astype(jnp.float32) * jnp.float32(1 / 127)
    whole = (unit * scales.astype(jnp.float32)[..., None, :]).astype(dtype)
    return whole.reshape(*lead, -1, outputs)


def check_blocks(shape: tuple[int, ...], kind: str, *, block: int, name: str = "weight") -> None:
    """Raises if a weight of this shape cannot be stored in blocks."""
    if kind not in get_args(Blocks):
        hint = did_you_mean(kind, get_args(Blocks)) or f"use one of: {', '.join(get_args(Blocks))}."
        raise MeshwrightError(f"unknown block storage {kind!r}.", hint=hint)
    step = 2 if kind == "nf4" else 1
    if block < 1 or block % step:
        wanted = "an even" if step == 2 else "a"
        raise MeshwrightError(f"{kind} needs {wanted} positive block size; got {block!r}.", hint="use 64, the default.")
    if len(shape) < 2 or shape[-2] % block:
        fitting = [size for size in (128, 64, 32, 16, 8, 4, 2) if len(shape) > 1 and shape[-2] % size == 0]
        hint = f"use block={fitting[0]}." if fitting else "leave this parameter out of the targets."
        raise MeshwrightError(f"`{name}` of shape {shape} cannot be stored in blocks of {block} inputs.", hint=hint)
