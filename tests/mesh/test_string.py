import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from meshwright.errors import MeshError
from meshwright.mesh.string import MeshAxis, MeshSpec, parse_mesh

names = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,6}", fullmatch=True)


@st.composite
def axes(draw, sizes=st.integers(1, 12)):
    size = draw(sizes)
    divisors = [d for d in range(1, size + 1) if size % d == 0]
    return size, draw(st.sampled_from([1, None, *divisors]))


@st.composite
def mesh_specs(draw):
    chosen = draw(st.lists(names, min_size=1, max_size=5, unique=True))
    drawn = [MeshAxis(name, *draw(axes())) for name in chosen]
    if draw(st.booleans()):
        free = draw(st.integers(0, len(drawn) - 1))
        drawn[free] = MeshAxis(drawn[free].name, -1, draw(st.sampled_from([1, None, 2])))
    return MeshSpec(tuple(drawn), plain_order=draw(st.booleans()))


@given(mesh_specs())
def test_mesh_strings_round_trip(spec):
    assert parse_mesh(str(spec)) == spec
    assert str(parse_mesh(str(spec))) == str(spec)


@given(mesh_specs(), st.randoms(use_true_random=False))
def test_names_set_the_order_of_axes(spec, random):
    order = list(spec.names)
    random.shuffle(order)
    reordered = parse_mesh(str(spec), order)
    assert reordered.names == tuple(order)
    assert set(reordered.axes) == set(spec.axes)


@given(mesh_specs(), st.integers(1, 24))
def test_resolved_sizes_have_the_number_of_devices_as_product(spec, factor):
    fixed = math.prod(size for size in spec.sizes if size != -1)
    free = -1 in spec.sizes
    num_devices = fixed * factor if free else fixed
    assume(not free or all(a.dcn in (None, 1) or factor % a.dcn == 0 for a in spec.axes if a.size == -1))
    resolved = spec.resolve(num_devices)
    assert math.prod(resolved.sizes) == num_devices
    assert [new for new, old in zip(resolved.sizes, spec.sizes, strict=True) if old == -1] == [factor] * free
    assert all(new == old for new, old in zip(resolved.sizes, spec.sizes, strict=True) if old != -1)
    assert resolved.resolve(num_devices) == resolved
    slow_times_fast = [d * i for d, i in zip(resolved.dcn_sizes, resolved.ici_sizes, strict=True)]
    assert tuple(slow_times_fast) == resolved.sizes


@given(mesh_specs(), st.integers(1, 100))
def test_a_wrong_number_of_devices_is_refused_with_a_hint(spec, num_devices):
    fixed = math.prod(size for size in spec.sizes if size != -1)
    assume(num_devices % fixed if -1 in spec.sizes else num_devices != fixed)
    with pytest.raises(MeshError, match=rf"{fixed} .*{num_devices}( devices)?\.\nhint: "):
        spec.resolve(num_devices)


@pytest.mark.parametrize(
    ("text", "names", "expected"),
    [
        ("dp:2,fsdp:-1,tp:2", None, (("dp", 2, 1), ("fsdp", -1, 1), ("tp", 2, 1))),
        (" dp : 2 , tp:+4 ", None, (("dp", 2, 1), ("tp", 4, 1))),
        ("dp:2@dcn,tp:4", None, (("dp", 2, None), ("tp", 4, 1))),
        ("dp:8@dcn=2,tp:4 @ dcn = 4", None, (("dp", 8, 2), ("tp", 4, 4))),
        ("2,-1", ("a", "b"), (("a", 2, 1), ("b", -1, 1))),
        ("b:2,a:4", ("a", "b"), (("a", 4, 1), ("b", 2, 1))),
        ("4@dcn,2", ("a", "b"), (("a", 4, None), ("b", 2, 1))),
    ],
)
@pytest.mark.parametrize("mark", ["", "!"])
def test_grammar(text, names, expected, mark):
    spec = parse_mesh(mark + text, names)
    assert tuple((axis.name, axis.size, axis.dcn) for axis in spec.axes) == expected
    assert spec.plain_order is bool(mark)
    assert spec.is_hybrid is ("dcn" in text)


@pytest.mark.parametrize(
    ("text", "names", "error"),
    [
        ("", None, r"cannot parse ''\.\nhint: write axes as name:size"),
        ("dp:2,,tp:2", None, "cannot parse ''"),
        ("dp:two", None, "cannot parse 'dp:two'"),
        ("dp=2", None, "cannot parse 'dp=2'"),
        ("dp:2@ici", None, "cannot parse 'dp:2@ici'"),
        ("dp:2.0", None, r"cannot parse 'dp:2\.0'"),
        ("2dp:2", None, "cannot parse '2dp:2'"),
        ("dp:2,4", None, r"mixes sizes with and without names\.\nhint: name all axes, or none"),
        ("2,4", None, r"has no axis names\.\nhint: "),
        ("dp:2", ("dp", "tp"), r'lacks axis .tp.; the required axes are: dp, tp\.\nhint: use "dp:2,tp:1"\.$'),
        ("dp:2,tpp:2", ("dp", "tp"), r"has an axis 'tpp'.*\nhint: did you mean 'tp'\?"),
        ("dp:2,dp:2", ("dp", "tp"), "'dp' appears more than once"),
        ("dp:2@dcn=0", None, r"has `@dcn=0`\.\nhint: use 1 or more"),
    ],
)
def test_errors_quote_the_part_that_does_not_parse(text, names, error):
    with pytest.raises(MeshError, match=error):
        parse_mesh(text, names)


def test_dcn_must_divide_the_axis():
    with pytest.raises(MeshError, match=r"'dp' has size 6, which its `@dcn=4` does not divide\.\nhint: .* a multiple"):
        parse_mesh("dp:-1@dcn=4,tp:2").resolve(12)


def test_a_mesh_needs_an_axis():
    with pytest.raises(MeshError, match="needs at least one axis"):
        MeshSpec(())
