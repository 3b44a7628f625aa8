"""Drop-in for `xlstm_jax.distributed.xla_utils`: settings that JAX reads once, when it starts."""

from __future__ import annotations

import os
import re
from typing import Any

import jax

from meshwright.errors import MeshError
from meshwright.mesh.build import simulate_cpu_devices

__all__ = ["set_XLA_flags", "simulate_CPU_devices"]

# Overlap of collectives with computation on GPUs. A flag that XLA does not know aborts the process, so each of these is
# started in a process of its own by the tests.
GPU_FLAGS = {
    "xla_gpu_enable_latency_hiding_scheduler": "true",
    "xla_gpu_enable_highest_priority_async_stream": "true",
    "xla_gpu_enable_pipelined_all_gather": "true",
    "xla_gpu_enable_pipelined_reduce_scatter": "true",
    "xla_gpu_enable_pipelined_all_reduce": "true",
}


def simulate_CPU_devices(device_count: int = 8) -> None:
    """Makes JAX use simulated CPU devices; raises when JAX has already started with others."""
    simulate_cpu_devices(device_count)


def set_XLA_flags() -> None:
    """Adds flags that suit training on GPUs to `XLA_FLAGS`; those that are set there already stay as they are.

    Raises when JAX has already started, since the flags would then have no effect.
    """
    if _jax_has_started():
        raise MeshError(
            "set_XLA_flags was called after JAX started, which is when XLA_FLAGS is read.",
            hint="call it before anything that uses an array or jax.devices(); or pass compiler_options to jax.jit.",
        )
    present = os.environ.get("XLA_FLAGS", "")
    known = set(re.findall(r"--(\w+)", present))
    added = [f"--{name}={value}" for name, value in GPU_FLAGS.items() if name not in known]
    os.environ["XLA_FLAGS"] = " ".join([present, *added]).strip()


def _jax_has_started() -> bool:
    # JAX offers no question to ask, but refuses to change this setting once it has started.
    config: Any = jax.config
    before = config.jax_num_cpu_devices
    try:
        config.update("jax_num_cpu_devices", 2 if before == 1 else 1)
    except RuntimeError:
        return True
    config.update("jax_num_cpu_devices", before)
    return False
