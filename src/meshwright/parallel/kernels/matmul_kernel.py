"""Products of gathered rows, written where they belong: a matmul of our own for Hopper GPUs (Pallas, by Mosaic).

If rows are gathered in parts (`collective_parts`), each part has rows of every device, and its products belong into as
many places of the result. XLA's matmuls write arrays of their own, which one more pass puts together: 4 to 8% of the
matmul. This one writes into the result itself.

Each block of the kernel makes one tile of 128 rows. One of its three warpgroups fetches pieces of rows and weights, the
two others multiply 64 rows each. There is a block for each tile and not, as is usual, one for each multiprocessor that
works through many: beside the matmul runs a transfer, which holds some multiprocessors, and the tiles of blocks that
wait for those would be late, all of them.

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
from meshwright.mesh.build import current_mesh
from meshwright.parallel.kernels.dispatch import is_interpreted

TILE_ROWS = 128
_WIDTHS = (256, 192, 128)  # of tiles, in columns; the first that divides a weight's
_DEPTH, _STAGES = 64, 4  # features of a piece that is fetched, and how many pieces are under way
_SQUARE = 64  # results leave in squares: what one warpgroup's rows and one row of swizzled memory have in common
_BAND = 8  # tiles of neighbouring rows that go together, so that they find the weights in the cache
_FETCHING_REGISTERS = 40
_LEAST_ROWS = 8  # that can be written at once, because shared memory comes in tiles of so many rows


def tile_columns(num_columns: int) -> int:
    """Returns how many columns the tiles of a product have."""
    return next((width for width in _WIDTHS if num_columns % width == 0), _WIDTHS[0])


def row_unit(together: int) -> int:
    """Returns the least number of rows of each of `together` shards that make whole tiles and can be written."""
    return max(TILE_ROWS // math.gcd(TILE_ROWS, together), _LEAST_ROWS)


def can_write(x: Any, weights: Sequence[Any], out_dtype: Any, size: int) -> bool:
    """Returns whether `write_product` can make the products of gathered `x` [B, M, K] and these weights, on this chip.

    It needs 16-bit floats throughout, and sizes that are whole tiles; Refs as arguments of kernels came with jax 0.11.
    """
    *lead, num_rows, width = x.shape
    dtypes = {jnp.dtype(kind) for kind in (x.dtype, out_dtype or x.dtype, *(w.dtype for w in weights))}
    return (
        jax.__version_info__ >= (0, 11)
        and (is_hopper(current_mesh()) or is_interpreted())
        and dtypes in ({jnp.dtype(jnp.bfloat16)}, {jnp.dtype(jnp.float16)})
        and 0 not in (*x.shape, *(w.shape[-1] for w in weights))
        and width % _DEPTH == 0
        and num_rows % row_unit(size * math.prod(lead)) == 0
        and all(w.shape[-1] % tile_columns(w.shape[-1]) == 0 for w in weights)
    )


def write_product(out: Any, rows: Any, w: Any, *, size: int, num_blocks: int, shard_rows: int, start: int) -> Any:
    """Returns `out` with the products of `rows` and `w` in their places; the memory of `out` is used again.

    Args:
        out: `[B * n * M, F]`; None for the first part: then it is made, and nothing else is in it. Kernels write into
            Refs, which must not be said to differ between devices; so neither is this, though it does. It is for the
            caller to say so when all parts are there.
        rows: `[n * B * M', K]`: of each of the n devices, rows `start` to `start + M'` of each of its B blocks.
        w: `[K, F]`.
        size: n.
        num_blocks: B.
        shard_rows: M.
    """
    pl, mosaic = _pallas()
    width, shards = tile_columns(w.shape[1]), size * num_blocks
    part = rows.shape[0] // shards

    def place(row: Any) -> Any:
        device, block = row // (num_blocks * part), row // part % num_blocks
        return (block * size + device) * shard_rows + start + row % part

    whole = jax.ShapeDtypeStruct((shards * shard_rows, w.shape[1]), rows.dtype)
    kernel = mosaic.kernel(
        functools.partial(_kernel, width=width, place=place, together=math.gcd(part, _SQUARE)),
        out_type=whole if out is None else (),
        scratch_types=[mosaic.SMEM((2, 2, _SQUARE, _SQUARE), rows.dtype, transforms=_swizzled())],
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
    # A Ref that is seen outside of this would keep JAX from differentiating loops around it, and from remat.
    return pl.run_state(lambda ref: kernel(rows, w, ref))(out)


def _cost(equation: Any) -> Tally:
    rows, w = (value.aval for value in equation.invars[:2])
    product = rows.shape[0], w.shape[1]  # the array that it is written into is larger
    num_elements = rows.size + w.size + math.prod(product)
    flops = Counter({rows.dtype.name: matmul_flops(product, rows.shape[1:])})
    return Tally(by_dtype=flops, moved=num_elements * rows.dtype.itemsize)


register_cost("write_product", _cost)


def _kernel(
    rows: Any, w: Any, out: Any, squares: Any, *, width: int, place: Callable[[Any], Any], together: int
) -> None:
    """Makes one tile of `width` columns.

    Args:
        squares: two for each warpgroup that multiplies: results on their way out.
        place: from a row's number to that of its product's row in `out`.
        together: how many neighbouring rows have neighbouring places.
    """
    pl, mosaic = _pallas()
    grid = rows.shape[0] // TILE_ROWS, w.shape[1] // width
    down, across = mosaic.planar_snake(lax.axis_index("tile"), grid, 1, _BAND)
    first_row, first_column = down * TILE_ROWS, across * width
    me = lax.axis_index("warpgroup")

    def fetched(shape: tuple[int, int], index: Callable[[Any], Any]) -> Any:
        return mosaic.BlockSpec(shape, index, transforms=_swizzled(), memory_space=mosaic.SMEM)

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
                mosaic.wait_smem_to_gmem(1, wait_read_only=True)  # two squares; the one before the last has left
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


def _swizzled() -> tuple[Any, ...]:
    """Returns how arrays lie in shared memory for matmuls to read them: rows of 128 bytes, in tiles of 8 of them."""
    _, mosaic = _pallas()
    return mosaic.TilingTransform((_LEAST_ROWS, _SQUARE)), mosaic.SwizzleTransform(2 * _SQUARE)


def _pallas() -> tuple[Any, Any]:
    """Returns Pallas and its part for GPUs since Hopper. Importing them takes a second, and types differ by version."""
    from jax.experimental import pallas
    from jax.experimental.pallas import mosaic_gpu

    return pallas, mosaic_gpu
