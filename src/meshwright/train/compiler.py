"""Options for XLA that measured well, per kind of device (benchmarks/RESULTS.md)."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from meshwright.errors import MeshwrightWarning
from meshwright.mesh import AnyMesh

# On an H200, a step of a 956M decoder: cuBLAS's matmuls are faster than XLA's own by 3%. The fusion of slices with
# matmuls comes before autotuning and keeps it away from every matmul whose weight is one of stacked layers: 1.5%.
_OPTIONS: dict[str, dict[str, Any]] = {
    "gpu": {"xla_gpu_enable_triton_gemm": False, "xla_gpu_enable_dynamic_slice_fusion": False},
}


def compiler_options(mesh: AnyMesh, wanted: dict[str, Any] | None) -> dict[str, Any] | None:
    """Returns the options for a step on this mesh: what measured well on its devices, overruled by what is wanted."""
    device = mesh.devices.flat[0] if hasattr(mesh, "devices") else None
    platform = {"cuda": "gpu"}.get(getattr(device, "platform", ""), getattr(device, "platform", ""))
    known = _OPTIONS.get(platform)
    if known is None:
        return wanted
    options = {name: value for name, value in known.items() if _is_known(name, value, mesh)}
    return options | (wanted or {})


@functools.lru_cache(maxsize=64)
def _is_known(name: str, value: Any, mesh: AnyMesh) -> bool:
    argument = jax.ShapeDtypeStruct((), jnp.float32, sharding=NamedSharding(mesh, P()))
    try:
        jax.jit(lambda x: x, compiler_options={name: value}).lower(argument).compile()
    except Exception as error:  # XLA's error for an unknown option has no type of its own
        warnings.warn(
            f"this XLA refuses the option {name}={value}, which makes steps faster on this device: {error}\n"
            "hint: steps are right without it; a newer meshwright may know its new name.",
            MeshwrightWarning,
            stacklevel=4,
        )
        return False
    return True
