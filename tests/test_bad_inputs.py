"""Bad meshes, rules and specs, each with an error that has the values and a fix."""

import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

import meshwright as mw
from meshwright import P

X = jax.ShapeDtypeStruct((8, 8), "float32")


def struct(*shape):
    return jax.ShapeDtypeStruct(shape, "float32")


def layout(rules, tree, mesh="fsdp:4,tp:2", **options):
    return mw.make_layout(rules, tree, mw.create_abstract_mesh(mesh), **options)


def constrain_misspelled():
    with jax.set_mesh(mw.create_mesh("data:4,model:2")):
        mw.with_sharding_constraint(jnp.ones((8, 8)), P("modle"))


def on_mesh(text, spec):
    return jax.device_put(np.ones((8, 8), np.float32), NamedSharding(mw.create_mesh(text), spec))


def shard_from_another_mesh():
    array = on_mesh("x:8", P("x"))
    mw.make_layout([("w", P("fsdp"))], {"w": array}, mw.create_mesh("fsdp:4,tp:2")).shard({"w": array})


def gather_from_another_mesh():
    array = on_mesh("x:8", P("x"))
    mw.make_layout([("w", P("fsdp"))], {"w": array}, mw.create_mesh("fsdp:4,tp:2")).gather({"w": array})


def constrain_from_another_mesh():
    array = on_mesh("x:8", P("x"))
    with jax.set_mesh(mw.create_mesh("fsdp:4,tp:2")):
        mw.with_sharding_constraint(array, P("tp"))


def call_shard_function_without_mesh():
    shard, _ = mw.make_shard_and_gather_fns({"w": P("tp")})
    mw.tree_apply(shard, {"w": np.ones(8, np.float32)})


# the mistake, a call with it, the error, and a regular expression for its message
ERRORS = [
    (
        "wrong number of devices",
        lambda: mw.create_mesh("data:3,tensor:2"),
        mw.MeshError,
        r"^the mesh data=3 x tensor=2 needs 6 devices, but there are 8\.\n"
        r"hint: use data:4,tensor:2, or pass devices=jax\.devices\(\)\[:6\]$",
    ),
    (
        "wrong number of devices",
        lambda: mw.create_mesh("data:8,tensor:2"),
        mw.MeshError,
        r"^the mesh data=8 x tensor=2 needs 16 devices, but there are 8\.\nhint: use data:4,tensor:2$",
    ),
    (
        "wrong number of devices",
        lambda: mw.create_mesh("a:3,b:3"),
        mw.MeshError,
        r"^the mesh a=3 x b=3 needs 9 devices, .* 8\.\nhint: choose sizes .* 8$",
    ),
    (
        "two sizes of -1",
        lambda: mw.create_mesh("dp:-1,tp:-1"),
        mw.MeshError,
        r"'dp' and 'tp' all have size -1.*\nhint: write the size of every axis but one",
    ),
    (
        "two sizes of -1",
        lambda: mw.create_mesh((-1, -1, 1, 1)),
        mw.MeshError,
        r"'dp' and 'fsdp' all have size -1.*\nhint: ",
    ),
    (
        "-1 that cannot be filled in",
        lambda: mw.create_mesh("dp:3,tp:-1"),
        mw.MeshError,
        r"^cannot fill in tp=-1: dp=3 = 3 does not divide 8 devices\.\nhint: .* divides 8",
    ),
    (
        "size 0, negative or fractional",
        lambda: mw.create_mesh("dp:0,tp:-1"),
        mw.MeshError,
        r"axis 'dp' has size 0\.\nhint: use a size of 1 or more, or -1",
    ),
    (
        "size 0, negative or fractional",
        lambda: mw.create_mesh((2, -4), ("a", "b")),
        mw.MeshError,
        r"axis 'b' has size -4\.\nhint: ",
    ),
    (
        "size 0, negative or fractional",
        lambda: mw.create_mesh((2, 4.0), ("a", "b")),
        mw.MeshError,
        r"axis 'b' has size 4\.0, which is not an integer",
    ),
    (
        "axis twice",
        lambda: mw.create_mesh("dp:2,dp:4"),
        mw.MeshError,
        r"axis 'dp' appears more than once\.\nhint: .* different name",
    ),
    ("axis twice", lambda: mw.create_mesh((2, 4), ("a", "a")), mw.MeshError, r"axis 'a' appears more than once"),
    (
        "different numbers of sizes and names",
        lambda: mw.create_mesh((2, 4), ("a", "b", "c")),
        mw.MeshError,
        r"^got 2 axis sizes for 3 axis names \(a, b, c\)\.\nhint: pass one size per name",
    ),
    (
        "different numbers of sizes and names",
        lambda: mw.get_jax_mesh("2,2,2", ("a", "b")),
        mw.MeshError,
        r"^got 3 axis sizes for 2 axis names \(a, b\)\.\nhint: ",
    ),
    (
        "misspelled axis",
        constrain_misspelled,
        mw.MeshError,
        r"names axis 'modle'; the mesh has axes: data, model\.\nhint: did you mean 'model'\?",
    ),
    (
        "misspelled axis",
        lambda: layout([("w", P("modle"))], {"w": X}, "data:4,model:2"),
        mw.LayoutError,
        r"`w` \(rule 0\): P\('modle'\) names axis 'modle'; the mesh has axes: data, model\.\n"
        r"hint: did you mean 'model'\?",
    ),
    (
        "a usual axis that the mesh lacks",
        lambda: layout([("w", P("tp"))], {"w": X}, "dp:8"),
        mw.LayoutError,
        r"names axis 'tp'; the mesh has axes: dp\.\nhint: if meshes may lack 'tp', pass Rules\(\.\.\., optional_axes",
    ),
    (
        "misspelled axis",
        lambda: mw.make_shard_and_gather_fns({"w": P("modle")}, mesh=mw.create_mesh("model:8")),
        mw.MeshError,
        r"'modle'; .*\nhint: did you mean 'model'\?",
    ),
    (
        "misspelled axis",
        lambda: mw.get_jax_mesh("dp:2,modle:4", ("dp", "model")),
        mw.MeshError,
        r"has an axis 'modle'; the expected axes are: dp, model\.\nhint: did you mean 'model'\?",
    ),
    (
        "no mesh",
        lambda: mw.with_sharding_constraint(jnp.ones(8), P("tp")),
        mw.MeshError,
        r"with_sharding_constraint\(P\('tp'\)\) needs a mesh, but none is set\.\nhint: .*jax\.set_mesh\(mesh\)",
    ),
    (
        "no mesh",
        call_shard_function_without_mesh,
        mw.MeshError,
        r"make_shard_and_gather_fns needs a mesh, but none .*\nhint: wrap",
    ),
    *(
        (
            "another mesh",
            call,
            mw.PlacementError,
            rf"^{what} is on the mesh x=8, but the current mesh is fsdp=4 x tp=2\.\n"
            r"hint: .*reshard=True",
        )
        for call, what in (
            (shard_from_another_mesh, "`w`"),
            (gather_from_another_mesh, "`w`"),
            (constrain_from_another_mesh, "the array"),
        )
    ),
    (
        "broken pattern",
        lambda: mw.Rules([("norm", P()), ("attn/(q|k", P("tp"))]),
        mw.RuleError,
        r"^rule 1: `attn/\(q\|k` is not a regular expression: missing \), .*\n {4}attn/\(q\|k\n {9}\^\n"
        r"hint: .*re\.escape",
    ),
    (
        "broken pattern",
        lambda: mw.get_weight_decay_mask(["*bias"]),
        mw.RuleError,
        r"nothing to repeat.*\n {4}\*bias\n {4}\^\nhint: ",
    ),
    (
        "pattern that could take exponential time",
        lambda: mw.Rules([(r"(a+)+(?=/bias)", P())]),
        mw.RuleError,
        r"could take exponential time .*is repeated.*\nhint: remove the nested repetition",
    ),
    (
        "pattern that could take exponential time",
        lambda: mw.Rules([(r"(\w+)+\1/bias", P())]),
        mw.RuleError,
        r"could take exponential time .*\nhint: ",
    ),
    (
        "pattern that could take exponential time",
        lambda: mw.Rules([(r"((a{1,99}){1,99})+", P())]),
        mw.RuleError,
        r"exponential time.*\nhint: ",
    ),
    (
        "leaves without a rule",
        lambda: layout([("bias", P())], {"a": [{"kernel": X}, {"kernel": X}], "bias": struct(8), "out": struct(8, 3)}),
        mw.LayoutError,
        r"^no rule matches 3 leaves:\n  `a/0/kernel` \(8, 8\) and 1 more like it\n  `out` \(8, 3\)\n"
        r"hint: add \(r\"a/\\d\+/kernel\$\", P\('fsdp', None\)\), \(r\"out\$\", P\('fsdp', None\)\)\.$",
    ),
    (
        "leaves without a rule",
        lambda: mw.match_partition_rules([("bias", P())], {"bias": struct(8), "w": X, "v": X}),
        mw.LayoutError,
        r"^no rule matches 2 leaves:\n  `v` \(8, 8\)\n  `w` \(8, 8\)\n"
        r"hint: add \(r\"v\$\", P\(None, None\)\), \(r\"w\$\"",
    ),
    (
        "spec longer than a shape",
        lambda: layout([("w", P("fsdp", "tp", None))], {"w": X}),
        mw.LayoutError,
        r"`w` \(rule 0\): P\('fsdp', 'tp', None\) has 3 entries; the shape \(8, 8\) has rank 2\.\n"
        r"hint: use at most 2 entries",
    ),
    (
        "spec longer than a shape",
        lambda: mw.match_partition_rules([("w", P(None, None, None))], {"w": X}),
        mw.LayoutError,
        r"has 3 entries; .* has rank 2",
    ),
    (
        "axis on two dims",
        lambda: mw.Rules([("w", P("tp", ("fsdp", "tp")))]),
        mw.RuleError,
        r"^rule 0 `w`: P\('tp', \('fsdp', 'tp'\)\) uses axis 'tp' more than once \(dims \[0, 1\]\)\.\n"
        r"hint: .*only one dim",
    ),
    (
        "axis on two dims",
        lambda: mw.logical_rules([("w", ("heads", "mlp"))], {"heads": "tp", "mlp": "tp"}),
        mw.RuleError,
        r"logical axes 'heads' and 'mlp' both map to mesh axis 'tp'\.\nhint: map one of them",
    ),
    (
        "size that does not divide",
        lambda: layout([("vocab", P("fsdp"))], {"vocab": struct(50257, 8)}),
        mw.LayoutError,
        r"`vocab` \(rule 0\): dim 0 has size 50257; `fsdp` has 4 devices: 50257 % 4 = 1\.\n"
        r"hint: pad to 50260, or drop `fsdp` here",
    ),
    (
        "size that does not divide",
        lambda: layout([("w", P(None, ("fsdp", "tp")))], {"w": struct(8, 12)}),
        mw.LayoutError,
        r"dim 1 has size 12; `fsdp` x `tp` has 8 devices: 12 % 8 = 4\.\nhint: pad to 16, or drop `fsdp` x `tp` here",
    ),
    (
        "not a PartitionSpec",
        lambda: mw.Rules([("w", ("fsdp", "tp"))]),
        mw.RuleError,
        r"^rule 0 `w`: .* is a tuple, not a PartitionSpec\.\nhint: write P\('fsdp', 'tp'\)\.$",
    ),
    (
        "not a PartitionSpec",
        lambda: mw.Rules([("w", (("fsdp", "tp"), None))]),
        mw.RuleError,
        r"\nhint: write P\(\('fsdp', 'tp'\), None\)\.$",
    ),
    (
        "not a PartitionSpec",
        lambda: mw.Rules([("w", None)]),
        mw.RuleError,
        r"None is a NoneType, not a PartitionSpec\.\nhint: write P\(\)\.$",
    ),
    (
        "not a PartitionSpec",
        lambda: mw.Rules([("w", "tp")]),
        mw.RuleError,
        r"'tp' is a str, not a PartitionSpec\.\nhint: write P\('tp'\)\.$",
    ),
    (
        "not a PartitionSpec",
        lambda: mw.make_shard_and_gather_fns({"w": ["tp"]}),
        mw.RuleError,
        r"'tp' is a str, not a PartitionSpec",
    ),
]


@pytest.mark.parametrize(("act", "error", "text"), [row[1:] for row in ERRORS], ids=[row[0] for row in ERRORS])
def test_error(act, error, text):
    with pytest.raises(mw.MeshwrightError, match=text) as caught:
        act()
    assert type(caught.value) is error


def fake_devices(num_hosts, each):
    return [
        types.SimpleNamespace(id=i, process_index=i // each, platform="gpu", device_kind="fake", local_hardware_id=0)
        for i in range(num_hosts * each)
    ]


def warn_of_spanning_axis():
    from meshwright.mesh import build as mesh
    from meshwright.mesh.string import parse_mesh

    devices = fake_devices(2, 4)
    mesh._warn_if_latency_bound_axes_span_hosts(parse_mesh("dp:1,tp:8"), mesh._domains(devices, None)[0])


WARNINGS = [
    (
        "tensor axis across hosts",
        warn_of_spanning_axis,
        r"axis 'tp' \(size 8\) spans 2 hosts or slices of 4 devices\. .*12 to 50 GB/s.*ten times slower.*\n"
        r"hint: keep tp <= 4",
    ),
    (
        "rule that matches nothing",
        lambda: layout([("attn/querry", P("tp")), ("query", P())], {"attn": {"query": X}}),
        r"rule 0 `attn/querry` matches no leaf; the closest path is `attn/query`",
    ),
    (
        "rule that matches nothing",
        lambda: mw.match_partition_rules([("attn/querry", P("tp")), ("query", P())], {"attn": {"query": X}}),
        r"rule 0 `attn/querry` matches no leaf; the closest path is `attn/query`",
    ),
    (
        "shadowed rule",
        lambda: layout([("kernel", P()), ("up/kernel", P("tp"))], {"up": {"kernel": X}}),
        r"rule 1 `up/kernel` is shadowed: rule 0 matches `up/kernel` first",
    ),
    (
        "large replicated leaf",
        lambda: layout([("w", P())], {"w": struct(2048, 2048)}),
        r"w 2048x2048 is replicated on every device: 16\.0 MiB each",
    ),
]


@pytest.mark.parametrize(("act", "text"), [row[1:] for row in WARNINGS], ids=[row[0] for row in WARNINGS])
def test_warning(act, text):
    with pytest.warns(mw.MeshwrightWarning, match=text):
        act()


@pytest.mark.parametrize("size", [(2047, 2048), (2048, 2048)])
def test_only_large_leaves_on_several_devices_cause_a_warning(size):
    assert bool(mw.explain_layout([("w", P())], {"w": struct(*size)}, mw.create_abstract_mesh("dp:2")).concerns()) is (
        size == (2048, 2048)
    )
    assert mw.explain_layout([("w", P())], {"w": struct(*size)}, mw.create_abstract_mesh("dp:1")).concerns() == []


def test_catastrophic_pattern_does_not_hang(run_python):
    # With `re`, the first would take seconds and the second would never finish; the timeout ends a hang.
    code = """
    import meshwright as mw
    import numpy as np
    from meshwright import P

    tree = {name: np.ones(2) for name in ["a" * n for n in (26, 60, 2000)] + ["a" * 40 + "/bias", "b" * 40]}
    for text in (r"(a+)+/bias$", r"(.*a){20}$", "(a|a)*b", ".*a.*a.*a.*a.*a.*b", "a*/bias$"):
        try:
            print(sum(mw.match_rules([(text, P("tp")), (".*", P())], tree).hits))
        except mw.RuleError as error:
            print("could take exponential time" in str(error))
    """
    result = run_python(code, timeout=120)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["True"] * 4 + ["5"]


def test_allowed_backtracking_is_bounded():
    # This is close to the limit for a path of this length.
    search = mw.rules.rule_set.compile_pattern("a?" * 3 + ".*.*X$").search
    assert search("X" + "a" * 100) is None
    with pytest.raises(mw.RuleError, match="too many places"):
        search("X" + "a" * 1000)


def test_errors_are_one_family_of_value_errors():
    for name in ("MeshError", "TreeError", "RuleError", "LayoutError", "PlacementError", "RngError", "JobError"):
        assert issubclass(getattr(mw, name), mw.MeshwrightError)
    assert issubclass(mw.MeshwrightError, ValueError)
    error = mw.MeshwrightError("what", hint="fix")
    assert str(error) == "what\nhint: fix"
    assert error.hint == "fix"
    assert str(mw.MeshwrightError("what")) == "what"
    assert issubclass(mw.MeshwrightWarning, UserWarning)


def test_layout_error_has_the_full_report():
    with pytest.raises(mw.LayoutError) as caught:
        layout([("w", P("fsdp"))], {"w": struct(6, 8), "v": X, "u": X})
    report = caught.value.report
    assert report.unmatched == ("u", "v")
    assert [(problem.name, problem.problem.padded) for problem in report.indivisible] == [("w", 8)]
    assert re.search(r"no rule matches 2 leaves:.*1 leaf does not fit the mesh fsdp=4 x tp=2:", str(caught.value), re.S)
