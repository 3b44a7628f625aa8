"""`local_map`: size-1 axes are free, and errors name the cause."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import meshwright as mw
from meshwright.errors import MeshError, PlacementError
from meshwright.linen import async_gather
from meshwright.mesh.axes import axis_index, axis_size, is_manual, pcast_varying, varying_axes
from meshwright.parallel import local_map
from meshwright.plan.compiled.collectives import read_schedule


def test_axes_of_size_one_leave_no_collectives():
    def loss(x):
        assert is_manual("dp")
        assert not is_manual("tp")
        assert axis_size("tp", who="test") == 1
        assert axis_index("tp", who="test") == 0
        return lax.psum(sum(async_gather(x, "tp")).sum(), "dp")

    mesh = mw.create_mesh("dp:8,tp:1")
    compiled = (
        jax.jit(local_map(loss, mesh=mesh, in_specs=P("dp", "tp"), out_specs=P())).lower(jnp.ones((8, 4))).compile()
    )
    schedule = read_schedule(compiled.as_text())
    assert (schedule.count(), schedule.count("all-reduce")) == (1, 1)


def test_one_device_runs_the_function_directly():
    mesh = mw.create_mesh("dp:1,tp:1", devices=1)
    f = local_map(lambda x: sum(async_gather(x, "tp")) * 2, mesh=mesh, in_specs=P("tp"), out_specs=P("tp"))
    np.testing.assert_array_equal(f(jnp.arange(4.0)), np.arange(4.0) * 2)
    assert "shard_map" not in str(jax.make_jaxpr(f)(jnp.arange(4.0)))


def test_current_mesh_is_used():
    f = local_map(lambda x: lax.psum(x, "dp"), in_specs=P("dp"), out_specs=P())
    with jax.set_mesh(mw.create_mesh("dp:8")):
        np.testing.assert_array_equal(jax.jit(f)(jnp.arange(8.0)), [28.0])
    with pytest.raises(MeshError, match="local_map needs a mesh, but none is set"):
        f(jnp.arange(8.0))


def test_only_the_named_axes_become_manual():
    def inside(x):
        assert is_manual("tp")
        assert not is_manual("dp")
        return x * 2

    f = local_map(
        inside, mesh=mw.create_mesh("dp:4,tp:2"), axes=("tp",), in_specs=P(None, "tp"), out_specs=P(None, "tp")
    )
    np.testing.assert_array_equal(jax.jit(f)(jnp.ones((4, 4))), np.full((4, 4), 2.0))


def test_an_output_declared_replicated_but_varying():
    f = local_map(lambda x: x, mesh=mw.create_mesh("dp:8"), in_specs=P("dp"), out_specs=P())
    with pytest.raises(PlacementError, match=r"declared replicated by its out_specs but differs(.|\n)*hint: reduce it"):
        f(jnp.arange(8.0))


def test_misspelled_axes():
    mesh = mw.create_mesh("dp:8")
    with pytest.raises(MeshError, match="local_map names axis 'pd'"):
        local_map(lambda x: x, mesh=mesh, in_specs=P("pd"), out_specs=P())(jnp.ones(8))
    with pytest.raises(MeshError, match="local_map names axis 'ddp'"):
        local_map(lambda x: x, mesh=mesh, axes=("ddp",), in_specs=P("dp"), out_specs=P("dp"))(jnp.ones(8))


@pytest.mark.parametrize("check_vma", [True, False])
def test_pcast_varying_sums_gradients_once(check_vma):
    mesh = mw.create_mesh("dp:4,tp:2")

    def loss(w, x):
        w = pcast_varying(pcast_varying(w, "dp"), ("dp", "tp"))
        if check_vma:
            assert varying_axes(w) == {"dp", "tp"}
        return jnp.sum(w * x)[None, None]

    def total(w, x):
        per_device = local_map(
            loss, mesh=mesh, in_specs=(P(), P("dp", "tp")), out_specs=P("dp", "tp"), check_vma=check_vma
        )
        return per_device(w, x).sum()

    x = jnp.arange(8.0).reshape(4, 2)
    np.testing.assert_allclose(jax.grad(total)(jnp.ones(()), x), 28.0)
