"""Weights in fp8, cast once per step and used by all of its minibatches.

Weights do not change between minibatches, and neither do their scales, which follow from the weights' own amaxes. So
each device casts its slices before the loop over minibatches: FSDP then gathers fp8 values for each minibatch, and
weights that a matmul needs transposed are transposed once. The loss gets them beside the parameters, which it does not
read for these matmuls; gradients still belong to the parameters.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from meshwright.layout import Layout
from meshwright.mesh.current import AnyMesh
from meshwright.models.stack import layers_form
from meshwright.parallel.fp8.casting import E4M3, WEIGHT, quantize
from meshwright.parallel.fp8.weight import Amaxes, CastWeight
from meshwright.parallel.kernels.dispatch import uses_kernels
from meshwright.specs import dim_axes
from meshwright.train.fp8_scaling import Fp8, nested
from meshwright.train.job import execution_of
from meshwright.train.views import PIPELINE_AXES
from meshwright.tree import named_leaves, tree_path_to_string
from meshwright.types import PyTree

FP8_WEIGHTS = "fp8_weights"
"""The argument of a loss that takes weights in fp8."""
_LAYERS = "layers"


@dataclass(frozen=True)
class WeightCasts:
    """Casts the fp8 weights of a step; made by `make_weight_casts`.

    Args:
        dtypes: dtype in which each weight would be multiplied, by name; it is cast to this dtype first.
        specs: spec of each weight.
        turns: names of the weights that no axis splits, which are kept transposed as well if a kernel does both.
        by_layer: whether each layer's weights are arrays of their own, for layers without a loop, or with several per
            step of one. Of slices of stacked weights, XLA:GPU widens the whole stack to bfloat16 first, and then
            multiplies in bfloat16.
        kernels: see `Execution`.
    """

    dtypes: Mapping[str, Any]
    specs: Mapping[str, P]
    turns: frozenset[str]
    by_layer: bool
    kernels: bool | None

    def __call__(self, params: PyTree, amaxes: Amaxes) -> PyTree:
        """Returns nested dicts with a `CastWeight` for each fp8 weight, stacked like the parameter.

        With `by_layer`, "layers" is a list with one such tree per layer.
        """
        leaves, known = ({leaf.name: leaf.value for leaf in named_leaves(tree)} for tree in (params, amaxes.tree))
        casts = {name: self._cast(name, leaves[name].astype(dtype), known[name]) for name, dtype in self.dtypes.items()}
        apart = [name for name in casts if self.by_layer and name.startswith(f"{_LAYERS}/")]
        if not apart:
            return nested({name: _stacked(found) for name, found in casts.items()})
        count = len(casts[apart[0]])
        layers = [nested({name: casts[name][place] for name in apart})[_LAYERS] for place in range(count)]
        return {**nested({name: _stacked(casts[name]) for name in casts if name not in apart}), _LAYERS: layers}

    def _cast(self, name: str, leaf: Any, amaxes: Any) -> CastWeight | list[CastWeight]:
        """Returns the weight in fp8, as a list of layers if they are cast one by one."""
        amax = amaxes[..., WEIGHT]
        kernels = name in self.turns and uses_kernels(self.kernels)
        if leaf.ndim == 3 and (kernels or (self.by_layer and name.startswith(f"{_LAYERS}/"))):
            made = [quantize(leaf[place], amax[place], E4M3, kernels=kernels) for place in range(leaf.shape[0])]
            return [CastWeight(one.value, one.turned) for one in made]
        one = quantize(leaf, amax[..., None, None], E4M3, kernels=kernels)
        return CastWeight(one.value, one.turned)

    def constrained(self, casts: PyTree, mesh: AnyMesh, specs: Mapping[str, P] | None = None) -> PyTree:
        """Returns the weights split as their parameters, or as in `specs`, by name; for the global view."""
        wanted = self.specs if specs is None else specs

        def constrain(path: Any, leaf: Any) -> Any:
            *names, field = str(tree_path_to_string(path, sep="/")).split("/")
            is_apart = self.by_layer and names[0] == _LAYERS
            spec = wanted["/".join([names[0], *names[2:]] if is_apart else names)]
            spec = P() if field == "turned" else P(*spec[1:]) if is_apart else spec
            return jax.lax.with_sharding_constraint(leaf, NamedSharding(mesh, spec))

        return jax.tree_util.tree_map_with_path(constrain, casts)


def make_weight_casts(
    job: Any,
    layout: Layout,
    fp8: Fp8 | None,
    dtypes: PyTree,
    *,
    takes: Collection[str],
    num_minibatches: int,
    by_layer: bool,
) -> WeightCasts | None:
    """Returns the casts for a step, or None if weights are cast where they are used.

    That is the form for one minibatch, which has nothing to share, for padded weights, which the loss cuts first, for
    pipelines, which move layers between their stages, and for unrolled layers whose stacks are split between layers.

    Args:
        layout: of the parameters.
        by_layer: whether the loss gathers its parameters layer by layer.
    """
    if fp8 is None or num_minibatches == 1 or FP8_WEIGHTS not in takes:
        return None
    if any(layout.mesh.shape.get(axis, 1) > 1 for axis in PIPELINE_AXES):
        return None
    names = set(fp8.names(layout.abstract))
    leaves = {leaf.name: leaf for leaf in layout.leaves if leaf.name in names}
    if any(leaf.is_padded for leaf in leaves.values()):
        return None
    run = execution_of(job)
    with jax.sharding.use_abstract_mesh(layout.mesh.abstract_mesh):
        is_loop = run is None or by_layer or layers_form(run.layers, gathers=False) in ("scan", 1)
    if not is_loop and any(len(leaf.spec) > 0 and dim_axes(leaf.spec[0]) for leaf in leaves.values()):
        return None
    return WeightCasts(
        dtypes={leaf.name: leaf.value for leaf in named_leaves(dtypes) if leaf.name in names},
        specs={name: leaf.spec for name, leaf in leaves.items()},
        turns=frozenset(name for name, leaf in leaves.items() if leaf.is_replicated),
        by_layer=not is_loop,
        kernels=None if run is None else run.kernels,
    )


def _stacked(casts: CastWeight | list[CastWeight]) -> CastWeight:
    return casts if isinstance(casts, CastWeight) else jax.tree.map(lambda *leaves: jnp.stack(leaves), *casts)
