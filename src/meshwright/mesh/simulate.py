"""Settings that JAX reads only when it starts: simulated CPU devices, and XLA's flags for GPUs."""

from __future__ import annotations

import os
import re
from typing import Any

import jax

from meshwright.errors import MeshError

MOST_CPU_DEVICES = 1024
"""Number of devices that one process can simulate; thousands take minutes and gigabytes to start."""

# Overlap of collectives with computation on GPUs. An unknown flag aborts XLA, so the tests try each in a new process.
GPU_FLAGS = {
    "xla_gpu_enable_latency_hiding_scheduler": "true",
    "xla_gpu_enable_highest_priority_async_stream": "true",
    "xla_gpu_enable_pipelined_all_gather": "true",
    "xla_gpu_enable_pipelined_reduce_scatter": "true",
    "xla_gpu_enable_pipelined_all_reduce": "true",
}


def check_simulated(count: int) -> None:
    """Raises if a process cannot simulate this many devices."""
    if not 1 <= count <= MOST_CPU_DEVICES:
        raise MeshError(
            f"cannot simulate {count} devices.",
            hint=f"pass a count of 1 to {MOST_CPU_DEVICES:,}; rules and plan need no devices for larger meshes.",
        )


def simulate_cpu_devices(count: int = 8) -> None:
    """Makes JAX simulate `count` devices on the CPU. Call it before anything else uses JAX.

    Raises if JAX has already started with other devices, because the number is fixed by then.

    Example:
        >>> simulate_cpu_devices(8)
        >>> jax.device_count(), jax.default_backend()
        (8, 'cpu')
    """
    check_simulated(count)
    flag = re.search(r"xla_force_host_platform_device_count=(\d+)", os.environ.get("XLA_FLAGS", ""))
    if flag and int(flag[1]) != count:
        raise MeshError(
            f"simulate_cpu_devices({count}) disagrees with XLA_FLAGS, which sets {flag[1]} CPU devices.",
            hint="remove --xla_force_host_platform_device_count from XLA_FLAGS.",
        )
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:
        if jax.default_backend() == "cpu" and jax.device_count() == count:
            return
        raise MeshError(
            f"JAX has already started with {jax.device_count()} {jax.default_backend()} device(s); "
            f"it is too late to simulate {count} CPU devices.",
            hint="call simulate_cpu_devices() before any code that uses an array or jax.devices().",
        ) from None
    jax.config.update("jax_platforms", "cpu")


def set_XLA_flags() -> None:
    """Adds flags for training on GPUs to `XLA_FLAGS`, without changing flags that are already set.

    Raises if JAX has already started, because XLA has read its flags by then.

    Example:
        >>> _ = jax.devices()  # starts JAX
        >>> set_XLA_flags()
        Traceback (most recent call last):
            ...
        meshwright.errors.MeshError: set_XLA_flags was called after JAX started, so it would have no effect.
        hint: call it before any code that uses an array or jax.devices(), or pass compiler_options to jax.jit.
    """
    config: Any = jax.config
    num_devices = config.jax_num_cpu_devices
    try:  # JAX has no public query for whether it has started, but then it refuses to change this setting
        config.update("jax_num_cpu_devices", 2 if num_devices == 1 else 1)
    except RuntimeError:
        raise MeshError(
            "set_XLA_flags was called after JAX started, so it would have no effect.",
            hint="call it before any code that uses an array or jax.devices(), or pass compiler_options to jax.jit.",
        ) from None
    config.update("jax_num_cpu_devices", num_devices)
    present = os.environ.get("XLA_FLAGS", "")
    known = set(re.findall(r"--(\w+)", present))
    added = [f"--{name}={value}" for name, value in GPU_FLAGS.items() if name not in known]
    os.environ["XLA_FLAGS"] = " ".join([present, *added]).strip()
