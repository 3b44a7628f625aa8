"""A state saved on one mesh is restored on any other, bit for bit; another model is rejected."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import meshwright as mw
from meshwright.checkpoint import Checkpoints
from meshwright.errors import CheckpointError

MESHES = ["dp:8", "fsdp:8", "tp:8", "dp:2,fsdp:2,tp:2"]


@pytest.fixture(scope="module")
def folders(lab, tmp_path_factory):
    """A checkpoint from each mesh, and the bits of the state that they all hold."""
    found, bits = {}, None
    for mesh in MESHES:
        layout, state = lab.start(mesh, seed=3)
        found[mesh] = tmp_path_factory.mktemp("mesh")
        lab.saved(found[mesh], layout, state, 1)
        bits = bits or lab.bits(state)
        assert lab.bits(state) == bits
    return found, bits


@pytest.mark.parametrize("there", MESHES)
@pytest.mark.parametrize("here", MESHES)
def test_any_mesh_to_any_mesh(lab, folders, here, there, assert_placed):
    found, bits = folders
    layout, _ = lab.start(there)
    restored = Checkpoints(found[here]).restore(layout)
    assert lab.bits(restored.state) == bits
    up = restored.state.params["up"]
    assert_placed(up, layout.mesh, layout["params/up"].spec, np.asarray(up))
    before, after = (mesh.replace(":", "=").replace(",", " x ") for mesh in (here, there))
    assert restored.notes == ([] if here == there else [f"saved on {before}, resharded to {after}"])


def test_one_device_and_other_specs(lab, folders):
    found, bits = folders
    alone = mw.make_layout([(".*", P())], lab.start("dp:8")[1], mw.create_mesh("dp:1", devices=1))
    restored = Checkpoints(found["tp:8"]).restore(alone)
    assert lab.bits(restored.state) == bits
    turned, _ = lab.start("fsdp:8", rules=mw.Rules([("up", P(None, "fsdp")), (".*", P())]))
    restored = Checkpoints(found["fsdp:8"]).restore(turned)
    assert lab.bits(restored.state) == bits
    assert restored.notes == ["6 leaves resharded on the same mesh, starting with `params/down`"]


def test_another_model_is_rejected_with_a_table(lab, folders):
    found, _ = folders

    def other(key):
        tree = lab.init(key, width=64)
        return {name: tree[name] for name in ("up", "bias", "scale")} | {"gate": jnp.ones((8, 8))}

    rules = mw.Rules([("up|gate", P("fsdp")), ("bias|scale", P())])
    layout, _ = lab.start("fsdp:8", init=other, rules=rules)
    with pytest.raises(CheckpointError, match="3 missing, 3 extra, 3 with another shape") as caught:
        Checkpoints(found["fsdp:8"]).restore(layout)
    lines = str(caught.value).splitlines()
    assert [line.split() for line in lines if "params/" in line] == [
        ["missing", "params/gate", "-", "float32[8,", "8]"],
        ["extra", "params/down", "float32[32,", "16]", "-"],
        ["shape", "params/up", "float32[16,", "32]", "float32[16,", "64]"],
    ]


def test_another_optimizer_is_rejected(lab, folders):
    found, _ = folders
    layout, _ = lab.start("fsdp:8", optimizer=optax.sgd(0.1))
    with pytest.raises(CheckpointError, match="a different model or optimizer: 0 missing, 9 extra") as caught:
        Checkpoints(found["fsdp:8"]).restore(layout)
    assert "opt_state/0/mu/up" in str(caught.value)


def test_other_dtypes_need_a_cast(lab, folders):
    found, _ = folders

    layout, _ = lab.start("fsdp:8", precision="bfloat16")
    checkpoints = Checkpoints(found["fsdp:8"])
    with pytest.raises(CheckpointError, match="the dtypes of step 1 differ from the requested ones") as caught:
        checkpoints.restore(layout)
    assert "float32     bfloat16" in str(caught.value)
    assert "cast=True" in str(caught.value)
    restored = checkpoints.restore(layout, cast=True)
    assert restored.notes == ["12 leaves cast from float32 to bfloat16"]
    plain = checkpoints.restore(lab.start("fsdp:8")[0]).state
    expected = jax.tree.map(lambda x: np.asarray(x).astype(jnp.bfloat16), plain.params)
    jax.tree.map(np.testing.assert_array_equal, restored.state.params, expected)
    assert restored.state.params["up"].dtype == jnp.bfloat16


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int8", "uint32", "bool"])
def test_dtypes_round_trip(lab, tmp_path, dtype):
    tree = {"x": jax.random.bits(jax.random.key(0), (8, 16), "uint32").astype(dtype), "nan": jnp.full(3, jnp.nan)}
    layout = mw.make_layout([("x", P("dp")), ("nan", P())], tree, mw.create_mesh("dp:8"))
    checkpoints = lab.saved(tmp_path, layout, layout.shard(tree), 1)
    assert lab.bits(checkpoints.restore(layout).state) == lab.bits(tree)


def test_only_floats_can_be_cast(lab, folders):
    found, _ = folders

    def whole(key):
        return lab.init(key) | {"up": jnp.ones((16, 32), jnp.int8)}

    checkpoints = Checkpoints(found["fsdp:8"])
    layout = mw.make_layout([(".*", P())], {"params": jax.eval_shape(whole, jax.random.key(0))}, mw.create_mesh("dp:8"))
    with pytest.raises(CheckpointError, match="`params/up` is float32 in the checkpoint but int8 here; only floats"):
        checkpoints.restore(layout, part="params", cast=True)


def test_keys_keep_their_generator(lab, tmp_path):
    def keys(impl):
        tree = {"one": jax.random.key(5, impl=impl), "four": jax.random.split(jax.random.key(6, impl=impl), 4)}
        layout = mw.make_layout([("one", P()), ("four", P("dp"))], tree, mw.create_mesh("dp:4,tp:2"))
        return layout, layout.shard(tree)

    layout, tree = keys("rbg")
    lab.saved(tmp_path, layout, tree, 1)
    restored = Checkpoints(tmp_path).restore(layout).state
    assert lab.bits(restored) == lab.bits(tree)
    assert str(jax.random.key_impl(restored["four"])) == "rbg"
    assert restored["four"].sharding.spec == P("dp")
    other, _ = keys("threefry2x32")
    with pytest.raises(CheckpointError, match=r"`four` is key<rbg> in the checkpoint but key<threefry2x32> here"):
        Checkpoints(tmp_path).restore(other, cast=True)


def test_restoring_only_parameters(lab, folders):
    found, _ = folders
    layout, _ = lab.start("tp:8", optimizer=optax.sgd(0.1))
    whole = Checkpoints(found["fsdp:8"]).restore(lab.start("tp:8")[0])
    restored = Checkpoints(found["fsdp:8"]).restore(layout, part="params")
    assert lab.bits(restored.state) == lab.bits(whole.state.params)
    with pytest.raises(CheckpointError, match="the layout has no part 'parms'"):
        Checkpoints(found["fsdp:8"]).restore(layout, part="parms")


def test_padding_follows_the_mesh(tmp_path):
    tree = {"w": np.arange(30, dtype=np.float32).reshape(10, 3)}
    layouts = {
        mesh: mw.make_layout([("w", P("fsdp"))], tree, mw.create_mesh(mesh, devices=devices), pad=True)
        for mesh, devices in (("fsdp:8", 8), ("fsdp:3", 3), ("fsdp:2", 2))
    }
    first = layouts["fsdp:8"]
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(first.shard(tree), step=1, layout=first, facts={})
    assert first["w"].stored_shape == (16, 3)
    for mesh, stored in (("fsdp:3", 12), ("fsdp:2", 10), ("fsdp:8", 16)):
        restored = Checkpoints(tmp_path).restore(layouts[mesh])
        assert restored.state["w"].shape == (stored, 3)
        np.testing.assert_array_equal(np.asarray(restored.state["w"])[10:], 0)
        np.testing.assert_array_equal(layouts[mesh].gather(restored.state)["w"], tree["w"])
        assert any("repadded" in note for note in restored.notes) == (mesh != "fsdp:8")


def test_an_abstract_mesh_is_rejected(lab, folders, first):
    found, _ = folders
    layout = mw.make_layout([("up", P("fsdp"))], {"up": jnp.ones((16, 32))}, mw.create_abstract_mesh("fsdp:8"))
    with pytest.raises(CheckpointError, match="cannot restore onto fsdp=8, an abstract mesh"):
        Checkpoints(found["fsdp:8"]).restore(layout)
