"""The loss of a job as a plan traces it: on one device of a platform, without allocating arrays."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType

from meshwright.models.execution import remat_policy
from meshwright.plan.compiled.topology import assumed_cudnn
from meshwright.train.job import traceable_loss
from meshwright.train.precision import Precision
from meshwright.types import PyTree

TRACED_ROWS = 2
"""Rows of a trace, or half of them."""
_KINDS = {"gpu": "NVIDIA H200", "tpu": "TPU v5", "cpu": "cpu"}


def planned_loss(job: Any, remat: str) -> Callable[..., Any]:
    """Returns the loss with a remat policy, as a train step calls it on one device."""
    loss = traceable_loss(job)
    if "remat" in inspect.signature(job.loss).parameters:
        return lambda params, batch, key, **options: loss(params, batch, key, remat=remat, **options)
    policy = remat_policy(remat, by_name=False)  # type: ignore[arg-type]
    if policy is None:
        return loss
    return jax.checkpoint(lambda params, batch, key, **options: loss(params, batch, key, **options), policy=policy)


def narrow_params(params: PyTree, dtypes: Precision) -> PyTree:
    """Returns the shapes of parameters in the dtypes in which the loss computes."""
    return jax.tree.map(
        lambda leaf, dtype: jax.ShapeDtypeStruct(leaf.shape, dtype), params, dtypes.compute_dtypes(params)
    )


@contextlib.contextmanager
def traced_for(platform: str) -> Iterator[None]:
    """Traces for one device of a platform."""
    device: Any = jax.sharding.AbstractDevice
    known = {"device_kind": _KINDS[platform], "num_cores": None, "platform": platform}
    taken = {name: value for name, value in known.items() if name in inspect.signature(device).parameters}
    mesh = AbstractMesh((1,), ("dp",), axis_types=(AxisType.Auto,), abstract_device=device(**taken))
    cudnn = assumed_cudnn() if platform == "gpu" else contextlib.nullcontext()
    with jax.sharding.use_abstract_mesh(mesh), cudnn:
        yield


def waiting_of(pull: Any) -> list[Any]:
    """Returns the values that a function from `jax.vjp` keeps for the backward pass."""
    return list({id(leaf): leaf for leaf in jax.tree.leaves(pull) if hasattr(leaf, "aval")}.values())
