"""Jobs from Equinox models."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from meshwright.errors import JobError
from meshwright.rng import abstract_key
from meshwright.train.job import Job
from meshwright.train.jobs.model_job import Names, make_job, rules_for
from meshwright.tree import key_to_string
from meshwright.types import PRNGKeyArray, PyTree


def equinox_job(
    make_model: Callable[[PRNGKeyArray], Any],
    loss: Callable[..., Any],
    batch: PyTree,
    rules: Any = None,
    *,
    eval_loss: Callable[..., Any] | None = None,
    predict: Callable[..., Any] | None = None,
    **fields: Any,
) -> Job:
    """Returns a job for an Equinox model, whose float arrays are the parameters.

    Other arrays of the model become buffers in the job's model state (`model_state/buffers/...`), which never change.
    The values of an `eqx.nn.State` (the statistics of `eqx.nn.BatchNorm`, for example) are there as well
    (`model_state/state/...`). A step keeps their updates in training and discards them in evaluation.

    Args:
        make_model: `make_model(key)` returns the model, or the model and its state (`eqx.nn.make_with_state`).
        loss: `loss(model, batch, key)`. For a model with a state, `loss(model, state, batch, key) -> (loss, state)` or
            `(loss, metrics, state)`. If `key` is None, the model is in inference mode. Use
            `meshwright.parallel.row_keys` for one key per row.
        batch: an example batch of arrays or shapes.
        rules: `(regex, PartitionSpec)` pairs, or `Rules`.
        eval_loss: like `loss`, for evaluation.
        predict: `predict(model, batch) -> outputs`, or `predict(model, state, batch)` for a model with a state.
        fields: other fields of `Job`.

    Example:
        >>> import equinox as eqx
        >>> from meshwright import P
        >>> job = equinox_job(
        ...     lambda key: eqx.nn.Linear(16, 4, key=key),
        ...     lambda model, batch, key: jnp.mean(jax.vmap(model)(batch["x"]) ** 2),
        ...     {"x": jax.ShapeDtypeStruct((8, 16), "float32")},
        ...     [("weight", P(None, "fsdp")), ("bias", P())],
        ... )
        >>> jax.tree.map(jnp.shape, job.init(jax.random.key(0)))
        {'bias': (4,), 'weight': (4, 16)}
    """
    try:
        import equinox as eqx
    except ModuleNotFoundError:
        raise JobError("equinox_job needs Equinox, which is not installed.", hint="pip install equinox") from None

    def build(key: PRNGKeyArray) -> tuple[Any, Any]:
        made = make_model(key)
        if isinstance(made, tuple) and len(made) == 2 and isinstance(made[1], eqx.nn.State):
            return made
        pair: tuple[Any, Any] = eqx.nn.make_with_state(lambda: made)()  # an empty state if there is nothing to keep
        return pair

    model, state = eqx.filter_eval_shape(build, abstract_key())
    params, rest = eqx.partition(model, _is_parameter)
    buffers, static = eqx.partition(rest, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))
    names, buffer_names, state_names = Names.of(params), Names.of(buffers), _state_names(state)
    has_state = bool(state_names.paths)

    def init(key: PRNGKeyArray) -> PyTree:
        return names.to_dict(jax.tree.leaves(eqx.filter(build(key)[0], eqx.is_inexact_array)))

    def init_state(key: PRNGKeyArray) -> PyTree:
        model, state = build(key)
        kept = eqx.filter(eqx.filter(model, eqx.is_inexact_array, inverse=True), eqx.is_array)
        return _state_dict(buffer_names.to_dict(jax.tree.leaves(kept)), state_names.to_dict(jax.tree.leaves(state)))

    def bind(params: PyTree, kept: PyTree, rng: PRNGKeyArray | None) -> list[Any]:
        """Returns the model, and its state if it has one."""
        fixed = buffer_names.from_dict(kept.get("buffers", {}))
        model = eqx.nn.inference_mode(eqx.combine(names.from_dict(params), fixed, static), rng is None)
        return [model, state_names.from_dict(kept["state"])] if has_state else [model]

    def job_loss(loss: Callable[..., Any]) -> Callable[..., Any]:
        def run(params: PyTree, kept: PyTree, batch: PyTree, rng: PRNGKeyArray | None) -> tuple[Any, PyTree]:
            result = loss(*bind(params, kept, rng), batch, rng)
            if not has_state:
                return result, kept
            if not isinstance(result, tuple) or not isinstance(result[-1], eqx.nn.State):
                raise JobError(
                    f"the loss of a model with an eqx.nn.State returned {type(result).__name__}, which does not end in "
                    "the state.",
                    hint="return (loss, state) or (loss, metrics, state).",
                )
            value = result[0] if len(result) == 2 else result[:-1]
            return value, kept | {"state": state_names.to_dict(jax.tree.leaves(result[-1]))}

        return run

    def job_predict(params: PyTree, kept: PyTree, batch: PyTree) -> Any:
        assert predict is not None
        return predict(*bind(params, kept, None), batch)

    return make_job(
        "equinox_job",
        init=init,
        loss=job_loss(loss),
        batch=batch,
        rules=rules_for(rules, [], ()),
        model_state=init_state if has_state or buffer_names.paths else None,
        eval_loss=None if eval_loss is None else job_loss(eval_loss),
        predict=None if predict is None else job_predict,
        fields=fields,
    )


def _is_parameter(leaf: Any) -> bool:
    return isinstance(leaf, jax.ShapeDtypeStruct) and jnp.issubdtype(leaf.dtype, jnp.inexact)


def _state_dict(buffers: PyTree, state: PyTree) -> PyTree:
    return {name: part for name, part in (("buffers", buffers), ("state", state)) if part}


def _state_names(state: Any) -> Names:
    """Names the values of an `eqx.nn.State` by the place of their index in the model: `norm/ema_state_index/0`."""
    values, markers = state.tree_flatten()
    paths = [
        (*re.findall(r"\w+", str(marker))[1:], *map(key_to_string, inner))  # the first word is the model's class
        for marker, value in zip(markers, values, strict=True)
        for inner, _ in jax.tree.leaves_with_path(value)
    ]
    return Names(tuple(paths), jax.tree.structure(state))
