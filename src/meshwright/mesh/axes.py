"""Queries about mesh axes inside a program: manual or not, size, this device's index, and which values vary.

The whole local view uses these functions, so a missing, misspelled or size-1 axis behaves the same everywhere. An
axis of size 1 needs no communication, and None stands for "not split", which is the same thing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from meshwright.errors import MeshError
from meshwright.hardware.chips import chip_family
from meshwright.mesh.current import current_mesh, require_axes
from meshwright.types import PyTree


def is_manual(axis: str) -> bool:
    """Returns whether the program sees one device's slice along this axis, as it does inside `shard_map`.

    Example:
        >>> from meshwright import P, create_mesh
        >>> is_manual("tp")
        False
        >>> with jax.set_mesh(create_mesh("tp:8")):
        ...     jax.shard_map(lambda x: x * is_manual("tp"), in_specs=P("tp"), out_specs=P("tp"))(jnp.ones(8)).sum()
        Array(8., dtype=float32)
    """
    mesh = current_mesh()
    return mesh is not None and axis in mesh.manual_axes


def view_of(axis: str | None, *, who: str) -> Literal["plain", "local", "global"]:
    """Returns how the program sees arrays that are split along an axis.

    `"local"`: one device's slice, inside `shard_map`. `"global"`: the whole array, in a program that XLA partitions.
    `"plain"`: the array is not split, because there is no mesh, the axis has size 1, or `axis` is None. Raises if the
    mesh lacks the axis; `who` names the caller in the error.

    Example:
        >>> from meshwright import create_mesh
        >>> with jax.set_mesh(create_mesh("dp:8,tp:1")):
        ...     view_of("dp", who="example"), view_of("tp", who="example")
        ('global', 'plain')
    """
    mesh = current_mesh()
    if mesh is None or axis is None:
        return "plain"
    require_axes(mesh, (axis,), where=who)
    if mesh.shape[axis] == 1:
        return "plain"
    return "local" if axis in mesh.manual_axes else "global"


def axis_size(axis: str | None, *, who: str = "axis_size") -> int:
    """Returns the number of devices along a manual axis, and 1 for None or for any axis of size 1.

    Raises if the mesh lacks the axis, or if the axis is not manual; `who` names the caller in the error.

    Example:
        >>> from meshwright import P, create_mesh
        >>> with jax.set_mesh(create_mesh("tp:8")):
        ...     jax.shard_map(lambda x: x * axis_size("tp"), in_specs=P("tp"), out_specs=P("tp"))(jnp.ones(8)).sum()
        Array(64., dtype=float32)
    """
    if axis is None:
        return 1
    mesh = current_mesh()
    if mesh is None:
        raise MeshError(
            f"{who} was called outside of shard_map, with no mesh that has axis {axis!r}.",
            hint="call it inside a function that you pass to meshwright.parallel.local_map or jax.shard_map.",
        )
    require_axes(mesh, (axis,), where=who)
    size = int(mesh.shape[axis])
    if axis not in mesh.manual_axes and size > 1:
        where = "outside of shard_map" if not mesh.manual_axes else "inside a shard_map over other axes"
        raise MeshError(
            f"{who} was called {where}: axis {axis!r} is automatic here.",
            hint=f"call it inside jax.shard_map and include {axis!r} in axis_names.",
        )
    return size


def ways_along(axis: str | None, *, who: str = "ways_along") -> int:
    """Returns the number of devices along an axis, manual or not; 1 for None or without a mesh."""
    mesh = current_mesh()
    if mesh is None or axis is None:
        return 1
    require_axes(mesh, (axis,), where=who)
    return int(mesh.shape[axis])


def axis_index(axis: str | None, *, who: str = "axis_index") -> Any:
    """Returns this device's index along a manual axis; 0 for None or for an axis of size 1.

    Example:
        >>> from meshwright import P, create_mesh
        >>> with jax.set_mesh(create_mesh("tp:8")):
        ...     jax.shard_map(lambda x: x * axis_index("tp"), in_specs=P("tp"), out_specs=P("tp"))(jnp.ones(8))
        Array([0., 1., 2., 3., 4., 5., 6., 7.], dtype=float32)
    """
    return lax.axis_index(axis) if axis is not None and axis_size(axis, who=who) > 1 else 0


def varying_axes(x: Any) -> frozenset[str]:
    """Returns the manual axes along which a value may vary; empty if `check_vma` is off.

    Example:
        >>> from meshwright import P, create_mesh
        >>> def show(x):
        ...     print(sorted(varying_axes(x)))
        ...     return x
        >>> with jax.set_mesh(create_mesh("dp:4,tp:2")):
        ...     _ = jax.jit(jax.shard_map(show, in_specs=P("dp"), out_specs=P("dp")))(jnp.ones(8))
        ['dp']
    """
    if isinstance(x, jax.ShapeDtypeStruct):
        # jax.typeof fails on it if any axis is automatic, and `local_map` makes all axes of size 1 automatic.
        known = x.manual_axis_type
        return frozenset() if known is None else frozenset(known.varying)
    kind = jax.typeof(x)
    matter = getattr(kind, "mat", None)  # since jax 0.12
    return frozenset(matter.varying if matter is not None else kind.vma)


def pcast_varying(tree: PyTree, axes: str | Sequence[str] | None) -> PyTree:
    """Casts arrays to varying along manual axes; the gradient of this cast is a sum over these axes.

    The explicit cast decides where that sum happens. Otherwise JAX inserts it at the first use of the array.

    Example:
        >>> from meshwright import P, create_mesh
        >>> loss = lambda w, x: (pcast_varying(w, "dp") * x).sum()
        >>> step = jax.shard_map(jax.grad(loss), in_specs=(P(), P("dp")), out_specs=P())
        >>> with jax.set_mesh(create_mesh("dp:8")):
        ...     jax.jit(step)(jnp.float32(1), jnp.arange(8.0))
        Array(28., dtype=float32)
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
    """Casts arrays to varying along `axes` and along every manual axis along which any of them varies.

    A gradient from `custom_vjp` must have its input's type, so all inputs of such a function vary along the same axes;
    the sums over devices that their gradients need happen outside.
    """
    return pcast_varying(trees, sorted(frozenset(axes).union(*map(varying_axes, jax.tree.leaves(trees)))))


def summing_dtype(dtype: Any) -> Any:
    """Returns the dtype for sums over devices: float32 for 16-bit floats on CPUs, otherwise `dtype`.

    With one manual and one automatic axis, even of size 1, XLA's CPU compiler (jax 0.10 to 0.12) aborts the process on
    a psum of 16-bit floats.
    """
    on_cpu = chip_family(current_mesh()) == "cpu"
    narrow = jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize == 2
    return jnp.float32 if on_cpu and narrow else dtype
