"""Random keys that differ per call, per mesh axis and per device."""

from __future__ import annotations

import functools
import itertools
import zlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from meshwright.errors import RngError
from meshwright.mesh.axes import axis_index
from meshwright.mesh.current import current_mesh
from meshwright.types import PRNGKeyArray

R = TypeVar("R")


def abstract_key() -> Any:
    """Returns the shape and dtype of a key, for `jax.eval_shape` and `jax.make_jaxpr`.

    Example:
        >>> abstract_key().dtype
        key<fry>
    """
    return jax.eval_shape(lambda: jax.random.key(0))


def fold_rng_over_axis(rng: PRNGKeyArray, axis_name: str | Sequence[str]) -> PRNGKeyArray:
    """Returns a key that differs on every device along a mesh axis, for use inside `shard_map`.

    The axis name is folded in as well as the index, so index 1 on `dp` and index 1 on `tp` get different keys. With
    several axes, each is folded in, in order. An axis of size 1 counts as index 0, manual or not.

    Example:
        >>> import meshwright as mw
        >>> draw = lambda key: jax.random.bits(fold_rng_over_axis(key, "tp"), (1,))
        >>> with jax.set_mesh(mw.create_mesh("tp:8")):
        ...     len(set(jax.shard_map(draw, in_specs=mw.P(), out_specs=mw.P("tp"))(jax.random.key(0)).tolist()))
        8
    """
    for name in (axis_name,) if isinstance(axis_name, str) else axis_name:
        rng = jax.random.fold_in(
            jax.random.fold_in(rng, zlib.crc32(name.encode())), axis_index(name, who="fold_rng_over_axis")
        )
    return rng


def wrap_function_with_rng(rng: PRNGKeyArray) -> Callable[[Callable[..., R]], Callable[..., R]]:
    """Decorates `f(key, ...)` so that call n gets the key `fold_in(rng, n)`.

    Calls inside `jax.jit` are counted when the program runs, not when it is traced, so each run draws new keys in the
    order of eager calls. An ordered callback fetches the count from the host, so pass keys explicitly in a hot loop. A
    traced call inside `shard_map`, or with several processes, raises an error, because devices would draw keys in no
    fixed order.

    Example:
        >>> @wrap_function_with_rng(jax.random.key(0))
        ... def noise(key, scale):
        ...     return scale * jax.random.normal(key)
        >>> bool(noise(1.0) != noise(1.0))
        True
        >>> draw = jax.jit(noise)
        >>> bool(draw(1.0) != draw(1.0))
        True
    """
    if not (hasattr(rng, "dtype") and jnp.issubdtype(rng.dtype, jax.dtypes.prng_key)):
        rng = jnp.asarray(rng)
    counter = itertools.count()

    def next_key() -> PRNGKeyArray:
        if isinstance(rng, jax.core.Tracer) or not isinstance(jax.random.fold_in(rng, 0), jax.core.Tracer):
            return jax.random.fold_in(rng, next(counter))
        return jax.random.fold_in(rng, _count_at_run_time(counter))

    def decorate(function: Callable[..., R]) -> Callable[..., R]:
        @functools.wraps(function)
        def wrapped(*args: Any, **kwargs: Any) -> R:
            return function(next_key(), *args, **kwargs)

        return wrapped

    return decorate


def _count_at_run_time(counter: itertools.count[int]) -> jax.Array:
    mesh = current_mesh()
    if (mesh is not None and mesh.manual_axes) or jax.process_count() > 1:
        raise RngError(
            "a function wrapped by wrap_function_with_rng was traced inside shard_map or with several processes, "
            "so devices would draw their keys in no fixed order.",
            hint="pass the key as an argument, and use fold_rng_over_axis for one key per device.",
        )
    from jax.experimental import io_callback

    count = io_callback(lambda: np.uint32(next(counter)), jax.ShapeDtypeStruct((), jnp.uint32), ordered=True)
    return jnp.asarray(count)
