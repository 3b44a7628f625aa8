"""Meshes of machines that are not here, for which real compilers can still compile.

TPU programs are compiled by libtpu (`pip install "meshwright[tpu]"`), GPU programs by JAX's CUDA plugin
(`pip install "meshwright[gpu]"`), on a machine that has neither.
"""

from __future__ import annotations

import functools
import importlib.resources
import importlib.util
import math
import os
import re
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from meshwright.errors import MeshError

TPU_KINDS = ("v4", "v5e", "v5p", "v6e", "tpu7x")
GPU_KINDS = ("h200",)
# libtpu asks the cloud for what machine it is on, unless it is told.
_TPU_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-16",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "TPU_STDERR_LOG_LEVEL": "3",
    "TPU_MIN_LOG_LEVEL": "3",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
# Rings close only where the torus wraps around: on these chips, in dims of this length (or any multiple of it).
_WRAP_LENGTH = {"v5e": 16, "v6e": 16, "v4": 4, "v5p": 4, "tpu7x": 4}


def can_compile_for(target: str) -> bool:
    """Returns whether the compiler for this target (`v5e:16x16`, `h200:1x8`) is installed here."""
    kind = target.partition(":")[0]
    if kind in TPU_KINDS:
        return importlib.util.find_spec("libtpu") is not None
    plugins = ("jax_cuda12_plugin", "jax_cuda13_plugin")
    return kind in GPU_KINDS and any(importlib.util.find_spec(name) is not None for name in plugins)


@functools.cache
def target_devices(target: str) -> tuple[Any, ...]:
    """Returns the devices of a machine that need not exist: `v5p:4x4x8`, `v5e:16x16`, `h200:1x8` (hosts x GPUs)."""
    kind, _, shape = target.partition(":")
    if kind not in (*TPU_KINDS, *GPU_KINDS) or not re.fullmatch(r"\d+(x\d+)*", shape):
        raise MeshError(f"{target!r} is not a target.", hint="for example v5e:16x16, v5p:4x4x8, v6e:16x16, h200:1x8.")
    if not can_compile_for(target):
        extra = "tpu" if kind in TPU_KINDS else "gpu"
        raise MeshError(f"the compiler for {kind} is not installed here.", hint=f'pip install "meshwright[{extra}]"')
    from jax.experimental import topologies

    dims = tuple(int(part) for part in shape.split("x"))
    if kind in GPU_KINDS:
        config = importlib.resources.files("meshwright.plan").joinpath(f"{kind}_target_config.pbtxt").read_text()
        hosts, gpus = (1, *dims)[-2:]
        description = topologies.get_topology_desc(
            platform="cuda", target_config=_known_fields(config), topology=f"1x{hosts}x{gpus}"
        )
    else:
        for name, value in _TPU_ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        wraps = [size % _WRAP_LENGTH[kind] == 0 for size in (*dims, 1, 1)[:3]]
        description = topologies.get_topology_desc(f"{kind}:{shape}", platform="tpu", wrap=wraps)
    devices = tuple(description.devices)
    assert len(devices) == math.prod(dims)
    return devices


def target_mesh(target: str, sizes: Sequence[int], names: Sequence[str]) -> Mesh:
    """Returns a mesh over a target's devices, in the order that suits its links."""
    from jax.experimental import mesh_utils

    devices = target_devices(target)
    if target.partition(":")[0] in GPU_KINDS:
        grid = np.array(devices, dtype=object).reshape(tuple(sizes))
    else:
        grid = mesh_utils.create_device_mesh(tuple(sizes), devices)
    return Mesh(grid, tuple(names), axis_types=(AxisType.Auto,) * len(names))


def _known_fields(config: str) -> str:
    # The compiler refuses fields it does not know; these are newer than jax 0.10.
    if jax.__version_info__ >= (0, 11):
        return config
    newer = "mem_clock_ghz|reserved_shared_memory_per_block|max_blocks_per_multiprocessor|collective_memory_granularity"
    return re.sub(rf"(?m)^\s*(?:{newer}):.*\n", "", config)
