"""Weights in the form that generation reads: cast once, one array per layer, one copy of each."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from meshwright.generate.spread import FEATURE_AXIS, PIPELINE_AXIS, Spread
from meshwright.mesh.current import current_mesh
from meshwright.specs import dim_axes, spec_axes
from meshwright.train.precision import Precision
from meshwright.types import PyTree


@dataclass(frozen=True)
class Weights:
    """Weights on the devices that generate; `Generator.load` makes them.

    Args:
        tree: like the parameters, with a list of layers.
    """

    tree: PyTree
    spread: Spread


def load_weights(params: PyTree, *, precision: Precision, num_rows: int) -> Weights:
    """Returns the weights for a number of rows, cast to the compute dtype, where their parameters are.

    An axis that splits layers in training splits their features here.
    """
    params, mesh = _needed_copies(params, num_rows)
    spread = Spread.of(mesh, num_rows)
    unstack = functools.partial(unstacked, precision=precision)
    shardings = None
    if mesh is not None:
        abstract = jax.eval_shape(unstack, params)
        specs = jax.tree.map(lambda leaf: leaf.sharding.spec, params)
        layer = jax.tree.map(
            lambda leaf, spec: NamedSharding(mesh, _layer_spec(spec, leaf.shape, mesh)), abstract["layers"][0],
            specs["layers"],
        )  # fmt: skip
        shardings = {
            name: [layer] * len(part)
            if name == "layers"
            else jax.tree.map(lambda spec: NamedSharding(mesh, spec), part)
            for name, part in (specs | {"layers": abstract["layers"]}).items()
        }
    return Weights(jax.jit(unstack, out_shardings=shardings)(params), spread)


def unstacked(params: PyTree, *, precision: Precision) -> PyTree:
    """Returns parameters in their compute dtypes, with a list of layers."""
    params = jax.tree.map(lambda leaf, dtype: leaf.astype(dtype), params, precision.compute_dtypes(params))
    count = jax.tree.leaves(params["layers"])[0].shape[0]
    return params | {"layers": [jax.tree.map(lambda leaf, n=n: leaf[n], params["layers"]) for n in range(count)]}


def _layer_spec(stacked: P, shape: tuple[int, ...], mesh: Mesh) -> P:
    """Returns the spec of one layer, from that of the stacked layers."""
    entries = list(stacked)[1:]
    stages = mesh.shape.get(PIPELINE_AXIS, 1)
    for dim, entry in enumerate(entries):
        axes = dim_axes(entry)
        ways = stages * (mesh.shape[FEATURE_AXIS] if FEATURE_AXIS in axes else 1)
        if axes in ((), (FEATURE_AXIS,)) and stages > 1 and len(shape) > 1 and shape[dim] % ways == 0:
            entries[dim] = (*axes, PIPELINE_AXIS)
            break
    return P(*entries)


def _needed_copies(params: PyTree, num_rows: int) -> tuple[PyTree, Mesh | None]:
    """Returns the parameters on as few devices as their rows need, and the mesh of those devices.

    Replicas without rows of their own would repeat the work of others, which is slow on simulated devices. Nothing is
    copied. Runs of several processes keep the whole mesh, and so do programs under a current mesh, which JAX does not
    let shrink.
    """
    leaves = jax.tree.leaves(params)
    found = [leaf.sharding for leaf in leaves if isinstance(leaf, jax.Array)]
    shardings = [sharding for sharding in found if isinstance(sharding, NamedSharding)]
    mesh = shardings[0].mesh if shardings else None
    if not isinstance(mesh, Mesh) or len(shardings) < len(leaves) or any(one.mesh != mesh for one in shardings):
        return params, None
    used = [axis for sharding in shardings for axis in spec_axes(sharding.spec)]
    used += Spread.of(mesh, num_rows).rows
    spare = [axis for axis in mesh.axis_names if mesh.shape[axis] > 1 and axis not in used]
    if not spare or jax.process_count() > 1 or current_mesh() is not None:
        return params, mesh
    places = tuple(slice(0, 1) if axis in spare else slice(None) for axis in mesh.axis_names)
    part = Mesh(mesh.devices[places], mesh.axis_names, axis_types=mesh.axis_types)

    def on_part(leaf: Any) -> Any:
        here = {shard.device: shard.data for shard in leaf.addressable_shards}
        sharding = NamedSharding(part, leaf.sharding.spec)
        pieces = [here[device] for device in part.devices.flat]
        return jax.make_array_from_single_device_arrays(leaf.shape, sharding, pieces)

    return jax.tree.map(on_part, params), part
