"""Meshes from a string or from sizes, on the devices of this machine or abstract ones for planning."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh

from meshwright.distributed.schedulers import on_slurm
from meshwright.errors import MeshError, MeshwrightWarning
from meshwright.mesh.string import MeshAxis, MeshSpec, check_counts, parse_mesh

AxisDims = str | Sequence[int] | MeshSpec
AxisTypes = AxisType | Sequence[AxisType]

DEFAULT_DIMS = (1, -1, 1, 1)
DEFAULT_NAMES = ("dp", "fsdp", "tp", "sp")
# Collectives along these axes sit between two matmuls of every layer, so on the slow network they dominate the step.
LATENCY_BOUND_AXES = ("tp", "tensor", "model", "mp", "sp", "seq", "sequence", "ep", "expert")


def create_mesh(
    axis_dims: AxisDims = DEFAULT_DIMS,
    axis_names: Sequence[str] = DEFAULT_NAMES,
    backend: str = "",
    *,
    devices: Sequence[jax.Device] | int | None = None,
    axis_types: AxisTypes = AxisType.Auto,
    process_is_granule: bool | None = None,
    allow_split_physical_axes: bool = False,
) -> Mesh:
    """Builds a mesh from `"dp:2,fsdp:-1,tp:2"`, or from sizes and names.

    Args:
        axis_dims: a mesh string (see `meshwright.mesh.string`), or one size per name, of which one may be -1.
        axis_names: names for the sizes; a mesh string with names needs none.
        backend: the platform to take devices from, e.g. "gpu" (default: JAX's default backend).
        devices: the devices to use, or n for the first n (default: all devices of the backend).
        axis_types: one type for all axes, or one per axis.
        process_is_granule: whether `@dcn` axes cross processes (True) or slices (False). By default they cross slices
            if the devices have a `slice_index`, otherwise processes.
        allow_split_physical_axes: whether two mesh axes may share one dim of a TPU torus.

    Example:
        >>> dict(create_mesh("dp:2,fsdp:-1,tp:2").shape)
        {'dp': 2, 'fsdp': 2, 'tp': 2}
        >>> create_mesh((2, 2), ("data", "model"), devices=4).devices.shape
        (2, 2)
    """
    spec = _spec_of(axis_dims, axis_names)
    chosen = _pick_devices(backend, devices)
    spec = spec.resolve(
        len(chosen), instead=lambda count: f"pass devices=jax.devices()[:{count}]" if count < len(chosen) else ""
    )
    _warn_if_latency_bound_axes_span_hosts(spec, _domains(chosen, process_is_granule)[0])
    grid = arrange_devices(
        spec, chosen, process_is_granule=process_is_granule, allow_split_physical_axes=allow_split_physical_axes
    )
    return Mesh(grid, spec.names, axis_types=_axis_types(axis_types, spec))


def create_abstract_mesh(
    axis_dims: AxisDims,
    axis_names: Sequence[str] = DEFAULT_NAMES,
    *,
    num_devices: int | None = None,
    axis_types: AxisTypes = AxisType.Auto,
) -> AbstractMesh:
    """Builds an abstract mesh, for planning without devices; `num_devices` is needed only to fill in a -1.

    Example:
        >>> create_abstract_mesh("fsdp:64,tp:8").size
        512
    """
    spec = _spec_of(axis_dims, axis_names)
    if num_devices is None:
        if -1 in spec.sizes:
            raise MeshError(
                f"mesh {str(spec)!r} has a size of -1, but the number of devices is unknown.",
                hint="write the size, or pass num_devices=.",
            )
        num_devices = math.prod(spec.sizes)
    spec = spec.resolve(num_devices)
    return AbstractMesh(spec.sizes, spec.names, axis_types=_axis_types(axis_types, spec))


def get_jax_mesh(axis_dims: str, names: Sequence[str]) -> Mesh:
    """Builds a mesh over all devices from a string whose axes must be exactly `names`.

    Named axes may come in any order; bare sizes follow `names`; a leading `!` keeps the devices in JAX's order.

    Example:
        >>> dict(get_jax_mesh("tp:2,dp:-1", ("dp", "tp")).shape)
        {'dp': 4, 'tp': 2}
    """
    return create_mesh(parse_mesh(axis_dims, names))


def initialize_mesh(parallel_config: Any, device_array: Any = None, init_distributed_on_slurm: bool = True) -> Mesh:
    """Builds a mesh from a config with `{data,fsdp,pipeline,model}_axis_{name,size}`, axes in that order.

    If Slurm started several tasks (see `on_slurm`), this first initializes JAX's distributed runtime, once.

    Args:
        parallel_config: an object with these attributes, or a mapping with these keys.
        device_array: the devices to use, in this order (default: all devices).
        init_distributed_on_slurm: whether to start JAX's distributed runtime under Slurm.

    Example:
        >>> config = {
        ...     "data_axis_name": "dp",
        ...     "fsdp_axis_name": "fsdp",
        ...     "pipeline_axis_name": "pp",
        ...     "model_axis_name": "tp",
        ... }
        >>> config |= {"data_axis_size": 2, "fsdp_axis_size": 2, "pipeline_axis_size": 1, "model_axis_size": -1}
        >>> dict(initialize_mesh(config).shape)
        {'dp': 2, 'fsdp': 2, 'pp': 1, 'tp': 2}
    """
    axes = []
    for role in ("data", "fsdp", "pipeline", "model"):
        name, size = (_config_value(parallel_config, f"{role}_axis_{part}") for part in ("name", "size"))
        axes.append(MeshAxis(name, size))
    spec = MeshSpec(tuple(axes), plain_order=device_array is not None)
    if init_distributed_on_slurm and on_slurm() and not jax.distributed.is_initialized():
        jax.distributed.initialize()
    devices = None if device_array is None else list(np.asarray(device_array, dtype=object).flat)
    return create_mesh(spec, devices=devices)


def arrange_devices(
    spec: MeshSpec,
    devices: Sequence[Any],
    *,
    process_is_granule: bool | None = None,
    allow_split_physical_axes: bool = False,
) -> np.ndarray[Any, Any]:
    """Returns the devices as an array of the mesh's shape, ordered so that neighbors share fast links."""
    from jax.experimental import mesh_utils

    if spec.plain_order and not spec.is_hybrid:
        grid = np.empty(len(devices), dtype=object)
        grid[:] = devices
        return grid.reshape(spec.sizes)
    options = {"allow_split_physical_axes": allow_split_physical_axes}
    if spec.is_hybrid:
        domains, unit = _domains(devices, process_is_granule)
        num_groups, num_domains = math.prod(spec.dcn_sizes), len(set(domains))
        if num_groups != num_domains:
            shown = " x ".join(f"{a.name}={d}" for a, d in zip(spec.axes, spec.dcn_sizes, strict=True) if d > 1)
            raise MeshError(
                f"the @dcn axes ({shown or 'all 1'}) make {num_groups} groups, but the devices form {num_domains} "
                f"{unit}.",
                hint=f"choose @dcn sizes whose product is {num_domains}, or set process_is_granule=.",
            )
        options["process_is_granule"] = unit == "processes"
    try:
        if not spec.is_hybrid:
            return mesh_utils.create_device_mesh(spec.sizes, devices, **options)
        return mesh_utils.create_hybrid_device_mesh(spec.ici_sizes, spec.dcn_sizes, devices, **options)
    except (NotImplementedError, AssertionError, ValueError) as error:  # from JAX, if the mesh does not fit
        raise MeshError(
            f"mesh {spec} does not fit the topology of these {len(devices)} devices: {error}",
            hint=f'pass allow_split_physical_axes=True, or use "!{spec}" to keep the devices in JAX\'s order.',
        ) from error


def _spec_of(axis_dims: AxisDims, axis_names: Sequence[str]) -> MeshSpec:
    if isinstance(axis_dims, MeshSpec):
        return axis_dims
    names = tuple(axis_names)
    if isinstance(axis_dims, str):
        named = ":" in axis_dims
        return parse_mesh(axis_dims, None if named and names == DEFAULT_NAMES else names)
    sizes = tuple(axis_dims)
    check_counts(len(sizes), names)
    for name, size in zip(names, sizes, strict=True):
        if isinstance(size, bool) or not isinstance(size, (int, np.integer)):
            raise MeshError(f"axis {name!r} has size {size!r}, which is not an integer.")
    return MeshSpec(tuple(MeshAxis(name, int(size)) for name, size in zip(names, sizes, strict=True)))


def _pick_devices(backend: str, devices: Sequence[jax.Device] | int | None) -> Sequence[jax.Device]:
    if devices is None or isinstance(devices, int):
        try:
            available = jax.devices(backend) if backend else jax.devices()
        except RuntimeError as error:
            raise MeshError(f"no devices found for backend {backend!r}: {error}") from None
        if devices is None:
            return available
        if not 1 <= devices <= len(available):
            count = len(available)
            raise MeshError(f"devices={devices} is out of range; {count} are available.", hint=f"use 1 to {count}.")
        return available[:devices]
    chosen = list(devices)
    if not chosen or len({id(device) for device in chosen}) != len(chosen):
        raise MeshError("devices= must contain at least one device, and no device twice.")
    foreign = [device for device in chosen if backend and device.platform != backend]
    if foreign:
        raise MeshError(f"devices= contains {foreign[0]}, which does not belong to backend {backend!r}.")
    return chosen


def _axis_types(axis_types: AxisTypes, spec: MeshSpec) -> tuple[AxisType, ...]:
    if isinstance(axis_types, AxisType):
        return (axis_types,) * len(spec.axes)
    if len(axis_types) != len(spec.axes):
        raise MeshError(
            f"got {len(axis_types)} axis types for {len(spec.axes)} axes.", hint="pass one type, or one per axis."
        )
    return tuple(axis_types)


def _domains(devices: Sequence[Any], process_is_granule: bool | None) -> tuple[list[int], str]:
    """Returns each device's domain of fast links (its slice, or without slices its process) and the unit's name."""
    if process_is_granule is None:
        process_is_granule = not all(hasattr(device, "slice_index") for device in devices)
    if process_is_granule:
        return [device.process_index for device in devices], "processes"
    return [device.slice_index for device in devices], "slices"


def _warn_if_latency_bound_axes_span_hosts(spec: MeshSpec, domains: Sequence[int]) -> None:
    num_domains = len(set(domains))
    if num_domains == 1:
        return
    inside = len(domains) // num_domains
    for index, axis in enumerate(spec.axes):
        # In row-major order, an axis stays inside a domain if it and all later axes fit into one.
        reach = math.prod(spec.ici_sizes[index:])
        crosses = spec.dcn_sizes[index] > 1 or (not spec.is_hybrid and reach > inside)
        if axis.name in LATENCY_BOUND_AXES and axis.size > 1 and crosses:
            warnings.warn(
                f"axis {axis.name!r} (size {axis.size}) spans {num_domains} hosts or slices of {inside} devices. Its "
                "collectives run in every layer, and the network between hosts (12 to 50 GB/s per device) is "
                "about ten times slower than the links inside a host (100 to 900 GB/s).\n"
                f"hint: keep {axis.name} <= {inside} and put it last; use @dcn on dp or fsdp instead.",
                MeshwrightWarning,
                stacklevel=3,
            )


def _config_value(config: Any, key: str) -> Any:
    value = config.get(key) if isinstance(config, Mapping) else getattr(config, key, None)
    if value is None:
        raise MeshError(
            f"the parallel config has no {key!r}.", hint="set {data,fsdp,pipeline,model}_axis_name and _axis_size."
        )
    return value
