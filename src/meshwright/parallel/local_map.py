"""`local_map` (a `shard_map` without size-1 axes) and `AxisView`, which runs one operation in any view."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
from jax import lax
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

from meshwright.errors import PlacementError
from meshwright.mesh.axes import pcast_alike, varying_axes, view_of, ways_along
from meshwright.mesh.current import AnyMesh, current_mesh, no_mesh_error, require_axes
from meshwright.specs import get_names_from_partition_spec, keep_axes, round_up
from meshwright.types import PyTree


def local_map(
    f: Callable[..., Any],
    *,
    in_specs: PyTree,
    out_specs: PyTree,
    mesh: AnyMesh | None = None,
    axes: Sequence[str] | None = None,
    check_vma: bool = True,
) -> Callable[..., Any]:
    """Maps `f` over the shards of global arrays, like `jax.shard_map`.

    Axes of size 1 are dropped first, so they cost nothing; on a mesh of one device, `f` is called directly.

    Args:
        mesh: the mesh (default: the current mesh when the result is called).
        axes: the axes to make manual (default: all). The others stay automatic.
        check_vma: let JAX check which values are replicated. If False, you must reduce the gradients of replicated
            values yourself.

    Example:
        >>> import jax.numpy as jnp, meshwright as mw
        >>> total = local_map(
        ...     lambda x: jax.lax.psum(x.sum(), "dp"), mesh=mw.create_mesh("dp:8"), in_specs=P("dp"), out_specs=P()
        ... )
        >>> float(total(jnp.arange(16.0)))
        120.0
    """

    @functools.wraps(f)
    def wrapped(*args: Any) -> Any:
        target: Any = mesh if mesh is not None else current_mesh()
        if target is None:
            raise no_mesh_error("local_map")
        wanted = tuple(target.axis_names if axes is None else axes)
        require_axes(target, wanted, where="local_map")
        specs = filter(_is_spec, jax.tree.leaves((in_specs, out_specs), is_leaf=_is_spec))
        require_axes(target, get_names_from_partition_spec(list(specs)), where="local_map")
        manual = frozenset(axis for axis in wanted if target.shape[axis] > 1)
        if not manual:
            abstract = target if isinstance(target, AbstractMesh) else target.abstract_mesh
            with jax.sharding.use_abstract_mesh(abstract):
                return f(*args)
        kept_in, kept_out = jax.tree.map(
            lambda spec: keep_axes(spec, manual.__contains__) if _is_spec(spec) else spec,
            (in_specs, out_specs),
            is_leaf=_is_spec,
        )
        try:
            return jax.shard_map(
                f, mesh=target, in_specs=kept_in, out_specs=kept_out, axis_names=manual, check_vma=check_vma
            )(*args)
        except ValueError as error:
            if "require replication which can't be statically inferred" not in str(error):
                raise
            raise PlacementError(
                f"an output of {getattr(f, '__name__', 'the function')} is declared replicated by its out_specs but "
                f"differs between devices.\n{error}",
                hint="reduce it (jax.lax.psum, pmean) over these axes, or name them in out_specs.",
            ) from None

    return wrapped


def island(f: Callable[..., Any], *, axis: str, in_specs: PyTree, out_specs: PyTree) -> Callable[..., Any]:
    """Runs `f` in the local view along one axis, inside a program in which that axis is automatic.

    Example:
        >>> import jax.numpy as jnp, meshwright as mw
        >>> total = island(lambda x: jax.lax.psum(x.sum(), "tp"), axis="tp", in_specs=P("tp"), out_specs=P())
        >>> with jax.set_mesh(mw.create_mesh("tp:8")):
        ...     float(jax.jit(lambda x: total(x) / x.size)(jnp.arange(16.0)))
        7.5
    """

    @functools.wraps(f)
    def wrapped(*args: Any) -> Any:
        mesh = current_mesh()
        inner = f
        if mesh is not None and mesh.manual_axes:
            # JAX 0.10 to 0.12 cannot lower residuals that name the outer manual axes, so only arguments are saved.
            inner = jax.checkpoint(f)
        mapped = local_map(inner, axes=(axis,), in_specs=in_specs, out_specs=out_specs)
        # Gradients that need a sum over an outer axis must be summed outside the island.
        return mapped(*pcast_alike(*args))

    return wrapped


@dataclass(frozen=True)
class AxisView:
    """The view in which an operation sees arrays split along an axis, with the matching argument checks.

    Args:
        axis: the mesh axis, or None for no split.
        kind: the view, as returned by `view_of`.
        ways: number of devices along the axis; 1 in the plain view.
        who: name of the operation, used as the prefix of its errors.
    """

    axis: str | None
    kind: Literal["plain", "local", "global"]
    ways: int
    who: str

    @classmethod
    def of(cls, axis: str | None, *, who: str) -> AxisView:
        """Returns the view of the program being traced; raises if its mesh lacks the axis."""
        return cls(axis, view_of(axis, who=who), ways_along(axis, who=who), who)

    @property
    def num_slices(self) -> int:
        """Number of visible slices that make up a whole array: 1 unless the view is local."""
        return self.ways if self.kind == "local" else 1

    def run(
        self,
        local: Callable[..., Any],
        *args: Any,
        in_specs: PyTree,
        out_specs: PyTree,
        plain: Callable[..., Any] | None = None,
    ) -> Any:
        """Runs `local` on slices (as an island in the global view), or `plain` in the plain view if given."""
        if self.kind == "global":
            assert self.axis is not None
            return island(local, axis=self.axis, in_specs=in_specs, out_specs=out_specs)(*args)
        return (plain if plain is not None and self.kind == "plain" else local)(*args)

    def error(self, text: str, *, hint: str) -> PlacementError:
        """Returns an error prefixed with the operation's name."""
        return PlacementError(f"{self.who}: {text}", hint=hint)

    def check_divides(self, size: int, what: str) -> None:
        """Raises if the axis size does not divide `size`."""
        if size % self.ways:
            raise self.error(
                f"{size} {what} cannot be split over {self.ways} devices of axis {self.axis!r}: {size} % {self.ways} = "
                f"{size % self.ways}.",
                hint=f"pad to {round_up(size, self.ways)}.",
            )

    def check_split(self, **slices: Any) -> None:
        """Raises if an argument is replicated over a manual axis that should split it."""
        if self.kind != "local" or self.axis not in varying_axes(lax.axis_index(self.axis)):
            return  # The arrays are whole in this view, or check_vma is off.
        for name, value in slices.items():
            if self.axis not in varying_axes(value):
                raise self.error(
                    f"{name} of shape {value.shape} is the same on every device of axis {self.axis!r}; each needs its "
                    "own slice.",
                    hint=f"name {self.axis!r} in the spec of {name}; if the slices are equal on purpose, mark it with "
                    "pcast_varying.",
                )

    def check_matmul(self, x: Any, ws: Sequence[Any]) -> None:
        """Raises if `[..., rows, K]` cannot be multiplied by `[K, F]`."""
        for w in ws:
            if x.ndim < 2 or w.ndim != 2 or w.shape[0] != x.shape[-1]:
                raise self.error(
                    f"cannot multiply x of shape {x.shape} by a weight of shape {w.shape}.",
                    hint="x must be [..., rows, K] and the weight [K, features]; in the local view, both are slices.",
                )


def _is_spec(node: Any) -> bool:
    return isinstance(node, P)
