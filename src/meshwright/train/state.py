"""The state of a run, initialized in place on a mesh and bitwise equal on every mesh.

layout = state_layout(job, optimizer, mesh)           # decides the sharding; allocates nothing
state = init_state(job, optimizer, layout, key)       # one program; each device creates its shards
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from meshwright.errors import JobError, LayoutError, did_you_mean
from meshwright.layout import Layout, make_layout
from meshwright.layout.leaf import LeafLayout, make_leaf
from meshwright.layout.report import PadPolicy
from meshwright.mesh.current import AnyMesh, require_axes
from meshwright.rules.matching import find_subjects
from meshwright.rules.rule_set import compile_pattern
from meshwright.specs import canonical, dim_axes, format_spec, shard_shape, spec_axes
from meshwright.train.fine_tuning.adapting import with_fields
from meshwright.train.job import abstract_init
from meshwright.train.padding import fill, require_padded_names, split_evenly
from meshwright.train.precision import Precision
from meshwright.tree import named_leaves
from meshwright.types import PRNGKeyArray, PyTree


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RunState:
    """The state that a run carries from step to step.

    Args:
        step: number of steps taken, including skipped ones.
        rng: the run's key; step n draws from `fold_in(rng, n)`.
        skipped: number of steps skipped because the loss or a gradient was not finite.
        skipped_in_a_row: number of steps skipped since the last step that was not.
        model_state: arrays that the loss updates; None if the job has no `model_state`.
        fp8: amaxes of the last steps for delayed fp8 scaling, see `Fp8`; None without.
        ema: moving average of the trained parameters, in float32, with None for frozen ones; None without.
    """

    step: Any
    params: PyTree
    opt_state: PyTree
    rng: PRNGKeyArray
    skipped: Any
    skipped_in_a_row: Any
    model_state: PyTree = None
    fp8: PyTree = None
    ema: PyTree = None


def make_state(
    job: Any, optimizer: Any, key: PRNGKeyArray, *, precision: Precision | str = "float32", ema: float | None = None
) -> RunState:
    """Returns the initial state of a run, without a sharding; `init_state` creates it on a mesh.

    Example:
        >>> import meshwright as mw, optax
        >>> job = mw.Job(init=lambda key: {"w": jax.random.normal(key, (4, 2))}, rules=[("w", P())])
        >>> state = make_state(job, optax.adam(1e-3), jax.random.key(0), precision="bfloat16")
        >>> int(state.step), state.params["w"].dtype.name, state.opt_state[0].mu["w"].shape
        (0, 'bfloat16', (4, 2))
    """
    init_key, run_key = jax.random.split(key)
    params = Precision.named(precision).stored(job.init(init_key), keep=getattr(job, "keep_dtypes", ()))
    zero = jnp.zeros((), jnp.int32)
    make_model_state = getattr(job, "model_state", None)
    model_state = None if make_model_state is None else make_model_state(init_key)
    learned = only_trainable(params, trainable_leaves(job, params))
    fp8 = Precision.named(precision).fp8
    scaling = None if fp8 is None else fp8.init(params)
    average = None if ema is None else jax.tree.map(lambda leaf: leaf.astype(jnp.float32), learned)
    return RunState(zero, params, optimizer.init(learned), run_key, zero, zero, model_state, scaling, average)


def state_layout(
    job: Any,
    optimizer: Any,
    mesh: AnyMesh,
    *,
    zero_axis: str | None = None,
    precision: Precision | str = "float32",
    pad: PadPolicy = False,
    ema: float | None = None,
) -> Layout:
    """Returns the layout of a run's whole state on a mesh; optimizer statistics are split like their parameters.

    Args:
        zero_axis: an axis over which to split optimizer statistics while parameters stay replicated (ZeRO-1). Gradients
            are then reduce-scattered and updated parameters all-gathered: the same bytes in a fraction of the memory.
        pad: the leaves that may be padded with zeros, as for `make_layout`. The loss and the optimizer see them without
            padding.
        ema: the decay that you pass to `make_train_step`, if any; the state then holds an average of the parameters.

    Example:
        >>> import meshwright as mw, optax
        >>> job = mw.Job(init=lambda key: {"w": jax.random.normal(key, (64, 8))}, rules=[("w", P())])
        >>> mesh = mw.create_abstract_mesh("dp:8")
        >>> state_layout(job, optax.adam(1e-3), mesh, zero_axis="dp")["opt_state/0/mu/w"].spec
        P('dp',)
    """
    abstract = abstract_init(lambda key: make_state(job, optimizer, key, precision=precision, ema=ema))
    require_padded_names(pad, abstract.params)
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
    job: Any,
    optimizer: Any,
    layout: Layout,
    key: PRNGKeyArray,
    *,
    precision: Precision | str = "float32",
    given: Mapping[str, Any] | None = None,
) -> RunState:
    """Creates the initial state of a run in place; the same key gives the same bits on every mesh.

    Args:
        given: parameters by name, in their stored shapes, to use instead of those of `job.init`. They are donated.

    Example:
        >>> import meshwright as mw, optax
        >>> job = mw.Job(init=lambda key: {"w": jax.random.normal(key, (64, 8))}, rules=[("w", P("fsdp"))])
        >>> layout = state_layout(job, optax.sgd(0.1), mw.create_mesh("fsdp:8"))
        >>> state = init_state(job, optax.sgd(0.1), layout, jax.random.key(0))
        >>> state.params["w"].sharding.spec
        P('fsdp',)
    """
    platform = getattr(layout.mesh.devices.flat[0], "platform", "cpu")
    # With optimizations, the last bit of jax.random.normal can depend on the shard's shape (CPU, jax 0.12).
    options = {"xla_backend_optimization_level": 0} if platform == "cpu" else None

    averages = 1.0 if keeps_ema(layout) else None

    def make(key: PRNGKeyArray, given: Mapping[str, Any]) -> RunState:
        started = with_fields(job, init=lambda key: _with_given(job.init(key), given)) if given else job
        made = make_state(started, optimizer, key, precision=precision, ema=averages)
        filled: RunState = fill(split_evenly(made, layout), layout.leaves)
        return filled

    make_jit = jax.jit(make, out_shardings=layout.shardings, compiler_options=options, donate_argnums=(1,))
    state: RunState = make_jit(key, dict(given or {}))
    return state


def _with_given(params: PyTree, given: Mapping[str, Any]) -> PyTree:
    """Returns parameters with some of them replaced by given ones, whose padding is cut off."""
    leaves: Any = jax.tree.leaves(params)
    values = [
        leaf if item.name not in given else given[item.name][tuple(map(slice, leaf.shape))]
        for item, leaf in zip(named_leaves(params), leaves, strict=True)
    ]
    return jax.tree.unflatten(jax.tree.structure(params), values)


def trainable_leaves(job: Any, params: PyTree) -> list[bool]:
    """Returns whether each parameter is trained: it matches the job's `trained`, if given, and not its `frozen`.

    Example:
        >>> import meshwright as mw
        >>> params = {"embed": jnp.ones(2), "head": jnp.ones(2), "norm": jnp.ones(2)}
        >>> trainable_leaves(mw.Job(init=None, rules=[], frozen="embed"), params)
        [False, True, True]
        >>> trainable_leaves(mw.Job(init=None, rules=[], trained=["head", "norm"], frozen="norm"), params)
        [False, True, False]
    """
    names = [leaf.name for leaf in named_leaves(params)]
    frozen, trained = (_matching(job, field, names) for field in ("frozen", "trained"))
    learns = [name not in frozen and (not trained or name in trained) for name in names]
    if names and not any(learns):
        both = " and ".join(f"{field}={getattr(job, field)!r}" for field in ("frozen", "trained") if _given(job, field))
        raise JobError(
            f"{both} freezes all {len(names)} parameters, so there is nothing to train.",
            hint="freeze fewer parameters.",
        )
    return learns


def frozen_names(job: Any, params: PyTree) -> frozenset[str]:
    """Returns the names of the parameters that are not trained."""
    pairs = zip(named_leaves(params), trainable_leaves(job, params), strict=True)
    return frozenset(leaf.name for leaf, learns in pairs if not learns)


def _matching(job: Any, field: str, names: Sequence[str]) -> set[str]:
    """Returns the names that match a field of patterns; raises if a pattern matches none."""
    found: set[str] = set()
    for pattern in map(compile_pattern, _given(job, field)):
        matched = {name for name in names if pattern.matches(name)}
        if not matched:
            hint = did_you_mean(pattern.text, names) or f"parameters are named like {names[0]!r}." if names else None
            raise JobError(f"{field}: {pattern.text!r} matches no parameter.", hint=hint)
        found |= matched
    return found


def _given(job: Any, field: str) -> Sequence[str]:
    given = getattr(job, field, ()) or ()
    return [given] if isinstance(given, str) else given


def only_trainable(tree: PyTree, trainable: Sequence[bool]) -> PyTree:
    """Returns a tree like the parameters with None in place of the leaves that are not trained.

    Example:
        >>> only_trainable({"embed": 1, "head": 2}, [False, True])
        {'embed': None, 'head': 2}
    """
    leaves: list[Any]
    structure: Any
    leaves, structure = jax.tree.flatten(tree, is_leaf=lambda node: isinstance(node, P))
    return structure.unflatten([leaf if keep else None for leaf, keep in zip(leaves, trainable, strict=True)])


def with_frozen(trained: PyTree, params: PyTree, trainable: Sequence[bool]) -> PyTree:
    """Returns `trained`, a result of `only_trainable`, with the other leaves of `params` in place of None.

    Example:
        >>> with_frozen({"embed": None, "head": 3}, {"embed": 1, "head": 2}, [False, True])
        {'embed': 1, 'head': 3}
    """
    structure: Any = jax.tree.structure(params)
    new = iter(jax.tree.leaves(trained))
    pairs = zip(jax.tree.leaves(params), trainable, strict=True)
    return structure.unflatten([next(new) if learns else leaf for leaf, learns in pairs])


def keeps_ema(layout: Layout) -> bool:
    """Returns whether the states of a layout hold a moving average of the parameters."""
    return getattr(layout.structure.unflatten(layout.leaves), "ema", None) is not None


def params_layout(layout: Layout) -> Layout:
    """Returns the parameters' part of a state layout."""
    parts = layout.structure.unflatten(layout.leaves)
    if not isinstance(parts, RunState):
        raise LayoutError(
            "the layout is not a state layout.", hint="use meshwright.train.state_layout(job, optimizer, mesh)."
        )
    leaves, structure = jax.tree.flatten(parts.params, is_leaf=lambda node: isinstance(node, LeafLayout))
    named = [leaf._replace(name=leaf.name.removeprefix("params/")) for leaf in leaves]
    return Layout(layout.mesh, named, structure, None)


def gradient_specs(layout: Layout) -> PyTree:
    """Returns the specs of the gradients: those of the parameters, or of their optimizer statistics if finer."""
    params = params_layout(layout)
    finest = {leaf.name: leaf.spec for leaf in params.leaves}
    for leaf, subject in zip(layout.leaves, find_subjects(layout.abstract), strict=True):
        name = subject.names[-1]
        if subject.role == "statistic" and name in finest and subject.param_shape == leaf.stored_shape:
            finest[name] = max(finest[name], leaf.spec, key=lambda spec: len(spec_axes(spec)))
    return params.structure.unflatten([finest[leaf.name] for leaf in params.leaves])


def _finer(leaf: LeafLayout, axis: str, mesh: AnyMesh) -> LeafLayout:
    if axis in spec_axes(leaf.spec) or mesh.shape[axis] == 1:
        return leaf
    sizes, entries = dict(mesh.shape), [*leaf.spec, *[None] * (len(leaf.shape) - len(leaf.spec))]
    local = shard_shape(leaf.spec, leaf.stored_shape, sizes)
    # Prefer dims that are not split yet, so that slices stay contiguous.
    for dim in sorted(range(len(entries)), key=lambda dim: bool(dim_axes(entries[dim]))):
        if local[dim] % sizes[axis] == 0:
            entries[dim] = (*dim_axes(entries[dim]), axis)
            spec = canonical(P(*entries))
            return make_leaf(
                leaf.name, leaf.shape, leaf.dtype, spec, sizes, rule=leaf.rule, pattern=leaf.pattern,
                reason=f"ZeRO-1 over {axis}", stored_shape=leaf.stored_shape,
            )  # fmt: skip
    return leaf._replace(reason=f"{axis} divides no dim of {format_spec(leaf.spec)}")


def require_loss(job: Any, *, who: str) -> None:
    """Raises if a job has no loss."""
    if getattr(job, "loss", None) is None:
        raise JobError(f"{who}: the job has no loss.", hint="pass one: Job(init=..., rules=..., loss=loss, batch=...).")


def abstract_params(job: Any, precision: Precision | str = "float32") -> PyTree:
    """Returns the shapes and stored dtypes of a job's parameters."""
    keep = getattr(job, "keep_dtypes", ())
    return jax.eval_shape(lambda params: Precision.named(precision).stored(params, keep=keep), abstract_init(job.init))
