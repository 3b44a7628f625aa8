"""Layers in fp8: the amaxes and the weights cast once travel beside the parameters, through loops and gathers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from meshwright.errors import ConfigError
from meshwright.mesh.axes import axis_index
from meshwright.parallel.fp8.weight import Amaxes, CastWeight
from meshwright.parallel.fsdp import Gather
from meshwright.parallel.lora.low_rank import Adapters
from meshwright.types import PyTree

AMAXES, CASTS = "fp8", "fp8_weights"
"""Keys of the amaxes and of the weights in fp8 among the parameters of a layer."""


def check_fp8(kind: str, fp8: Amaxes, lora: Adapters | None) -> None:
    """Raises if a model of this kind cannot run these matmuls in fp8."""
    if lora is not None:
        raise ConfigError(f"{kind} does not run adapters in fp8.", hint="use precision='mixed'.")
    others = [name for name in fp8.tree if name != "layers"]
    if others or "layers" not in fp8.tree:
        raise ConfigError(
            f"{kind} multiplies only weights of its layers in fp8; got {', '.join(others) or 'none'}.",
            hint="choose the matmuls with a regex that matches only parameters under layers/.",
        )


def gather_beside(gather: Gather, layers: PyTree) -> Gather:
    """Returns a `Gather` of layers with replicated amaxes and weights in fp8, split as the parameters."""
    added = {name: layers[name] for name in (AMAXES, CASTS) if name in layers}
    specs = {**gather.specs, AMAXES: jax.tree.map(lambda _: P(), added[AMAXES])}
    if CASTS in added:
        specs[CASTS] = _specs_of(added[CASTS], gather.specs)
    dtypes = None if gather.dtypes is None else {**gather.dtypes, **jax.tree.map(lambda leaf: leaf.dtype, added)}
    return replace(gather, specs=specs, dtypes=dtypes, amaxes=AMAXES, casts=CASTS if CASTS in added else None)


def _specs_of(casts: PyTree, specs: PyTree) -> PyTree:
    if isinstance(casts, CastWeight):
        return jax.tree.map(lambda _: specs, casts)
    return {name: _specs_of(cast, specs[name]) for name, cast in casts.items()}


def of_stage(fp8: Amaxes, axis: str, count: int) -> Amaxes:
    """Returns the amaxes of this device's layers, `count` on each device; the last devices may hold padding."""

    def take(leaf: Any) -> Any:
        missing = jax.lax.axis_size(axis) * count - leaf.shape[0]
        padded = jnp.pad(leaf, ((0, missing), *((0, 0) for _ in leaf.shape[1:])))
        return jax.lax.dynamic_slice_in_dim(padded, axis_index(axis) * count, count)

    return replace(fp8, tree=jax.tree.map(take, fp8.tree))
