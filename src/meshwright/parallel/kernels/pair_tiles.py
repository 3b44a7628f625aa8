"""What `pair_kernel` computes for a tile, and how it splits its work."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from meshwright.specs import ceil_div

TILE_ROWS = 128
SIDE = 64  # Tokens of a multiplying warpgroup, and columns of a row of swizzled memory.
_WIDTHS = (256, 192, 128, 64)
_SHARED_BYTES = 224 * 1024  # Of 227 kB, the rest for barriers and vectors.
_MOST_STAGES = 4
_SLICE = 512  # With it, a width of 256 has three stages.


@dataclass(frozen=True)
class Tiles:
    """How a block splits its work. A stage is `width` columns of 64 tokens, or as many bytes of another array.

    For `y`, a stage is `y_rows` tokens of one or more times `y_columns` features, of which the first are used.
    """

    width: int  # columns of the result
    slices: tuple[int, ...]  # features of `x` that are in shared memory at once
    y_rows: int
    y_columns: int
    num_stages: int


@functools.cache
def pair_tiles(x_size: int, z_size: int) -> Tiles | None:
    """Returns the tiles for these numbers of features, or None if they are not multiples of 64.

    All tiles have one width, so the last two may share columns; both compute them.
    """
    if x_size % SIDE or z_size % SIDE:
        return None
    # Scores are computed once per tile, so fewer tiles cost less; narrower ones share fewer columns.
    widths = sorted((width for width in _WIDTHS if width <= z_size), key=lambda width: (ceil_div(z_size, width), width))
    parts = (*(_SLICE,) * (x_size // _SLICE), *((x_size % _SLICE,) if x_size % _SLICE else ()))
    for width in widths:
        for slices in ((x_size,), parts):
            num_stages = (_SHARED_BYTES - TILE_ROWS * max(*slices, width) * 2) // (SIDE * width * 2)
            if num_stages < 3:
                continue
            y_rows = TILE_ROWS if slices == (width // 2,) else SIDE
            most = width * SIDE // y_rows
            y_columns = math.gcd(most, *slices)
            return Tiles(width, slices, y_rows, y_columns, min(num_stages, _MOST_STAGES))
    raise AssertionError(f"no tiles for {x_size} and {z_size} features")


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
