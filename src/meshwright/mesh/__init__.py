"""Mesh strings (`string`), meshes of devices (`build`), axes inside a program (`axes`), and the current mesh."""

from meshwright.mesh.build import create_abstract_mesh, create_mesh, get_jax_mesh, initialize_mesh
from meshwright.mesh.current import current_mesh, names_in_current_mesh
from meshwright.mesh.simulate import simulate_cpu_devices

__all__ = [
    "create_mesh",
    "create_abstract_mesh",
    "get_jax_mesh",
    "initialize_mesh",
    "simulate_cpu_devices",
    "current_mesh",
    "names_in_current_mesh",
]
