"""The update of an optimizer, with the loss for optimizers that ask for it.

Optax passes more than gradients to some optimizers: the loss to `reduce_on_plateau`, and the loss as a function of the
parameters to the line search of `lbfgs`. All work on global arrays, so they take the same steps on every mesh.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from meshwright.errors import MeshwrightError
from meshwright.layout import Layout
from meshwright.types import PyTree


def require_known_optimizer(layout: Layout) -> None:
    """Raises if the optimizer state of a layout belongs to an optimizer that a step cannot run."""
    parts = layout.structure.unflatten(layout.leaves)

    def is_lookahead(node: Any) -> bool:
        return isinstance(node, optax.LookaheadState)

    if any(is_lookahead(node) for node in jax.tree.leaves(parts, is_leaf=is_lookahead)):
        raise MeshwrightError(
            "optax.lookahead does not work in a train step: it replaces the parameters by two copies "
            "(`LookaheadParams`), and the job's loss and rules know only one.",
            hint="use an optimizer that keeps its second copy in its state, e.g. optax.contrib.schedule_free(...).",
        )


def update(
    optimizer: Any,
    grads: PyTree,
    opt_state: PyTree,
    params: PyTree,
    *,
    loss: Any,
    loss_at: Callable[[PyTree], Any],
    loss_and_grads_at: Callable[[PyTree], tuple[Any, PyTree]],
    clipped: bool,
    specs: PyTree = None,
) -> tuple[PyTree, PyTree]:
    """Returns `optimizer.update(grads, opt_state, params)`, with the loss for optimizers that take it.

    Args:
        loss_at, loss_and_grads_at: the loss of this step's batch for other parameters, for line searches.
        clipped: whether the gradients may be clipped; a line search needs those of the loss.
        specs: the specs of the parameters on the current mesh, for optimizers that communicate (`muon`).

    Example:
        >>> optimizer = optax.polyak_sgd()
        >>> params = {"w": jnp.float32(3.0)}
        >>> square = lambda params: params["w"] ** 2
        >>> updates, _ = update(
        ...     optimizer,
        ...     jax.grad(square)(params),
        ...     optimizer.init(params),
        ...     params,
        ...     loss=square(params),
        ...     loss_at=square,
        ...     loss_and_grads_at=jax.value_and_grad(square),
        ...     clipped=False,
        ... )
        >>> float(updates["w"])  # loss / gradient
        -1.5
    """
    # A rule for `jax.jvp` serves line searches that use `jax.grad` and those that use `jax.linearize`.
    value_fn = jax.custom_jvp(loss_at)

    @value_fn.defjvp
    def tangent(primals: tuple[PyTree], tangents: tuple[PyTree]) -> tuple[Any, Any]:
        value, slopes = loss_and_grads_at(*primals)
        products = jax.tree.map(lambda slope, change: jnp.vdot(slope.astype(change.dtype), change), slopes, tangents[0])
        return value, sum(jax.tree.leaves(products), jnp.zeros((), value.dtype))

    def searched(params: PyTree, specs: PyTree = None) -> Any:
        del specs  # a line search rejects extra arguments that the loss does not take
        if clipped:
            raise MeshwrightError(
                "this optimizer searches along its update for a lower loss, which needs unclipped gradients.",
                hint="leave out clip: the line search already limits the step.",
            )
        return value_fn(params)

    full = optax.with_extra_args_support(optimizer)
    result: tuple[PyTree, PyTree] = full.update(
        grads, opt_state, params, value=loss, grad=grads, value_fn=searched, specs=specs
    )
    return result
