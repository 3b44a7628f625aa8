"""States with padded leaves: stored with zeros at the end of dims that a mesh does not divide.

The loss and the optimizer see the logical shapes, so that results equal those of one device. Cutting a parameter
before the loss pads its gradient with zeros, and an update is padded with zeros again, so padding stays zero.
"""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from meshwright.errors import LayoutError
from meshwright.layout import Layout
from meshwright.layout.leaf import LeafLayout
from meshwright.layout.report import LayoutReport, PadPolicy
from meshwright.rules.rule_set import compile_pattern
from meshwright.specs import dim_axes
from meshwright.train.job import execution_of, loss_axes
from meshwright.train.views import GATHER_AXES, PIPELINE_AXES, View, ViewChoice, resolve_view
from meshwright.tree import named_leaves
from meshwright.types import PyTree

STACKED = "layers/"
"""The stacked layers of a model."""
MOST_NAMED = 4


def part_leaves(layout: Layout, part: str) -> list[LeafLayout]:
    """Returns the leaves of one field of a state's layout, such as `opt_state`."""
    parts = layout.structure.unflatten(layout.leaves)
    return jax.tree.leaves(getattr(parts, part), is_leaf=lambda node: isinstance(node, LeafLayout))


def require_padded_names(pad: PadPolicy, params: PyTree) -> None:
    """Raises if a regex of parameters to pad matches none.

    Example:
        >>> require_padded_names(["layers/"], {"w": jnp.zeros(6)})
        Traceback (most recent call last):
        meshwright.errors.LayoutError: pad='layers/' has no effect: no parameter matches.
        hint: leave it out, or use e.g. 'w'.
    """
    if isinstance(pad, bool):
        return
    names = [leaf.name for leaf in named_leaves(params)]
    for text in [pad] if isinstance(pad, str) else pad:
        if not any(map(compile_pattern(text).matches, names)):
            (close,) = difflib.get_close_matches(text, names, 1, 0) or [""]
            hint = f"leave it out, or use e.g. {close!r}."
            raise LayoutError(f"pad={text!r} has no effect: no parameter matches.", hint=hint)


def cut(tree: PyTree, leaves: Sequence[LeafLayout]) -> PyTree:
    """Returns a tree without padding; dims that are not padded keep their size, so slices in the local view do too.

    Example:
        >>> import meshwright as mw
        >>> params = {"w": jnp.ones(10)}
        >>> layout = mw.make_layout([("w", mw.P("fsdp"))], params, mw.create_abstract_mesh("fsdp:8"), pad=True)
        >>> stored = fill(params, layout.leaves)
        >>> stored["w"].shape, cut(stored, layout.leaves)["w"].shape
        ((16,), (10,))
    """
    return _each(_cut, tree, leaves)


def fill(tree: PyTree, leaves: Sequence[LeafLayout]) -> PyTree:
    """Returns a tree with its leaves padded with zeros to their stored shapes; see `cut`."""
    return _each(_fill, tree, leaves)


def split_evenly(tree: PyTree, layout: Layout) -> PyTree:
    """Constrains leaves that will be padded to be split only along their other dims, for use inside `jax.jit`.

    Random numbers in uneven shards can differ in the last bit from those on one device.
    """

    def constrain(value: Any, leaf: LeafLayout) -> Any:
        dims = zip(leaf.spec, leaf.shape, leaf.stored_shape, strict=False)
        spec = P(*(entry if size == stored else None for entry, size, stored in dims))
        return jax.lax.with_sharding_constraint(value, NamedSharding(layout.mesh, spec))

    return _each(constrain, tree, layout.leaves)


def needs_global_view(leaves: Sequence[LeafLayout], *, also: Sequence[str] = ()) -> LeafLayout | None:
    """Returns the first parameter that is padded along an axis over which the local view does not gather, or None.

    Args:
        also: axes along which the loss takes padded slices, such as that of a pipeline.
    """
    return next((leaf for leaf in leaves if is_padded_along_others(leaf, (*GATHER_AXES, *also))), None)


def view_of_layout(
    job: Any, layout: Layout, view: View | None, *, data_axes: str | Sequence[str] | None = None
) -> ViewChoice:
    """`resolve_view` for the layout of a train state, whose padding may need the global view.

    Example:
        >>> import meshwright as mw, optax
        >>> job = mw.Job(init=lambda key: {"w": jnp.zeros(6)}, rules=[("w", mw.P("dp"))])
        >>> layout = mw.train.state_layout(job, optax.sgd(0.1), mw.create_abstract_mesh("dp:4"), pad=True)
        >>> print(view_of_layout(job, layout, None))
        global (`w` is padded)
    """
    choice, run = resolve_view(job, layout.mesh, view, data_axes=data_axes), execution_of(job)
    leaves = part_leaves(layout, "params")
    if run is not None and (leaf := next((leaf for leaf in leaves if run.tensor_axis in _padded_axes(leaf)), None)):
        raise LayoutError(
            f"`{leaf.name.removeprefix('params/')}` is padded from {leaf.shape} to {leaf.stored_shape} along "
            f"{run.tensor_axis!r}, but the model's matmuls need dims that this axis divides.",
            hint="choose a size that it divides, or another mesh.",
        )
    if choice.view == "global":
        return choice
    padded = needs_global_view(leaves, also=stage_axes(job, view))
    if padded is None:
        return choice
    padded = padded._replace(name=padded.name.removeprefix("params/"))
    if view is not None:
        raise pads_in_local_view(padded)
    ignores = needs_global_view(leaves, also=stage_axes(job, "local")) is None
    more = '; if the stages of the loss ignore padding, pass view="local" (--view local)' if ignores else ""
    return ViewChoice("global", f"`{padded.name}` is padded{more}")


def stage_axes(job: Any, view: View | None) -> tuple[str, ...]:
    """Returns the axes along which the loss takes padded slices of stacked layers.

    A language model ignores padding. Whether the stages of another job do is not known, so it has to force the view.

    Example:
        >>> import meshwright as mw
        >>> job = mw.Job(init=lambda key: {}, rules=[], local_axes=("pp",))
        >>> stage_axes(job, None), stage_axes(job, "local")
        ((), ('pp',))
    """
    run = execution_of(job)
    handled = loss_axes(job) if run is None and view == "local" else () if run is None else (run.pipeline_axis,)
    return tuple(axis for axis in PIPELINE_AXES if axis in handled)


@contextlib.contextmanager
def padding_suggested(job: Any) -> Iterator[None]:
    """Adds `--pad` to the hint of a layout's error, with the parameters, if storing them padded is enough to train.

    Example:
        >>> import meshwright as mw, optax
        >>> job = mw.Job(init=lambda key: {"w": jnp.zeros(6)}, rules=[("w", mw.P("dp"))])
        >>> with padding_suggested(job):
        ...     mw.train.state_layout(job, optax.sgd(0.1), mw.create_abstract_mesh("dp:4"))
        Traceback (most recent call last):
        meshwright.errors.LayoutError: 1 leaf does not fit the mesh dp=4:
          `params/w` (rule 0): dim 0 has size 6; `dp` has 4 devices: 6 % 4 = 2.
        hint: pad to 8, or drop `dp` here. Or store it padded: --pad w
    """
    try:
        yield
    except LayoutError as error:
        raise _with_padding(error, job) from None


def _with_padding(error: LayoutError, job: Any) -> LayoutError:
    report, run = error.report, execution_of(job)
    if not isinstance(report, LayoutReport) or report.matches.unmatched:
        return error
    if len(report.indivisible) != len(report.problems):
        return error
    names = []
    for (subject, _, spec, _), problem in report.problems:
        if spec is None or (run is not None and run.tensor_axis in dim_axes(spec[problem.dim])):
            return error  # its matmuls do not take padding
        part, _, name = subject.name.partition("/")
        if part == "params":
            names.append(STACKED if name.startswith(STACKED) else name)
    names = list(dict.fromkeys(names))
    if not names or len(names) > MOST_NAMED:
        return error
    them = "it" if len(names) == 1 else "them"
    hint = f"{error.hint} Or store {them} padded: --pad {' '.join(names)}"
    message = str(error).rpartition("\nhint: ")[0]
    return LayoutError(message, hint=hint, report=report)


def is_padded_along_others(leaf: LeafLayout, axes: Sequence[str]) -> bool:
    """Returns whether a leaf is padded along an axis that is not among these."""
    return bool(set(_padded_axes(leaf)) - set(axes))


def pads_in_local_view(leaf: LeafLayout) -> LayoutError:
    """Returns the error for a parameter from `needs_global_view`."""
    axis = next(axis for axis in _padded_axes(leaf) if axis not in GATHER_AXES)
    return LayoutError(
        f"`{leaf.name}` is padded from {leaf.shape} to {leaf.stored_shape} along {axis!r}, so its slices in the local "
        "view would contain padding.",
        hint='use view="global", or sizes that divide evenly.',
    )


def _padded_axes(leaf: LeafLayout) -> list[str]:
    dims = zip(leaf.spec, leaf.shape, leaf.stored_shape, strict=False)
    return [axis for entry, size, stored in dims if size != stored for axis in dim_axes(entry)]


def _each(change: Callable[[Any, LeafLayout], Any], tree: PyTree, leaves: Sequence[LeafLayout]) -> PyTree:
    """Applies a function to the padded leaves of a tree."""
    if not any(leaf.is_padded for leaf in leaves):
        return tree
    pairs = zip(jax.tree.leaves(tree), leaves, strict=True)
    changed = [change(value, leaf) if leaf.is_padded else value for value, leaf in pairs]
    return jax.tree.unflatten(jax.tree.structure(tree), changed)


def _cut(value: Any, leaf: LeafLayout) -> Any:
    sizes = zip(leaf.shape, leaf.stored_shape, strict=True)
    return value[tuple(slice(size) if size != stored else slice(None) for size, stored in sizes)]


def _fill(value: Any, leaf: LeafLayout) -> Any:
    return jnp.pad(value, [(0, stored - size) for size, stored in zip(leaf.shape, leaf.stored_shape, strict=True)])
