"""Embedding and head that the devices of a pipeline hold in slices, gathered before the loop over ticks.

A train step gathers them itself, once for all minibatches. This is for a model in a `local_map` of your own.
"""

from __future__ import annotations

from dataclasses import replace

import jax
from jax.sharding import PartitionSpec as P

from meshwright.mesh.axes import axis_size, varying_axes
from meshwright.parallel.fsdp import Gather, gather_array, leaf_scope
from meshwright.specs import dim_axes, keep_axes
from meshwright.types import PyTree


def gathered_ends(
    params: PyTree, gather: Gather | None, *, stages: str, tensor: str | None, vocab_size: int, d_model: int
) -> tuple[PyTree, Gather | None]:
    """Returns the parameters with embedding and head gathered along `stages`, and `gather` without that axis.

    `tensor` splits the vocabulary; `gather` gathers along other axes, later.
    """
    if gather is not None:
        others = {name: specs for name, specs in gather.specs.items() if name != "layers"}
        left = jax.tree.map(
            lambda spec: keep_axes(spec, lambda axis: axis != stages), others, is_leaf=lambda node: isinstance(node, P)
        )
        gather = replace(gather, specs={**gather.specs, **left})
    shapes = {("embed", "table"): (vocab_size, d_model), ("head", "kernel"): (d_model, vocab_size)}
    for (group, name), shape in shapes.items():
        vocabulary = int(group == "head")
        leaf = params.get(group, {}).get(name)
        if not isinstance(leaf, jax.Array):  # tied to the embedding, or with adapters
            continue
        spec = (None,) * len(shape) if gather is None else (*gather.specs[group][name], *[None] * len(shape))
        for dim, size in enumerate(shape):
            axes = [axis for axis in dim_axes(spec[dim]) if gather is not None and axis in gather.axes]
            axes += [tensor] if dim == vocabulary and tensor in varying_axes(leaf) else []
            ways = axis_size(stages)
            for axis in axes:
                ways *= axis_size(axis)
            if leaf.shape[dim] * ways == size:
                with leaf_scope(f"{group}/{name}"):
                    whole = gather_array(leaf, dim=dim, axis=stages)
                params = {**params, group: {**params[group], name: whole}}
    return params, gather
