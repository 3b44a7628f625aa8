"""How much of a loss waits for its gradient, and which layers made it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax

from meshwright.plan.costs.layer_kind import kind_of, makers

# What changes no value, and what is cheaper to compute again than to store.
_RENAMES = ("reshape", "name", "squeeze", "expand_dims", "convert_element_type", "copy")
_CHEAP = ("mul", "add", "sub", "neg", "convert_element_type")


def bytes_kept(
    jaxpr: Any, waiting: Sequence[Any], num_params: int
) -> tuple[Mapping[str, float], Mapping[str, float], Mapping[str, float]]:
    """Returns the bytes of what waits for the backward pass, by the kind of layer that made it.

    Three times: as a compiler stores it, as a loop over layers hands it over, and what waits on the host.

    Left out is what depends on parameters alone, and what can be made on the way from something that waits already.
    Widened values wait as they were before. A loop over layers leaves out only the first.
    """
    hosted = [var for var in waiting if _is_on_host(var)]
    waiting = [var for var in waiting if not _is_on_host(var)]
    made = makers(jaxpr)
    of_batch = {id(var) for var in jaxpr.invars[num_params:]}
    for equation in jaxpr.eqns:
        if any(id(value) in of_batch for value in equation.invars):
            of_batch.update(id(var) for var in equation.outvars)

    def origin(var: Any) -> Any:
        equation = made.get(id(var))
        if equation is None or equation.primitive.name not in _RENAMES:
            return var
        source = equation.invars[0]
        narrows = var.aval.dtype.itemsize < source.aval.dtype.itemsize
        return var if narrows else origin(source)

    roots = {id(root): root for root in map(origin, waiting) if id(root) in of_batch}
    inputs = {id(var) for var in jaxpr.invars}

    def is_free(var: Any) -> bool:
        equation = made.get(id(var))
        if equation is None or equation.primitive.name not in _CHEAP:
            return id(var) in inputs
        large = [
            value for value in equation.invars if not hasattr(value, "val") and 8 * value.aval.size > var.aval.size
        ]
        return all(id(origin(value)) in roots and origin(value) is not var for value in large)

    stored = [root for root in roots.values() if not is_free(root)]
    handed = {id(var): var for var in waiting if id(var) in of_batch and id(var) not in inputs}
    return _by_kind(made, stored), _by_kind(made, handed.values()), _by_kind(made, hosted)


def _by_kind(made: Mapping[int, Any], variables: Iterable[Any]) -> dict[str, float]:
    """Returns the bytes of variables, by the kind of layer that made them."""
    found: dict[str, float] = {}
    for var in variables:
        kind = kind_of(made, var)
        found[kind] = found.get(kind, 0.0) + float(var.aval.size * var.aval.dtype.itemsize)
    return found


def _is_on_host(var: Any) -> bool:
    return bool(getattr(var.aval, "memory_space", None) == jax.memory.Space.Host)
