"""Entering the local view, and running one operation in every view.

`local_map` is `shard_map` without the axes that have one device, and with errors that name the cause. `AxisView` is
what every layer asks: how a program sees arrays that an axis splits, which checks follow, and how to run there.
"""

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
from meshwright.mesh.build import AnyMesh, current_mesh, no_mesh_error, require_axes
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
    """Returns `f` as a function of global arrays, run on every device's slice of them.

    Axes of size 1 are dropped first, so they cost nothing: on a mesh of one device `f` runs as it is.

    Args:
        mesh: the mesh; by default the one in force when the result is called.
        axes: the axes that become manual; all of the mesh by default. The others stay automatic.
        check_vma: lets JAX check what is replicated. Without it, gradients of replicated values are wrong unless they
            are reduced by hand.

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
        require_axes(target, get_names_from_partition_spec([_leaves(in_specs), _leaves(out_specs)]), where="local_map")
        manual = frozenset(axis for axis in wanted if target.shape[axis] > 1)
        if not manual:
            abstract = target if isinstance(target, AbstractMesh) else target.abstract_mesh
            with jax.sharding.use_abstract_mesh(abstract):
                return f(*args)
        try:
            return jax.shard_map(
                f,
                mesh=target,
                in_specs=_without_small_axes(in_specs, manual),
                out_specs=_without_small_axes(out_specs, manual),
                axis_names=manual,
                check_vma=check_vma,
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
    """Returns `f` as one operation of a program in which an axis is automatic: only that axis is manual inside."""

    @functools.wraps(f)
    def wrapped(*args: Any) -> Any:
        mesh = current_mesh()
        inner = f
        if mesh is not None and mesh.manual_axes:
            # What the backward pass keeps from inside gets specs that name the axes outside, which JAX (0.10 to 0.12)
            # cannot lower. It keeps arguments as they are, so here they are all that is kept.
            inner = jax.checkpoint(f)
        mapped = local_map(inner, axes=(axis,), in_specs=in_specs, out_specs=out_specs)
        # Sums over the axes outside, which gradients of arguments may need, must happen outside as well.
        return mapped(*pcast_alike(*args))

    return wrapped


@dataclass(frozen=True)
class AxisView:
    """How an operation sees arrays that are split along an axis, with the checks that depend on it.

    Args:
        kind: what `view_of` returns.
        ways: how many devices lie along the axis; 1 in the plain view.
        who: the name of the operation, with which its errors begin.
    """

    axis: str | None
    kind: Literal["plain", "local", "global"]
    ways: int
    who: str

    @classmethod
    def of(cls, axis: str | None, *, who: str) -> AxisView:
        """Returns the view of the program that is traced here; raises if its mesh lacks the axis."""
        return cls(axis, view_of(axis, who=who), ways_along(axis, who=who), who)

    @property
    def num_slices(self) -> int:
        """How many of the slices that the program sees make up a whole array: 1 unless the view is local."""
        return self.ways if self.kind == "local" else 1

    def run(
        self,
        local: Callable[..., Any],
        *args: Any,
        in_specs: PyTree,
        out_specs: PyTree,
        plain: Callable[..., Any] | None = None,
    ) -> Any:
        """Runs `local` on slices, in the global view as an island; in the plain view, `plain` if it is given."""
        if self.kind == "global":
            assert self.axis is not None
            return island(local, axis=self.axis, in_specs=in_specs, out_specs=out_specs)(*args)
        return (plain if plain is not None and self.kind == "plain" else local)(*args)

    def error(self, text: str, *, hint: str) -> PlacementError:
        """Returns an error that begins with the operation's name."""
        return PlacementError(f"{self.who}: {text}", hint=hint)

    def check_divides(self, size: int, what: str) -> None:
        """Raises if the axis does not divide a dim that it splits."""
        if size % self.ways:
            raise self.error(
                f"{size} {what} cannot be split over {self.ways} devices of axis {self.axis!r}: {size} % {self.ways} = "
                f"{size % self.ways}.",
                hint=f"pad to {round_up(size, self.ways)}.",
            )

    def check_split(self, **slices: Any) -> None:
        """Raises if an argument is whole on every device of a manual axis that should have split it."""
        if self.kind != "local" or self.axis not in varying_axes(lax.axis_index(self.axis)):
            return  # whole arrays are right here; or check_vma is off, and nothing is known
        for name, value in slices.items():
            if self.axis not in varying_axes(value):
                raise self.error(
                    f"{name} of shape {value.shape} is the same on every device of axis {self.axis!r}; each needs its "
                    "own slice.",
                    hint=f"name {self.axis!r} in the spec of {name}; if the slices really are equal, mark it with "
                    "vary.",
                )

    def check_matmul(self, x: Any, ws: Sequence[Any]) -> None:
        """Raises if `[..., rows, K]` cannot be multiplied by `[K, F]`."""
        for w in ws:
            if x.ndim < 2 or w.ndim != 2 or w.shape[0] != x.shape[-1]:
                raise self.error(
                    f"cannot multiply x of shape {x.shape} by a weight of shape {w.shape}.",
                    hint="x must be [..., rows, K] and the weight [K, features]; in the local view, both are slices.",
                )


def _leaves(specs: PyTree) -> list[Any]:
    return [spec for spec in jax.tree.leaves(specs, is_leaf=lambda node: isinstance(node, P)) if isinstance(spec, P)]


def _without_small_axes(specs: PyTree, manual: frozenset[str]) -> PyTree:
    return jax.tree.map(
        lambda spec: keep_axes(spec, lambda axis: axis in manual) if isinstance(spec, P) else spec,
        specs,
        is_leaf=lambda node: isinstance(node, P),
    )
