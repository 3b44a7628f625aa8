"""Attention heads split over a tensor axis.

Each device computes some of the query heads. With grouped-query attention there can be fewer key/value heads than
devices. Neighboring devices then share a head: each computes some of its features, and they all-gather the whole head,
which is small compared to the rows of the block. The gradient is a reduce-scatter among the same devices.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
from jax import lax

from meshwright.errors import PlacementError
from meshwright.mesh.axes import pcast_varying, summing_dtype
from meshwright.parallel.local_map import AxisView
from meshwright.specs import round_up


def heads_fit(num_heads: int, ways: int, *, shared: bool = False) -> bool:
    """Returns whether `ways` devices can split the heads evenly, or with `shared`, share each head evenly.

    Example:
        >>> heads_fit(16, 8), heads_fit(4, 8), heads_fit(4, 8, shared=True), heads_fit(3, 8, shared=True)
        (True, False, True, False)
    """
    return num_heads % ways == 0 or (shared and num_heads > 0 and ways % num_heads == 0)


def local_heads(num_heads: int, *, axis: str | None, what: str = "heads") -> int:
    """Returns the number of heads visible to the program: one device's share in the local view, otherwise all.

    Raises in every view if the axis size does not divide the number of heads.

    Args:
        what: name of the heads in errors, e.g. "kv heads".

    Example:
        >>> import meshwright as mw
        >>> with jax.set_mesh(mw.create_mesh("tp:8")):
        ...     local_heads(16, axis="tp")
        16
    """
    view = AxisView.of(axis, who="local_heads")
    if not heads_fit(num_heads, view.ways):
        raise _unfit(num_heads, view.ways, axis, what, shared=False)
    return num_heads // view.num_slices


def split_heads(
    y: jax.Array, num_heads: int, *, axis: str | None, shared: bool = False, what: str = "heads"
) -> jax.Array:
    """Reshapes features into this device's heads, `[..., heads, K]`.

    Args:
        y: `[..., features]`, split by features over `axis`, as returned by `column_dense`.
        num_heads: total number of heads; a multiple of the axis size.
        shared: allow fewer heads than devices (for keys and values) if `num_heads` divides the axis size. Each device
            then gets the whole head to which its features belong.
        what: name of the heads in errors.

    Example:
        >>> import jax.numpy as jnp
        >>> import meshwright as mw
        >>> from jax.sharding import PartitionSpec as P
        >>> call = lambda y: split_heads(y, 2, axis="tp", shared=True)
        >>> run = mw.parallel.local_map(
        ...     call, mesh=mw.create_mesh("tp:8"), in_specs=P(None, "tp"), out_specs=P(None, "tp", None)
        ... )
        >>> run(jnp.arange(8.0)[None])[0].tolist()[3:5]
        [[0.0, 1.0, 2.0, 3.0], [4.0, 5.0, 6.0, 7.0]]
    """
    view = AxisView.of(axis, who="split_heads")
    ways = view.ways
    if not heads_fit(num_heads, ways, shared=shared):
        raise _unfit(num_heads, ways, axis, what, shared=shared)
    view.check_split(y=y)
    together, here = ways // num_heads if num_heads else 1, num_heads
    if axis is not None and view.kind == "local":
        here = max(1, num_heads // ways)
        if together > 1:
            y = _from_neighbors(axis, together, pcast_varying(y, axis))
    elif together > 1:
        spec = tuple(jax.typeof(y).sharding.spec)  # Names the axes of each dim if they are explicit.
        if len(spec) == y.ndim and spec[-1] is not None:
            raise view.error(
                f"{num_heads} {what} for {ways} devices of axis {axis!r}, which is explicit, would split heads.",
                hint="use the local view, or a mesh whose axes are automatic (AxisType.Auto).",
            )
    if here < 1 or y.shape[-1] % here:
        raise view.error(f"{y.shape[-1]} features are not {here} {what} of one size.", hint="check num_heads.")
    return y.reshape(*y.shape[:-1], here, y.shape[-1] // here)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _from_neighbors(axis: str, together: int, y: Any) -> Any:
    """All-gathers the last dim among groups of `together` neighboring devices."""
    return lax.all_gather(y, axis, axis=y.ndim - 1, tiled=True, axis_index_groups=_groups(axis, together))


def _from_neighbors_bwd(axis: str, together: int, _: None, d_whole: Any) -> tuple[Any]:
    total = lax.psum_scatter(
        d_whole.astype(summing_dtype(d_whole.dtype)),
        axis,
        scatter_dimension=d_whole.ndim - 1,
        tiled=True,
        axis_index_groups=_groups(axis, together),
    )
    return (total.astype(d_whole.dtype),)


_from_neighbors.defvjp(lambda axis, together, y: (_from_neighbors(axis, together, y), None), _from_neighbors_bwd)


def _groups(axis: str, together: int) -> list[list[int]]:
    return [list(range(first, first + together)) for first in range(0, lax.axis_size(axis), together)]


def _unfit(num_heads: int, ways: int, axis: str | None, what: str, *, shared: bool) -> PlacementError:
    fitting = [str(count) for count in range(2, num_heads + 1) if num_heads % count == 0]
    down, up = num_heads // ways * ways, round_up(num_heads, ways)
    if shared:
        fitting.append(f"{2 * num_heads}, {4 * num_heads} or so")
        down = down or max(count for count in range(1, ways) if ways % count == 0 and count <= max(1, num_heads))
    return PlacementError(
        f"{num_heads} {what} are not divisible by the {ways} devices of axis {axis!r}: "
        f"{num_heads} % {ways} = {num_heads % ways}.",
        hint=f"use {f'{down} or {up}' if down else up} {what}, or an axis of {', '.join(['1', *fitting])} devices.",
    )
