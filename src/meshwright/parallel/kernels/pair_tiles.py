"""What `pair_kernel` computes for a tile, and how it splits its work."""

from __future__ import annotations

import functools
from dataclasses import dataclass

TILE_ROWS = 128
SIDE = 64  # Tokens of a multiplying warpgroup, and columns of a row of swizzled memory.
_WIDTHS = (256, 192, 128, 64)
_SHARED_BYTES = 224 * 1024  # Of 227 kB, the rest for barriers and vectors.
_MOST_STAGES = 4


@dataclass(frozen=True)
class Tiles:
    """How a block splits its work. A stage is `width` columns of 64 tokens, or as many bytes of `y` or the memory."""

    width: int  # columns of the result
    y_rows: int
    y_columns: int
    num_stages: int


@functools.cache
def pair_tiles(x_size: int, z_size: int) -> Tiles | None:
    """Returns the tiles for these numbers of features, or None if the kernel does not support them."""
    if x_size % SIDE or z_size % SIDE:
        return None
    for width in _WIDTHS:
        if z_size % width:
            continue
        y_rows = SIDE if x_size >= width else TILE_ROWS
        y_columns = width * SIDE // y_rows
        if y_columns % SIDE or x_size % y_columns:
            continue
        num_stages = (_SHARED_BYTES - TILE_ROWS * max(x_size, width) * 2) // (SIDE * width * 2)
        if num_stages >= 3:
            return Tiles(width, y_rows, y_columns, min(num_stages, _MOST_STAGES))
    return None


@dataclass(frozen=True)
class Pairs:
    """Which pairs count, and what else a tile computes.

    Attributes:
        causal: s <= t; otherwise s >= t.
        normalize: divide the result by `max(|size|, floor)`, where size is the sum of a token's weighted scores and of
            `own_size`, and also return size.
        bias: "row" or "column" adds a number per token to the scores.
        own: also return the dot product of each token's result with its `own` vector.
        transposed: the memory is `[Z, X]` instead of `[X, Z]`.
    """

    causal: bool
    normalize: bool = False
    name: str = "gated_pairs"
    bias: str | None = None
    own: bool = False
    transposed: bool = False

    @property
    def row_names(self) -> tuple[str, ...]:
        names = ["row", "inter", "bound"]
        names += ["own_size", "floor"] if self.normalize else []
        names += ["row_bias"] if self.bias == "row" else []
        return (*names, *(["vector_factor"] if self.own else []))

    @property
    def column_names(self) -> tuple[str, ...]:
        return ("column", "column_bias") if self.bias == "column" else ("column",)
