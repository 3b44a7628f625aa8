"""Mesh strings such as "dp:2,fsdp:4" (`string`), meshes of devices (`build`), and axes inside a program (`axes`)."""

from meshwright.mesh.build import (
    create_abstract_mesh,
    create_mesh,
    current_mesh,
    get_jax_mesh,
    initialize_mesh,
    names_in_current_mesh,
    simulate_cpu_devices,
)

__all__ = [
    "create_mesh",
    "create_abstract_mesh",
    "get_jax_mesh",
    "initialize_mesh",
    "simulate_cpu_devices",
    "current_mesh",
    "names_in_current_mesh",
]
