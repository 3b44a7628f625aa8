"""Default XLA options of a step by device family, as measured in benchmarks/results/decoder_h200.md."""

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
from meshwright.mesh.current import AnyMesh
from meshwright.parallel.overlap.forms import overlap_options

# Step time of a 956M decoder on one H200: cuBLAS matmuls save 3% over Triton's; disabling the fusion of slices, which
# keeps autotuning from matmuls with stacked weights, saves 1.5%.
_OPTIONS: dict[str, dict[str, Any]] = {
    "gpu": {"xla_gpu_enable_triton_gemm": False, "xla_gpu_enable_dynamic_slice_fusion": False},
}
# XLA merges small matmuls that share an operand before it recognizes fp8, and then multiplies in bfloat16.
_FP8_OPTIONS: dict[str, dict[str, Any]] = {"gpu": {"xla_gpu_dot_merger_threshold_mb": 0}}


def xla_options(
    mesh: AnyMesh, wanted: dict[str, Any] | None, *, overlap: bool = False, fp8: bool = False
) -> dict[str, Any] | None:
    """Returns the XLA options for a step on this mesh: defaults for its devices, overridden by `wanted`.

    With `overlap`, the defaults include `overlap_options`; with `fp8`, those that keep fp8 matmuls in fp8.
    """
    chip = chip_family(mesh) if isinstance(mesh, Mesh) else ""
    known = _OPTIONS.get(chip, {}) | (overlap_options(mesh) if overlap and mesh.size > 1 else {})
    known |= _FP8_OPTIONS.get(chip, {}) if fp8 else {}
    if not known:
        return wanted
    options = tuple(known.items())
    if not _is_known(options, mesh):
        options = tuple(option for option in options if _is_known((option,), mesh))
    return dict(options) | (wanted or {})


@functools.lru_cache(maxsize=64)
def _is_known(options: tuple[tuple[str, Any], ...], mesh: AnyMesh) -> bool:
    """Whether the compiler accepts these options; warns if it rejects a single one."""
    argument = jax.ShapeDtypeStruct((), jnp.float32, sharding=NamedSharding(mesh, P()))
    try:
        jax.jit(lambda x: x, compiler_options=dict(options)).lower(argument).compile()
    except Exception as error:  # XLA has no specific error type for an unknown option
        if len(options) == 1:
            name, value = options[0]
            warnings.warn(
                f"this XLA version rejects {name}={value}, an option that makes steps faster on this device: {error}\n"
                "hint: results are correct without it; a newer Meshwright may know its new name.",
                MeshwrightWarning,
                stacklevel=4,
            )
        return False
    return True
