"""Gated pairs of tokens for Hopper GPUs (Pallas, Mosaic GPU): the parallel part of a chunkwise linear recurrence.

For every token t of a chunk, with the pairs (t, s) in one direction of time and the chunk's memory M,

    out_t = inter_t M^T x_t + sum_s (x_t . y_s + bias) exp2(row_t + column_s) z_s

Outputs of an mLSTM and its gradients of queries, keys and values all have this form. Scores never leave the
multiprocessor. Blocks are persistent, one per multiprocessor. One warpgroup fetches the next tiles while the other two
multiply 64 tokens each.

Shapes: B rows, S positions, H heads, N chunks of L positions, X features of x and y, Z features of z and the result.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp

from meshwright.hardware.flops import Tally, matmul_flops, register_cost
from meshwright.mesh.axes import pcast_varying, varying_axes
from meshwright.parallel.kernels.dispatch import is_interpreted, mosaic_gpu, swizzled
from meshwright.parallel.kernels.pair_program import pair_program
from meshwright.parallel.kernels.pair_tiles import SIDE, TILE_ROWS, Pairs, pair_tiles
from meshwright.specs import ceil_div

_MULTIPROCESSORS = 132


@functools.partial(jax.jit, static_argnames="pairs")  # so that each kernel is lowered once for all layers
def gated_pairs(
    pairs: Pairs,
    x: Any,
    y: Any,
    z: Any,
    memory: Any,
    vectors: dict[str, Any],
    *,
    own: Any = None,
    chunk_vectors: Any = None,
) -> tuple[Any, Any]:
    """Returns the result `[B, S, H, Z]` in the dtype of `x`, and a number per token `[B, H, S]` or None; see `Pairs`.

    Args:
        x, y, z: `[B, S, H, X or Z]`, of one 16-bit float dtype.
        memory: `[B, H, N, X, Z]`, of that dtype. A chunk has S / N tokens, a multiple of 128.
        vectors: `[B, H, S]`, float32, by `Pairs.row_names` and `Pairs.column_names`. `bound` is the first position s
            in the chunk that counts for t, or the last one if not causal.
        own: `[B, S, H, Z]`.
        chunk_vectors: `[B, H, N, Z]`, float32; the result gets `vector_factor_t` times its chunk's vector.
    """
    mosaic = mosaic_gpu()
    (num_rows, length, num_heads, x_size), z_size, num_chunks = x.shape, z.shape[-1], memory.shape[2]
    tiles = pair_tiles(x_size, z_size)
    assert tiles is not None
    matrices = [t.reshape(num_rows * length, -1) for t in (x, y, z, *((own,) if pairs.own else ()))]
    matrices.append(memory.reshape(-1, memory.shape[-1]))
    sums = num_rows * num_heads
    inputs = [*matrices, *(
        jnp.stack([vectors[name].reshape(sums, length) for name in names], axis=1)
        for names in (pairs.row_names, pairs.column_names)
    )]  # fmt: skip
    if pairs.own:
        inputs.append(chunk_vectors.reshape(sums * num_chunks, z_size))
    out_type = [jax.ShapeDtypeStruct((num_rows * length, num_heads * z_size), x.dtype)]
    tiles_across = ceil_div(z_size, tiles.width)
    if pairs.normalize or pairs.own:
        out_type.append(jax.ShapeDtypeStruct((sums, tiles_across if pairs.own else 1, length), jnp.float32))

    def shared(*shape: int) -> Any:
        return mosaic.SMEM(shape, x.dtype, transforms=swizzled())

    # Arrays of `y` may be smaller than a stage. Interpreted views do not share memory, so no test shows a wrong place.
    per_stage, rest = divmod(SIDE * tiles.width, tiles.y_rows * tiles.y_columns)
    assert not rest
    views = [
        shared(tiles.num_stages, SIDE, tiles.width),
        shared(tiles.num_stages * per_stage, tiles.y_rows, tiles.y_columns),
    ]
    if pairs.transposed:
        views.append(shared(tiles.num_stages, tiles.width, SIDE))
    num_tiles = sums * (length // TILE_ROWS) * tiles_across
    kernel = mosaic.kernel(
        functools.partial(
            pair_program, pairs=pairs, tiles=tiles, num_heads=num_heads, num_chunks=num_chunks, num_tiles=num_tiles
        ),
        out_type=out_type,
        scratch_types={
            "x_tile": shared(max(*tiles.slices, tiles.width) // SIDE, TILE_ROWS, SIDE),
            "stages": mosaic.RefUnion(*views),
            "numbers": mosaic.SMEM((2, SIDE), jnp.float32),
            # Left operands are registers, which interpret mode (jax 0.11) does not support.
            **({"left": shared(2, SIDE, SIDE)} if is_interpreted() else {}),
            "x_filled": mosaic.Barrier(num_barriers=max(tiles.slices) // SIDE),
            "x_emptied": mosaic.Barrier(num_arrivals=2),
            "filled": mosaic.Barrier(num_barriers=tiles.num_stages),
            "emptied": mosaic.Barrier(num_arrivals=2, num_barriers=tiles.num_stages),
        },
        grid=(min(_MULTIPROCESSORS, num_tiles),),
        grid_names=("block",),
        num_threads=3,
        thread_name="warpgroup",
        kernel_name=pairs.name,
        compiler_params=mosaic.CompilerParams(
            approx_math=True,
            reduction_scratch_bytes=0,  # Sums of rows stay within a warp.
            lowering_semantics=mosaic.LoweringSemantics.Warpgroup,
        ),
        interpret=mosaic.InterpretGPUParams() if is_interpreted() else None,
    )
    found = pcast_varying(tuple(kernel(*inputs)), sorted(varying_axes(x)))
    out = found[0].reshape(*x.shape[:3], z_size)
    if len(found) == 1:
        return out, None
    return out, jnp.sum(found[1], axis=1).reshape(num_rows, num_heads, length)


def register_pairs(pairs: Pairs) -> None:
    """Registers the cost of a kernel, so that programs with it can be counted."""
    register_cost(pairs.name, functools.partial(_cost, pairs))


def _cost(pairs: Pairs, equation: Any) -> Tally:
    shapes = [value.aval for value in equation.invars]
    x, _, z, memory = shapes[0], shapes[1], shapes[2], shapes[4 if pairs.own else 3]
    num_sums, _, length = shapes[5 if pairs.own else 4].shape
    num_tokens = num_sums * length
    x_size, z_size = x.size // num_tokens, z.size // num_tokens
    tiles_down = length * x_size * z_size * num_sums // memory.size // TILE_ROWS
    columns = TILE_ROWS * (tiles_down + 1) // 2  # on average, with the masked half of the tiles on the diagonal
    flops = matmul_flops((num_tokens, columns), (x_size + z_size,)) + matmul_flops((num_tokens, x_size), (z_size,))
    moved = sum(math.prod(one.aval.shape) * one.aval.dtype.itemsize for one in (*equation.invars, *equation.outvars))
    return Tally(by_dtype=Counter({x.dtype.name: flops}), moved=moved)
