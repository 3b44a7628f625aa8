"""A matmul for Hopper GPUs (Pallas, Mosaic GPU) that writes products of gathered rows into their final place.

If rows are gathered in parts (`collective_parts`), each part has rows of every device, whose products belong in
different places of the result. XLA's matmuls write separate arrays, and one more pass joins them, which takes 4 to 8%
of the matmul's time. This kernel writes into the result directly.

Each block of the kernel computes one tile of 128 rows. One of its three warpgroups fetches pieces of rows and weights;
the other two multiply 64 rows each. A persistent kernel, with one block per multiprocessor, would be late here: the
overlapped transfer occupies some multiprocessors, and all tiles of the blocks that wait for them would be delayed.

Shapes: n devices, B = leading dims, M = rows of one device's shard, M' = those in this part, K, F = features.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from meshwright.hardware.chips import is_hopper
from meshwright.hardware.flops import Tally, matmul_flops, register_cost
from meshwright.mesh.current import current_mesh
from meshwright.parallel.kernels.dispatch import has_mosaic, is_interpreted, mosaic_gpu, swizzled

TILE_ROWS = 128
_WIDTHS = (256, 192, 128)  # Tile widths in columns; the first that divides the weight's columns is used.
_DEPTH, _STAGES = 64, 4  # Features per fetched piece, and pieces in flight.
_SQUARE = 64  # Results are written in squares of this side: a warpgroup's rows, and a row of swizzled memory.
_BAND = 8  # Neighboring row tiles that run together, so that they find the weights in the cache.
_FETCHING_REGISTERS = 40
_LEAST_ROWS = 8  # Rows per write, because shared memory is tiled by this many rows.


def tile_columns(num_columns: int) -> int:
    """Returns the tile width for a product with this many columns."""
    return next((width for width in _WIDTHS if num_columns % width == 0), _WIDTHS[0])


def row_unit(together: int) -> int:
    """Returns the fewest rows of each of `together` shards that fill whole tiles and can be written."""
    return max(TILE_ROWS // math.gcd(TILE_ROWS, together), _LEAST_ROWS)


def can_write(x: Any, weights: Sequence[Any], out_dtype: Any, size: int) -> bool:
    """Returns whether `write_product` supports gathered `x` [B, M, K] and these weights on this chip.

    It needs 16-bit floats, sizes that fill whole tiles, and jax 0.11 for Refs as kernel arguments.
    """
    *lead, num_rows, width = x.shape
    dtypes = {jnp.dtype(kind) for kind in (x.dtype, out_dtype or x.dtype, *(w.dtype for w in weights))}
    return (
        has_mosaic()
        and (is_hopper(current_mesh()) or is_interpreted())
        and dtypes in ({jnp.dtype(jnp.bfloat16)}, {jnp.dtype(jnp.float16)})
        and 0 not in (*x.shape, *(w.shape[-1] for w in weights))
        and width % _DEPTH == 0
        and num_rows % row_unit(size * math.prod(lead)) == 0
        and all(w.shape[-1] % tile_columns(w.shape[-1]) == 0 for w in weights)
    )


def write_product(out: Any, rows: Any, w: Any, *, size: int, num_blocks: int, shard_rows: int, start: int) -> Any:
    """Writes the products of `rows` and `w` into their places in `out`, reusing its memory.

    Args:
        out: `[B * n * M, F]`, or None for the first part, which allocates it. It is not marked as varying over devices,
            because kernels cannot write into varying Refs; the caller marks it after the last part.
        rows: `[n * B * M', K]`: rows `start` to `start + M'` of each of the B blocks of each of the n devices.
        w: `[K, F]`.
        size: n.
        num_blocks: B.
        shard_rows: M.
    """
    from jax.experimental import pallas as pl

    mosaic = mosaic_gpu()
    width, shards = tile_columns(w.shape[1]), size * num_blocks
    part = rows.shape[0] // shards

    def place(row: Any) -> Any:
        device, block = row // (num_blocks * part), row // part % num_blocks
        return (block * size + device) * shard_rows + start + row % part

    whole = jax.ShapeDtypeStruct((shards * shard_rows, w.shape[1]), rows.dtype)
    kernel = mosaic.kernel(
        functools.partial(_kernel, width=width, place=place, together=math.gcd(part, _SQUARE)),
        out_type=whole if out is None else (),
        scratch_types=[mosaic.SMEM((2, 2, _SQUARE, _SQUARE), rows.dtype, transforms=swizzled())],
        grid=(rows.shape[0] // TILE_ROWS * (w.shape[1] // width),),
        grid_names=("tile",),
        num_threads=3,
        thread_name="warpgroup",
        kernel_name="write_product",
        compiler_params=mosaic.CompilerParams(lowering_semantics=mosaic.LoweringSemantics.Warpgroup),
        interpret=mosaic.InterpretGPUParams() if is_interpreted() else None,
    )
    if out is None:
        return kernel(rows, w)
    # If the Ref were visible outside, JAX could neither differentiate nor remat loops around it.
    return pl.run_state(lambda ref: kernel(rows, w, ref))(out)


def _cost(equation: Any) -> Tally:
    rows, w = (value.aval for value in equation.invars[:2])
    product = rows.shape[0], w.shape[1]  # The output array is larger.
    num_elements = rows.size + w.size + math.prod(product)
    flops = Counter({rows.dtype.name: matmul_flops(product, rows.shape[1:])})
    return Tally(by_dtype=flops, moved=num_elements * rows.dtype.itemsize)


register_cost("write_product", _cost)


def _kernel(
    rows: Any, w: Any, out: Any, squares: Any, *, width: int, place: Callable[[Any], Any], together: int
) -> None:
    """Computes one tile of `width` columns.

    Args:
        squares: two output buffers for each multiplying warpgroup.
        place: maps a row's index to its row in `out`.
        together: number of consecutive rows that stay consecutive in `out`.
    """
    from jax.experimental import pallas as pl

    mosaic = mosaic_gpu()
    grid = rows.shape[0] // TILE_ROWS, w.shape[1] // width
    down, across = mosaic.planar_snake(lax.axis_index("tile"), grid, 1, _BAND)
    first_row, first_column = down * TILE_ROWS, across * width
    me = lax.axis_index("warpgroup")

    def fetched(shape: tuple[int, int], index: Callable[[Any], Any]) -> Any:
        return mosaic.BlockSpec(shape, index, transforms=swizzled(), memory_space=mosaic.SMEM)

    def multiply(_: Any, some_rows: Any, some_weights: Any, total: Any) -> Any:
        mosaic.wgmma(total, some_rows.at[pl.ds(me * _SQUARE, _SQUARE)], some_weights)
        mosaic.wgmma_wait(0)
        return total

    def compute(run: Callable[[Any], None]) -> None:
        @functools.partial(pl.run_scoped, total=mosaic.ACC((_SQUARE, width), jnp.float32))
        def _(total: Any) -> None:
            run(total)
            product = total[...].astype(out.dtype)
            for number, column in enumerate(range(0, width, _SQUARE)):
                mosaic.wait_smem_to_gmem(1, wait_read_only=True)  # One of the two buffers is free again.
                square = squares.at[me, number % 2]
                square[...] = product[:, column : column + _SQUARE]
                mosaic.commit_smem()
                for row in range(0, _SQUARE, together):
                    target = place(first_row + me * _SQUARE + row)
                    mosaic.copy_smem_to_gmem(
                        square.at[row : row + together],
                        out.at[pl.ds(target, together), pl.ds(first_column + column, _SQUARE)],
                        commit_group=row + together == _SQUARE,
                    )
            mosaic.wait_smem_to_gmem(0, wait_read_only=True)

    mosaic.emit_pipeline_warp_specialized(
        multiply,
        grid=(rows.shape[1] // _DEPTH,),
        in_specs=[fetched((TILE_ROWS, _DEPTH), lambda k: (0, k)), fetched((_DEPTH, width), lambda k: (k, 0))],
        compute_context=compute,
        wg_axis="warpgroup",
        num_compute_wgs=2,
        memory_registers=_FETCHING_REGISTERS,
        max_concurrent_steps=_STAGES,
    )(rows.at[pl.ds(first_row, TILE_ROWS), :], w.at[:, pl.ds(first_column, width)])
