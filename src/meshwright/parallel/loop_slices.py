"""Slices of values that a loop does not change, taken before the loop.

A loss with unrolled layers slices stacked weights. In a loop over minibatches, XLA:GPU writes these slices in each
iteration and keeps them for the backward pass, beside the stacked weights that the loop carries. Taken before the loop,
they are written once, and the stacked weights are freed.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from typing import Any

import jax
from jax.extend import core

from meshwright.types import PyTree

_SLICES = ("slice", "squeeze")


def slices_first(function: Callable[..., PyTree], *args: PyTree) -> Callable[..., PyTree]:
    """Returns `function` for arguments shaped like `args`; slices of values that it closes over are taken now.

    Example:
        >>> import jax.numpy as jnp
        >>> stacked = jnp.arange(6.0).reshape(2, 3)
        >>> body = slices_first(lambda x: x * jax.lax.index_in_dim(stacked, 1, keepdims=False), jnp.ones(3))
        >>> body(jnp.ones(3)).tolist()
        [3.0, 4.0, 5.0]
    """
    closed, shape = jax.make_jaxpr(function, return_shape=True)(*args)
    known = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    whole = _uses(closed.jaxpr, known, [one for one in closed.jaxpr.eqns if not _is_slice(one)])
    left = []
    for equation in closed.jaxpr.eqns:
        reads = [var for var in equation.invars if isinstance(var, core.Var)]
        if _is_slice(equation) and all(var in known and var not in whole for var in reads):
            alone = closed.jaxpr.replace(constvars=[], invars=reads, outvars=equation.outvars, eqns=[equation])
            found = core.jaxpr_as_fun(core.ClosedJaxpr(alone, []))(*(known[var] for var in reads))
            known |= dict(zip(equation.outvars, found, strict=True))
        else:
            left.append(equation)
    kept = _uses(closed.jaxpr, known, left)
    consts = [var for var in known if var in kept]
    rest = closed.jaxpr.replace(constvars=consts, eqns=left)
    run = core.jaxpr_as_fun(core.ClosedJaxpr(rest, [known[var] for var in consts]))
    structure: Any = jax.tree.structure(shape)

    def call(*args: PyTree) -> PyTree:
        return structure.unflatten(run(*jax.tree.leaves(args)))

    return call


def _is_slice(equation: Any) -> bool:
    """Whether an equation takes slices, or calls a function that does nothing else."""
    inside = equation.params.get("call_jaxpr")
    if inside is None:
        return equation.primitive.name in _SLICES
    return all(_is_slice(inner) for inner in getattr(inside, "jaxpr", inside).eqns)


def _uses(jaxpr: Any, known: Container[Any], equations: Sequence[Any]) -> set[Any]:
    """Returns the known variables that these equations read, or that the jaxpr returns."""
    read = [var for equation in equations for var in equation.invars]
    return {var for var in (*read, *jaxpr.outvars) if isinstance(var, core.Var) and var in known}
