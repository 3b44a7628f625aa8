"""Jobs from `flax.nnx` models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from meshwright.rules.annotations import annotation_of
from meshwright.train.job import Job
from meshwright.train.jobs.model_job import STATE, Names, make_job, rules_for, zeros
from meshwright.types import PRNGKeyArray, PyTree


def nnx_job(
    make_model: Callable[[Any], Any],
    loss: Callable[..., Any],
    batch: PyTree,
    rules: Any = None,
    *,
    unannotated: Any = (),
    eval_loss: Callable[..., Any] | None = None,
    predict: Callable[..., Any] | None = None,
    **fields: Any,
) -> Job:
    """Returns a job for a `flax.nnx` model.

    Variables other than `nnx.Param` and random streams (`nnx.BatchStat`, `nnx.Cache`, ...) become the job's model
    state. A step keeps their updates in training and discards them in evaluation.

    Args:
        make_model: `make_model(rngs)` returns the model, given `nnx.Rngs`.
        loss: `loss(model, batch)`. The model is in training mode if dropout has a key, else in evaluation mode.
        batch: an example batch of arrays or shapes.
        rules: rules, a table of mesh axes by logical name, or None if `nnx.with_partitioning` names mesh axes; see
            `rules_from_annotations`.
        unannotated: rules for parameters without an annotation, if the others have one.
        eval_loss: like `loss`, for evaluation.
        predict: `predict(model, batch) -> outputs`.
        fields: other fields of `Job`.

    Example:
        >>> from flax import nnx
        >>> from meshwright import P
        >>> job = nnx_job(
        ...     lambda rngs: nnx.Linear(16, 4, rngs=rngs),
        ...     lambda model, batch: jnp.mean(model(batch["x"]) ** 2),
        ...     {"x": jax.ShapeDtypeStruct((8, 16), "float32")},
        ...     [("kernel", P("fsdp")), ("bias", P())],
        ... )
        >>> jax.tree.map(jnp.shape, job.init(jax.random.key(0)))
        {'bias': (4,), 'kernel': (16, 4)}
    """
    from flax import nnx  # slow to import

    def build(seed: Any) -> Any:
        # With eager sharding, an annotated variable needs a mesh that has all of its axes.
        with nnx.use_eager_sharding(False):
            return make_model(nnx.Rngs(seed))

    def is_variable(node: Any) -> bool:
        return isinstance(node, nnx.Variable)

    parts: Any = nnx.split(nnx.eval_shape(lambda: build(0)), nnx.Param, nnx.RngState, ...)
    graph, params, streams, others = parts
    param_names, state_names = Names.of(params, is_variable), Names.of(others, is_variable)
    places = [path for path, _ in nnx.to_flat_state(others)]

    def init(key: PRNGKeyArray) -> PyTree:
        return param_names.to_dict(jax.tree.leaves(nnx.state(build(key), nnx.Param)))

    def read_state(model: Any) -> PyTree:
        flat = dict(nnx.to_flat_state(nnx.state(model)))  # the model may have sown other variables
        return state_names.to_dict([leaf for path in places for leaf in jax.tree.leaves(flat[path])])

    def bind(params: PyTree, state: PyTree, rng: PRNGKeyArray | None) -> Any:
        key = jax.random.key(0) if rng is None else rng
        # Every random stream restarts with each batch, each from a different key.
        fresh = [
            jax.random.fold_in(key, place) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else zeros(leaf)
            for place, leaf in enumerate(jax.tree.leaves(streams))
        ]
        keys = jax.tree.unflatten(jax.tree.structure(streams), fresh)
        model = nnx.merge(graph, param_names.from_dict(params), keys, state_names.from_dict(state))
        (model.eval if rng is None else model.train)()
        return model

    def job_loss(loss: Callable[..., Any]) -> Callable[..., Any]:
        def run(params: PyTree, state: PyTree, batch: PyTree, rng: PRNGKeyArray | None) -> tuple[Any, PyTree]:
            model = bind(params, state, rng)
            return loss(model, batch), read_state(model)

        return run

    def job_predict(params: PyTree, state: PyTree, batch: PyTree) -> Any:
        assert predict is not None
        return predict(bind(params, state, None), batch)

    annotated = [
        ("/".join(map(str, (*prefix, *path))), annotation_of(variable))
        for prefix, part in (((), params), ((STATE,), others))
        for path, variable in nnx.to_flat_state(part)
    ]
    return make_job(
        "nnx_job",
        init=init,
        loss=job_loss(loss),
        batch=batch,
        rules=rules_for(rules, annotated, unannotated),
        model_state=(lambda key: read_state(build(key))) if places else None,
        eval_loss=None if eval_loss is None else job_loss(eval_loss),
        predict=None if predict is None else job_predict,
        fields=fields,
    )
