"""The local view: mechanisms on plain arrays, for use inside `shard_map`."""

from meshwright.axes import axis_size, is_manual, place_on, vary, varying_axes
from meshwright.parallel.local import local_map
from meshwright.parallel.ring import (
    async_gather,
    async_gather_bidirectional,
    async_gather_split,
    async_scatter,
    async_scatter_split,
)

__all__ = [
    "async_gather",
    "async_gather_bidirectional",
    "async_gather_split",
    "async_scatter",
    "async_scatter_split",
    "axis_size",
    "is_manual",
    "local_map",
    "place_on",
    "vary",
    "varying_axes",
]
