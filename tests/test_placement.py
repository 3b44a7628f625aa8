import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding

import meshwright as mw
from meshwright import P

from .meshes import host, legacy, mesh


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
def test_all_forms_of_dtype_specs(dtypes, meant, source, assert_placed):
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
    with pytest.raises(mw.PlacementError, match=r"cannot cast a float32 array to int8.*\nhint: "):
        mw.tree_apply(shard, {"w": host(8)})


@pytest.mark.parametrize(
    ("value", "dtype"), [(host(8, dtype=np.float64), None), (host(8, dtype=np.int64), "bfloat16"), (host(8), "float64")]
)
def test_64_bit_arrays_are_not_truncated(value, dtype):
    shard, _ = mw.make_shard_and_gather_fns({"w": P()}, dtype, mesh=mesh())
    with pytest.raises(
        mw.PlacementError, match=r"64 array would become .*32 .*jax_enable_x64 is off\.\nhint: cast it to"
    ):
        mw.tree_apply(shard, {"w": value})


def test_64_bit_floats_can_be_cast_explicitly():
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


def test_one_spec_applies_to_a_subtree(assert_placed):
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
def test_the_mesh_at_creation_wins_over_the_mesh_at_the_call(enter):
    with enter(mesh()):
        shard, _ = mw.make_shard_and_gather_fns({"w": P("dp")})
    with enter(mw.create_mesh("dp:2,x:4")):
        assert mw.tree_apply(shard, {"w": host(8)})["w"].sharding == NamedSharding(mesh(), P("dp"))


@pytest.mark.parametrize("enter", [jax.set_mesh, legacy], ids=["set_mesh", "with mesh"])
def test_without_a_mesh_at_creation_the_mesh_at_the_call_is_used(enter):
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
def test_specs_that_do_not_fit(specs, value, text):
    shard, _ = mw.make_shard_and_gather_fns({"w": specs}, mesh=mesh())
    with pytest.raises(mw.PlacementError, match=text):
        mw.tree_apply(shard, {"w": value})


def test_dtypes_and_specs_must_have_the_same_structure():
    with pytest.raises(mw.PlacementError, match="dtype_specs and partition_specs differ in structure"):
        mw.make_shard_and_gather_fns({"w": P()}, {"v": "bfloat16"}, mesh=mesh())


def test_none_is_not_a_spec():
    with pytest.raises(mw.RuleError, match=r"None is a NoneType, .*\nhint: write P\(\)"):
        mw.make_shard_and_gather_fns({"w": None}, mesh=mesh())


def test_host_trees_need_no_program_and_mesh_trees_one(count_programs):
    tree = {f"w{i}": host(8, 3 + i) for i in range(7)}
    specs = {name: P("dp") for name in tree}
    shard, gather = mw.make_shard_and_gather_fns(specs, mesh=mesh())
    with count_programs() as first:
        placed = mw.tree_apply(shard, tree)
        mw.tree_apply(gather, placed)
    other, _ = mw.make_shard_and_gather_fns({name: P("tp") for name in tree}, "bfloat16", mesh=mesh())
    with count_programs() as second:
        mw.tree_apply(other, placed)
    with count_programs() as third:
        mw.tree_apply(other, placed)
    layout = mw.make_layout([("w", P("dp"))], tree, mesh())
    with count_programs() as fourth:
        layout.gather(layout.shard(tree))
    assert [len(programs) for programs in (first, second, third, fourth)] == [0, 1, 0, 0]
