"""A kernel that casts a matrix to fp8, transposes it and takes its amax, in one pass.

Each operand of an fp8 matmul is used twice, once as it is and once transposed, because cuBLASLt multiplies fp8 operands
only along their last dims. For [32768, 2048] on an H200, XLA takes 0.181 ms to do all three, the kernel 0.102 ms
(benchmarks/results/fp8_h200.md).
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from meshwright.hardware.flops import register_cost
from meshwright.parallel.kernels.dispatch import block_index, call_kernel, is_interpreted, mosaic_gpu

_SIDE = 128  # of the square that a block casts
_HALF = 64  # rows that a warpgroup holds at once
_SWIZZLE = 128  # bytes of a row of shared memory


def can_cast(shape: tuple[int, ...]) -> bool:
    """Returns whether squares of the kernel divide a matrix of this shape."""
    return len(shape) == 2 and all(dim and dim % _SIDE == 0 for dim in shape)


@functools.partial(jax.jit, static_argnames="dtype")  # so that the kernel is lowered once for all layers
def cast_both_ways(x: Any, inverse: Any, dtype: Any) -> tuple[Any, Any, Any]:
    """Returns `x * inverse` in fp8, clipped to its range, its transpose, and amaxes of 128 columns of each row.

    Example:
        >>> value, turned, amaxes = cast_both_ways(jnp.ones((128, 256)), jnp.float32(2.0), jnp.float8_e4m3fn)
        >>> value.shape, turned.shape, float(turned[0, 0]), amaxes.shape, float(amaxes.max())
        ((128, 256), (256, 128), 2.0, (2, 128), 1.0)
    """
    rows, columns = x.shape
    value, turned, amaxes = call_kernel(
        functools.partial(_cast_kernel, dtype=dtype),
        x,
        inverse.reshape(1),
        grid=(rows // _SIDE, columns // _SIDE),
        outs=[((rows, columns), dtype), ((columns, rows), dtype), ((columns // _SIDE, rows), jnp.float32)],
        name="cast_both_ways",
        scratch=_squares(x.dtype, dtype),
    )
    return value, turned, amaxes


register_cost("cast_both_ways")


def _squares(wide: Any, narrow: Any) -> list[Any]:
    if is_interpreted():
        return []
    mosaic = mosaic_gpu()

    def square(dtype: Any) -> Any:
        width = _SWIZZLE // jnp.dtype(dtype).itemsize
        transforms = mosaic.TilingTransform((8, width)), mosaic.SwizzleTransform(_SWIZZLE)
        return mosaic.SMEM((_SIDE, _SIDE), dtype, transforms=transforms)

    return [square(wide), square(narrow), square(narrow), mosaic.SMEM((_SIDE,), jnp.float32), mosaic.Barrier()]


def _cast_kernel(x: Any, inverse: Any, value: Any, turned: Any, amaxes: Any, *memory: Any, dtype: Any) -> None:
    from jax.experimental import pallas as pl

    row, column = block_index(0), block_index(1)
    here, there = pl.ds(row * _SIDE, _SIDE), pl.ds(column * _SIDE, _SIDE)
    source, targets = x.at[here, there], (value.at[here, there], turned.at[there, here], amaxes.at[column, here])
    if memory:
        _cast_square(source, inverse[0], targets, *memory, dtype=dtype)
        return
    wide = source[...].astype(jnp.float32)
    top = float(jnp.finfo(dtype).max)
    narrow = jnp.clip(wide * inverse[0], -top, top).astype(dtype)
    for target, found in zip(targets, (narrow, narrow.T, jnp.max(jnp.abs(wide), axis=1)), strict=True):
        target[...] = found


def _cast_square(source: Any, inverse: Any, targets: Any, *memory: Any, dtype: Any) -> None:
    """Casts a square twice, read from shared memory by rows and by columns; the hardware's cast clips."""
    from jax.experimental import pallas as pl

    mosaic = mosaic_gpu()

    wide, narrow, turned, largest, barrier = memory
    mosaic.copy_gmem_to_smem(source, wide, barrier)
    mosaic.barrier_wait(barrier)
    for half in range(_SIDE // _HALF):
        some = pl.ds(half * _HALF, _HALF)
        by_rows = mosaic.load(wide.at[some], layout=mosaic.Layout.WGMMA).astype(jnp.float32)
        largest.at[some][...] = jnp.max(jnp.abs(by_rows), axis=1)
        narrow.at[some][...] = (by_rows * inverse).astype(dtype)
        by_columns = mosaic.load(wide.at[:, some].transpose((1, 0)), layout=mosaic.Layout.WGMMA, optimized=False)
        turned.at[some][...] = (by_columns.astype(jnp.float32) * inverse).astype(dtype)
    mosaic.commit_smem()
    for found, target in zip((narrow, turned, largest), targets, strict=True):
        mosaic.copy_smem_to_gmem(found, target, commit_group=False)
    mosaic.commit_smem_to_gmem_group()
    mosaic.wait_smem_to_gmem(0, wait_read_only=True)
