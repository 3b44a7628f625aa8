import json
import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from jax.sharding import NamedSharding

import meshwright as mw
from meshwright import P
from meshwright import specs as sp

SIZES = {"a": 2, "b": 3, "c": 4, "one": 1}
MESH = mw.create_abstract_mesh("a:2,b:3,c:4,one:1")


@st.composite
def partition_specs(draw, rank=4):
    """Draws a spec over SIZES that uses no axis twice, with tuples, Nones and one-name tuples."""
    axes = draw(st.permutations(list(SIZES)))
    entries, used = [], 0
    for _ in range(draw(st.integers(0, rank))):
        count = draw(st.integers(0, min(3, len(axes) - used)))
        names = tuple(axes[used : used + count])
        used += count
        entries.append(None if not names else names if count > 1 or draw(st.booleans()) else names[0])
    return P(*entries)


@st.composite
def specs_with_shapes(draw, fitting=True):
    spec = draw(partition_specs())
    shape = []
    for dim in range(len(spec) + draw(st.integers(0, 2))):
        ways = math.prod(SIZES[axis] for axis in sp.dim_axes(spec[dim])) if dim < len(spec) else 1
        shape.append(draw(st.integers(0, 5)) * ways if fitting else draw(st.integers(0, 30)))
    return spec, tuple(shape)


@given(specs_with_shapes())
def test_shard_shape_is_jax_s(case):
    spec, shape = case
    assert sp.spec_problem(spec, shape, SIZES) is None
    assert sp.shard_shape(spec, shape, SIZES) == NamedSharding(MESH, spec).shard_shape(shape)


@given(specs_with_shapes(fitting=False))
def test_a_spec_is_refused_exactly_if_jax_refuses_it(case):
    spec, shape = case
    try:
        NamedSharding(MESH, spec).shard_shape(shape)
        fits = True
    except ValueError:
        fits = False
    problem = sp.spec_problem(spec, shape, SIZES)
    assert (problem is None) is fits
    if problem is not None:
        assert problem.kind == "indivisible"
        assert f"{shape[problem.dim]} % " in problem.message
        assert f"pad to {problem.padded}" in problem.hint


@given(specs_with_shapes(fitting=False))
def test_padding_is_minimal(case):
    spec, shape = case
    padded = sp.padded_shape(spec, shape, SIZES)
    assert sp.spec_problem(spec, padded, SIZES) is None
    for dim, (old, new) in enumerate(zip(shape, padded, strict=True)):
        ways = math.prod(SIZES[axis] for axis in sp.dim_axes(spec[dim])) if dim < len(spec) else 1
        assert 0 <= new - old < ways


@given(partition_specs())
def test_canonical_form_is_equivalent_and_stable(spec):
    shape = (24,) * 4
    canonical = sp.canonical(spec)
    assert sp.canonical(canonical) == canonical
    one, other = NamedSharding(MESH, spec), NamedSharding(MESH, canonical)
    assert one.is_equivalent_to(other, 4)
    assert sp.shard_shape(spec, shape, SIZES) == sp.shard_shape(canonical, shape, SIZES)
    assert not canonical or canonical[-1] is not None


@given(partition_specs(), st.sets(st.sampled_from(sorted(SIZES))))
def test_keep_axes_keeps_order_rank_and_nothing_else(spec, kept):
    result = sp.keep_axes(spec, lambda axis: axis in kept)
    assert len(result) == len(spec)
    for before, after in zip(spec, result, strict=True):
        assert sp.dim_axes(after) == tuple(axis for axis in sp.dim_axes(before) if axis in kept)
    if set(sp.spec_axes(spec)) <= kept:
        assert result is spec
    sp.check_spec_type(result, where="test")


@given(partition_specs())
def test_json_round_trip(spec):
    assert sp.spec_from_json(json.loads(json.dumps(sp.spec_to_json(spec)))) == spec


@given(partition_specs())
def test_format_spec_evaluates_to_the_spec(spec):
    assert eval(sp.format_spec(spec), {"P": P}) == spec


def test_unconstrained_dims():
    spec = P("a", P.UNCONSTRAINED)
    assert sp.spec_axes(spec) == ("a",)
    assert sp.format_spec(spec) == "P('a', UNCONSTRAINED)"
    assert sp.keep_axes(spec, lambda axis: False) == P(None, P.UNCONSTRAINED)
    problem = sp.spec_problem(spec, (2, 2), SIZES)
    assert (problem.kind, problem.hint) == ("unconstrained", "use None.")


@pytest.mark.parametrize(
    ("specs", "names"),
    [
        (P(), []),
        (None, []),
        ("tp", ["tp"]),
        (P("b", None, ("a", "c")), ["b", "a", "c"]),
        ({"z": P("tp"), "a": P("dp", "tp")}, ["tp", "dp"]),
        ([P("a"), [P("b"), {"x": ("c", None)}], None], ["a", "b", "c"]),
        (P(P.UNCONSTRAINED, "a"), ["a"]),
        (frozenset({"b", "c", "a"}), ["a", "b", "c"]),
    ],
)
def test_get_names_from_partition_spec(specs, names):
    assert mw.get_names_from_partition_spec(specs) == names


@pytest.mark.parametrize(("kind", "spec"), [("rank", P("a", "b")), ("unknown axis", P("z")), ("indivisible", P("b"))])
def test_kinds_of_problems(kind, spec):
    assert sp.spec_problem(spec, (4,), SIZES).kind == kind


def test_unknown_axis_lists_the_known_axes():
    assert sp.spec_problem(P("zzz"), (4,), SIZES).hint == "use one of: a, b, c, one; or list it in optional_axes."


@given(partition_specs(), st.sampled_from(sorted(SIZES)))
def test_an_axis_named_twice_is_refused(spec, axis):
    assume(axis in sp.spec_axes(spec))
    # Newer versions of JAX refuse such a spec themselves.
    with pytest.raises(ValueError, match=axis):
        sp.check_spec_type(P(*spec, axis), where="test")


def test_entries_that_are_not_names():
    with pytest.raises(mw.RuleError, match=r"0 in .* is not an axis name"):
        sp.check_spec_type(P((0, "a")), where="rule 3")
