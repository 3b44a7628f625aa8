"""Mesh axes inside a program: which are manual here, how long they are, where this device stands, what varies.

Every function of the local view asks here, so that an axis that is missing, misspelt or of size 1 is treated the
same everywhere: size 1 means "nothing to do", whether the axis is manual or was dropped before `shard_map`. Where a
function takes None for an axis, that means "not split", and is like an axis of size 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from meshwright.errors import MeshError
from meshwright.hardware.chips import chip_family
from meshwright.mesh.build import current_mesh, require_axes
from meshwright.types import PyTree


def is_manual(axis: str) -> bool:
    """Returns whether the program here sees one device's slice along this axis (inside `shard_map`)."""
    mesh = current_mesh()
    return mesh is not None and axis in mesh.manual_axes


def view_of(axis: str | None, *, who: str) -> Literal["plain", "local", "global"]:
    """Returns how a program sees arrays that are split along an axis: the choice that every layer makes.

    `"local"`: as one device's slice, inside `shard_map`. `"global"`: whole, in a program that XLA splits. `"plain"`:
    whole, on one device, since there is no mesh, the axis has size 1, or None was given for it: nothing is split then.
    Raises where a mesh lacks the axis.
    """
    mesh = current_mesh()
    if mesh is None or axis is None:
        return "plain"
    require_axes(mesh, (axis,), where=who)
    if mesh.shape[axis] == 1:
        return "plain"
    return "local" if axis in mesh.manual_axes else "global"


def axis_size(axis: str | None, *, who: str = "axis_size") -> int:
    """Returns how many devices lie along a manual axis; 1 for an axis of size 1, manual or not, and for None.

    Raises when there is no such axis, or when the program is not split over it; `who` names the caller.
    """
    if axis is None:
        return 1
    mesh = current_mesh()
    if mesh is None:
        raise MeshError(
            f"{who} was called outside of shard_map, where axis {axis!r} has no devices to talk to.",
            hint="call it inside the function given to meshwright.parallel.local_map or jax.shard_map.",
        )
    require_axes(mesh, (axis,), where=who)
    size = int(mesh.shape[axis])
    if axis not in mesh.manual_axes and size > 1:
        where = "outside of shard_map" if not mesh.manual_axes else "where this axis is not manual"
        raise MeshError(
            f"{who} was called {where}: axis {axis!r} is automatic here.",
            hint=f"call it inside jax.shard_map with {axis!r} among its axis_names.",
        )
    return size


def ways_along(axis: str | None, *, who: str = "ways_along") -> int:
    """Returns how many devices lie along an axis, manual or not; 1 for None, and where there is no mesh."""
    mesh = current_mesh()
    view_of(axis, who=who)  # raises for an axis that the mesh lacks
    return 1 if mesh is None or axis is None else int(mesh.shape[axis])


def axis_index(axis: str | None, *, who: str = "axis_index") -> Any:
    """Returns this device's index along an axis: 0 where the axis has size 1, and for None."""
    return lax.axis_index(axis) if axis is not None and axis_size(axis, who=who) > 1 else 0


def varying_axes(x: Any) -> frozenset[str]:
    """Returns the manual axes along which this value may differ; empty where `check_vma` is off."""
    if isinstance(x, jax.ShapeDtypeStruct):
        # Its type cannot be asked for where an axis is automatic, which `local_map` makes all axes of size 1.
        known = x.manual_axis_type
        return frozenset() if known is None else frozenset(known.varying)
    kind = jax.typeof(x)
    matter = getattr(kind, "mat", None)  # since jax 0.12
    return frozenset(matter.varying if matter is not None else kind.vma)


def pcast_varying(tree: PyTree, axes: str | Sequence[str] | None) -> PyTree:
    """Marks arrays as differing along manual axes; the gradient of this mark is the sum over these axes.

    Doing it in one place, on purpose, decides where that sum happens; JAX would otherwise do it at the first use.
    """
    wanted = [axis for axis in ((axes,) if isinstance(axes, str) else axes or ()) if is_manual(axis)]

    def mark(leaf: Any) -> Any:
        missing = tuple(axis for axis in wanted if axis not in varying_axes(leaf))
        if not missing:
            return leaf
        kind = jnp.result_type(leaf)
        return lax.pcast(jnp.asarray(leaf, summing_dtype(kind)), missing, to="varying").astype(kind)

    return jax.tree.map(mark, tree)


def pcast_alike(*trees: PyTree, axes: Sequence[str] = ()) -> Any:
    """Marks arrays as differing along every manual axis along which one of them does, and along `axes`.

    A custom gradient must have the type of what it is the gradient of, so all inputs of such a function vary alike; the
    sums that this implies for their gradients happen outside.
    """
    return pcast_varying(trees, sorted(frozenset(axes).union(*map(varying_axes, jax.tree.leaves(trees)))))


def summing_dtype(dtype: Any) -> Any:
    """Returns the dtype in which devices here can add up values of another: itself, but for 16-bit floats on CPUs.

    Where one axis is manual and another, even of size 1, is automatic, XLA's CPU compiler (jax 0.10 to 0.12) aborts the
    process on a sum over devices of such floats.
    """
    on_cpu = chip_family(current_mesh()) == "cpu"
    narrow = jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize == 2
    return jnp.float32 if on_cpu and narrow else dtype
