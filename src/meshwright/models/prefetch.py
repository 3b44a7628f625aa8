"""Stacked layers whose weights are gathered one layer ahead, so that the gather hides behind the layer before it.

In a plain loop, a layer's first matmul waits for its own weights. Here a step of the loop gathers the next layer's
while it computes its own, forwards and backwards. Autodiff cannot write the backward loop: it would keep what the
forward loop carries, the gathered weights of all layers. So the backward loop is written out below. What a layer keeps
for it is decided by `jax.checkpoint`, as always; weights are left out of that and gathered again.

Along the way, the last layer's weights wait for the backward pass, which begins with them. One layer more than needed
is gathered in all: the backward loop's last step gathers the first layer's again, since every step is the same program.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from meshwright.mesh.axes import varying_axes
from meshwright.types import PyTree


def run_prefetched(
    block: Callable[[PyTree, Any, Any], Any],
    layers: PyTree,
    h: Any,
    numbers: Any,
    *,
    whole: Callable[[PyTree], PyTree],
    remat: Callable[[Callable[..., Any]], Callable[..., Any]],
    unroll: int = 1,
) -> Any:
    """Returns `h` after all layers: `h = block(whole(layer), h, number)` for each, gathered one layer ahead.

    Args:
        layers: slices of the layers' parameters, stacked along their leading dim.
        numbers: a number for each layer.
        whole: makes a layer's slices whole; its gradient is the reduce-scatter.
        remat: wraps `block` in the `jax.checkpoint` that is wanted, if any.
        unroll: how many layers are written out in each step of the loop; all of them make no loop.
    """
    count = int(numbers.shape[0])
    run = remat(block)
    shape_of_pull: list[Any] = []  # set by the forward pass, for the backward pass of the same program

    def neighbour(layers: PyTree, place: Any, by: int, h: Any) -> tuple[PyTree, Any]:
        """Returns the whole weights of the layer before or after, and `h`, which the gather waits for."""
        # Beyond the ends there is none to gather; the one at the end is taken, since every step is the same program.
        place = tied = jnp.clip(place + by, 0, count - 1)
        if unroll > 1:
            # Written out, all layers are in one program, and nothing else keeps XLA from gathering them all at once.
            h, tied = lax.optimization_barrier((h, place))

        def take(leaf: Any) -> Any:
            # Tied to `h`, an index differs wherever `h` does, and so would what does not: it is not gathered anyway.
            index = tied if varying_axes(tied) <= varying_axes(leaf) else place
            return lax.dynamic_index_in_dim(leaf, index, keepdims=False)

        return whole(jax.tree.map(take, layers)), h

    def forward(layers: PyTree, h: Any, *, keeps: bool) -> tuple[Any, Any]:
        def step(carry: Any, x: Any) -> tuple[Any, Any]:
            h, weights = carry
            place, number = x
            following, h = neighbour(layers, place, 1, h)
            if not keeps:
                return (run(weights, h, number), following), None
            out, pull = jax.vjp(lambda weights, h: run(weights, h, number), weights, h)
            kept, shape = _without(pull, weights)
            shape_of_pull[:] = [shape]
            return (out, following), kept

        first = whole(jax.tree.map(lambda leaf: leaf[0], layers))
        (h, last), kept = lax.scan(step, (h, first), (jnp.arange(count), numbers), unroll=unroll)
        return h, (kept, last, layers)

    @jax.custom_vjp
    def all_layers(layers: PyTree, h: Any) -> Any:
        return forward(layers, h, keeps=False)[0]

    def backward(saved: Any, dh: Any) -> tuple[PyTree, Any]:
        kept, last, layers = saved

        def step(carry: Any, x: Any) -> tuple[Any, PyTree]:
            dh, weights = carry
            kept, place = x
            before, dh = neighbour(layers, place, -1, dh)
            d_weights, dh = _with(kept, weights, shape_of_pull[0])(dh)
            layer = jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, place, keepdims=False), layers)
            (d_layer,) = jax.vjp(whole, layer)[1](d_weights)
            return (dh, before), d_layer

        xs = (kept, jnp.arange(count))
        (dh, _), d_layers = lax.scan(step, (dh, last), xs, reverse=True, unroll=unroll)
        return d_layers, dh

    all_layers.defvjp(lambda layers, h: forward(layers, h, keeps=True), backward)
    return all_layers(layers, h)


def _without(pull: PyTree, weights: PyTree) -> tuple[list[Any], Any]:
    """Returns what a pull-back keeps apart from the weights, and how to put it together again."""
    leaves, structure = jax.tree.flatten(pull)
    places = {id(leaf): place for place, leaf in enumerate(jax.tree.leaves(weights))}
    sources = [places.get(id(leaf)) for leaf in leaves]
    kept = [leaf for leaf, source in zip(leaves, sources, strict=True) if source is None]
    return kept, (structure, sources)


def _with(kept: list[Any], weights: PyTree, shape: Any) -> Any:
    structure, sources = shape
    whole, rest = jax.tree.leaves(weights), iter(kept)
    return structure.unflatten([next(rest) if source is None else whole[source] for source in sources])
