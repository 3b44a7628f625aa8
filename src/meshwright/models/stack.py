"""Layers that are stacked along a leading dim, run one after the other: in a loop, written out, or in blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from meshwright.errors import LayoutError
from meshwright.hardware.chips import chip_family
from meshwright.mesh.build import current_mesh
from meshwright.models.execution import Layers, Remat, remat_policy
from meshwright.models.ops import unstack
from meshwright.models.prefetch import run_prefetched
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
        return run_prefetched(
            block,
            layers,
            h,
            numbers,
            whole=whole,
            remat=lambda block: block if policy is None else jax.checkpoint(block, policy=policy, prevent_cse=size > 1),
            unroll=size,
        )
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
