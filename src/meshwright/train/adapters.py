"""Jobs from Flax Linen, Flax NNX and Equinox models.

Parameters become nested dicts with the paths of the model, so rules use these paths, and a checkpoint can be read
without the library. A loss returns a mean or, for correct weights with masks and minibatches, a `(sum, count)` pair,
optionally followed by a dict of metrics.
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
    make_batch: Callable[[int], PyTree] | None = None,
) -> Job:
    """Returns a job for a `flax.linen` module whose only variables are parameters.

    Args:
        loss: `loss(apply, batch, rng)`; `apply(*args, **kwargs)` calls the module with its parameters, and with `rng`
            for dropout. `rng` is None if dropout is off.
        batch: an example batch of arrays or shapes.
        make_batch: `make_batch(seed) -> batch`, for `meshwright train --job` and `verify`.
        init_args: arrays or shapes to initialize the module with (default: the arguments of the loss's first call).

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

    return _job(init, job_loss, batch, rules, mesh, make_batch)


def nnx_job(
    make_model: Callable[[Any], Any],
    loss: Callable[..., Any],
    batch: PyTree,
    rules: Any,
    *,
    mesh: str | None = None,
    make_batch: Callable[[int], PyTree] | None = None,
) -> Job:
    """Returns a job for a `flax.nnx` model whose only state is parameters and random streams.

    Args:
        make_model: `make_model(rngs)` returns the model, given `nnx.Rngs`.
        loss: `loss(model, batch)`. The model is in training mode if dropout has a key, else in evaluation mode.
        batch: an example batch of arrays or shapes.
        make_batch: `make_batch(seed) -> batch`, for `meshwright train --job` and `verify`.

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
    from flax import nnx  # slow to import

    model = nnx.eval_shape(lambda: make_model(nnx.Rngs(0)))
    parts: Any = nnx.split(model, nnx.Param, nnx.RngState, ...)
    graph, params, streams, others = parts
    _refuse_others(model, (type(variable).__name__ for _, variable in nnx.to_flat_state(others)))
    # Treat variables as leaves, so that names do not end in the entry for their value.
    names = _Names.of(params, is_leaf=lambda node: isinstance(node, nnx.Variable))

    def init(key: PRNGKeyArray) -> PyTree:
        return names.to_dict(nnx.state(make_model(nnx.Rngs(key)), nnx.Param))

    def job_loss(params: PyTree, batch: PyTree, rng: PRNGKeyArray | None) -> Any:
        key = jax.random.key(0) if rng is None else rng
        # Every random stream restarts with each batch, each from a different key.
        fresh = [
            jax.random.fold_in(key, place) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else _zeros(leaf)
            for place, leaf in enumerate(jax.tree.leaves(streams))
        ]
        model = nnx.merge(graph, names.from_dict(params), jax.tree.unflatten(jax.tree.structure(streams), fresh))
        (model.eval if rng is None else model.train)()
        return loss(model, batch)

    return _job(init, job_loss, batch, rules, mesh, make_batch)


def equinox_job(
    make_model: Callable[[PRNGKeyArray], Any],
    loss: Callable[..., Any],
    batch: PyTree,
    rules: Any,
    *,
    mesh: str | None = None,
    make_batch: Callable[[int], PyTree] | None = None,
) -> Job:
    """Returns a job for an Equinox model, whose float arrays are the parameters.

    Args:
        make_model: `make_model(key)` returns the model.
        loss: `loss(model, batch, key)`. If `key` is None, the model is in inference mode.
        batch: an example batch of arrays or shapes.
        make_batch: `make_batch(seed) -> batch`, for `meshwright train --job` and `verify`.

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
        raise JobError("equinox_job needs Equinox, which is not installed.", hint="pip install equinox") from None
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

    return _job(init, job_loss, batch, rules, mesh, make_batch)


class _Names(NamedTuple):
    """The paths of a tree's leaves, to convert it to nested dicts and back."""

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


def _job(
    init: Callable[..., Any],
    loss: Callable[..., Any],
    batch: PyTree,
    rules: Any,
    mesh: str | None,
    make_batch: Callable[[int], PyTree] | None,
) -> Job:
    """Returns a job whose loss always returns a dict of metrics."""

    def with_metrics(params: PyTree, batch: PyTree, rng: PRNGKeyArray | None) -> tuple[Any, Mapping[str, Any]]:
        result = loss(params, batch, rng)
        has_metrics = isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping)
        return result if has_metrics else (result, {})

    return Job(init=init, rules=rules, loss=with_metrics, batch=batch, mesh=mesh, make_batch=make_batch)


def _refuse_others(model: Any, others: Iterable[str]) -> None:
    found = sorted(set(others))
    if found:
        raise JobError(
            f"{type(model).__name__} holds more than parameters: {', '.join(found)}.",
            hint="use layers without running statistics or buffers; a step updates only parameters.",
        )


def _zeros(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf: jnp.zeros(jnp.shape(leaf), jnp.result_type(leaf)), tree)


def _is_array(leaf: Any) -> bool:
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")
