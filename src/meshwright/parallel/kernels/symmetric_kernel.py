"""A matmul for Hopper GPUs (Pallas, Mosaic GPU) whose result is symmetric: it computes half of it and mirrors the rest.

XLA's matmuls compute all of `x x^T`, or of a product of two polynomials of one symmetric matrix. This kernel computes
the tiles that touch the lower triangle, 53% of all at 2048 rows, and writes each of the others as a transpose.
Newton-Schulz iterations (`train/optimizer/newton_schulz.py`) consist of such products.

Each block is one warpgroup that computes one tile of 128 rows and 128 columns. Its registers and memory leave room for
a second block on the same multiprocessor, so one multiplies while the other writes its result. Wider tiles would fetch
less, but leave no such room.

Shapes: N matrices of a stack, m rows, k features.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from meshwright.hardware.flops import Tally, matmul_flops, register_cost
from meshwright.mesh.axes import pcast_varying, varying_axes
from meshwright.parallel.kernels.dispatch import is_interpreted, mosaic_gpu, swizzled, uses_hopper_kernels

_TILE = 128  # rows and columns of a tile
_DEPTH, _STAGES = 64, 3  # features per fetched piece, and pieces in flight; a fourth would not fit into half the memory
_SQUARE = 64  # results are written in squares of this side: a row of swizzled memory


def can_mirror(num_rows: int, num_features: int, dtype: Any) -> bool:
    """Returns whether `symmetric_product` supports factors `[N, num_rows, num_features]` here; see `uses_kernels`."""
    return (
        num_rows > 0
        and num_features > 0
        and num_rows % _TILE == 0
        and num_features % _DEPTH == 0
        and jnp.dtype(dtype) in (jnp.dtype(jnp.float16), jnp.dtype(jnp.bfloat16))
        and uses_hopper_kernels(None)
    )


@functools.partial(jax.jit, static_argnames=("scale", "diagonal"))
def symmetric_product(a: Any, b: Any, *, scale: float = 1.0, diagonal: float = 0.0) -> Any:
    """Returns `scale * a b^T + diagonal * I` for stacks `[N, m, k]` whose products are symmetric.

    Check `can_mirror` before. Accumulates in float32; the result has the dtype of `a`.
    """
    mosaic = mosaic_gpu()
    count, num_rows, features = a.shape
    kernel = mosaic.kernel(
        functools.partial(_kernel, num_rows=num_rows, scale=scale, diagonal=diagonal),
        out_type=jax.ShapeDtypeStruct((count * num_rows, num_rows), a.dtype),
        scratch_types=[mosaic.SMEM((2, _SQUARE, _SQUARE), a.dtype, transforms=swizzled())],
        grid=(count * _tiles_before(num_rows // _TILE, num_rows // _TILE),),
        grid_names=("tile",),
        kernel_name="symmetric_product",
        compiler_params=mosaic.CompilerParams(lowering_semantics=mosaic.LoweringSemantics.Warpgroup),
        interpret=mosaic.InterpretGPUParams() if is_interpreted() else None,
    )
    found = kernel(a.reshape(count * num_rows, features), b.reshape(count * num_rows, features))
    return pcast_varying(found.reshape(count, num_rows, num_rows), sorted(varying_axes(a)))


def _tiles_before(column: Any, side: int) -> Any:
    """Returns the number of tiles in the columns of tiles before this one; each starts one tile lower."""
    return column * side - column * (column - 1) // 2


def _cost(equation: Any) -> Tally:
    a, out = equation.invars[0].aval, equation.outvars[0].aval
    # Counted as a whole product, like a matmul of XLA's, so that figures compare.
    flops = Counter({a.dtype.name: matmul_flops(out.shape, a.shape[1:])})
    return Tally(by_dtype=flops, moved=(2 * a.size + out.size) * a.dtype.itemsize)


register_cost("symmetric_product", _cost)


def _kernel(a: Any, b: Any, out: Any, squares: Any, *, num_rows: int, scale: float, diagonal: float) -> None:
    """Computes one tile and its mirror image.

    Args:
        squares: two output buffers, for a square and for its transpose.
    """
    from jax.experimental import pallas as pl

    mosaic = mosaic_gpu()
    tile, side = lax.axis_index("tile"), num_rows // _TILE
    per_matrix = _tiles_before(side, side)
    matrix, place = lax.div(tile, per_matrix), lax.rem(tile, per_matrix)
    column = sum((place >= _tiles_before(number, side)).astype(jnp.int32) for number in range(1, side))
    row = place - _tiles_before(column, side) + column
    first_row, first_column = row * _TILE, column * _TILE
    start = matrix * num_rows

    def write(square: Any, target_row: Any, target_column: Any, wanted: Any = True) -> None:
        mosaic.commit_smem()
        target = out.at[pl.ds(start + target_row, _SQUARE), pl.ds(target_column, _SQUARE)]
        pl.when(wanted)(lambda: mosaic.copy_smem_to_gmem(square, target, commit_group=False))
        mosaic.commit_smem_to_gmem_group()

    @functools.partial(pl.run_scoped, total=mosaic.ACC((_TILE, _TILE), jnp.float32))
    def _(total: Any) -> None:
        def multiply(_: Any, left: Any, right: Any) -> None:
            mosaic.wgmma(total, left, right.transpose((1, 0)))
            mosaic.wgmma_wait(1)  # the previous product is done, so its pieces may be replaced

        piece = mosaic.BlockSpec(
            (_TILE, _DEPTH), lambda k: (0, k), transforms=swizzled(), memory_space=mosaic.SMEM, delay_release=1
        )
        mosaic.emit_pipeline(
            multiply, grid=(a.shape[1] // _DEPTH,), in_specs=[piece, piece], max_concurrent_steps=_STAGES
        )(a.at[pl.ds(start + first_row, _TILE), :], b.at[pl.ds(start + first_column, _TILE), :])
        mosaic.wgmma_wait(0)
        product = total[...] * scale
        if diagonal:
            shape, layout = (_TILE, _TILE), mosaic.Layout.WGMMA
            rows, columns = (mosaic.broadcasted_iota(jnp.int32, shape, dim, layout=layout) for dim in (0, 1))
            product = jnp.where(rows + (first_row - first_column) == columns, product + diagonal, product)
        rounded = product.astype(out.dtype)
        straight, turned = squares.at[0], squares.at[1]
        for i, j in itertools.product(range(0, _TILE, _SQUARE), repeat=2):
            part = rounded[i : i + _SQUARE, j : j + _SQUARE]
            mosaic.wait_smem_to_gmem(1, wait_read_only=True)  # the older of the two buffers is free again
            straight[...] = part
            write(straight, first_row + i, first_column + j)
            mosaic.wait_smem_to_gmem(1, wait_read_only=True)
            turned.transpose((1, 0))[...] = mosaic.layout_cast(part, mosaic.Layout.WGMMA_TRANSPOSED)
            write(turned, first_column + j, first_row + i, row != column)
        mosaic.wait_smem_to_gmem(0, wait_read_only=True)
