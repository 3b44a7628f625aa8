"""Misspelled optional axes are reported, although the mesh may lack optional axes."""

import jax
import pytest

import meshwright as mw
from meshwright import P, Rules

PARAMS = {"w": jax.ShapeDtypeStruct((16, 16), "float32")}


def report(spec, optional, mesh):
    rules = Rules([("w", spec)], optional_axes=optional)
    return mw.explain_layout(rules, PARAMS, mw.create_abstract_mesh(mesh))


@pytest.mark.parametrize(
    ("spec", "optional", "mesh", "line"),
    [
        (P("fsdp", "tp"), ("fsdp", "tpp"), "fsdp:4,tp:2", "optional axis 'tpp' is in no rule; did you mean 'tp'?"),
        (P("fdsp"), ("fdsp",), "fsdp:8", "optional axis 'fdsp' is not in the mesh, so nothing .*mean 'fsdp'?"),
        (P("fsdp"), ("fsdp",), "fdsp:8", "optional axis 'fsdp' is not in the mesh, so nothing .*mean 'fdsp'?"),
        (P("tensor"), ("tensor",), "tensors:8", "optional axis 'tensor' is not in the mesh.*mean 'tensors'?"),
    ],
)
def test_a_close_name_is_a_warning(spec, optional, mesh, line):
    start, _, end = line.partition(".*")
    (found,) = report(spec, optional, mesh).concerns()
    assert found.startswith(start)
    assert found.endswith(end)
    rules = Rules([("w", spec)], optional_axes=optional)
    with pytest.warns(mw.MeshwrightWarning, match="did you mean"):
        mw.make_layout(rules, PARAMS, mw.create_abstract_mesh(mesh))


@pytest.mark.parametrize(
    ("spec", "optional", "mesh"),
    [
        (P("fsdp", "tp"), ("fsdp", "tp", "pp"), "dp:8"),  # the usual names are close to each other
        (P("fsdp", "tp"), ("fsdp", "tp", "sp", "ep"), "dp:2,fsdp:2,tp:2"),
        (P("model"), ("model",), "data:8"),
        (P("rows", "row"), ("row",), "rows:8"),  # the rules name both
        (P("fsdp"), ("fsdp",), "fsdp:4,fsdps:1"),
    ],
)
def test_other_names_are_not(spec, optional, mesh):
    found = report(spec, optional, mesh)
    assert found.misspelled == ()
    assert "optional axis" not in str(found)


def test_an_optional_axis_that_no_rule_names_is_noted():
    found = report(P("fsdp"), ("fsdp", "stage", "tp"), "fsdp:8")
    assert found.concerns() == []
    assert found.notes() == ["optional axis 'stage' is in no rule"]
    twice = report(P("fsdp", "tp"), ("fsdp", "tpp"), "fsdp:4,tp:2")
    assert len(twice.notes()) == 1  # not repeated as a note
