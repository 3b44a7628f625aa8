"""Running sums of outer products for Hopper GPUs (Pallas, Mosaic GPU), stored once per chunk.

A linear recurrence such as the mLSTM's keeps a K x V memory per head, too large for one multiprocessor. Each block of
this kernel follows time for a part of one memory, which stays in registers as float32, and writes a copy for every
chunk. One warpgroup fetches tokens; the others scale the left factors in shared memory, and multiply.

Shapes: B rows, S positions, H heads, N chunks of L positions, K and V features of the two factors.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from meshwright.hardware.flops import Tally, matmul_flops, register_cost
from meshwright.mesh.axes import pcast_varying, varying_axes
from meshwright.parallel.kernels.dispatch import is_interpreted, mosaic_gpu, swizzled

_STEP = 64  # Tokens that are fetched and multiplied at once; also the width of a row of swizzled memory.
_STAGES = 4  # Steps in flight.
_FETCHING_REGISTERS, _MULTIPLYING_REGISTERS = 40, 232
_ENOUGH_BLOCKS = 120  # Narrower tiles than needed for this many blocks would only read the left factors more often.


@functools.partial(jax.jit, static_argnames="reverse")  # so that the kernel is lowered once for all layers
def running_sums(a: Any, c: Any, weights: Any, keep: Any, *, reverse: bool = False) -> Any:
    """Returns `[B, H, N, K, V]`: the sum before each chunk, of which every chunk keeps a part and adds its products.

    After chunk n the sum is `keep[n] * sum + einsum("lk,l,lv->kv", a, weights, c)` over the chunk's tokens. The first
    sum is 0. Accumulates in float32; the result has the dtype of `a`.

    Args:
        a, c: `[B, S, H, K]` and `[B, S, H, V]`, of one 16-bit float dtype; K and V are multiples of 64.
        weights: `[B, H, S]`, float32.
        keep: `[B, H, N]`, float32. A chunk has S / N tokens, a multiple of 64.
        reverse: start with the last chunk.
    """
    mosaic = mosaic_gpu()
    num_rows, length, num_heads, keys = a.shape
    values, num_chunks = c.shape[-1], keep.shape[-1]
    num_groups, group_rows, width = _tile(keys, values, num_rows * num_heads)
    tiles = keys // (num_groups * group_rows), values // width
    kernel = mosaic.kernel(
        functools.partial(_kernel, num_heads=num_heads, num_chunks=num_chunks, tiles=tiles, reverse=reverse),
        out_type=jax.ShapeDtypeStruct((num_rows * num_heads * num_chunks * keys, values), a.dtype),
        scratch_types=[
            mosaic.SMEM((_STAGES, num_groups, _STEP, group_rows), a.dtype, transforms=swizzled()),
            mosaic.SMEM((_STAGES, _STEP, width), a.dtype, transforms=swizzled()),
            mosaic.SMEM((_STAGES, _STEP), jnp.float32),
            mosaic.SMEM((num_groups, group_rows, width), a.dtype, transforms=swizzled()),
            mosaic.Barrier(num_arrivals=num_groups + 2, num_barriers=_STAGES),
            mosaic.Barrier(num_arrivals=num_groups, num_barriers=_STAGES),
        ],
        grid=(num_rows * num_heads * math.prod(tiles),),
        grid_names=("tile",),
        num_threads=num_groups + 1,
        thread_name="warpgroup",
        kernel_name="running_sums",
        compiler_params=mosaic.CompilerParams(lowering_semantics=mosaic.LoweringSemantics.Warpgroup),
        interpret=mosaic.InterpretGPUParams() if is_interpreted() else None,
    )
    sums = kernel(
        a.reshape(num_rows * length, num_heads * keys),
        c.reshape(num_rows * length, num_heads * values),
        weights.reshape(num_rows * num_heads, length),
        keep.reshape(num_rows * num_heads, num_chunks),
    )
    sums = sums.reshape(num_rows, num_heads, num_chunks, keys, values)
    return pcast_varying(sums, sorted(varying_axes(a)))


def _tile(keys: int, values: int, num_sums: int) -> tuple[int, int, int]:
    """Returns the number of multiplying warpgroups, the rows of each and the columns, for a block's part of a sum."""
    num_groups, group_rows = next(
        (groups, rows) for groups, rows in ((2, 128), (2, 64), (1, 64)) if keys % (groups * rows) == 0
    )
    down = keys // (num_groups * group_rows)
    # Registers for both a sum and its next addition: at most 64 + 64 per thread.
    widths = [width for width in (128, 64) if values % width == 0 and group_rows * width <= 128 * _STEP]
    return num_groups, group_rows, next((w for w in widths if num_sums * down * values // w >= _ENOUGH_BLOCKS), 64)


def _cost(equation: Any) -> Tally:
    a, c, _, keep = (value.aval for value in equation.invars[:4])
    out = equation.outvars[0].aval
    heads = keep.shape[0]
    keys = out.shape[0] // (heads * keep.shape[1])
    tokens = a.size // keys
    flops = Counter({a.dtype.name: matmul_flops((keys, out.shape[1]), (tokens,))})
    return Tally(by_dtype=flops, moved=(a.size + c.size + out.size) * a.dtype.itemsize)


register_cost("running_sums", _cost)


def _kernel(
    a: Any,
    c: Any,
    weights: Any,
    keep: Any,
    out: Any,
    a_stages: Any,
    c_stages: Any,
    weight_stages: Any,
    squares: Any,
    filled: Any,
    emptied: Any,
    *,
    num_heads: int,
    num_chunks: int,
    tiles: tuple[int, int],
    reverse: bool,
) -> None:
    from jax.experimental import pallas as pl

    mosaic = mosaic_gpu()
    _, num_groups, _, group_rows = a_stages.shape
    width, length = c_stages.shape[-1], weights.shape[1]
    keys = tiles[0] * num_groups * group_rows
    chunk_steps = length // num_chunks // _STEP
    me, tile = lax.axis_index("warpgroup"), lax.axis_index("tile")
    across, rest = lax.rem(tile, tiles[1]), lax.div(tile, tiles[1])
    down, which = lax.rem(rest, tiles[0]), lax.div(rest, tiles[0])
    row, head = lax.div(which, num_heads), lax.rem(which, num_heads)

    def fetch() -> None:
        mosaic.set_max_registers(_FETCHING_REGISTERS, action="decrease")
        num_steps = (num_chunks - 1) * chunk_steps

        def one_step(step: Any, _: None) -> None:
            stage = lax.rem(step, _STAGES)
            pl.when(step >= _STAGES)(lambda: mosaic.barrier_wait(emptied.at[stage]))
            token = (length - _STEP) - step * _STEP if reverse else step * _STEP
            tokens = pl.ds(row * length + token, _STEP)
            for group in range(num_groups):
                column = head * keys + (down * num_groups + group) * group_rows
                mosaic.copy_gmem_to_smem(
                    a.at[tokens, pl.ds(column, group_rows)], a_stages.at[stage, group], filled.at[stage]
                )
            columns = pl.ds((head * tiles[1] + across) * width, width)
            mosaic.copy_gmem_to_smem(c.at[tokens, columns], c_stages.at[stage], filled.at[stage])
            mosaic.copy_gmem_to_smem(weights.at[which, pl.ds(token, _STEP)], weight_stages.at[stage], filled.at[stage])

        lax.fori_loop(0, num_steps, one_step, None)
        for step in range(max(num_steps - _STAGES, 0), num_steps):
            mosaic.barrier_wait(emptied.at[step % _STAGES])

    def multiply() -> None:
        mosaic.set_max_registers(_MULTIPLYING_REGISTERS, action="increase")
        square = squares.at[me]

        def store(chunk: Any, total: Any) -> None:
            mosaic.wait_smem_to_gmem(0, wait_read_only=True)
            square[...] = total.astype(out.dtype)
            mosaic.commit_smem()
            first = (which * num_chunks + chunk) * keys + (down * num_groups + me) * group_rows
            mosaic.copy_smem_to_gmem(square, out.at[pl.ds(first, group_rows), pl.ds(across * width, width)])

        def one_chunk(index: Any, total: Any) -> Any:
            chunk = num_chunks - 1 - index if reverse else index
            kept = keep[which, chunk]
            store(chunk, total)

            def products(added: Any) -> Any:
                for number in range(chunk_steps):
                    stage = lax.rem(index * chunk_steps + number, _STAGES)
                    mosaic.barrier_wait(filled.at[stage])
                    left = a_stages.at[stage, me]
                    weight = mosaic.load(weight_stages.at[stage], layout=mosaic.Layout.WGMMA.reduce(1))
                    scaled = mosaic.load(left, layout=mosaic.Layout.WGMMA).astype(jnp.float32)
                    scaled = scaled * lax.broadcast_in_dim(weight, left.shape, [0])
                    left[...] = scaled.astype(a.dtype)
                    mosaic.commit_smem()
                    mosaic.wgmma(added, left.transpose((1, 0)), c_stages.at[stage])
                    # The matmul before this one is done, so that its stage can be refilled.
                    mosaic.wgmma_wait(1)
                    if number:
                        mosaic.barrier_arrive(emptied.at[lax.rem(index * chunk_steps + number - 1, _STAGES)])
                return added[...]

            added = pl.run_scoped(products, mosaic.ACC((group_rows, width), jnp.float32))
            mosaic.barrier_arrive(emptied.at[lax.rem((index + 1) * chunk_steps - 1, _STAGES)])
            return total * kept + added

        zeros = mosaic.layout_cast(jnp.zeros((group_rows, width), jnp.float32), mosaic.Layout.WGMMA)
        total = lax.fori_loop(0, num_chunks - 1, one_chunk, zeros)
        store(0 if reverse else num_chunks - 1, total)
        mosaic.wait_smem_to_gmem(0, wait_read_only=True)

    pl.when(me == num_groups)(fetch)
    pl.when(me < num_groups)(multiply)
