import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import meshwright as mw
from meshwright import PlacementError
from meshwright.parallel import local_map
from meshwright.parallel.kernels import dispatch as kernels
from meshwright.parallel.kernels.dispatch import backed_by, uses_hopper_kernels, uses_kernels


def in_local_view(mesh, wanted):
    """Returns the answer of `uses_kernels` inside shard_map."""
    answers = []

    def ask(x):
        answers.append(uses_kernels(wanted))
        return x

    jax.eval_shape(local_map(ask, mesh=mesh, in_specs=P(), out_specs=P()), jax.ShapeDtypeStruct((8,), jnp.float32))
    return answers[0]


def test_cpus_get_kernels_on_request_only():
    assert not uses_kernels(None)
    assert uses_kernels(True)
    with jax.set_mesh(mw.create_mesh("dp:1", devices=1)):
        assert not uses_kernels(None)
        assert uses_kernels(True)


@pytest.fixture
def hopper(monkeypatch):
    """Makes meshes look like Hopper GPUs, with a JAX that compiles kernels for them."""
    monkeypatch.setattr(kernels, "chip_family", lambda mesh: "gpu")
    monkeypatch.setattr(kernels, "is_hopper", lambda mesh: True)
    monkeypatch.setattr(jax, "__version_info__", max(jax.__version_info__, (0, 11)))


def test_gpus_use_kernels_on_per_device_arrays(hopper):
    one, many = mw.create_mesh("dp:1", devices=1), mw.create_mesh("dp:4,tp:2")
    with jax.set_mesh(one):
        assert uses_kernels(None)
    with jax.set_mesh(many):  # XLA splits arrays here
        assert not uses_kernels(None)
    assert in_local_view(many, None)
    assert not in_local_view(many, False)


def test_explicit_axes_disable_kernels(hopper):
    mesh = jax.make_mesh((1,), ("dp",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:1])
    with jax.set_mesh(mesh):
        assert not uses_kernels(None)


def test_other_gpus_and_old_jax_do_not_use_kernels(hopper, monkeypatch):
    assert uses_kernels(None)
    assert uses_kernels(True)
    monkeypatch.setattr(jax, "__version_info__", (0, 10, 2))
    assert not uses_kernels(None)
    with pytest.raises(PlacementError, match=r"need Hopper GPUs and jax 0\.11; this is jax"):
        uses_kernels(True)
    monkeypatch.setattr(kernels, "is_hopper", lambda mesh: False)
    assert not uses_kernels(None)
    with pytest.raises(PlacementError, match="this is another GPU"):
        uses_kernels(True)


def test_hopper_kernels_need_hopper_and_new_jax(monkeypatch):
    monkeypatch.setattr(jax, "__version_info__", max(jax.__version_info__, (0, 11)))
    assert not uses_hopper_kernels(None)
    assert uses_hopper_kernels(True)  # interpreted
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    for kind, wanted in (("NVIDIA H200", True), ("NVIDIA B200", False)):
        device = type("Device", (), {"device_kind": kind})()
        monkeypatch.setattr(jax, "local_devices", lambda device=device: [device])
        assert uses_hopper_kernels(None) is wanted, kind
    monkeypatch.setattr(jax, "__version_info__", (0, 10, 2))
    assert not uses_hopper_kernels(True)


def test_impossible_requests_raise(monkeypatch):
    with (
        jax.set_mesh(mw.create_mesh("dp:4,tp:2")),
        pytest.raises(PlacementError, match=r"XLA splits arrays over 'dp', 'tp' here"),
    ):
        uses_kernels(True)
    with pytest.raises(PlacementError, match="JAX cannot interpret them on several CPU devices"):
        in_local_view(mw.create_mesh("dp:8"), True)
    monkeypatch.setattr(kernels, "chip_family", lambda mesh: "v5p")
    with pytest.raises(PlacementError, match=r"need Hopper GPUs and jax 0\.11; this is v5p"):
        uses_kernels(True)


def test_vmap_and_grad_use_the_plain_function():
    run = backed_by(lambda x, y: 3.0 * x * y, lambda x, y: 2.0 * x * y)  # different, to tell them apart
    x, y = jnp.arange(4.0), jnp.float32(5)
    assert run(x, y).tolist() == (10 * x).tolist()
    assert jax.vmap(run, in_axes=(0, None))(x, y).tolist() == (15 * x).tolist()
    assert jax.grad(lambda x: run(x, y).sum())(x).tolist() == [15.0] * 4
