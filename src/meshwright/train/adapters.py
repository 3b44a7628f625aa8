"""Models of other libraries as jobs: their variables, states and modules become plain trees of parameters.

Parameters are nested dicts whose paths are those of the model: rules read like the model, and a checkpoint can be read
without its library. A loss returns a mean, or better a `(sum, count)` pair, which is right with masks, minibatches and
any mesh; and after it a dict of metrics, if there are any.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen
from flax.traverse_util import unflatten_dict

from meshwright.errors import JobError
from meshwright.train.job import Job
from meshwright.tree import key_to_string
from meshwright.types import PRNGKeyArray, PyTree


def linen_job(
    module: Any,
    loss: Callable[..., Any],
    batch: PyTree,
    rules: Any,
    *,
    init_args: tuple[Any, ...] | None = None,
    mesh: str | None = None,
) -> Job:
    """Makes a job of a `flax.linen` module whose only variables are its parameters.

    Args:
        loss: `loss(apply, batch, rng)`, where `apply(*args, **kwargs)` calls the module with its parameters, and with
            `rng` for dropout. `rng` is None where nothing is to be dropped.
        batch: an example batch, of arrays or shapes.
        init_args: arrays or shapes to initialise the module with; by default those that the loss first calls it with.

    Example:
        >>> import meshwright as mw
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

    def init(key: PRNGKeyArray) -> PyTree:
        made: dict[str, Any] = {}

        def apply(*args: Any, **kwargs: Any) -> Any:
            if made:
                return module.apply(made, *args, **kwargs)
            out, variables = module.init_with_output(key, *args, **kwargs)
            made.update(variables)
            return out

        if init_args is None:
            loss(apply, _zeros(batch), None)
        else:
            apply(*_zeros(init_args))
        _refuse_others(module, (name for name in made if name != "params"))
        return linen.meta.unbox(made.get("params", {}))

    def job_loss(params: PyTree, batch: PyTree, rng: PRNGKeyArray | None) -> Any:
        def apply(*args: Any, **kwargs: Any) -> Any:
            return module.apply({"params": params}, *args, rngs=None if rng is None else {"dropout": rng}, **kwargs)

        return loss(apply, batch, rng)

    return _job(init, job_loss, batch, rules, mesh)


def nnx_job(
    make_model: Callable[[Any], Any],
    loss: Callable[..., Any],
    batch: PyTree,
    rules: Any,
    *,
    mesh: str | None = None,
) -> Job:
    """Makes a job of a `flax.nnx` model whose only state is its parameters and random streams.

    Args:
        make_model: `make_model(rngs)`, with `nnx.Rngs`, makes the model.
        loss: `loss(model, batch)`. The model is in training mode where dropout has a key, in evaluation mode if not.
        batch: an example batch, of arrays or shapes.

    Example:
        >>> import meshwright as mw
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
    from flax import nnx  # as slow to import as the rest of Flax

    model = nnx.eval_shape(lambda: make_model(nnx.Rngs(0)))
    parts: Any = nnx.split(model, nnx.Param, nnx.RngState, ...)
    graph, params, streams, others = parts
    _refuse_others(model, (type(variable).__name__ for _, variable in nnx.to_flat_state(others)))
    # The last step into a variable is to its value, which is no name.
    names = _Names.of(params, is_leaf=lambda node: isinstance(node, nnx.Variable))

    def init(key: PRNGKeyArray) -> PyTree:
        return names.to_dict(nnx.state(make_model(nnx.Rngs(key)), nnx.Param))

    def job_loss(params: PyTree, batch: PyTree, rng: PRNGKeyArray | None) -> Any:
        key = jax.random.key(0) if rng is None else rng
        # Every stream starts anew with each batch, from a key of its own.
        fresh = [
            jax.random.fold_in(key, place) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else _zeros(leaf)
            for place, leaf in enumerate(jax.tree.leaves(streams))
        ]
        model = nnx.merge(graph, names.from_dict(params), jax.tree.unflatten(jax.tree.structure(streams), fresh))
        (model.eval if rng is None else model.train)()
        return loss(model, batch)

    return _job(init, job_loss, batch, rules, mesh)


def equinox_job(
    make_model: Callable[[PRNGKeyArray], Any],
    loss: Callable[..., Any],
    batch: PyTree,
    rules: Any,
    *,
    mesh: str | None = None,
) -> Job:
    """Makes a job of an Equinox model: its arrays of floats are the parameters, the rest stays as it was made.

    Args:
        make_model: `make_model(key)` makes the model.
        loss: `loss(model, batch, key)`. Without a key, the model is in inference mode.
        batch: an example batch, of arrays or shapes.

    Example:
        >>> import equinox as eqx, meshwright as mw
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
        raise JobError("equinox_job needs Equinox.", hint="pip install equinox") from None
    model = eqx.filter_eval_shape(make_model, jax.eval_shape(lambda: jax.random.key(0)))
    params, static = eqx.partition(model, lambda leaf: _is_array(leaf) and jnp.issubdtype(leaf.dtype, jnp.inexact))
    buffers = [leaf for leaf in jax.tree.leaves(static) if _is_array(leaf)]
    _refuse_others(model, (f"{leaf.dtype}{list(leaf.shape)}" for leaf in buffers))
    names = _Names.of(params)

    def init(key: PRNGKeyArray) -> PyTree:
        return names.to_dict(eqx.filter(make_model(key), eqx.is_inexact_array))

    def job_loss(params: PyTree, batch: PyTree, rng: PRNGKeyArray | None) -> Any:
        model = eqx.combine(names.from_dict(params), static)
        return loss(eqx.nn.inference_mode(model, rng is None), batch, rng)

    return _job(init, job_loss, batch, rules, mesh)


class _Names(NamedTuple):
    """The paths of a tree's leaves, by which it becomes nested dicts and a tree again."""

    paths: tuple[tuple[str, ...], ...]
    structure: Any

    @classmethod
    def of(cls, tree: PyTree, is_leaf: Callable[[Any], bool] | None = None) -> _Names:
        leaves = jax.tree.leaves_with_path(tree, is_leaf=is_leaf)
        return cls(tuple(tuple(key_to_string(key) for key in path) for path, _ in leaves), jax.tree.structure(tree))

    def to_dict(self, tree: PyTree) -> PyTree:
        return unflatten_dict(dict(zip(self.paths, jax.tree.leaves(tree), strict=True)))

    def from_dict(self, nested: PyTree) -> PyTree:
        return self.structure.unflatten([functools.reduce(operator.getitem, path, nested) for path in self.paths])


def _job(init: Callable[..., Any], loss: Callable[..., Any], batch: PyTree, rules: Any, mesh: str | None) -> Job:
    """Returns a job of functions of nested dicts; a loss that returns no metrics gets none."""

    def with_metrics(params: PyTree, batch: PyTree, rng: PRNGKeyArray | None) -> tuple[Any, Mapping[str, Any]]:
        result = loss(params, batch, rng)
        has_metrics = isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping)
        return result if has_metrics else (result, {})

    return Job(init=init, rules=rules, loss=with_metrics, batch=batch, mesh=mesh)


def _refuse_others(model: Any, others: Iterable[str]) -> None:
    found = sorted(set(others))
    if found:
        raise JobError(
            f"{type(model).__name__} holds more than parameters: {', '.join(found)}.",
            hint="a step changes parameters only; use layers without running statistics or buffers.",
        )


def _zeros(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf: jnp.zeros(jnp.shape(leaf), jnp.result_type(leaf)), tree)


def _is_array(leaf: Any) -> bool:
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")
