"""The parts that all adapters share: leaf names, rules from annotations, and the fields of the job."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax.traverse_util import unflatten_dict

from meshwright.errors import JobError, did_you_mean
from meshwright.rules.annotations import Annotation, annotated_rules, is_axis_table
from meshwright.train.job import Job
from meshwright.tree import key_to_string
from meshwright.types import PRNGKeyArray, PyTree

STATE = "model_state"
# An adapter sets these fields itself; all other fields of a job are keyword arguments.
_OWN = ("init", "rules", "loss", "batch", STATE, "eval_loss", "predict", "model", "execution")


class Names(NamedTuple):
    """The paths of a tree's leaves, to convert it to nested dicts and back."""

    paths: tuple[tuple[str, ...], ...]
    structure: Any

    @classmethod
    def of(cls, tree: PyTree, is_box: Callable[[Any], bool] | None = None) -> Names:
        """Names the leaves of a tree. A box around one array adds no level to its name."""
        paths: list[tuple[str, ...]] = []
        for path, node in jax.tree.leaves_with_path(tree, is_leaf=is_box):
            name, inside = tuple(map(key_to_string, path)), jax.tree.leaves_with_path(node)
            paths += [name if len(inside) == 1 else (*name, *map(key_to_string, inner)) for inner, _ in inside]
        return cls(tuple(paths), jax.tree.structure(tree))

    def to_dict(self, leaves: Sequence[Any]) -> PyTree:
        return unflatten_dict(dict(zip(self.paths, leaves, strict=True)))

    def from_dict(self, nested: PyTree) -> PyTree:
        return self.structure.unflatten([functools.reduce(operator.getitem, path, nested) for path in self.paths])


def make_job(
    kind: str,
    *,
    init: Callable[..., Any],
    loss: Callable[..., Any],
    batch: PyTree,
    rules: Any,
    model_state: Callable[..., Any] | None,
    eval_loss: Callable[..., Any] | None,
    predict: Callable[..., Any] | None,
    fields: Mapping[str, Any],
) -> Job:
    """Returns a job. The functions take `(params, model_state, ...)`, whether the model has a state or not."""
    known = [field.name for field in dataclasses.fields(Job) if field.name not in _OWN]
    for name in fields:
        if name not in known:
            raise JobError(
                f"{kind} has no argument {name!r}.",
                hint=did_you_mean(name, known) or f"use one of: {', '.join(known)}.",
            )
    stateful = model_state is not None
    given: dict[str, Any] = {
        STATE: model_state,
        "eval_loss": None if eval_loss is None else _with_metrics(eval_loss, stateful),
        "predict": None if predict is None else _with_state(predict, stateful),
    }
    return Job(
        init=init,
        rules=rules,
        loss=_with_metrics(loss, stateful),
        batch=batch,
        **{name: value for name, value in given.items() if value is not None},
        **fields,
    )


def _with_metrics(loss: Callable[..., Any], stateful: bool) -> Callable[..., Any]:
    """Returns a job's loss, which always returns a dict of metrics, and the state if there is one."""

    def run(params: PyTree, state: PyTree, batch: PyTree, rng: PRNGKeyArray | None) -> Any:
        result, updated = loss(params, state, batch, rng)
        has_metrics = isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping)
        value, metrics = result if has_metrics else (result, {})
        if not stateful:
            return value, metrics
        return value, metrics, state if rng is None else updated

    if stateful:
        return run

    def without_state(params: PyTree, batch: PyTree, rng: PRNGKeyArray | None) -> Any:
        return run(params, {}, batch, rng)

    return without_state


def _with_state(predict: Callable[..., Any], stateful: bool) -> Callable[..., Any]:
    return predict if stateful else lambda params, batch: predict(params, {}, batch)


def rules_for(rules: Any, annotations: Iterable[tuple[str, Annotation | None]], unannotated: Any) -> Any:
    """Returns the rules of a job: those that were given, or those of the model's annotations."""
    if rules is None or is_axis_table(rules):
        return annotated_rules(annotations, rules, others=unannotated)
    if unannotated:
        raise JobError(
            "unannotated= adds rules to those of the model's annotations, but rules= replaces the annotations.",
            hint="pass rules=None or a table of axes, or put all rules into rules=.",
        )
    return rules


def zeros(tree: PyTree) -> PyTree:
    """Returns a tree with zeros instead of arrays and shapes; Python numbers stay, as they may be options."""
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype) if hasattr(leaf, "shape") else leaf, tree)
