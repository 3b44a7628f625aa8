"""The program of `pair_kernel`: a warpgroup that fetches, and two that multiply.

Work comes in tiles of 128 tokens and `Tiles.width` features of the result. A ring of stages in shared memory holds the
operands of the next steps of a tile, in this order:

1. for each slice of the features of `x`, because scores are sums over features:
   for every tile of 128 columns with pairs, twice: `y` of 64 tokens, and `z` of the same tokens;
   then 64 rows of the chunk's memory at a time;
2. `own` of both multiplying warpgroups, if needed. Results leave through the memory of `x`.

All warpgroups count steps alike. Both multiplying warpgroups wait for every step, including those they do not read, so
that barriers stay in phase.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax

from meshwright.parallel.kernels.dispatch import is_interpreted, mosaic_gpu
from meshwright.parallel.kernels.pair_tiles import SIDE, TILE_ROWS, Pairs, Tiles
from meshwright.specs import ceil_div

_FETCHING_REGISTERS, _MULTIPLYING_REGISTERS = 40, 232


@dataclass(frozen=True)
class _Slice:
    """Features of `x` that are in shared memory at once."""

    start: int
    num_parts: int  # of 64 features
    pieces_per_half: int  # of `y`; 0 if all of 128 tokens comes at once


@dataclass(frozen=True)
class _Place:
    """Where a tile is: indices of its head, chunk, tile of rows in the chunk, and tile of columns."""

    row: Any
    head: Any
    which: Any  # row and head
    chunk: Any
    down: Any
    across: Any
    column: Any  # first column of the tile


def pair_program(
    *refs: Any, pairs: Pairs, tiles: Tiles, num_heads: int, num_chunks: int, num_tiles: int, **scratch: Any
) -> None:
    """Runs one block; see `pair_kernel.gated_pairs` for the arguments and scratch memory."""
    from jax.experimental import pallas as pl

    mosaic = mosaic_gpu()
    names = ["x", "y", "z", *(["own"] if pairs.own else []), "memory", "rows", "columns"]
    names += [*(["chunk_vectors"] if pairs.own else []), "out"]
    names += ["numbers_out"] if pairs.normalize or pairs.own else []
    given = dict(zip(names, refs, strict=True))
    x, y, z, memory, rows, columns, out = (given[name] for name in ("x", "y", "z", "memory", "rows", "columns", "out"))
    x_tile, x_filled, x_emptied = (scratch[name] for name in ("x_tile", "x_filled", "x_emptied"))
    filled, emptied, numbers = (scratch[name] for name in ("filled", "emptied", "numbers"))
    z_stages, y_stages, *other = scratch["stages"]
    memory_stages = other[0] if pairs.transposed else z_stages
    y_per_stage = SIDE * tiles.width // (tiles.y_rows * tiles.y_columns)

    length, width = rows.shape[2], tiles.width
    chunk_size = length // num_chunks
    x_size, z_size = x.shape[1] // num_heads, z.shape[1] // num_heads
    tiles_across, tiles_down = ceil_div(z_size, width), chunk_size // TILE_ROWS
    overlap = tiles_across * width - z_size  # columns of the last tile that the one before has as well
    slices = [
        _Slice(
            start=sum(tiles.slices[:n]),
            num_parts=size // SIDE,
            pieces_per_half=size // tiles.y_columns if tiles.y_rows == SIDE else 0,
        )
        for n, size in enumerate(tiles.slices)
    ]
    me, block = lax.axis_index("warpgroup"), lax.axis_index("block")
    num_local = lax.div(num_tiles - 1 - block, lax.axis_size("block")) + 1

    def place_of(number: Any) -> _Place:
        tile = block + number * lax.axis_size("block")
        across, tile = lax.rem(tile, tiles_across), lax.div(tile, tiles_across)
        down, tile = lax.rem(tile, tiles_down), lax.div(tile, tiles_down)
        chunk, which = lax.rem(tile, num_chunks), lax.div(tile, num_chunks)
        column = jnp.minimum(across * width, z_size - width) if overlap else across * width
        return _Place(lax.div(which, num_heads), lax.rem(which, num_heads), which, chunk, down, across, column)

    def column_range(down: Any) -> tuple[Any, Any]:
        """Tiles of 128 columns with pairs of this tile of rows."""
        return (0, down + 1) if pairs.causal else (down, tiles_down)

    def fetch() -> None:
        mosaic.set_max_registers(_FETCHING_REGISTERS, action="decrease")

        def stage_for(step: Any) -> Any:
            stage = lax.rem(step, tiles.num_stages)
            pl.when(step >= tiles.num_stages)(lambda: mosaic.barrier_wait(emptied.at[stage]))
            return stage

        def one_tile(number: Any, step: Any) -> Any:
            p = place_of(number)
            first = p.row * length + p.chunk * chunk_size

            def fetch_x(some: _Slice) -> None:
                if some.start:
                    mosaic.barrier_wait(x_emptied)
                else:
                    pl.when(number > 0)(lambda: mosaic.barrier_wait(x_emptied))
                feature = p.head * x_size + some.start
                for part in range(some.num_parts):
                    mosaic.copy_gmem_to_smem(
                        x.at[pl.ds(first + p.down * TILE_ROWS, TILE_ROWS), pl.ds(feature + part * SIDE, SIDE)],
                        x_tile.at[part],
                        x_filled.at[part],
                    )

            def fetch_y(some: _Slice, half: int, piece: int, column: Any, step: Any) -> None:
                stage = stage_for(step)
                mosaic.copy_gmem_to_smem(
                    y.at[
                        pl.ds(first + column * TILE_ROWS + half * SIDE, tiles.y_rows),
                        pl.ds(p.head * x_size + some.start + piece * tiles.y_columns, tiles.y_columns),
                    ],
                    y_stages.at[stage * y_per_stage],
                    filled.at[stage],
                )

            def fetch_z(half: int, column: Any, step: Any) -> None:
                stage = stage_for(step)
                mosaic.copy_gmem_to_smem(
                    z.at[
                        pl.ds(first + column * TILE_ROWS + half * SIDE, SIDE),
                        pl.ds(p.head * z_size + p.column, width),
                    ],
                    z_stages.at[stage],
                    filled.at[stage],
                )

            def one_slice(some: _Slice, step: Any) -> Any:
                def one_column(column: Any, step: Any) -> Any:
                    for half in range(2):
                        for piece in range(some.pieces_per_half or 1 - half):
                            fetch_y(some, half, piece, column, step)
                            step += 1
                        fetch_z(half, column, step)
                        step += 1
                    return step

                fetch_x(some)
                step = lax.fori_loop(*column_range(p.down), one_column, step)
                for part in range(some.num_parts):
                    stage = stage_for(step)
                    base, feature = p.which * num_chunks + p.chunk, some.start + part * SIDE
                    if pairs.transposed:
                        source = memory.at[pl.ds(base * z_size + p.column, width), pl.ds(feature, SIDE)]
                    else:
                        source = memory.at[pl.ds(base * x_size + feature, SIDE), pl.ds(p.column, width)]
                    mosaic.copy_gmem_to_smem(source, memory_stages.at[stage], filled.at[stage])
                    step += 1
                return step

            for some in slices:
                step = one_slice(some, step)
            for half in range(2 if pairs.own else 0):
                stage = stage_for(step)
                mosaic.copy_gmem_to_smem(
                    given["own"].at[
                        pl.ds(first + p.down * TILE_ROWS + half * SIDE, SIDE),
                        pl.ds(p.head * z_size + p.column, width),
                    ],
                    z_stages.at[stage],
                    filled.at[stage],
                )
                step += 1
            return step

        last = lax.fori_loop(0, num_local, one_tile, jnp.int32(0))
        mosaic.barrier_wait(x_emptied)
        for number in range(tiles.num_stages):  # A tile has at least as many steps.
            mosaic.barrier_wait(emptied.at[lax.rem(last + number, tiles.num_stages)])

    def multiply() -> None:
        mosaic.set_max_registers(_MULTIPLYING_REGISTERS, action="increase")
        by_row, by_column = mosaic.Layout.WGMMA.reduce(1), mosaic.Layout.WGMMA.reduce(0)
        mine = pl.ds(me * SIDE, SIDE)
        square = (SIDE, SIDE)

        def ready(step: Any) -> Any:
            stage = lax.rem(step, tiles.num_stages)
            mosaic.barrier_wait(filled.at[stage])
            return stage

        def done(stage: Any) -> None:
            mosaic.barrier_arrive(emptied.at[stage])

        def add_product(total: Any, left: Any, right: Any) -> None:
            if is_interpreted():
                scratch["left"].at[me][...] = left
                left = scratch["left"].at[me]
            mosaic.wgmma(total, left, right)
            mosaic.wgmma_wait(0)

        def one_tile(number: Any, step: Any) -> Any:
            p = place_of(number)
            start = p.chunk * chunk_size
            local_row = p.down * TILE_ROWS + me * SIDE  # in the chunk

            def of_rows(name: str) -> Any:
                where = pl.ds(start + local_row, SIDE)
                return mosaic.load(rows.at[p.which, pairs.row_names.index(name), where], layout=by_row, optimized=False)

            def of_columns(name: str, column: Any) -> Any:
                where = pl.ds(start + column, SIDE)
                return mosaic.load(
                    columns.at[p.which, pairs.column_names.index(name), where], layout=by_column, optimized=False
                )

            def down(vector: Any) -> Any:
                return lax.broadcast_in_dim(vector, square, [0])

            def along(vector: Any) -> Any:
                return lax.broadcast_in_dim(vector, square, [1])

            row = of_rows("row")
            bound = of_rows("bound").astype(jnp.int32) - local_row
            row_bias = of_rows("row_bias") if pairs.bias == "row" else None

            def work(total: Any) -> Any:
                def weights(column: Any, logs: Any) -> Any:
                    """exp2(row + column) for 64 columns from `column` on, and 0 for pairs that do not count."""
                    log = down(row) + along(logs)
                    t = mosaic.broadcasted_iota(jnp.int32, square, 0, layout=mosaic.Layout.WGMMA)
                    s = mosaic.broadcasted_iota(jnp.int32, square, 1, layout=mosaic.Layout.WGMMA)
                    s = s + (column - local_row)
                    if pairs.causal:
                        counts = (s <= t) & (s >= down(bound))
                    else:
                        counts = (s >= t) & (s <= down(bound))
                    return jnp.exp2(jnp.where(counts, log, -jnp.inf))

                def one_column(some: _Slice, column: Any, carry: Any) -> Any:
                    step, size = carry
                    y_stage = None
                    for half in range(2):
                        first = column * TILE_ROWS + half * SIDE
                        logs = of_columns("column", first)

                        def score(scores: Any, half: int = half, step: Any = step, y_stage: Any = y_stage) -> Any:
                            if some.pieces_per_half:
                                parts_per_piece = tiles.y_columns // SIDE
                                for piece in range(some.pieces_per_half):
                                    stage = ready(step + piece)
                                    for part in range(parts_per_piece):
                                        mosaic.wgmma(
                                            scores,
                                            x_tile.at[piece * parts_per_piece + part, mine],
                                            y_stages.at[stage * y_per_stage, :, pl.ds(part * SIDE, SIDE)].transpose(
                                                (1, 0)
                                            ),
                                        )
                                    if piece:  # There may be more pieces than stages.
                                        mosaic.wgmma_wait(parts_per_piece)
                                        done(lax.rem(step + piece - 1, tiles.num_stages))
                            else:
                                stage = ready(step) if half == 0 else y_stage
                                for part in range(some.num_parts):
                                    mosaic.wgmma(
                                        scores,
                                        x_tile.at[part, mine],
                                        y_stages.at[
                                            stage * y_per_stage, pl.ds(half * SIDE, SIDE), pl.ds(part * SIDE, SIDE)
                                        ].transpose((1, 0)),
                                    )
                            return scores[...], stage

                        scores, y_stage = pl.run_scoped(score, mosaic.ACC(square, jnp.float32))
                        step += some.pieces_per_half or 1 - half
                        if some.pieces_per_half or half:
                            done(y_stage)
                        if pairs.bias == "row" and not some.start:
                            scores = scores + down(row_bias)
                        elif pairs.bias == "column" and not some.start:
                            scores = scores + along(of_columns("column_bias", first))
                        weighted = scores * weights(first, logs)
                        if pairs.normalize:
                            size = size + jnp.sum(weighted, axis=1)
                        stage = ready(step)
                        add_product(total, weighted.astype(x.dtype), z_stages.at[stage])
                        done(stage)
                        step += 1
                    return step, size

                size = mosaic.layout_cast(jnp.zeros(SIDE, jnp.float32), by_row)
                step_now = step
                for some in slices:
                    if some.start:
                        mosaic.barrier_arrive(x_emptied)
                    for part in range(some.num_parts):
                        mosaic.barrier_wait(x_filled.at[part])
                    step_now, size = lax.fori_loop(
                        *column_range(p.down), functools.partial(one_column, some), (step_now, size)
                    )
                    inter = of_rows("inter")
                    for part in range(some.num_parts):
                        read = mosaic.load(x_tile.at[part, mine], layout=mosaic.Layout.WGMMA).astype(jnp.float32)
                        read = (read * down(inter)).astype(x.dtype)
                        stage = ready(step_now)
                        piece = memory_stages.at[stage]
                        add_product(total, read, piece.transpose((1, 0)) if pairs.transposed else piece)
                        done(stage)
                        step_now += 1
                finish(p, total[...], size, step_now)
                return step_now + (2 if pairs.own else 0)

            def finish(p: _Place, total: Any, size: Any, step: Any) -> None:
                first = p.row * length + start + local_row
                factor = own_stage = None
                if pairs.normalize:
                    size = size + of_rows("own_size")
                    factor = 1.0 / jnp.maximum(jnp.abs(size), of_rows("floor"))
                if pairs.own:
                    factor = of_rows("vector_factor")
                    for half in range(2):
                        ready(step + half)
                    own_stage = lax.rem(step + me, tiles.num_stages)
                for part in range(width // SIDE):
                    some = total[:, part * SIDE : (part + 1) * SIDE]
                    if pairs.normalize:
                        some = some * down(factor)
                    if pairs.own:
                        vector = mosaic.load(
                            given["chunk_vectors"].at[
                                p.which * num_chunks + p.chunk, pl.ds(p.column + part * SIDE, SIDE)
                            ],
                            layout=by_column,
                            optimized=False,
                        )
                        some = some + down(factor) * along(vector)
                        own_part = mosaic.load(
                            z_stages.at[own_stage, :, pl.ds(part * SIDE, SIDE)], layout=mosaic.Layout.WGMMA
                        )
                        dots = jnp.sum(some * own_part.astype(jnp.float32), axis=1)
                        if part * SIDE < overlap:
                            dots = dots * (p.across < tiles_across - 1).astype(jnp.float32)
                        size = size + dots
                    x_tile.at[part, mine][...] = some.astype(out.dtype)  # `x` is no longer needed.
                if pairs.own:
                    for half in range(2):
                        done(lax.rem(step + half, tiles.num_stages))
                if pairs.normalize or pairs.own:
                    numbers.at[me][...] = size
                mosaic.commit_smem()
                for part in range(width // SIDE):
                    mosaic.copy_smem_to_gmem(
                        x_tile.at[part, mine],
                        out.at[pl.ds(first, SIDE), pl.ds(p.head * z_size + p.column + part * SIDE, SIDE)],
                        commit_group=False,
                    )
                if pairs.normalize or pairs.own:
                    mosaic.copy_smem_to_gmem(
                        numbers.at[me],
                        given["numbers_out"].at[p.which, p.across if pairs.own else 0, pl.ds(start + local_row, SIDE)],
                        commit_group=False,
                    )
                mosaic.commit_smem_to_gmem_group()
                mosaic.wait_smem_to_gmem(0, wait_read_only=True)
                mosaic.barrier_arrive(x_emptied)

            return pl.run_scoped(work, mosaic.ACC((SIDE, width), jnp.float32))

        lax.fori_loop(0, num_local, one_tile, jnp.int32(0))

    pl.when(me == 2)(fetch)
    pl.when(me < 2)(multiply)
