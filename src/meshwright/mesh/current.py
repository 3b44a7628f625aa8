"""The current mesh, checks of the axes of a mesh, and errors about meshes."""

from __future__ import annotations

from collections.abc import Sequence

import jax
from jax.sharding import AbstractMesh, Mesh

from meshwright.errors import MeshError, PlacementError, did_you_mean

AnyMesh = Mesh | AbstractMesh


def current_mesh() -> AbstractMesh | None:
    """Returns the current mesh (from `jax.set_mesh`, `with mesh:` or `shard_map`), also while tracing, or None.

    Example:
        >>> import meshwright as mw
        >>> with jax.set_mesh(mw.create_mesh("dp:4,tp:2")):
        ...     current_mesh().axis_names
        ('dp', 'tp')
        >>> current_mesh() is None
        True
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.axis_names:
        return mesh
    legacy = _legacy_mesh()
    return legacy.abstract_mesh if legacy is not None else None


def current_concrete_mesh() -> Mesh | None:
    """Returns the current mesh with its devices, or None; inside `jit` there is none."""
    try:
        mesh = jax.sharding.get_mesh()
    except ValueError:  # raised inside jit
        mesh = None
    if isinstance(mesh, Mesh) and mesh.axis_names:
        return mesh
    return _legacy_mesh()


def names_in_current_mesh(*names: str) -> bool:
    """Returns whether the current mesh has all these axes; False without a mesh.

    Example:
        >>> import meshwright as mw
        >>> with jax.set_mesh(mw.create_mesh("dp:4,tp:2")):
        ...     names_in_current_mesh("dp", "tp"), names_in_current_mesh("sp")
        (True, False)
    """
    mesh = current_mesh()
    return mesh is not None and all(name in mesh.axis_names for name in names)


def require_axes(mesh: AnyMesh, names: Sequence[str], *, where: str) -> None:
    """Raises if `mesh` lacks one of the axes, with a spelling hint."""
    for name in names:
        if name not in mesh.axis_names:
            known = ", ".join(mesh.axis_names)
            raise MeshError(
                f"{where} names axis {name!r}; the mesh has axes: {known}.",
                hint=did_you_mean(name, mesh.axis_names) or f"use one of: {known}",
            )


def describe_mesh(mesh: AnyMesh) -> str:
    """Returns the mesh as a short string for messages and tables: `dp=2 x tp=4`."""
    return " x ".join(f"{name}={size}" for name, size in mesh.shape.items()) or "no axes"


def no_mesh_error(who: str) -> MeshError:
    """Returns the error for a call that needs a current mesh."""
    return MeshError(f"{who} needs a mesh, but none is set.", hint="wrap the call in `with jax.set_mesh(mesh):`.")


def other_mesh_error(what: str, own: AnyMesh, mesh: AnyMesh) -> PlacementError:
    """Returns the error for an array on another mesh than the current one."""
    return PlacementError(
        f"{what} is on the mesh {describe_mesh(own)}, but the current mesh is {describe_mesh(mesh)}.",
        hint="move it with Layout.shard(tree, reshard=True).",
    )


def _legacy_mesh() -> Mesh | None:
    # `with mesh:` is deprecated but still common, and JAX has no public way to query it.
    from jax._src.mesh import thread_resources

    mesh = thread_resources.env.physical_mesh
    return None if mesh.empty else mesh
