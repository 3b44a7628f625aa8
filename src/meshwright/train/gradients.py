"""Loss and gradients of a job on a mesh, in the local or global view."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from meshwright.errors import JobError, MeshwrightError, did_you_mean
from meshwright.layout import Layout
from meshwright.mesh.axes import varying_axes
from meshwright.mesh.build import AnyMesh, require_axes
from meshwright.models.execution import DATA_AXES, Remat, remat_policy
from meshwright.parallel.fsdp import Gather
from meshwright.parallel.local_map import local_map
from meshwright.specs import spec_axes
from meshwright.train.accumulate import Accumulated, accumulate, is_pair, over
from meshwright.train.precision import Precision
from meshwright.train.state import gradient_specs, params_layout, require_loss
from meshwright.train.sync import Sync
from meshwright.types import Metrics, PyTree

View = Literal["global", "local"]

GATHER_AXES = ("fsdp",)
PIPELINE_AXES = ("pp",)
_COUNTED = "tokens of the loss"  # unlikely to be the name of a job's metric


@dataclass(frozen=True)
class Gradients:
    """`gradients(params, batch, rng) -> (Accumulated, squares)`, for use inside `jax.jit`.

    `squares` is an array with the sum of squares of each leaf's gradient. `row_axes` split the rows of a batch.
    """

    compute: Callable[[PyTree, PyTree, Any], tuple[Accumulated, Any]]
    row_axes: tuple[str, ...]

    def __call__(self, params: PyTree, batch: PyTree, rng: Any) -> tuple[Accumulated, Any]:
        result, squares = self.compute(params, batch, rng)
        return result._replace(metrics=_values(result.metrics)), squares


def make_gradients(
    job: Any,
    layout: Layout,
    *,
    view: View = "local",
    num_minibatches: int = 1,
    sync: Sync | None = None,
    precision: Precision | str = "float32",
    remat: Remat = "none",
    data_axes: str | Sequence[str] | None = None,
    with_gradients: bool = True,
) -> Gradients:
    """Returns a function that computes a job's loss and gradients from global arrays, for use inside `jax.jit`.

    The arguments are those of `make_train_step`. With `with_gradients=False`, gradients are None.

    Example:
        >>> import meshwright as mw, optax
        >>> def loss(params, batch, rng):
        ...     return jnp.mean(batch["x"] @ params["w"]), {}
        >>> job = mw.Job(init=lambda key: {"w": jnp.zeros(8)}, rules=[("w", P("fsdp"))], loss=loss)
        >>> gradients = make_gradients(job, mw.train.state_layout(job, optax.sgd(0.1), mw.create_mesh("fsdp:8")))
        >>> result, squares = jax.jit(gradients)({"w": jnp.zeros(8)}, {"x": jnp.full((16, 8), 2.0)}, None)
        >>> result.grads["w"].tolist(), squares.tolist()
        ([2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0], [32.0])
    """
    require_loss(job, who="make_gradients")
    if view not in ("global", "local"):
        hint = did_you_mean(str(view), ("global", "local")) or "use 'global' or 'local'."
        raise MeshwrightError(f"unknown view {view!r}.", hint=hint)
    if view == "global" and sync is not None:
        raise MeshwrightError(
            f"sync={sync!r} works only in the local view; in the global view, XLA decides when to reduce gradients.",
            hint="leave out sync, or pass view='local'.",
        )
    mesh, params = layout.mesh, params_layout(layout)
    precision, specs = Precision.named(precision), gradient_specs(layout)
    row_axes = _row_axes(data_axes, mesh)
    gather_axes = tuple(axis for axis in GATHER_AXES if axis in mesh.axis_names and mesh.shape[axis] > 1)
    takes = inspect.signature(job.loss).parameters
    # With sync="once", parameters are gathered before the minibatches, so layers have nothing to gather.
    by_layer = view == "local" and sync != "once" and bool(gather_axes) and "gather" in takes
    gather, dtypes = None, precision.compute_dtypes(params.abstract)
    if by_layer:
        gather = Gather(params.specs, gather_axes, dtypes, grad_scatter_dtype=precision.reduce)
        # The gather casts parameters, so that their gradients keep the dtype of the reduction.
        dtypes = params.structure.unflatten(
            [
                leaf.dtype if set(gather_axes) & set(spec_axes(leaf.spec)) else dtype
                for leaf, dtype in zip(params.leaves, jax.tree.leaves(dtypes), strict=True)
            ]
        )
    loss = _loss_function(job, takes, gather, remat)
    options: Any = {"num_minibatches": num_minibatches, "dtypes": dtypes, "with_gradients": with_gradients}

    def in_global_view(params: PyTree, batch: PyTree, rng: Any) -> tuple[Accumulated, Any]:
        ways = math.prod(mesh.shape[axis] for axis in row_axes) if num_minibatches > 1 else 1
        result = accumulate(loss, params, batch, rng, row_blocks=ways, **options)
        if not with_gradients:
            return result, None
        grads = jax.lax.with_sharding_constraint(result.grads, named_shardings(mesh, specs))
        return result._replace(grads=grads), leaf_square_sums(grads)

    def on_each_device(params_here: PyTree, batch: PyTree, rng: Any) -> tuple[Accumulated, Any]:
        result = accumulate(
            loss,
            params_here,
            batch,
            rng,
            specs=params.specs,
            sync=sync or "hybrid",
            gather_axes=() if by_layer else gather_axes,
            axes=[axis for axis in mesh.axis_names if axis in (*row_axes, *PIPELINE_AXES)],
            row_axes=row_axes,
            grad_specs=specs,
            reduce_dtype=precision.reduce,
            **options,
        )
        return result, leaf_square_sums(result.grads) if with_gradients else None

    def in_local_view(params_whole: PyTree, batch: PyTree, rng: Any) -> tuple[Accumulated, Any]:
        rows = jax.tree.map(lambda leaf: P(row_axes) if np.ndim(leaf) else P(), batch)
        replicated: Any = P()
        grads = specs if with_gradients else replicated
        out_specs = (Accumulated(loss=replicated, grads=grads, metrics=replicated), replicated)
        mapped = local_map(on_each_device, mesh=mesh, in_specs=(params.specs, rows, P()), out_specs=out_specs)
        result: tuple[Accumulated, Any] = mapped(params_whole, batch, rng)
        return result

    return Gradients(in_global_view if view == "global" else in_local_view, row_axes)


# --- Norms of sharded trees ---


def leaf_square_sums(tree: PyTree) -> Any:
    """Returns the sum of squares of every leaf, `[num_leaves]` in float32, of whole leaves also in the local view.

    Leaves split over the same axes share one psum. A leaf is counted once along axes that it is replicated over.
    """
    leaves = jax.tree.leaves(tree)
    sums = [jnp.sum(jnp.square(leaf.astype(jnp.float32))) for leaf in leaves]
    groups: dict[tuple[str, ...], list[int]] = {}
    for place, leaf in enumerate(leaves):
        groups.setdefault(tuple(sorted(varying_axes(leaf))), []).append(place)
    whole: list[Any] = [None] * len(leaves)
    for axes, places in groups.items():
        part = jnp.stack([sums[place] for place in places])
        total = lax.psum(part, axes) if axes else part
        for index, place in enumerate(places):
            whole[place] = total[index]
    return jnp.stack(whole)


def global_norm(tree: PyTree) -> Any:
    """Returns the global norm of a tree in both views; `optax.global_norm` sees only shards in the local view.

    Example:
        >>> float(global_norm({"a": jnp.array([3.0]), "b": jnp.array([4.0])}))
        5.0
    """
    return jnp.sqrt(leaf_square_sums(tree).sum())


def named_shardings(mesh: AnyMesh, specs: PyTree) -> PyTree:
    """Converts a tree of specs to shardings on a mesh."""
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda node: isinstance(node, P))


def _row_axes(asked: str | Sequence[str] | None, mesh: AnyMesh) -> tuple[str, ...]:
    """Returns the axes that split the batch's rows (default: the usual data axes that the mesh has)."""
    if asked is None:
        return tuple(axis for axis in DATA_AXES if axis in mesh.axis_names)
    axes = (asked,) if isinstance(asked, str) else tuple(asked)
    require_axes(mesh, axes, where="data_axes")
    return axes


def _loss_function(job: Any, takes: Container[str], gather: Gather | None, remat: Remat) -> Callable[..., Any]:
    options: dict[str, Any] = {} if gather is None else {"gather": gather}
    policy = remat_policy(remat, by_name=False)
    if "remat" in takes:
        options["remat"] = remat

    def loss(params: PyTree, batch: PyTree, rng: Any) -> Any:
        def call(params: PyTree, batch: PyTree, rng: Any) -> Any:
            return job.loss(params, batch, rng, **options)

        # A loss without a `remat` argument is recomputed as a whole.
        value, metrics = _checked(
            call(params, batch, rng)
            if policy is None or "remat" in takes
            else jax.checkpoint(call, policy=policy)(params, batch, rng)
        )
        if is_pair(value):
            metrics = {**metrics, _COUNTED: (value[1], jnp.ones_like(value[1]))}
        return value, metrics

    return loss


def _checked(found: Any) -> tuple[Any, Mapping[str, Any]]:
    """Returns the result of a job's loss; raises if it is not a loss and a dict of metrics."""
    if not (isinstance(found, tuple) and len(found) == 2 and isinstance(found[1], Mapping)):
        kinds = ", ".join(type(part).__name__ for part in (found if isinstance(found, tuple) else (found,)))
        raise JobError(
            f"a loss must return (loss, metrics), with a dict of metrics; this one returned {kinds}.",
            hint="return (loss, {}) if there are no metrics.",
        )
    value: Any = found[0]
    is_array = hasattr(value, "dtype")
    if not is_pair(value) and (not is_array or np.ndim(value)) and not isinstance(value, (int, float)):
        kind = f"an array of shape {np.shape(value)}" if is_array else f"a {type(value).__name__}"
        raise JobError(
            f"a loss must be a scalar or a (sum, count) pair; this one is {kind}.",
            hint="return loss.mean(), or (loss.sum(), count) if rows have different numbers of valid targets.",
        )
    return value, found[1]


def _values(metrics: PyTree) -> Metrics:
    """Returns metrics with each pair replaced by its mean, and the number of tokens."""
    counted = metrics.get(_COUNTED)
    plain = jax.tree.map(lambda node: over(node[0], node[1]) if is_pair(node) else node, metrics, is_leaf=is_pair)
    return plain if counted is None else {**{k: v for k, v in plain.items() if k != _COUNTED}, "tokens": counted[0]}
