import jax
import jax.numpy as jnp
import pytest

import meshwright as mw
from meshwright import P
from meshwright.mesh.current import current_concrete_mesh, describe_mesh

from ..meshes import legacy


def test_no_current_mesh():
    assert mw.current_mesh() is None
    assert current_concrete_mesh() is None
    assert mw.names_in_current_mesh("dp") is False


@pytest.mark.parametrize("enter", [jax.set_mesh, legacy], ids=["set_mesh", "with mesh"])
def test_current_mesh_eagerly_and_while_tracing(enter):
    mesh = mw.create_mesh("dp:4,tp:2")
    seen = []

    def look(x):
        seen.append(
            (dict(mw.current_mesh().shape), mw.names_in_current_mesh("tp", "dp"), mw.names_in_current_mesh("sp"))
        )
        return x

    with enter(mesh):
        look(0)
        jax.jit(look)(jnp.ones(2))
        assert current_concrete_mesh() == mesh
    assert seen == [({"dp": 4, "tp": 2}, True, False)] * 2
    assert mw.current_mesh() is None


def test_current_mesh_inside_shard_map():
    mesh = mw.create_mesh("dp:4,tp:2")
    seen = []

    def look(x):
        seen.append((mw.names_in_current_mesh("dp", "tp"), set(mw.current_mesh().manual_axes)))
        return x

    jax.shard_map(look, mesh=mesh, in_specs=P("dp"), out_specs=P("dp"), axis_names={"dp"})(jnp.ones(8))
    assert seen[0] == (True, {"dp"})


def test_describe_mesh():
    assert describe_mesh(mw.create_abstract_mesh("dp:2,tp:4")) == "dp=2 x tp=4"
