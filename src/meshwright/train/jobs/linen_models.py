"""Jobs from `flax.linen` modules."""

from __future__ import annotations

import functools
import re
import zlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from flax import linen
from flax.core.scope import DenyList, in_filter, union_filters
from flax.errors import InvalidRngError

from meshwright.rules.annotations import annotation_of
from meshwright.train.job import Job, abstract_init
from meshwright.train.jobs.model_job import STATE, make_job, rules_for, zeros
from meshwright.tree import named_boxes
from meshwright.types import PRNGKeyArray, PyTree


def linen_job(
    module: Any,
    loss: Callable[..., Any],
    batch: PyTree,
    rules: Any = None,
    *,
    unannotated: Any = (),
    init_args: tuple[Any, ...] | None = None,
    eval_loss: Callable[..., Any] | None = None,
    predict: Callable[..., Any] | None = None,
    **fields: Any,
) -> Job:
    """Returns a job for a `flax.linen` module.

    Collections other than `params` become the job's model state. `apply` updates them in training and leaves them
    unchanged in evaluation, so a loss never passes `mutable=`.

    Args:
        loss: `loss(apply, batch, rng)`; `apply(*args, **kwargs)` calls the module with its variables, and in training
            with a key for each random stream that it asks for. `rng` is None in evaluation.
        batch: an example batch of arrays or shapes.
        rules: rules, a table of mesh axes by logical name for `nn.with_logical_partitioning`, or None for
            `nn.with_partitioning`; see `rules_from_annotations`.
        unannotated: rules for parameters without an annotation, if the others have one.
        init_args: arrays or shapes to initialize the module with (default: the arguments of the loss's first call).
        eval_loss: like `loss`, for evaluation.
        predict: `predict(apply, batch) -> outputs`.
        fields: other fields of `Job`.

    Example:
        >>> import jax.numpy as jnp
        >>> from meshwright import P
        >>> job = linen_job(
        ...     linen.Dense(4),
        ...     lambda apply, batch, rng: jnp.mean(apply(batch["x"]) ** 2),
        ...     {"x": jax.ShapeDtypeStruct((8, 16), "float32")},
        ...     [("kernel", P("fsdp")), ("bias", P())],
        ... )
        >>> jax.tree.map(jnp.shape, job.init(jax.random.key(0)))
        {'bias': (4,), 'kernel': (16, 4)}
    """

    def make(key: PRNGKeyArray, *, unbox: bool = True) -> dict[str, Any]:
        made: dict[str, Any] = {}

        def apply(*args: Any, mutable: Any = False, **kwargs: Any) -> Any:
            if made:
                return module.apply(made, *args, mutable=mutable, **kwargs)
            every = union_filters(DenyList("intermediates"), mutable)
            out, variables = module.init_with_output(key, *args, mutable=every, **kwargs)
            made.update({name: value for name, value in variables.items() if name != "intermediates"})
            return out if mutable is False else (out, _asked(variables, mutable))

        # In the context of a mesh, Flax would constrain each parameter to its annotation, which may name other axes.
        with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
            if init_args is None:
                loss(apply, zeros(batch), None)
            else:
                apply(*zeros(init_args))
            return {name: linen.meta.unbox(value) for name, value in made.items()} if unbox else made

    def init(key: PRNGKeyArray) -> PyTree:
        return make(key).get("params", {})

    def init_state(key: PRNGKeyArray) -> PyTree:
        return {name: value for name, value in make(key).items() if name != "params"}

    shapes = abstract_init(functools.partial(make, unbox=False))
    collections = [name for name in shapes if name != "params"]
    streams = ["dropout"]

    def job_loss(loss: Callable[..., Any]) -> Callable[..., Any]:
        def run(params: PyTree, state: PyTree, batch: PyTree, rng: PRNGKeyArray | None) -> tuple[Any, PyTree]:
            apply = _Apply(module, {"params": params, **state}, rng, streams)
            return loss(apply, batch, rng), {name: apply.variables[name] for name in state}

        return run

    def job_predict(params: PyTree, state: PyTree, batch: PyTree) -> Any:
        assert predict is not None
        return predict(_Apply(module, {"params": params, **state}, None, streams), batch)

    boxes = {**shapes.get("params", {}), STATE: {name: shapes[name] for name in collections}}
    return make_job(
        "linen_job",
        init=init,
        loss=job_loss(loss),
        batch=batch,
        rules=rules_for(rules, ((leaf.name, annotation_of(leaf.value)) for leaf in named_boxes(boxes)), unannotated),
        model_state=init_state if collections else None,
        eval_loss=None if eval_loss is None else job_loss(eval_loss),
        predict=None if predict is None else job_predict,
        fields=fields,
    )


class _Apply:
    """The `apply` of one call of the loss: it keeps the collections that the module updates."""

    def __init__(self, module: Any, variables: dict[str, Any], rng: PRNGKeyArray | None, streams: list[str]) -> None:
        self.module = module
        self.variables = variables
        self.rng = rng
        self.streams = streams

    def __call__(self, *args: Any, mutable: Any = False, rngs: Any = None, **kwargs: Any) -> Any:
        own = [name for name in self.variables if name != "params"] if self.rng is not None else []
        every = union_filters(mutable, own) if own else mutable
        while True:
            keys = {**self._keys(), **(rngs or {})}
            try:
                out = self.module.apply(self.variables, *args, rngs=keys or None, mutable=every, **kwargs)
                break
            except InvalidRngError as error:
                # Flax does not list the random streams of a module; it only names a missing one.
                wanted = re.search(r'needs PRNG for "([^"]+)"', str(error))
                if self.rng is None or wanted is None or wanted[1] in keys:
                    raise
                self.streams.append(wanted[1])
        if every is False:
            return out
        out, updates = out
        self.variables = {**self.variables, **{name: updates[name] for name in own if name in updates}}
        if mutable is False:
            return out
        return out, _asked(updates, mutable)

    def _keys(self) -> dict[str, PRNGKeyArray]:
        if self.rng is None:
            return {}
        return {
            name: self.rng if name == "dropout" else jax.random.fold_in(self.rng, np.uint32(zlib.crc32(name.encode())))
            for name in self.streams
        }


def _asked(collections: Any, mutable: Any) -> dict[str, Any]:
    return {name: value for name, value in collections.items() if in_filter(mutable, name)}
