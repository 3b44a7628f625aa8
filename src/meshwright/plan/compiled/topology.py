"""Meshes of hardware you don't have, to compile for.

libtpu (`pip install "meshwright[tpu]"`) compiles TPU programs, and JAX's CUDA plugin (`pip install "meshwright[gpu]"`)
compiles GPU programs, on machines without TPUs or GPUs.

Compiling cuDNN attention needs the cuDNN library, so a stand-in with the same operands, results and memory, but without
its matmuls, replaces it. It serves to read memory and communication, and never runs.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.resources
import importlib.util
import os
import re
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh

from meshwright.errors import MeshError
from meshwright.hardware.libtpu import TPU_ENVIRONMENT
from meshwright.mesh.build import arrange_devices
from meshwright.mesh.string import parse_mesh
from meshwright.plan.target import Target, check_slices, parse_target

_CUDNN = 91900  # cuDNN 9.19, as on the H200 of the measurements
# Differences from an H200, whose description was read from a real one; from XLA's published descriptions.
_GPU_FACTS: dict[str, dict[str, Any]] = {
    "h200": {},
    "h100": {
        "memory_bandwidth": 3352320000000,
        "l2_cache_size": 52428800,
        "device_memory_size": 84942979072,
        "name": '"NVIDIA H100 80GB HBM3"',
    },
    "a100": {
        "memory_bandwidth": 2039040000000,
        "l2_cache_size": 41943040,
        "device_memory_size": 85100068864,
        "name": '"NVIDIA A100-SXM4-80GB"',
        "core_count": 108,
        "fpus_per_core": 64,
        "clock_rate_ghz": 1.41,
        "shared_memory_per_core": 167936,
        "shared_memory_per_block_optin": 166912,
        "major": 8,
    },
    "b200": {
        "memory_bandwidth": 7672320000000,
        "l2_cache_size": 132644864,
        "device_memory_size": 191514411008,
        "name": '"NVIDIA B200"',
        "core_count": 148,
        "clock_rate_ghz": 1.965,
        "major": 10,
    },
}
_GPU_FACTS["a100-40"] = _GPU_FACTS["a100"] | {
    "memory_bandwidth": 1555200000000,
    "device_memory_size": 42331013120,
    "name": '"NVIDIA A100-SXM4-40GB"',
}


def can_compile_for(target: str | Target) -> bool:
    """Returns whether the compiler for a target is installed.

    Example:
        >>> can_compile_for("cpu:8")
        True
    """
    platform = parse_target(target).platform
    if platform == "tpu":
        return importlib.util.find_spec("libtpu") is not None
    plugins = ("jax_cuda12_plugin", "jax_cuda13_plugin")
    return platform == "cpu" or any(importlib.util.find_spec(name) is not None for name in plugins)


def require_compiler(target: str | Target) -> None:
    """Raises a `MeshError` if the compiler for a target is not installed.

    Example:
        >>> require_compiler("cpu:8")
    """
    target = parse_target(target)
    if not can_compile_for(target):
        hint = f'run `pip install "meshwright[{target.platform}]"`.'
        raise MeshError(f"the compiler for {target.kind} is not installed.", hint=hint)


@functools.cache
def target_devices(target: str | Target) -> tuple[Any, ...]:
    """Returns the devices of a target, to compile for; those of `cpu:8` are CPU devices of this process.

    Example:
        >>> len(target_devices("cpu:8"))
        8
    """
    target = parse_target(target)
    require_compiler(target)
    if target.platform == "cpu":
        here = jax.devices("cpu")
        if len(here) < target.num_devices:
            raise MeshError(
                f"{target} needs {target.num_devices} CPU devices; this process has {len(here)}.",
                hint=f"call meshwright.simulate_cpu_devices({target.num_devices}) before using JAX.",
            )
        return tuple(here[: target.num_devices])
    from jax.experimental import topologies

    if target.platform == "gpu":
        hosts, gpus = target.shape
        description = topologies.get_topology_desc(
            platform="cuda", target_config=gpu_target_config(target.kind), topology=f"1x{hosts}x{gpus}"
        )
    else:
        for name, value in TPU_ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        options: dict[str, Any] = {"wrap": [*target.wraps, False, False][:3]}
        if target.num_slices > 1:
            options["num_slices"] = target.num_slices
        if target.kind == "v4":
            options["chip_config_name"] = "megacore"  # one device per chip, as in JAX
        shape = "x".join(map(str, target.shape))
        description = topologies.get_topology_desc(f"{target.kind}:{shape}", platform="tpu", **options)
    devices = tuple(description.devices)
    assert len(devices) == target.num_devices
    return devices


def target_mesh(target: str | Target, sizes: Sequence[int], names: Sequence[str]) -> Mesh:
    """Returns a mesh over a target's devices, in a topology-aware order.

    Example:
        >>> target_mesh("cpu:8", (4, 2), ("fsdp", "tp")).axis_names
        ('fsdp', 'tp')
    """
    text = ",".join(f"{name}:{size}" for name, size in zip(names, sizes, strict=True))
    return mesh_on_target(target, text)


def mesh_on_target(target: str | Target, mesh: str) -> Mesh:
    """Returns the mesh of a mesh string over a target's devices.

    Several slices need an axis that crosses them: `"dp:4@dcn,fsdp:16,tp:4"`. An axis that does not fill whole dims of
    a TPU torus shares one with another axis.

    Example:
        >>> mesh_on_target("cpu:8", "fsdp:4,tp:2").devices.shape
        (4, 2)
    """
    target = parse_target(target)
    spec = parse_mesh(mesh).resolve(target.num_devices)
    check_slices(target, spec)
    devices = target_devices(target)
    if target.platform != "tpu":
        grid = np.array(devices, dtype=object).reshape(spec.sizes)
    else:
        try:
            grid = arrange_devices(spec, devices)
        except MeshError:
            grid = arrange_devices(spec, devices, allow_split_physical_axes=True)
    return Mesh(grid, spec.names, axis_types=(AxisType.Auto,) * len(spec.axes))


def gpu_target_config(kind: str) -> str:
    """Returns XLA's description of a GPU to compile for, as a text-format protocol buffer."""
    text = importlib.resources.files("meshwright.plan.compiled").joinpath("h200_target_config.pbtxt").read_text()
    facts = _GPU_FACTS[kind]
    if facts:
        # XLA derives the removed fields from the compute capability; the H200's would be wrong.
        text = re.sub(r"(?ms)^  (?:scalar|matrix)_unit_description \{.*?^  \}\n", "", text)
        text = re.sub(r"(?m)^  (?:model_str|platform_version): .*\n", "", text)
        text = text.replace('device_description_str: "NVIDIA H200"', f"device_description_str: {facts['name']}")
    for name, value in facts.items():
        text, count = re.subn(rf"(?m)^( +){name}: .*$", rf"\g<1>{name}: {value}", text, count=1)
        assert count == 1, name
    if facts.get("major", 9) == 8:
        text = text.replace("feature_extension: ACCELERATED_FEATURES", "feature_extension: NONE")
    if jax.__version_info__ >= (0, 11):
        return text
    # jax 0.10 rejects these newer fields.
    newer = "mem_clock_ghz|reserved_shared_memory_per_block|max_blocks_per_multiprocessor|collective_memory_granularity"
    return re.sub(rf"(?m)^\s*(?:{newer}):.*\n", "", text)


@contextlib.contextmanager
def assumed_cudnn() -> Iterator[None]:
    """Context in which JAX traces as if cuDNN 9.19 and an H200 were present."""
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    with (
        mock.patch.object(cudnn, "check_cudnn_version", return_value=_CUDNN),
        mock.patch.object(cudnn, "check_compute_capability", return_value=True),
        # It would start JAX's backends, among them libtpu, which can take 20 seconds.
        mock.patch.object(cudnn, "is_cuda_compute_capability_equal", return_value=False),
    ):
        yield


def stand_in_for_cudnn() -> None:
    """Replaces the lowering of cuDNN attention for the rest of the process, which must only compile."""
    from jax._src.cudnn import fused_attention_stablehlo as cudnn
    from jax._src.interpreters import mlir

    forward, backward = cudnn._dot_product_attention_fwd_p_wrapper, cudnn._dot_product_attention_bwd_p_wrapper
    mlir.register_lowering(forward, mlir.lower_fun(_forward, multiple_results=True), platform="cuda")
    mlir.register_lowering(backward, mlir.lower_fun(_backward, multiple_results=True), platform="cuda")


def _forward(query: Any, key: Any, value: Any, *rest: Any, layout: int, is_training: bool, **_: Any) -> list[Any]:
    mixed = jnp.sum(key, dtype=jnp.float32) + jnp.sum(value, dtype=jnp.float32)
    out = (query * mixed.astype(query.dtype)).astype(query.dtype)
    if not is_training:
        return [out]
    # Log of the softmax denominator, [B, N, T], for each document of a row.
    stats = jnp.sum(query, axis=-1, dtype=jnp.float32) + mixed
    by_heads = layout == 1  # [B, N, T, H] instead of [B, T, N, H]
    _bias, _q_lengths, _kv_lengths, q_offsets, *_others = rest
    documents = q_offsets.shape[1] - 1 if q_offsets.ndim == 2 else 1
    return [out, jnp.repeat(stats if by_heads else jnp.swapaxes(stats, 1, 2), documents, axis=0)]


def _backward(query: Any, key: Any, value: Any, *rest: Any, variadic_args: Any, **_: Any) -> list[Any]:
    bias, *_unused, stats, out, dout = rest
    mixed = jnp.sum(stats) + jnp.sum(out, dtype=jnp.float32) + jnp.sum(dout, dtype=jnp.float32)
    grads = [(leaf * mixed.astype(leaf.dtype)).astype(leaf.dtype) for leaf in (query, key, value)]
    _, has_dbias = variadic_args
    return [*grads, bias * mixed.astype(bias.dtype)] if has_dbias else grads
