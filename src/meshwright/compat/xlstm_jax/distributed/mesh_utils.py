"""Drop-in for `xlstm_jax.distributed.mesh_utils`."""

from meshwright.mesh.build import initialize_mesh

__all__ = ["initialize_mesh"]
