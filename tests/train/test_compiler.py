"""Options for XLA: those that measured well, where the compiler knows them, and never over what was asked for."""

import pytest

import meshwright as mw
from meshwright.train import compiler


def test_devices_without_measurements_get_what_was_asked_for():
    mesh = mw.create_mesh("dp:8")
    assert compiler.compiler_options(mesh, None) is None
    assert compiler.compiler_options(mesh, {"xla_dump_to": "x"}) == {"xla_dump_to": "x"}


def test_what_is_asked_for_wins_and_what_is_refused_is_told(monkeypatch):
    known = {"xla_backend_optimization_level": 1, "xla_no_such_option": True}
    monkeypatch.setitem(compiler._OPTIONS, "cpu", known)
    with pytest.warns(mw.MeshwrightWarning, match="this XLA refuses the option xla_no_such_option=True"):
        found = compiler.compiler_options(mw.create_mesh("dp:8"), {"xla_backend_optimization_level": 2})
    assert found == {"xla_backend_optimization_level": 2}


def test_a_model_must_say_what_a_layer_is():
    with pytest.raises(TypeError, match="abstract"):
        mw.models.LanguageModel(vocab_size=8, num_layers=1, d_model=8)
