"""Drop-in for `xlstm_jax.distributed.mesh_utils`; the code is in `meshwright.mesh.build`."""

from meshwright.mesh.build import initialize_mesh

__all__ = ["initialize_mesh"]
