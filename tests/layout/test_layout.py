import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding

import meshwright as mw
from meshwright import P
from meshwright.layout import format_bytes
from meshwright.placement import shard_leaves

RULES = [("kernel", P("fsdp", "tp")), ("ids", P("fsdp")), ("bias", P())]


def make_tree():
    return {
        "blocks": [
            {"kernel": np.arange(i, i + 48, dtype=np.float32).reshape(8, 6), "bias": np.ones(6, np.float32)}
            for i in range(2)
        ],
        "ids": np.arange(8, dtype=np.int32),
        "half": {"kernel": np.arange(16, dtype=np.float32).reshape(4, 4).astype(jnp.bfloat16)},
        "key": jax.random.key(7),
        "step": 3,
    }


def mesh():
    return mw.create_mesh("fsdp:4,tp:2")


def same_bits(one, other):
    if hasattr(one, "dtype") and jnp.issubdtype(one.dtype, jax.dtypes.prng_key):
        one, other = jax.random.key_data(one), jax.random.key_data(other)
    one, other = np.asarray(one, None if hasattr(one, "dtype") else np.int32), np.asarray(other)
    return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()


# --- Queries ---


def test_specs_shardings_and_bytes():
    layout = mw.make_layout(RULES, make_tree(), mesh())
    assert layout.specs["blocks"][1] == {"kernel": P("fsdp", "tp"), "bias": P()}
    assert layout.shardings["half"]["kernel"] == NamedSharding(mesh(), P("fsdp", "tp"))
    sizes = {
        "blocks/0/kernel": (192, 24),
        "blocks/0/bias": (24, 24),
        "ids": (32, 8),
        "half/kernel": (32, 4),
        "key": (8, 8),
        "step": (4, 4),
    }
    for name, (total, per_device) in sizes.items():
        assert (layout[name].bytes_total, layout[name].bytes_per_device) == (total, per_device), name
    assert layout.bytes_total == 2 * (192 + 24) + 32 + 32 + 8 + 4
    assert layout.bytes_per_device == 2 * (24 + 24) + 8 + 4 + 8 + 4
    assert layout["blocks/0/kernel"].why == "0 `kernel`"
    assert layout["step"].why == "one element"


def test_bytes_equal_those_on_the_devices():
    layout = mw.make_layout(RULES, make_tree(), mesh())
    placed = layout.shard(make_tree())
    held = dict.fromkeys(jax.devices(), 0)
    for array in jax.tree.leaves(placed):
        data = jax.random.key_data(array) if jnp.issubdtype(array.dtype, jax.dtypes.prng_key) else array
        for shard in data.addressable_shards:
            held[shard.device] += shard.data.nbytes
    assert set(held.values()) == {layout.bytes_per_device}


def test_abstract_tree_has_stored_shapes():
    layout = mw.make_layout([("w", P("fsdp"))], {"w": np.ones((6, 2), np.float32)}, mesh(), pad=True)
    struct = layout.abstract["w"]
    assert (struct.shape, struct.dtype, struct.sharding) == ((8, 2), np.float32, NamedSharding(mesh(), P("fsdp")))


def test_unknown_leaf_is_explained():
    layout = mw.make_layout(RULES, make_tree(), mesh())
    with pytest.raises(mw.LayoutError, match=r"no leaf 'blocks/0/kernal'\.\nhint: did you mean 'blocks/0/kernel'"):
        layout["blocks/0/kernal"]


def test_text_forms():
    layout = mw.make_layout(RULES, make_tree(), mesh())
    text = str(layout)
    assert "blocks/{0..1}/kernel (x2)  8x6     float32   0 `kernel`   P('fsdp', 'tp')          48 B" in text
    assert text.endswith("8 leaves on fsdp=4 x tp=2: 508 B in total, 120 B per device")
    assert repr(layout) == "<Layout 8 leaves on fsdp=4 x tp=2: 508 B in total, 120 B per device>"
    assert "blocks/1/kernel" in layout.table(collapse=False)


def test_rich_table_has_the_same_cells():
    from rich.console import Console

    layout = mw.make_layout(RULES, make_tree(), mesh())
    console = Console(width=140)
    with console.capture() as captured:
        console.print(layout)
    for cell in ("blocks/{0..1}/kernel (x2)", "P('fsdp', 'tp')", "0 `kernel`", "120 B per device"):
        assert cell in captured.get()


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (1536, "1.5 KiB"), (2**30, "1.0 GiB"), (2**60, "1024.0 PiB")],
)
def test_format_bytes(count, text):
    assert format_bytes(count) == text


# --- Moving trees ---


@pytest.mark.parametrize("source", ["host", "one device", "mesh"])
@pytest.mark.parametrize("axis_types", [AxisType.Auto, AxisType.Explicit])
def test_shard_and_gather_are_exact(source, axis_types, assert_placed):
    target = mw.create_mesh("fsdp:4,tp:2", axis_types=axis_types)
    tree = make_tree()
    given = tree
    if source == "one device":
        given = jax.tree.map(jnp.asarray, tree)
    elif source == "mesh":
        given = jax.device_put(jax.tree.map(jnp.asarray, tree), NamedSharding(target, P()))
    layout = mw.make_layout(RULES, given, target)
    placed = layout.shard(given)
    for leaf, sharding in zip(jax.tree.leaves(placed), jax.tree.leaves(layout.shardings), strict=True):
        assert leaf.sharding == sharding
    assert_placed(placed["blocks"][1]["kernel"], target, P("fsdp", "tp"), tree["blocks"][1]["kernel"])
    back = layout.gather(placed)
    for before, after in zip(jax.tree.leaves(tree), jax.tree.leaves(back), strict=True):
        assert same_bits(before, after)
    assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(back["blocks"]))


@pytest.mark.parametrize("source", [np.asarray, jnp.asarray], ids=["host", "device"])
@pytest.mark.parametrize(
    ("shape", "spec", "stored"),
    [
        ((7, 3), P("fsdp"), (8, 3)),
        ((7, 3), P("fsdp", "tp"), (8, 4)),
        ((5,), P(("fsdp", "tp")), (8,)),
        ((8, 4), P("tp"), (8, 4)),
    ],
)
def test_padding_is_zeros_and_gather_removes_it(source, shape, spec, stored, assert_placed):
    value = source(-np.arange(1, np.prod(shape) + 1, dtype=np.float32).reshape(shape))
    layout = mw.make_layout([("w", spec)], {"w": value}, mesh(), pad=True)
    leaf = layout["w"]
    assert (leaf.shape, leaf.stored_shape, leaf.is_padded) == (shape, stored, shape != stored)
    placed = layout.shard({"w": value})
    padded = np.pad(value, [(0, new - old) for old, new in zip(shape, stored, strict=True)])
    assert_placed(placed["w"], mesh(), spec, padded)
    np.testing.assert_array_equal(layout.gather(placed)["w"], value, strict=True)


@pytest.mark.parametrize(
    ("pad", "padded"), [(True, "ab"), ("a", "a"), (["^b$"], "b"), (["a", "b"], "ab"), (("x", "a|b"), "ab")]
)
def test_pad_selects_leaves(pad, padded):
    tree = {"a": np.ones(6, np.float32), "b": np.ones(6, np.float32)}
    report = mw.explain_layout([(".*", P("fsdp"))], tree, mesh(), pad=pad)
    assert "".join(leaf.name for leaf in report.padded) == padded
    assert "".join(problem.name for problem in report.indivisible) == "".join(
        name for name in "ab" if name not in padded
    )


def test_no_padding_by_default():
    with pytest.raises(mw.LayoutError, match=r"6 % 4 = 2"):
        mw.make_layout([("w", P("fsdp"))], {"w": np.ones(6)}, mesh())


def test_jit_takes_the_shardings(assert_placed):
    def init():
        return {"w": jnp.arange(32.0).reshape(8, 4)}

    layout = mw.make_layout([("w", P("fsdp", "tp"))], jax.eval_shape(init), mesh())
    made = jax.jit(init, out_shardings=layout.shardings)()
    assert_placed(made["w"], mesh(), P("fsdp", "tp"), np.arange(32, dtype=np.float32).reshape(8, 4))


def test_arrays_move_between_meshes_only_with_reshard(assert_placed):
    value = np.arange(64, dtype=np.float32).reshape(8, 8)
    for other in (mw.create_mesh("x:8"), mw.create_mesh("x:4", devices=4), mw.create_mesh("x:2,y:4")):
        array = jax.device_put(value, NamedSharding(other, P("x")))
        layout = mw.make_layout([("w", P("fsdp", "tp"))], {"w": array}, mesh())
        with pytest.raises(mw.PlacementError, match="is on the mesh x="):
            layout.shard({"w": array})
        moved = layout.shard({"w": array}, reshard=True)
        assert_placed(moved["w"], mesh(), P("fsdp", "tp"), value)
        np.testing.assert_array_equal(layout.gather(moved)["w"], value)


@pytest.mark.parametrize("axes", ["y:8", "one:1,y:8"])
def test_equivalent_shardings_are_replaced_without_a_copy(axes):
    value = np.arange(8, dtype=np.float32)
    array = jax.device_put(value, NamedSharding(mw.create_mesh("x:8"), P("x")))
    target = mw.create_mesh(axes)
    layout = mw.make_layout([("w", P("y"))], {"w": array}, target)
    moved = layout.shard({"w": array}, reshard=True)
    assert moved["w"].sharding == NamedSharding(target, P("y"))
    np.testing.assert_array_equal(layout.gather(moved)["w"], value)


def test_one_device_gets_the_layout_s_sharding():
    target = mw.create_mesh("x:1", devices=1)
    layout = mw.make_layout([("w", P("x"))], {"w": jnp.arange(4.0)}, target)
    assert layout.shard({"w": jnp.arange(4.0)})["w"].sharding == NamedSharding(target, P("x"))


def test_placed_arrays_are_not_copied():
    layout = mw.make_layout([("w", P("fsdp"))], {"w": np.ones(8, np.float32)}, mesh())
    placed = layout.shard({"w": np.ones(8, np.float32)})
    assert layout.shard(placed)["w"] is placed["w"]


def test_donated_arrays_are_deleted_and_others_kept():
    tree = {"w": jax.device_put(np.ones((8, 8), np.float32), NamedSharding(mesh(), P("fsdp", "tp")))}
    layout = mw.make_layout([("w", P("tp", "fsdp"))], tree, mesh())
    kept = layout.shard(tree)
    assert not tree["w"].is_deleted()
    np.testing.assert_array_equal(kept["w"], np.ones((8, 8), np.float32))
    back = layout.gather(kept, donate=True)
    assert kept["w"].is_deleted()
    np.testing.assert_array_equal(back["w"], np.ones((8, 8), np.float32))
    same = {"w": jax.device_put(np.ones((8, 8), np.float32), NamedSharding(mesh(), P("fsdp")))}
    moved = mw.make_layout([("w", P("fsdp", None))], same, mesh()).shard(same, donate=True)
    np.testing.assert_array_equal(moved["w"], np.ones((8, 8), np.float32))


@pytest.mark.parametrize("old", [P("fsdp", "tp"), P(), P(None, "fsdp")])
def test_donating_while_resharding(old):
    value = np.arange(64, dtype=np.float32).reshape(8, 8)
    tree = {"w": jax.device_put(value, NamedSharding(mesh(), old))}
    layout = mw.make_layout([("w", P("tp", "fsdp"))], tree, mesh())
    moved = layout.shard(tree, donate=True)
    assert moved["w"].sharding.spec == P("tp", "fsdp")
    np.testing.assert_array_equal(moved["w"], value)
    assert tree["w"].is_deleted()


def test_only_arrays_on_the_mesh_are_donated():
    value = np.arange(64, dtype=np.float32).reshape(8, 8)
    tree = {
        "there": jax.device_put(value, NamedSharding(mesh(), P("fsdp", "tp"))),
        "one": jax.device_put(value, jax.devices()[0]),
        "other": jax.device_put(value, NamedSharding(mw.create_mesh("x:2", devices=2), P("x"))),
    }
    sharding, half = NamedSharding(mesh(), P("tp")), np.dtype(jnp.bfloat16)
    sharded = shard_leaves(list(tree.values()), [sharding] * 3, [half] * 3, donate=True)
    assert [array.is_deleted() for array in tree.values()] == [True, False, False]
    for array in sharded:
        np.testing.assert_array_equal(array, value.astype(jnp.bfloat16), strict=True)
    np.testing.assert_array_equal(tree["other"], value)


@pytest.mark.parametrize(
    ("tree", "error", "text"),
    [
        (
            {"w": np.ones((8, 4), np.float32)},
            mw.PlacementError,
            r"`w` is float32\[8, 4\], but the layout .* float32\[8, 8\]",
        ),
        ({"w": np.ones((8, 8), np.int32)}, mw.PlacementError, r"`w` is int32\[8, 8\], .*\nhint: "),
        ({"v": np.ones((8, 8), np.float32)}, mw.LayoutError, r"missing: w; extra: v"),
        ({"w": [np.ones((8, 8), np.float32)]}, mw.LayoutError, r"missing: w; extra: w/0"),
    ],
)
def test_another_tree_is_refused(tree, error, text):
    layout = mw.make_layout([("w", P("fsdp"))], {"w": np.ones((8, 8), np.float32)}, mesh())
    for act in (layout.shard, layout.gather):
        with pytest.raises(error, match=text):
            act(tree)


def test_same_names_in_other_containers():
    layout = mw.make_layout([(".*", P())], {"0": np.ones(4, np.float32), "1": np.ones(4, np.float32)}, mesh())
    with pytest.raises(mw.LayoutError, match="same leaf names, different containers"):
        layout.shard([np.ones(4, np.float32)] * 2)


@pytest.mark.parametrize("dtype", [np.float64, np.int64])
def test_64_bit_arrays_are_not_truncated(dtype):
    tree = {"w": np.arange(8, dtype=dtype)}
    layout = mw.make_layout([("w", P("fsdp"))], tree, mesh())
    with pytest.raises(mw.PlacementError, match=r"64 array would become .*32 on the mesh, .*\nhint: cast it"):
        layout.shard(tree)


def test_abstract_meshes_hold_no_arrays():
    tree = {"w": np.ones(8, np.float32)}
    layout = mw.make_layout([("w", P("fsdp"))], tree, mw.create_abstract_mesh("fsdp:4"))
    for act in (layout.shard, layout.gather):
        with pytest.raises(mw.PlacementError, match=r"the mesh fsdp=4 of this layout is abstract .*\nhint: "):
            act(tree)


# --- JSON ---

names = st.text("ab/_0", min_size=1, max_size=4)
dtypes = st.sampled_from(["float32", "bfloat16", "int8", "int4", "bool", "float8_e4m3fn", "complex64"])


@st.composite
def layouts(draw):
    tree = {}
    for name in draw(st.lists(names, max_size=5, unique=True)):
        shape = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
        tree[name] = jax.ShapeDtypeStruct(shape, jnp.dtype(draw(dtypes)))
    kinds = st.sampled_from([AxisType.Auto, AxisType.Explicit])
    where = mw.create_abstract_mesh("x:2,y:3", axis_types=(draw(kinds), draw(kinds)))
    specs = [P(), P("x"), P(None, "y"), P(("x", "y")), P("y", "x")]
    rules = [("a", draw(st.sampled_from(specs))), ("b", draw(st.sampled_from(specs))), (".*", P())]
    report = mw.explain_layout(rules, tree, where, pad=True)
    fitting = {leaf.name for leaf in report.leaves}
    tree = {name: leaf for name, leaf in tree.items() if name in fitting}
    report = mw.explain_layout(rules, tree, where, pad=True)
    return mw.Layout(where, report.leaves, jax.tree.structure(tree), report), tree


@given(layouts())
def test_json_round_trip(case):
    layout, tree = case
    text = layout.to_json()
    for read in (mw.Layout.from_json(text), mw.Layout.from_json(text, like=tree)):
        assert read == layout
        assert read.to_json() == text
        assert read.bytes_per_device == layout.bytes_per_device
        assert not layout.diff(read)
    assert mw.Layout.from_json(text, like=tree).specs == layout.specs


def test_json_of_a_real_state_places_it():
    tree = make_tree()
    layout = mw.make_layout(RULES, tree, mesh())
    read = mw.Layout.from_json(layout.to_json(), like=tree, mesh=mesh())
    back = read.gather(read.shard(tree))
    assert all(same_bits(*pair) for pair in zip(jax.tree.leaves(tree), jax.tree.leaves(back), strict=True))
    flat = mw.Layout.from_json(layout.to_json(), mesh=mesh())
    assert flat == layout
    assert flat.specs["blocks/0/kernel"] == P("fsdp", "tp")


def test_json_keeps_unsorted_leaves_equal():
    tree = [np.ones(4, np.float32)] * 11  # "10" sorts before "2"
    layout = mw.make_layout([(".*", P())], tree, mesh())
    read = mw.Layout.from_json(layout.to_json())
    assert read == layout
    assert list(read.specs) == sorted(leaf.name for leaf in layout.leaves)


@pytest.mark.parametrize(
    ("act", "text"),
    [
        (lambda text: mw.Layout.from_json("nonsense"), "not the JSON of a layout"),
        (lambda text: mw.Layout.from_json("[]"), "not the JSON of a layout"),
        (
            lambda text: mw.Layout.from_json(text.replace('"version": 1', '"version": 9')),
            "version 9; this release reads",
        ),
        (
            lambda text: mw.Layout.from_json(text, mesh=mw.create_mesh("x:8")),
            "made for fsdp=4 x tp=2, but mesh= is x=8",
        ),
        (lambda text: mw.Layout.from_json(text, like={"v": 1}), "missing: w; extra: v"),
        (lambda text: mw.Layout.from_json(text).report(), "does not store the rules"),
    ],
)
def test_json_that_does_not_fit(act, text):
    layout = mw.make_layout([("w", P("fsdp"))], {"w": np.ones(8, np.float32)}, mesh())
    with pytest.raises(mw.LayoutError, match=text):
        act(layout.to_json())


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_json_of_keys(impl):
    tree = {"keys": jax.eval_shape(lambda: jax.random.split(jax.random.key(0, impl=impl), 8))}
    layout = mw.make_layout([("keys", P("fsdp"))], tree, mesh())
    assert mw.Layout.from_json(layout.to_json())["keys"].dtype == tree["keys"].dtype
    assert json.loads(layout.to_json())["leaves"][0]["dtype"].startswith("key<")


def test_equality():
    tree = {"w": np.ones((8, 8), np.float32)}
    base = mw.make_layout([("w", P("fsdp"))], tree, mesh())
    assert base == mw.make_layout([("w", P("fsdp"))], tree, mw.create_abstract_mesh("fsdp:4,tp:2"))
    assert base != mw.make_layout([("w", P("tp"))], tree, mesh())
    assert base != mw.make_layout([("w", P("fsdp"))], tree, mw.create_mesh("fsdp:4,x:2"))
    assert base != mw.make_layout([("w", P("fsdp"))], {"w": np.ones((8, 4), np.float32)}, mesh())
    assert base != "layout"
