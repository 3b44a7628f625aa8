"""Jobs: the input of the commands, and the questions that other modules ask of them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import jax

from meshwright.errors import MeshError, did_you_mean
from meshwright.models.execution import DATA_AXES, Execution
from meshwright.models.language import ENDS, LanguageModel
from meshwright.rng import abstract_key
from meshwright.rules import as_rules
from meshwright.specs import spec_axes
from meshwright.types import PyTree


@dataclass(frozen=True)
class Job:
    """A task as plain functions: a model, its sharding rules, its loss, and optionally its data and optimizer.

    Any object with these attributes is a job; only `init` and `rules` are required.

    Args:
        init: `init(key) -> params` (or a whole train state).
        rules: `(regex, PartitionSpec)` pairs, or `Rules`.
        loss: `loss(params, batch, rng) -> (loss, metrics)`; with a model state, `loss(params, model_state, batch, rng)
            -> (loss, metrics, model_state)`. The loss is a mean, or a `(sum, count)` pair over valid targets. Metrics
            combine as they declare, see `meshwright.metrics`. `rng` is None in evaluation.
        batch: an example batch of arrays or `jax.ShapeDtypeStruct`.
        mesh: the job's usual mesh, as a string.
        make_batch: `make_batch(seed) -> batch` with the example's shapes, for `meshwright train --job` and
            `verify`.
        vocab_size: size of the model's vocabulary. Data with larger tokens is rejected, because JAX clamps them.
        model: the model that the loss trains, if it is a `meshwright.models.LanguageModel`, for plans by layer.
        execution: the execution options of that model.
        model_state: `model_state(key) -> arrays` that the loss updates without gradients, such as BatchNorm statistics;
            gets the key of `init`.
        model_state_reduce: how devices combine their model states in the local view; see `accumulate`.
        frozen: regexes; parameters with a match in their path get no gradient and no optimizer state.
        trained: regexes; if given, all other parameters are frozen too.
        keep_dtypes: regexes; parameters with a match are stored in the dtype that `init` returns, in any precision.
        lora: the settings of the job's adapters, which `meshwright.train.fine_tuning.lora` sets.
        data: training data for `meshwright train --job`: arrays, a Grain dataset, a path, or a function from a seed to
            an iterator.
        eval_data: evaluation data, in the same forms.
        eval_loss: a loss for evaluation, if it differs from `loss` with `rng=None`.
        optimizer: an optax optimizer, or a function from the number of steps to one.
        schedule: `schedule(step) -> learning rate`, for the built-in optimizers.
        is_matrix: `is_matrix(name, leaf)`: the parameters that the built-in muon orthogonalizes; see `muon`.
        predict: `predict(params, batch)`, or `predict(params, model_state, batch)`, for the report page.
        local_axes: mesh axes, other than the data axes and `fsdp`, over which the loss communicates in the local view,
            for example `("tp",)`. On meshes with any other axis, the step runs in the global view.
    """

    init: Callable[[Any], PyTree]
    rules: Any
    loss: Callable[..., Any] | None = None
    batch: PyTree = None
    mesh: str | None = None
    make_batch: Callable[[int], PyTree] | None = None
    vocab_size: int | None = None
    model: LanguageModel | None = None
    execution: Execution | None = None
    model_state: Callable[[Any], PyTree] | None = None
    model_state_reduce: Any = "mean"
    frozen: str | Sequence[str] = ()
    trained: str | Sequence[str] = ()
    keep_dtypes: str | Sequence[str] = ()
    lora: Any = None
    data: Any = None
    eval_data: Any = None
    eval_loss: Callable[..., Any] | None = None
    optimizer: Any = None
    schedule: Callable[[Any], Any] | None = None
    is_matrix: Callable[[str, Any], bool] | None = None
    predict: Callable[..., Any] | None = None
    local_axes: tuple[str, ...] = ()


def abstract_init(init: Callable[[Any], PyTree]) -> PyTree:
    """Returns the shapes and dtypes of `init(key)` without computing or allocating anything.

    Example:
        >>> abstract_init(lambda key: {"w": jax.random.normal(key, (2, 3))})
        {'w': ShapeDtypeStruct(shape=(2, 3), dtype=float32)}
    """
    return jax.eval_shape(init, abstract_key())


def traceable_loss(job: Any) -> Callable[..., Any]:
    """Returns `loss(params, batch, rng, **options) -> (loss, metrics)` of any job, with zeros as its model state.

    Use it to count operations and bytes, not to compute a loss.
    """
    make_state = getattr(job, "model_state", None)
    if make_state is None:
        return cast("Callable[..., Any]", job.loss)
    shapes = abstract_init(make_state)

    @functools.wraps(job.loss)
    def loss(params: PyTree, batch: PyTree, rng: Any, **options: Any) -> Any:
        zeros = jax.tree.map(lambda leaf: jax.numpy.zeros(leaf.shape, leaf.dtype), shapes)
        return job.loss(params, zeros, batch, rng, **options)[:2]

    return loss


def model_of(job: Any) -> LanguageModel | None:
    """Returns the job's `LanguageModel`, or None."""
    model = getattr(job, "model", None)
    return model if isinstance(model, LanguageModel) else None


def execution_of(job: Any) -> Execution | None:
    """Returns the execution options of the job's language model, or None."""
    execution = getattr(job, "execution", None)
    return execution if isinstance(execution, Execution) else None


def stored_along(job: Any, params: Any) -> list[str | None]:
    """Returns for each leaf of a layout the axis along which a language model only stores it, and uses it whole.

    These are the embedding and the head of a pipeline. The loss of another job gets all slices as its rules say.

    Example:
        >>> import meshwright as mw
        >>> from meshwright.models import Decoder
        >>> job = mw.language_job(Decoder.named("tiny"), batch_size=8, num_tokens=16)
        >>> layout = mw.make_layout(job.rules, abstract_init(job.init), mw.create_abstract_mesh("pp:2"))
        >>> [leaf.name for leaf, axis in zip(layout.leaves, stored_along(job, layout)) if axis]
        ['embed/table', 'head/kernel']
    """
    run = execution_of(job)
    axis = None if run is None else run.pipeline_axis
    return [
        axis if axis in spec_axes(leaf.spec) and leaf.name.startswith(ENDS) and params.mesh.shape[axis] > 1 else None
        for leaf in params.leaves
    ]


def loss_axes(job: Any) -> tuple[str, ...]:
    """Returns the mesh axes that the loss handles itself: those of its `Execution`, and the job's `local_axes`."""
    execution, declared = execution_of(job), getattr(job, "local_axes", ())
    found = [declared] if isinstance(declared, str) else [*declared]
    if execution is not None:
        found += [*execution.data_axes, *filter(None, (execution.pipeline_axis, execution.tensor_axis))]
    return tuple(dict.fromkeys(found))


def unused_axes(
    job: Any,
    mesh_sizes: Mapping[str, int],
    *,
    data_axes: str | Sequence[str] | None = None,
    split_axes: Iterable[str] | None = None,
) -> list[str]:
    """Returns the mesh axes of size 2 or more that split nothing, so that their devices repeat the same work.

    Args:
        data_axes: the axes that split the rows of a batch (default: `dp` and `fsdp`).
        split_axes: the axes that split parameters or optimizer state (default: the axes of the job's rules).
    """
    known = _known_axes(job, data_axes, split_axes)
    return [axis for axis, size in mesh_sizes.items() if size > 1 and axis not in known]


def check_axes(
    job: Any,
    mesh_sizes: Mapping[str, int],
    *,
    data_axes: str | Sequence[str] | None = None,
    split_axes: Iterable[str] | None = None,
) -> None:
    """Raises if an axis of the mesh splits nothing; the arguments are those of `unused_axes`."""
    unused = unused_axes(job, mesh_sizes, data_axes=data_axes, split_axes=split_axes)
    if not unused:
        return
    known = _known_axes(job, data_axes, None)
    names = f"use {', '.join(known)}"
    if execution_of(job) is None:
        names += "; if the loss communicates over another axis, declare it: Job(..., local_axes=...)"
    close = did_you_mean(unused[0], known)
    axes = f"{'axis' if len(unused) == 1 else 'axes'} {', '.join(map(repr, unused))}"
    raise MeshError(f"this job does not use mesh {axes}.", hint=f"{close} {names}." if close else f"{names}.")


def _known_axes(job: Any, data_axes: str | Sequence[str] | None, split_axes: Iterable[str] | None) -> tuple[str, ...]:
    if split_axes is None:
        split_axes = (axis for _, spec in as_rules(job.rules) for axis in spec_axes(spec))
    rows = DATA_AXES if data_axes is None else (data_axes,) if isinstance(data_axes, str) else data_axes
    return tuple(dict.fromkeys([*rows, *split_axes, *loss_axes(job)]))
