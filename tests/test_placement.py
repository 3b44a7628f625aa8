import contextlib
import warnings

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding

import meshwright as mw
from meshwright import P

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
KINDS = {"auto": AUTO, "explicit": EXPLICIT, "mixed": (EXPLICIT, AUTO), "mixed other way": (AUTO, EXPLICIT)}


def mesh(axis_types=AUTO):
    return mw.create_mesh("dp:4,tp:2", axis_types=axis_types)


def host(*shape, dtype=np.float32):
    return np.arange(np.prod(shape), dtype=dtype).reshape(shape)


@contextlib.contextmanager
def legacy(mesh):
    # Deprecated in newer JAX, and still what much code uses.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        mesh.__enter__()
    try:
        yield
    finally:
        mesh.__exit__(None, None, None)


# --- Trees of functions ---


def make_tree():
    return {"w": host(8, 6), "b": host(6), "ids": host(8, dtype=np.int32), "on": host(8) > 3, "key": jax.random.key(1)}


SPECS = {"w": P("dp", "tp"), "b": P(None), "ids": P("dp"), "on": P("tp"), "key": P()}
DTYPES = {
    "name": ("bfloat16", "bfloat16"),
    "short name": ("bf16", "bfloat16"),
    "numpy": (np.dtype("float16"), "float16"),
    "numpy type": (np.float16, "float16"),
    "jnp": (jnp.bfloat16, "bfloat16"),
    "ml_dtypes": (ml_dtypes.float8_e4m3fn, "float8_e4m3fn"),
    "fp8 name": ("float8_e5m2", "float8_e5m2"),
    "struct": (jax.ShapeDtypeStruct((), jnp.bfloat16), "bfloat16"),
    "tree of names": (dict.fromkeys(SPECS, "bfloat16"), "bfloat16"),
    "tree of structs": ({name: jax.ShapeDtypeStruct((3,), jnp.float16) for name in SPECS}, "float16"),
    "tree with gaps": (dict.fromkeys(SPECS) | {"ids": jnp.bfloat16, "on": np.float16}, "float32"),
    "none": (None, "float32"),
}


@pytest.mark.parametrize(
    "source", [lambda tree: tree, lambda tree: jax.tree.map(jnp.asarray, tree)], ids=["host", "jax"]
)
@pytest.mark.parametrize(("dtypes", "meant"), DTYPES.values(), ids=DTYPES)
def test_every_form_of_dtype(dtypes, meant, source, assert_placed):
    tree = source(make_tree())
    shard, gather = mw.make_shard_and_gather_fns(SPECS, dtypes, mesh=mesh())
    placed = mw.tree_apply(shard, tree)
    for name in ("w", "b"):
        assert_placed(placed[name], mesh(), SPECS[name], np.asarray(tree[name]).astype(jnp.dtype(meant)))
    for name in ("ids", "on"):
        assert_placed(placed[name], mesh(), SPECS[name], np.asarray(tree[name]))
    back = mw.tree_apply(gather, placed)
    assert [str(back[name].dtype) for name in ("ids", "on")] == ["int32", "bool"]
    assert back["key"].dtype == tree["key"].dtype
    np.testing.assert_array_equal(jax.random.key_data(back["key"]), jax.random.key_data(tree["key"]))
    for name in ("w", "b", "ids", "on"):
        assert isinstance(back[name], np.ndarray)
        np.testing.assert_array_equal(back[name], np.asarray(placed[name]), strict=True)


def test_gather_casts_too():
    _, gather = mw.make_shard_and_gather_fns({"w": P("dp")}, "float32", mesh=mesh())
    stored = jax.device_put(host(8).astype(jnp.bfloat16), NamedSharding(mesh(), P("dp")))
    np.testing.assert_array_equal(mw.tree_apply(gather, {"w": stored})["w"], host(8), strict=True)


def test_floats_do_not_become_integers():
    shard, _ = mw.make_shard_and_gather_fns({"w": P()}, "int8", mesh=mesh())
    with pytest.raises(mw.PlacementError, match=r"cannot be cast to int8.*\nhint: "):
        mw.tree_apply(shard, {"w": host(8)})


@pytest.mark.parametrize(
    ("value", "dtype"), [(host(8, dtype=np.float64), None), (host(8, dtype=np.int64), "bfloat16"), (host(8), "float64")]
)
def test_64_bits_are_not_cut_in_half_unasked(value, dtype):
    shard, _ = mw.make_shard_and_gather_fns({"w": P()}, dtype, mesh=mesh())
    with pytest.raises(mw.PlacementError, match=r"64 would become .*32 .*jax_enable_x64 is off\.\nhint: cast it to"):
        mw.tree_apply(shard, {"w": value})


def test_64_bit_floats_may_be_cast_when_asked():
    shard, _ = mw.make_shard_and_gather_fns({"w": P()}, "bfloat16", mesh=mesh())
    assert mw.tree_apply(shard, {"w": host(8, dtype=np.float64)})["w"].dtype == jnp.bfloat16


def test_leaf_by_leaf_is_the_same_as_all_at_once():
    tree = make_tree()
    shard, gather = mw.make_shard_and_gather_fns(SPECS, "bfloat16", mesh=mesh())
    for name, value in tree.items():
        one, all_at_once = shard[name](value), mw.tree_apply(shard, tree)[name]
        assert one.sharding == all_at_once.sharding
        if name != "key":
            np.testing.assert_array_equal(one, all_at_once, strict=True)
            np.testing.assert_array_equal(gather[name](one), np.asarray(one), strict=True)


def test_one_spec_may_stand_for_a_subtree(assert_placed):
    shard, gather = mw.make_shard_and_gather_fns({"a": P("dp"), "b": P()}, "float16", mesh=mesh())
    tree = {"a": {"x": host(8), "y": [host(4, 2)]}, "b": host(3)}
    for placed in (mw.tree_apply(shard, tree), {name: shard[name](tree[name]) for name in tree}):
        assert_placed(placed["a"]["x"], mesh(), P("dp"), host(8).astype(np.float16))
        assert_placed(placed["a"]["y"][0], mesh(), P("dp"), host(4, 2).astype(np.float16))
        back = mw.tree_apply(gather, placed)
        np.testing.assert_array_equal(back["a"]["y"][0], host(4, 2).astype(np.float16), strict=True)


def test_named_shardings_bring_their_own_mesh(assert_placed):
    other = mw.create_mesh("x:2", devices=2)
    shard, gather = mw.make_shard_and_gather_fns({"w": NamedSharding(other, P("x"))})
    placed = mw.tree_apply(shard, {"w": host(4)})
    assert_placed(placed["w"], other, P("x"), host(4))
    np.testing.assert_array_equal(mw.tree_apply(gather, placed)["w"], host(4))


@pytest.mark.parametrize("enter", [jax.set_mesh, legacy], ids=["set_mesh", "with mesh"])
def test_the_mesh_of_creation_wins_over_that_of_the_call(enter):
    with enter(mesh()):
        shard, _ = mw.make_shard_and_gather_fns({"w": P("dp")})
    with enter(mw.create_mesh("dp:2,x:4")):
        assert mw.tree_apply(shard, {"w": host(8)})["w"].sharding == NamedSharding(mesh(), P("dp"))


@pytest.mark.parametrize("enter", [jax.set_mesh, legacy], ids=["set_mesh", "with mesh"])
def test_without_a_mesh_at_creation_that_of_the_call_counts(enter):
    shard, _ = mw.make_shard_and_gather_fns({"w": P("dp")})
    with enter(mesh()):
        assert mw.tree_apply(shard, {"w": host(8)})["w"].sharding == NamedSharding(mesh(), P("dp"))
    with enter(mw.create_mesh("x:8")), pytest.raises(mw.MeshError, match="names axis 'dp'"):
        mw.tree_apply(shard, {"w": host(8)})


@pytest.mark.parametrize(
    ("specs", "value", "text"),
    [
        (P("dp"), host(6), r"dim 0 has size 6; `dp` has 4 devices: 6 % 4 = 2\.\nhint: pad to 8"),
        (P("dp", "tp"), host(8), "has 2 entries; the shape"),
    ],
)
def test_what_does_not_fit(specs, value, text):
    shard, _ = mw.make_shard_and_gather_fns({"w": specs}, mesh=mesh())
    with pytest.raises(mw.PlacementError, match=text):
        mw.tree_apply(shard, {"w": value})


def test_dtypes_and_specs_must_have_one_structure():
    with pytest.raises(mw.PlacementError, match="dtype_specs and partition_specs differ in structure"):
        mw.make_shard_and_gather_fns({"w": P()}, {"v": "bfloat16"}, mesh=mesh())


def test_none_is_no_spec():
    with pytest.raises(mw.RuleError, match=r"None is a NoneType, .*\nhint: write P\(\)"):
        mw.make_shard_and_gather_fns({"w": None}, mesh=mesh())


def test_host_trees_need_no_program_and_mesh_trees_one(count_programs):
    tree = {f"w{i}": host(8, 3 + i) for i in range(7)}
    specs = {name: P("dp") for name in tree}
    shard, gather = mw.make_shard_and_gather_fns(specs, mesh=mesh())
    with count_programs() as first:
        placed = mw.tree_apply(shard, tree)
        mw.tree_apply(gather, placed)
    other, _ = mw.make_shard_and_gather_fns({name: P("tp") for name in tree}, "float16", mesh=mesh())
    with count_programs() as second:
        mw.tree_apply(other, placed)
    with count_programs() as third:
        mw.tree_apply(other, placed)
    layout = mw.make_layout([("w", P("dp"))], tree, mesh())
    with count_programs() as fourth:
        layout.gather(layout.shard(tree))
    assert [len(programs) for programs in (first, second, third, fourth)] == [0, 1, 0, 0]


# --- Constraints ---


def constrained(x, specs, **options):
    """Eagerly and under jit, which must agree."""
    eager = mw.with_sharding_constraint(x, specs, **options)
    traced = jax.jit(lambda x: mw.with_sharding_constraint(x, specs, **options))(x)
    return eager, traced


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize(
    "spec",
    [
        P(),
        P("dp"),
        P("tp"),
        P("dp", "tp"),
        P("tp", "dp"),
        P(None, "dp"),
        P(None, "tp"),
        P(("dp", "tp")),
        P(None, ("dp", "tp")),
    ],
    ids=str,
)
def test_arrays_are_split_as_asked(kind, spec, assert_placed):
    value, where = host(8, 8), mesh(kind)
    auto_before_explicit = kind == (AUTO, EXPLICIT) and ("dp", "tp") in tuple(spec)
    with jax.set_mesh(where):
        if auto_before_explicit:
            with pytest.raises(
                mw.PlacementError, match=r"split by an Auto axis before an Explicit.*\nhint: name the Explicit"
            ):
                mw.with_sharding_constraint(value, spec)
            return
        for result in constrained(jnp.asarray(value), spec):
            assert_placed(result, where, spec, value)


@pytest.mark.parametrize("spec", [P("dp", "tp"), P(("tp", "dp")), P(None, "tp")], ids=str)
def test_legacy_mesh_context(spec, assert_placed):
    with legacy(mesh()):
        for result in constrained(jnp.asarray(host(8, 8)), spec):
            assert_placed(result, mesh(), spec, host(8, 8))


def test_legacy_context_of_an_explicit_mesh_is_not_silently_ignored():
    with legacy(mesh(EXPLICIT)), pytest.raises(ValueError, match="set_mesh"):
        mw.with_sharding_constraint(jnp.ones((8, 8)), P("dp"))


@pytest.mark.parametrize(
    ("kind", "enter"),
    # JAX takes shardings over Explicit axes only under their mesh.
    [*((kind, jax.set_mesh) for kind in KINDS.values()), (AUTO, legacy), (AUTO, lambda mesh: contextlib.nullcontext())],
    ids=[*KINDS, "auto, with mesh", "auto, no mesh"],
)
def test_named_shardings(kind, enter, assert_placed):
    where = mesh(kind)
    with enter(where):
        for result in constrained(jnp.asarray(host(8, 8)), NamedSharding(where, P("dp", "tp"))):
            assert_placed(result, where, P("dp", "tp"), host(8, 8))
        with pytest.raises(mw.PlacementError, match=r"6 % 4 = 2"):
            mw.with_sharding_constraint(jnp.ones((6, 8)), NamedSharding(where, P("dp", "tp")))


def test_named_sharding_of_another_mesh():
    sharding = NamedSharding(mw.create_mesh("x:8"), P("x"))
    with jax.set_mesh(mesh()), pytest.raises(mw.PlacementError, match="the NamedSharding lives on the mesh x=8"):
        mw.with_sharding_constraint(jnp.ones((8, 8)), sharding)


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT], ids=["auto", "explicit"])
def test_unconstrained_dims_stay_as_they_are(kind, assert_placed):
    where, value = mesh(kind), host(8, 8)
    with jax.set_mesh(where):
        x = mw.with_sharding_constraint(jnp.asarray(value), P(None, "tp"))
        for result in constrained(x, P("dp", P.UNCONSTRAINED)):
            assert_placed(result, where, P("dp", "tp"), value)
        for result in constrained(x, P(P.UNCONSTRAINED, None)):
            assert_placed(result, where, P(), value)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_unconstrained_beside_a_split_dim(kind):
    # With both kinds of axes, the compiler is free in the unconstrained dim; the other one is settled.
    with jax.set_mesh(mesh(kind)):
        x = mw.with_sharding_constraint(jnp.asarray(host(8, 8)), P(None, "tp"))
        for result in constrained(x, P("dp", P.UNCONSTRAINED)):
            assert {shard.data.shape[0] for shard in result.addressable_shards} == {2}
            np.testing.assert_array_equal(result, host(8, 8))


def test_trees_of_specs(assert_placed):
    tree = {"a": {"x": host(8, 4), "y": host(4, 8)}, "b": [host(8), host(3)], "c": host(5)}
    specs = {"a": P("dp", "tp"), "b": [P("tp"), P()], "c": None}
    with jax.set_mesh(mesh()):
        for result in constrained(jax.tree.map(jnp.asarray, tree), specs):
            assert_placed(result["a"]["x"], mesh(), P("dp", "tp"), tree["a"]["x"])
            assert_placed(result["a"]["y"], mesh(), P("dp", "tp"), tree["a"]["y"])
            assert_placed(result["b"][0], mesh(), P("tp"), tree["b"][0])
            np.testing.assert_array_equal(result["c"], tree["c"])


def test_none_leaves_everything_alone():
    x = jnp.ones(3)
    assert mw.with_sharding_constraint(x, None) is x
    assert mw.with_sharding_constraint({"a": [x]}, None)["a"][0] is x


def test_without_a_mesh_only_specs_that_ask_for_nothing_pass():
    x = jnp.ones((4, 4))
    assert mw.with_sharding_constraint(x, P()) is x
    assert mw.with_sharding_constraint(x, P(None, P.UNCONSTRAINED)) is x
    assert mw.with_sharding_constraint(x, P("tp"), optional_axes=("tp",)) is x
    with pytest.raises(mw.MeshError, match="none is active"):
        jax.jit(lambda x: mw.with_sharding_constraint(x, P("tp")))(x)


def test_optional_axes_are_skipped_and_others_are_not(assert_placed):
    with jax.set_mesh(mesh()):
        for result in constrained(jnp.asarray(host(8, 8)), P("dp", ("sp", "tp")), optional_axes=("sp", "ep")):
            assert_placed(result, mesh(), P("dp", "tp"), host(8, 8))
        with pytest.raises(mw.MeshError, match=r"names axis 'sp'; the mesh has axes: dp, tp\.\nhint: "):
            mw.with_sharding_constraint(jnp.ones((8, 8)), P("dp", ("sp", "tp")), optional_axes=("ep",))


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_indivisible_dims_are_an_error(kind):
    # Plain JAX replicates such an array without a word on some versions.
    with jax.set_mesh(mesh(kind)):
        for act in (mw.with_sharding_constraint, jax.jit(mw.with_sharding_constraint, static_argnums=1)):
            with pytest.raises(
                mw.PlacementError, match=r"with_sharding_constraint: dim 0 has size 6; `dp`.*\nhint: pad to 8"
            ):
                act(jnp.ones((6, 8)), P("dp"))
            with pytest.raises(mw.PlacementError, match=r"has 3 entries; the shape \(6, 8\)"):
                act(jnp.ones((6, 8)), P(None, None, "tp"))


@pytest.mark.parametrize("spec", [("dp",), ["dp"], "dp"])
def test_what_is_no_spec(spec):
    with jax.set_mesh(mesh()), pytest.raises(ValueError, match=r"not a PartitionSpec|structure|None for|Expected"):
        mw.with_sharding_constraint(jnp.ones((8, 8)), spec)


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT], ids=["auto", "explicit"])
@pytest.mark.parametrize(
    "spec", [P("dp", "tp"), P(None, "tp"), P("tp", "dp"), P(("dp", "tp"), P.UNCONSTRAINED)], ids=str
)
def test_inside_partly_manual_shard_map(kind, spec, assert_placed):
    """Manual axes are left out of the spec; the rest is applied to the slice at hand."""
    where, value, seen = mesh(kind), host(16, 8), []
    rest = mw.specs.keep_axes(spec, lambda axis: axis != "dp")

    def inner(x):
        x = mw.with_sharding_constraint(x, spec)
        if kind is EXPLICIT:
            seen.append(jax.typeof(x).sharding.spec)
        return x * 2

    with jax.set_mesh(where):
        mapped = jax.shard_map(inner, in_specs=P("dp"), out_specs=P("dp"), axis_names={"dp"})
        result = jax.jit(mapped)(jax.device_put(value, NamedSharding(where, P("dp"))))
    np.testing.assert_array_equal(result, value * 2)
    whole = P(*(("dp", *mw.specs.dim_axes(rest[0])) if dim == 0 else entry for dim, entry in enumerate(rest)))
    settled = P(*(None if entry is P.UNCONSTRAINED else entry for entry in whole))
    assert_placed(result, where, settled, value * 2)
    if kind is EXPLICIT:
        assert mw.specs.canonical(seen[0]) == mw.specs.canonical(rest)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_inside_fully_manual_shard_map_nothing_is_left_to_do(kind):
    value, jaxprs = host(8, 8), []

    def inner(x):
        jaxprs.append(jax.make_jaxpr(lambda x: mw.with_sharding_constraint(x, P("dp", "tp")))(x))
        return mw.with_sharding_constraint(x, P("dp", "tp")) + 1

    placed = jax.device_put(value, NamedSharding(mesh(kind), P("dp", "tp")))
    with jax.set_mesh(mesh(kind)):
        result = jax.jit(jax.shard_map(inner, in_specs=P("dp", "tp"), out_specs=P("dp", "tp")))(placed)
    np.testing.assert_array_equal(result, value + 1)
    assert len(jaxprs[0].eqns) == 0


def test_misspelt_axis_inside_shard_map():
    mapped = jax.shard_map(
        lambda x: mw.with_sharding_constraint(x, P("dpp")), mesh=mesh(), in_specs=P("dp"), out_specs=P("dp")
    )
    with pytest.raises(mw.MeshError, match=r"'dpp'.*\nhint: did you mean 'dp'"):
        mapped(host(8, 8))


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("traced", [True, False], ids=["jit", "eager"])
def test_gradients_pass_unchanged(kind, traced):
    value, weight = host(8, 8), host(8, 8) ** 2

    def loss(x):
        return (mw.with_sharding_constraint(x, P("dp", "tp")) * weight).sum()

    with jax.set_mesh(mesh(kind)):
        gradient = jax.grad(loss)
        result = (jax.jit(gradient) if traced else gradient)(jnp.asarray(value))
    np.testing.assert_array_equal(result, weight)


def test_constraints_nest_in_scan_and_vmap(assert_placed):
    def body(x, _):
        return mw.with_sharding_constraint(x + 1, P("dp", "tp")), None

    with jax.set_mesh(mesh()):
        scanned = jax.jit(lambda x: jax.lax.scan(body, x, None, length=3)[0])(jnp.zeros((8, 8)))
        assert_placed(scanned, mesh(), P("dp", "tp"), np.full((8, 8), 3, np.float32))
        mapped = jax.jit(jax.vmap(lambda x: mw.with_sharding_constraint(x, P("dp"))))(jnp.zeros((3, 8)))
    np.testing.assert_array_equal(mapped, np.zeros((3, 8)))
