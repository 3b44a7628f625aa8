"""Options for XLA that measured well, per kind of device (benchmarks/RESULTS.md)."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from meshwright.errors import MeshwrightWarning
from meshwright.hardware.chips import chip_family
from meshwright.mesh.build import AnyMesh
from meshwright.parallel.overlap.forms import overlap_options

# On an H200, a step of a 956M decoder: cuBLAS's matmuls are faster than XLA's own by 3%. The fusion of slices with
# matmuls comes before autotuning and keeps it away from every matmul whose weight is one of stacked layers: 1.5%.
_OPTIONS: dict[str, dict[str, Any]] = {
    "gpu": {"xla_gpu_enable_triton_gemm": False, "xla_gpu_enable_dynamic_slice_fusion": False},
}


def compiler_options(mesh: AnyMesh, wanted: dict[str, Any] | None, *, overlap: bool = False) -> dict[str, Any] | None:
    """Returns the options for a step on this mesh: what measured well on its devices, overruled by what is wanted.

    With `overlap`, also what hides whole collectives there (`overlap_options`).
    """
    chip = chip_family(mesh) if isinstance(mesh, Mesh) else ""
    known = _OPTIONS.get(chip, {}) | (overlap_options(mesh) if overlap and mesh.size > 1 else {})
    if not known:
        return wanted
    options = tuple(known.items())
    if not _is_known(options, mesh):
        options = tuple(option for option in options if _is_known((option,), mesh))
    return dict(options) | (wanted or {})


@functools.lru_cache(maxsize=64)
def _is_known(options: tuple[tuple[str, Any], ...], mesh: AnyMesh) -> bool:
    """Says whether the compiler takes options; of a single one that it refuses, it warns."""
    argument = jax.ShapeDtypeStruct((), jnp.float32, sharding=NamedSharding(mesh, P()))
    try:
        jax.jit(lambda x: x, compiler_options=dict(options)).lower(argument).compile()
    except Exception as error:  # XLA's error for an unknown option has no type of its own
        if len(options) == 1:
            name, value = options[0]
            warnings.warn(
                f"this XLA refuses the option {name}={value}, which makes steps faster on this device: {error}\n"
                "hint: steps are right without it; a newer meshwright may know its new name.",
                MeshwrightWarning,
                stacklevel=4,
            )
        return False
    return True
