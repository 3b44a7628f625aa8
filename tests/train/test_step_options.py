"""XLA options of a step: defaults by device that the compiler accepts, overridden by the user's."""

import warnings

import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec as P

import meshwright as mw
from meshwright.parallel.overlap.forms import OPTIONS
from meshwright.train import step_options
from meshwright.train.step_options import xla_options


def test_devices_without_defaults():
    mesh = mw.create_mesh("dp:8")
    assert xla_options(mesh, None) is None
    assert xla_options(mesh, {"xla_dump_to": "x"}) == {"xla_dump_to": "x"}


def test_user_options_win_and_rejected_defaults_warn(monkeypatch):
    known = {"xla_backend_optimization_level": 1, "xla_no_such_option": True}
    monkeypatch.setitem(step_options._OPTIONS, "cpu", known)
    with pytest.warns(mw.MeshwrightWarning, match="this XLA version rejects xla_no_such_option=True"):
        found = xla_options(mw.create_mesh("dp:8"), {"xla_backend_optimization_level": 2})
    assert found == {"xla_backend_optimization_level": 2}


def test_overlap_options_need_several_devices(monkeypatch):
    monkeypatch.setitem(OPTIONS, "cpu", {"xla_backend_optimization_level": 1})
    mesh = mw.create_mesh("dp:8")
    assert xla_options(mesh, None, overlap=True) == {"xla_backend_optimization_level": 1}
    wanted = {"xla_backend_optimization_level": 3}
    assert xla_options(mesh, wanted, overlap=True) == wanted
    assert xla_options(mesh, None) is None
    one = mw.create_mesh("dp:1", devices=mesh.devices.flat[:1])
    assert xla_options(one, None, overlap=True) is None


@pytest.mark.parametrize(("view", "overlap", "asked"), [("local", True, 1), ("local", False, 0), ("global", True, 0)])
def test_overlap_options_are_for_the_local_view(monkeypatch, view, overlap, asked):
    seen = []
    monkeypatch.setattr(
        "meshwright.train.step_options.overlap_options", lambda mesh: seen.append(mesh) or {"xla_no_such_option": True}
    )
    job = mw.Job(
        init=lambda key: {"w": jnp.zeros(8)}, rules=[("w", P("fsdp"))], loss=lambda p, b, r: (p["w"].sum(), {})
    )
    layout = mw.train.state_layout(job, optax.sgd(0.1), mw.create_mesh("fsdp:8"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        mw.train.make_train_step(job, optax.sgd(0.1), layout, view=view, overlap=overlap)
        mw.train.make_eval_step(job, layout, view=view)
    assert (len(seen), sum("xla_no_such_option" in str(one.message) for one in caught)) == (asked, asked)
