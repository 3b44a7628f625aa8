"""The user's functions of a pipeline, and the types of the arrays that pass between its stages."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from meshwright.dtypes import is_float
from meshwright.errors import PlacementError
from meshwright.mesh.axes import axis_size, pcast_varying, varying_axes
from meshwright.mesh.current import current_mesh
from meshwright.parallel.overlap.forms import branch
from meshwright.parallel.pipeline.raw_slices import refuse_slices
from meshwright.parallel.pipeline.stage_collectives import refuse_collectives
from meshwright.parallel.row_keys import row_key
from meshwright.parallel.rows import Parts
from meshwright.types import PyTree


@dataclass(frozen=True)
class Functions:
    """The user's functions and the microbatches of `(x, extras, targets)`."""

    stage_fn: Callable[..., PyTree]
    first: Callable[..., PyTree] | None
    last: Callable[..., PyTree] | None
    parts: Parts
    rng: PyTree

    def rows(self, microbatch: Any) -> Any:
        """Returns one microbatch of `(x, extras, targets)`."""
        take = [lax.dynamic_index_in_dim(array, microbatch, keepdims=False) for array in self.parts.arrays]
        return self.parts.join(take)

    def keys(self, microbatch: Any) -> dict[str, PyTree]:
        """Returns the `rng=` argument of a stage, if there is a key."""
        if self.rng is None:
            return {}
        first_row = microbatch * self.parts.num_rows
        return {"rng": jax.tree.map(lambda key: row_key(key, first_row), self.rng)}

    def enter(self, params: PyTree, microbatch: Any) -> PyTree:
        """Returns the input of the first stage."""
        x = self.rows(microbatch)[0]
        with branch():
            return x if self.first is None else self.first(params, x)

    def run(self, params: PyTree, h: PyTree, microbatch: Any) -> PyTree:
        """Returns the output of a stage."""
        return self.stage(params, h, self.rows(microbatch)[1], self.keys(microbatch))

    def stage(self, params: PyTree, h: PyTree, extras: Any, keywords: dict[str, PyTree]) -> PyTree:
        """Returns the output of a stage, given its other arguments."""
        with branch():
            return self.stage_fn(params, h, *extras, **keywords)

    def in_branch(self) -> contextlib.AbstractContextManager[None]:
        """Marks code that only some devices run."""
        return branch()

    def leave(self, params: PyTree, h: PyTree, microbatch: Any) -> PyTree:
        """Returns the result of the last stage."""
        if self.last is None:
            return h
        targets = self.rows(microbatch)[2]
        with branch():
            return self.last(params, h) if targets is None else self.last(params, h, targets)


@dataclass(frozen=True)
class Type:
    """Shape, dtype and varying axes of one array."""

    shape: tuple[int, ...]
    dtype: Any
    axes: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


def flow(f: Functions, params: tuple[PyTree, PyTree, PyTree], axis: str) -> tuple[PyTree, PyTree]:
    """Returns the types of `h` and of the result, and checks the user's functions.

    Args:
        params: the parameters of one stage, of `first` and of `last`.
    """
    stage, first, last = params
    zero = pcast_varying(jnp.int32(0), axis)
    h_type = traced_types(lambda: f.enter(first, zero), axis, name="first")
    while True:
        made = traced_types(lambda: f.run(stage, zeros(h_type), zero), axis, name="stage_fn")  # noqa: B023, called at once
        wider = _join_types(h_type, made)
        if wider == h_type:
            break
        h_type = wider  # A stage may return an `h` that varies along more axes; then its input must vary as well.
    return h_type, traced_types(lambda: f.leave(last, zeros(h_type), zero), axis, name="last")


def traced_types(call: Callable[[], PyTree], axis: str, *, name: str) -> PyTree:
    """Returns the types of a function's results; raises if it would deadlock or closes over slices of parameters.

    A stage may close over slices, which may be its own layers.
    """
    jaxpr, shapes = jax.make_jaxpr(call, return_shape=True)()
    if axis_size(axis, who="pipeline") > 1:
        refuse_collectives(jaxpr.jaxpr, axis=axis, name=name)
    if name != "stage_fn":
        refuse_slices(list(jaxpr.consts), axis=axis, who=f"pipeline: {name}")
    # False if check_vma is off or the axis has size 1.
    checked = axis in varying_axes(pcast_varying(jnp.int32(0), axis))
    for value in jaxpr.consts:
        outside = isinstance(value, jax.core.Tracer) and is_float(value.dtype)
        if checked and outside and axis not in varying_axes(value):
            raise PlacementError(
                f"pipeline: {name} closes over a {value.dtype} array of shape {value.shape} that is replicated over "
                f"{axis!r}. Its gradient would be a sum over {axis!r} inside one stage's branch, which deadlocks.",
                hint=f"pass it through {name}'s parameters, or close over "
                f"meshwright.parallel.pcast_varying(array, {axis!r}).",
            )
    return jax.tree.map(
        lambda leaf: Type(tuple(leaf.shape), leaf.dtype, in_mesh_order(varying_axes(leaf) | {axis})), shapes
    )


def _join_types(taken: PyTree, made: PyTree) -> PyTree:
    structures: list[Any] = [jax.tree.structure(taken), jax.tree.structure(made)]
    same = structures[0] == structures[1] and all(
        (a.shape, a.dtype) == (b.shape, b.dtype)
        for a, b in zip(jax.tree.leaves(taken), jax.tree.leaves(made), strict=True)
    )
    if not same:
        raise PlacementError(
            f"pipeline: a stage takes {jax.tree.map(str, taken)} but returns {jax.tree.map(str, made)}; input and "
            "output must have the same shapes and dtypes.",
            hint="move layers that change shapes into first= (an embedding) or last= (a head).",
        )
    return jax.tree.map(
        lambda a, b: Type(a.shape, a.dtype, in_mesh_order(frozenset(a.axes) | frozenset(b.axes))), taken, made
    )


def zeros(types: PyTree) -> PyTree:
    """Returns zeros of these types."""
    return jax.tree.map(lambda t: pcast_varying(jnp.zeros(t.shape, t.dtype), t.axes), types)


def mark(tree: PyTree, types: PyTree) -> PyTree:
    """Casts a tree to these types."""
    return jax.tree.map(lambda leaf, t: pcast_varying(jnp.asarray(leaf, t.dtype), t.axes), tree, types)


def in_mesh_order(axes: frozenset[str]) -> tuple[str, ...]:
    """Returns axes in the order of the mesh."""
    mesh = current_mesh()
    return tuple(axis for axis in mesh.axis_names if axis in axes) if mesh is not None else ()
