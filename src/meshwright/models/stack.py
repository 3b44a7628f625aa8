"""Layers that are stacked along a leading dim, run one after the other: in a loop, written out, or in blocks.

Where layers are gathered (FSDP), their weights can be gathered one layer ahead, so that the gather hides behind the
layer before it. In a plain loop, a layer's first matmul waits for its own weights. Here a step of the loop gathers the
next layer's while it computes its own, forwards and backwards. Autodiff cannot write the backward loop: it would keep
what the forward loop carries, the gathered weights of all layers. So the backward loop is written out below. What a
layer keeps for it is decided by `jax.checkpoint`, as always; weights are left out of that and gathered again.

Along the way, the last layer's weights wait for the backward pass, which begins with them. One layer more than needed
is gathered in all: the backward loop's last step gathers the first layer's again, since every step is the same program.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from meshwright.errors import LayoutError
from meshwright.hardware.chips import chip_family
from meshwright.mesh.axes import varying_axes
from meshwright.mesh.build import current_mesh
from meshwright.models.execution import Layers, Remat, remat_policy
from meshwright.models.ops import unstack
from meshwright.parallel.fsdp import Gather
from meshwright.types import PyTree

# Measured (benchmarks/RESULTS.md): on GPUs a scan's slices of stacked weights and residuals cost about a tenth. Where
# layers are gathered one by one, they are slices already, and unrolled programs take minutes to compile.
_BEST_FORM: dict[str, Layers] = {"gpu": "unroll"}


def run_layers(
    block: Callable[[PyTree, Any, Any], Any],
    layers: PyTree,
    h: Any,
    *,
    first: Any = 0,
    form: Layers = "auto",
    remat: Remat = "none",
    gather: Gather | None = None,
    prefetch: bool = True,
    kernels: bool | None = None,
) -> Any:
    """Returns `h` after all layers: `h = block(layer, h, number)` for each.

    Args:
        layers: the layers' parameters, stacked along their leading dim.
        first: the number of the first layer.
        form: "scan", "unroll", a number of layers per step of the loop, or "auto".
        remat: what the backward pass computes again; see `Execution`.
        gather: makes a layer's slices whole, just before they are used. They are gathered again for the backward pass.
        prefetch: gathers each layer's while the one before it computes.
        kernels: whether a kernel of ours puts the layers' gradients together; see `Execution`.
    """
    count = int(jax.tree.leaves(layers)[0].shape[0])
    if form == "auto":
        form = "scan" if gather is not None else _BEST_FORM.get(chip_family(current_mesh()), "scan")
    size = _block_size(form, count)
    numbers = first + jnp.arange(count)
    whole = gather.layer() if gather is not None else None

    def run(layer: PyTree, h: Any, number: Any) -> Any:
        return block(layer if whole is None else whole(layer), h, number)

    policy = remat_policy(remat)
    if prefetch and whole is not None and count > 1:
        if policy is not None:
            block = jax.checkpoint(block, policy=policy, prevent_cse=size > 1)
        return run_prefetched(block, layers, h, numbers, whole=whole, unroll=size)
    if policy is None and whole is not None:
        policy = _all_but_gathered
    if policy is not None:
        # Only a loop keeps XLA from merging what is computed again with what was there before.
        run = jax.checkpoint(run, policy=policy, prevent_cse=size == count)
    if size == count:
        for number, layer in enumerate(unstack(layers, count, kernels=kernels)):
            h = run(layer, h, numbers[number])
        return h

    def step(h: Any, x: Any) -> tuple[Any, None]:
        layer, number = x
        if size == 1:
            return run(layer, h, number), None
        for place, single in enumerate(unstack(layer, size, kernels=kernels)):
            h = run(single, h, number[place])
        return h, None

    if size > 1:
        layers = jax.tree.map(lambda leaf: jnp.reshape(leaf, (count // size, size, *leaf.shape[1:])), layers)
        numbers = jnp.reshape(numbers, (count // size, size))
    return lax.scan(step, h, (layers, numbers))[0]


def _all_but_gathered(primitive: Any, *_: Any, **__: Any) -> bool:
    # Kept, the gathered weights of all layers would be the whole model on every device.
    return "all_gather" not in str(primitive.name)


def _block_size(form: Layers, count: int) -> int:
    if form == "scan":
        return 1
    if form == "unroll":
        return count
    if not isinstance(form, int) or form < 1 or count % form:
        fitting = [str(size) for size in range(1, count + 1) if count % size == 0]
        raise LayoutError(
            f"{count} layers cannot be run in blocks of {form!r}.",
            hint=f'use "scan", "unroll" or one of: {", ".join(fitting)}.',
        )
    return form


# --- Gathered one layer ahead ---


def run_prefetched(
    block: Callable[[PyTree, Any, Any], Any],
    layers: PyTree,
    h: Any,
    numbers: Any,
    *,
    whole: Callable[[PyTree], PyTree],
    unroll: int = 1,
) -> Any:
    """Returns `h` after all layers: `h = block(whole(layer), h, number)` for each, gathered one layer ahead.

    Args:
        layers: slices of the layers' parameters, stacked along their leading dim.
        numbers: a number for each layer.
        whole: makes a layer's slices whole; its gradient is the reduce-scatter.
        unroll: how many layers are written out in each step of the loop; all of them make no loop.
    """
    count = int(numbers.shape[0])
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
                return (block(weights, h, number), following), None
            out, pull = jax.vjp(lambda weights, h: block(weights, h, number), weights, h)
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
