"""The state of a run: made in place on a mesh, bit for bit the same on every one.

layout = state_layout(job, optimizer, mesh)           # decides; allocates nothing
state = init_state(job, optimizer, layout, key)       # one program, each device makes its slices
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from meshwright.errors import JobError, LayoutError
from meshwright.layout import Layout, make_layout
from meshwright.layout.leaf import LeafLayout, make_leaf
from meshwright.layout.report import PadPolicy
from meshwright.mesh.build import AnyMesh, require_axes
from meshwright.rules.matching import find_subjects
from meshwright.specs import canonical, dim_axes, format_spec, shard_shape, spec_axes
from meshwright.train.job import abstract_init
from meshwright.train.precision import Precision
from meshwright.types import PRNGKeyArray, PyTree


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RunState:
    """All that a run carries from step to step.

    Args:
        step: how many steps were taken, skipped ones included.
        rng: the run's key; step n draws from `fold_in(rng, n)`.
        skipped: how many steps were skipped because something was not finite.
        skipped_in_a_row: those of them since the last step that was not.
    """

    step: Any
    params: PyTree
    opt_state: PyTree
    rng: PRNGKeyArray
    skipped: Any
    skipped_in_a_row: Any


def make_state(job: Any, optimizer: Any, key: PRNGKeyArray, *, precision: Precision | str = "float32") -> RunState:
    """Returns the first state of a run, wherever the caller's program puts it; `init_state` puts it on a mesh."""
    init_key, run_key = jax.random.split(key)
    params = Precision.named(precision).stored(job.init(init_key))
    zero = jnp.zeros((), jnp.int32)
    return RunState(zero, params, optimizer.init(params), run_key, zero, zero)


def state_layout(
    job: Any,
    optimizer: Any,
    mesh: AnyMesh,
    *,
    zero_axis: str | None = None,
    precision: Precision | str = "float32",
    pad: PadPolicy = False,
) -> Layout:
    """Decides how a run's whole state is split over a mesh: the optimizer's statistics as their parameters.

    Args:
        job: `init` and `rules` are used.
        zero_axis: splits statistics along this axis too, over which parameters are replicated (ZeRO-1). Gradients are
            then scattered along it and updated parameters gathered: the same bytes as before, a fraction of the memory.

    Example:
        >>> import meshwright as mw, optax
        >>> job = mw.Job(init=lambda key: {"w": jax.random.normal(key, (64, 8))}, rules=[("w", P())])
        >>> mesh = mw.create_abstract_mesh("dp:8")
        >>> state_layout(job, optax.adam(1e-3), mesh, zero_axis="dp")["opt_state/0/mu/w"].spec
        P('dp',)
    """
    abstract = abstract_init(lambda key: make_state(job, optimizer, key, precision=precision))
    layout = make_layout(job.rules, abstract, mesh, pad=pad)
    if zero_axis is None:
        return layout
    require_axes(mesh, (zero_axis,), where="zero_axis")
    subjects = find_subjects(abstract)
    leaves = [
        _finer(leaf, zero_axis, mesh) if subject.role == "statistic" and subject.param_shape == leaf.shape else leaf
        for leaf, subject in zip(layout.leaves, subjects, strict=True)
    ]
    return Layout(mesh, leaves, layout.structure, layout.report())


def init_state(
    job: Any, optimizer: Any, layout: Layout, key: PRNGKeyArray, *, precision: Precision | str = "float32"
) -> RunState:
    """Makes the first state of a run in place: one seed gives one state, bit for bit, on every mesh.

    Example:
        >>> import meshwright as mw, optax
        >>> job = mw.Job(init=lambda key: {"w": jax.random.normal(key, (64, 8))}, rules=[("w", P("fsdp"))])
        >>> layout = state_layout(job, optax.sgd(0.1), mw.create_mesh("fsdp:8"))
        >>> state = init_state(job, optax.sgd(0.1), layout, jax.random.key(0))
        >>> state.params["w"].sharding.spec
        P('fsdp',)
    """
    padded = [leaf for leaf in layout.leaves if leaf.stored_shape != leaf.shape]
    if padded:
        raise LayoutError(
            f"init_state: the layout pads {padded[0].name} from {padded[0].shape} to {padded[0].stored_shape}, and a "
            "state that is trained has the shapes that its loss takes.",
            hint="make the layout without pad=, with rules or sizes that divide.",
        )
    platform = getattr(layout.mesh.devices.flat[0], "platform", "cpu")
    # Optimized, the normal distribution's last bit can depend on a slice's shape (CPU, jax 0.12).
    options = {"xla_backend_optimization_level": 0} if platform == "cpu" else None
    make = functools.partial(make_state, job, optimizer, precision=precision)
    state: RunState = jax.jit(make, out_shardings=layout.shardings, compiler_options=options)(key)
    return state


def params_layout(layout: Layout) -> Layout:
    """Returns the part of a state's layout that belongs to its parameters."""
    parts = layout.structure.unflatten(layout.leaves)
    if not isinstance(parts, RunState):
        raise LayoutError(
            "this is not the layout of a run's state.", hint="meshwright.train.state_layout(job, optimizer, mesh)."
        )
    leaves, structure = jax.tree.flatten(parts.params, is_leaf=lambda node: isinstance(node, LeafLayout))
    named = [leaf._replace(name=leaf.name.removeprefix("params/")) for leaf in leaves]
    return Layout(layout.mesh, named, structure, None)


def gradient_specs(layout: Layout) -> PyTree:
    """Returns how gradients leave a step: as parameters, or finer where the optimizer's statistics of them are."""
    params = params_layout(layout)
    finest = {leaf.name: leaf.spec for leaf in params.leaves}
    for leaf, subject in zip(layout.leaves, find_subjects(layout.abstract), strict=True):
        name = subject.names[-1]
        if subject.role == "statistic" and name in finest and subject.param_shape == leaf.shape:
            finest[name] = max(finest[name], leaf.spec, key=lambda spec: len(spec_axes(spec)))
    return params.structure.unflatten([finest[leaf.name] for leaf in params.leaves])


def _finer(leaf: LeafLayout, axis: str, mesh: AnyMesh) -> LeafLayout:
    if axis in spec_axes(leaf.spec) or mesh.shape[axis] == 1:
        return leaf
    sizes, entries = dict(mesh.shape), [*leaf.spec, *[None] * (len(leaf.shape) - len(leaf.spec))]
    local = shard_shape(leaf.spec, leaf.stored_shape, sizes)
    # Dims that are still whole first: their slices stay contiguous.
    for dim in sorted(range(len(entries)), key=lambda dim: bool(dim_axes(entries[dim]))):
        if local[dim] % sizes[axis] == 0:
            entries[dim] = (*dim_axes(entries[dim]), axis)
            spec = canonical(P(*entries))
            return make_leaf(
                leaf.name, leaf.shape, leaf.dtype, spec, sizes, rule=leaf.rule, pattern=leaf.pattern,
                reason=f"ZeRO-1 over {axis}", stored_shape=leaf.stored_shape,
            )  # fmt: skip
    return leaf._replace(reason=f"no dim left of {format_spec(leaf.spec)} that {axis} divides")


def require_loss(job: Any, *, who: str) -> None:
    """Raises where a job cannot be trained."""
    if getattr(job, "loss", None) is None:
        raise JobError(f"{who}: the job has no loss.", hint="Job(init=..., rules=..., loss=loss, batch=...).")


def abstract_params(job: Any, precision: Precision | str = "float32") -> PyTree:
    """Returns the shapes and dtypes of a job's parameters as they are stored."""
    return jax.eval_shape(Precision.named(precision).stored, abstract_init(job.init))
