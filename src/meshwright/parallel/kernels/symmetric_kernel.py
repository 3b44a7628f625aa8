"""A matmul for Hopper GPUs (Pallas, Mosaic GPU) whose result is symmetric: it computes half of it and mirrors the rest.

XLA's matmuls compute all of `x x^T`, or of a product of two polynomials of one symmetric matrix. This kernel computes
the tiles that touch the lower triangle, which are 56% of all at 2048 rows, and writes each of their squares twice, the
second time transposed. Newton-Schulz iterations (`train/optimizer/newton_schulz.py`) consist of such products.

Each block computes one tile of 128 rows and 256 columns. One of its three warpgroups fetches pieces of both factors;
the other two multiply 64 rows each.

Shapes: N matrices of a stack, m rows, k features.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from meshwright.hardware.flops import Tally, matmul_flops, register_cost
from meshwright.mesh.axes import pcast_varying, varying_axes
from meshwright.parallel.kernels.dispatch import is_interpreted, mosaic_gpu, uses_hopper_kernels

_ROWS, _COLUMNS = 128, 256  # of a tile
_DEPTH, _STAGES = 64, 3  # features per fetched piece, and pieces in flight
_SQUARE = 64  # results are written in squares of this side: a warpgroup's rows, and a row of swizzled memory
_FETCHING_REGISTERS = 40


def can_mirror(num_rows: int, num_features: int, dtype: Any, *, kernels: bool | None = None) -> bool:
    """Returns whether `symmetric_product` supports factors `[N, num_rows, num_features]` here; see `uses_kernels`."""
    return (
        num_rows > 0
        and num_features > 0
        and num_rows % _COLUMNS == 0
        and num_features % _DEPTH == 0
        and jnp.dtype(dtype) in (jnp.dtype(jnp.float16), jnp.dtype(jnp.bfloat16))
        and uses_hopper_kernels(kernels)
    )


@functools.partial(jax.jit, static_argnames=("scale", "diagonal"))
def symmetric_product(a: Any, b: Any, *, scale: float = 1.0, diagonal: float = 0.0) -> Any:
    """Returns `scale * a b^T + diagonal * I` for stacks `[N, m, k]` whose products are symmetric.

    Check `can_mirror` before. Accumulates in float32; the result has the dtype of `a`.
    """
    from jax.experimental import pallas as pl

    mosaic = mosaic_gpu()
    count, num_rows, features = a.shape
    down, across = num_rows // _ROWS, num_rows // _COLUMNS
    kernel = mosaic.kernel(
        functools.partial(_kernel, pl=pl, num_rows=num_rows, scale=scale, diagonal=diagonal),
        out_type=jax.ShapeDtypeStruct((count * num_rows, num_rows), a.dtype),
        scratch_types=[mosaic.SMEM((2, 2, 2, _SQUARE, _SQUARE), a.dtype, transforms=_swizzled())],
        grid=(count * _tiles_before(across, down),),
        grid_names=("tile",),
        num_threads=3,
        thread_name="warpgroup",
        kernel_name="symmetric_product",
        compiler_params=mosaic.CompilerParams(lowering_semantics=mosaic.LoweringSemantics.Warpgroup),
        interpret=mosaic.InterpretGPUParams() if is_interpreted() else None,
    )
    found = kernel(a.reshape(count * num_rows, features), b.reshape(count * num_rows, features))
    return pcast_varying(found.reshape(count, num_rows, num_rows), sorted(varying_axes(a)))


def _tiles_before(column: Any, down: int) -> Any:
    """Returns the number of tiles in the columns of tiles before this one; each starts two tiles of rows lower."""
    return column * down - column * (column - 1)


def _cost(equation: Any) -> Tally:
    a, out = equation.invars[0].aval, equation.outvars[0].aval
    # Counted as a whole product, like a matmul of XLA's, so that figures compare.
    flops = Counter({a.dtype.name: matmul_flops(out.shape, a.shape[1:])})
    return Tally(by_dtype=flops, moved=(2 * a.size + out.size) * a.dtype.itemsize)


register_cost("symmetric_product", _cost)


def _kernel(a: Any, b: Any, out: Any, squares: Any, *, pl: Any, num_rows: int, scale: float, diagonal: float) -> None:
    mosaic = mosaic_gpu()
    down, across = num_rows // _ROWS, num_rows // _COLUMNS
    tile, me = lax.axis_index("tile"), lax.axis_index("warpgroup")
    per_matrix = _tiles_before(across, down)
    matrix, place = lax.div(tile, per_matrix), lax.rem(tile, per_matrix)
    column = sum((place >= _tiles_before(number, down)).astype(jnp.int32) for number in range(1, across))
    row = place - _tiles_before(column, down) + 2 * column
    first_row, first_column = row * _ROWS, column * _COLUMNS
    start = matrix * num_rows

    def fetched(rows: int) -> Any:
        return mosaic.BlockSpec((rows, _DEPTH), lambda k: (0, k), transforms=_swizzled(), memory_space=mosaic.SMEM)

    def multiply(_: Any, left: Any, right: Any, total: Any) -> Any:
        mosaic.wgmma(total, left.at[pl.ds(me * _SQUARE, _SQUARE)], right.transpose((1, 0)))
        mosaic.wgmma_wait(0)
        return total

    def write(square: Any, target_row: Any, target_column: Any, wanted: Any) -> None:
        mosaic.commit_smem()
        target = out.at[pl.ds(start + target_row, _SQUARE), pl.ds(target_column, _SQUARE)]
        pl.when(wanted)(lambda: mosaic.copy_smem_to_gmem(square, target, commit_group=False))
        mosaic.commit_smem_to_gmem_group()

    def compute(run: Callable[[Any], None]) -> None:
        @functools.partial(pl.run_scoped, total=mosaic.ACC((_SQUARE, _COLUMNS), jnp.float32))
        def _(total: Any) -> None:
            run(total)
            product = total[...] * scale
            my_row = first_row + me * _SQUARE
            if diagonal:
                shape, layout = (_SQUARE, _COLUMNS), mosaic.Layout.WGMMA
                rows, columns = (mosaic.broadcasted_iota(jnp.int32, shape, dim, layout=layout) for dim in (0, 1))
                product = jnp.where(rows + (my_row - first_column) == columns, product + diagonal, product)
            rounded = product.astype(out.dtype)
            for number in range(_COLUMNS // _SQUARE):
                part = rounded[:, number * _SQUARE : (number + 1) * _SQUARE]
                my_column = first_column + number * _SQUARE
                mosaic.wait_smem_to_gmem(3, wait_read_only=True)  # the oldest of four buffers is free again
                square = squares.at[me, number % 2, 0]
                square[...] = part
                write(square, my_row, my_column, my_column <= my_row)
                mosaic.wait_smem_to_gmem(3, wait_read_only=True)
                turned = squares.at[me, number % 2, 1]
                turned.transpose((1, 0))[...] = mosaic.layout_cast(part, mosaic.Layout.WGMMA_TRANSPOSED)
                write(turned, my_column, my_row, my_column < my_row)
            mosaic.wait_smem_to_gmem(0, wait_read_only=True)

    mosaic.emit_pipeline_warp_specialized(
        multiply,
        grid=(a.shape[1] // _DEPTH,),
        in_specs=[fetched(_ROWS), fetched(_COLUMNS)],
        compute_context=compute,
        wg_axis="warpgroup",
        num_compute_wgs=2,
        memory_registers=_FETCHING_REGISTERS,
        max_concurrent_steps=_STAGES,
    )(a.at[pl.ds(start + first_row, _ROWS), :], b.at[pl.ds(start + first_column, _COLUMNS), :])


def _swizzled() -> tuple[Any, ...]:
    mosaic = mosaic_gpu()
    return mosaic.TilingTransform((8, _SQUARE)), mosaic.SwizzleTransform(2 * _SQUARE)
