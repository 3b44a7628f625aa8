"""Correct behavior for the original's defects 9 and 11 to 17."""

import contextlib
import warnings

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import meshwright as mw
from meshwright import P

from ..meshes import host

# --- 9 and 11: keys and simulated devices ---


def test_item_09_same_index_on_two_axes_gives_two_keys():
    mesh = mw.create_mesh("dp:2,tp:2", devices=4)

    def draw(key):
        return jnp.stack([jax.random.bits(mw.fold_rng_over_axis(key, axis)) for axis in ("dp", "tp")])[None, None]

    bits = jax.shard_map(draw, mesh=mesh, in_specs=P(), out_specs=P("dp", "tp"))(jax.random.key(0))
    assert bits[1, 1, 0] != bits[1, 1, 1]
    assert bits[0, 0, 0] != bits[0, 0, 1]


def test_item_11_simulating_after_jax_started_is_an_error():
    jax.devices()
    with pytest.raises(mw.MeshError, match=r"already started with 8 cpu device.*too late to simulate 3 CPU devices"):
        mw.simulate_cpu_devices(3)


# --- 12: meshes ---


def test_item_12_devices_come_from_the_backend(monkeypatch):
    real = jax.devices()
    monkeypatch.setattr(jax, "devices", lambda backend=None: real[4:] if backend == "cpu" else real)
    assert mw.create_mesh("dp:-1", backend="cpu").devices.tolist() == real[4:]
    assert mw.create_mesh("dp:-1").devices.size == 8


@pytest.mark.parametrize("chosen", [[2, 3, 4, 5], [7, 1, 3, 5]])
def test_item_12_mesh_over_a_subset(chosen):
    devices = [jax.devices()[i] for i in chosen]
    assert mw.create_mesh("!dp:2,tp:2", devices=devices).devices.flatten().tolist() == devices
    assert mw.create_mesh("dp:2,tp:2", devices=4).devices.flatten().tolist() == jax.devices()[:4]


@pytest.mark.parametrize(
    "act",
    [
        lambda: mw.create_mesh("dp:3"),
        lambda: mw.create_mesh("dp:-1,tp:-1"),
        lambda: mw.create_mesh((1, 2)),
        lambda: mw.get_jax_mesh("dp:2,tp:3", ("dp", "tp")),
        lambda: mw.get_jax_mesh("dp:8", ("dp", "tp")),
        lambda: mw.get_jax_mesh("", ("dp",)),
    ],
)
def test_item_12_no_blank_assertion_errors(act):
    with pytest.raises(mw.MeshError) as caught:
        act()
    assert "\nhint: " in str(caught.value)


def test_item_12_initialize_mesh_starts_the_runtime_once(monkeypatch):
    started = []
    for name, value in {"JOB_ID": "7", "STEP_NODELIST": "n[1-4]", "NTASKS": "4", "PROCID": "0", "LOCALID": "0"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: bool(started))
    monkeypatch.setattr(jax.distributed, "initialize", lambda **kwargs: started.append(kwargs))
    config = {f"{role}_axis_{part}": value for role, size in (("data", 2), ("fsdp", -1), ("pipeline", 1), ("model", 2))
              for part, value in (("name", role), ("size", size))}  # fmt: skip
    for _ in range(3):
        mw.initialize_mesh(config)
    assert started == [{}]


# --- 13: rules ---


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        (P("tp", None, None), "has 3 entries; the shape"),
        (P("model"), "names axis 'model'"),
        (P(None, "tp"), r"dim 1 has size 5; `tp` has 2 devices: 5 % 2 = 1"),
    ],
)
@pytest.mark.parametrize("given", ["mesh=", "set_mesh", "layout"])
def test_item_13_specs_are_checked_against_the_leaf(spec, text, given):
    mesh, rules, tree = mw.create_mesh("fsdp:4,tp:2"), [("w", spec)], {"w": host(4, 5)}
    act = {
        "mesh=": lambda: mw.match_partition_rules(rules, tree, mesh=mesh),
        "set_mesh": lambda: mw.match_partition_rules(rules, tree),
        "layout": lambda: mw.make_layout(rules, tree, mesh),
    }[given]
    in_force = jax.set_mesh(mesh) if given == "set_mesh" else contextlib.nullcontext()
    with in_force, pytest.raises(mw.LayoutError, match=text):
        act()


def test_item_13_a_letter_inside_a_word_causes_a_warning():
    with pytest.warns(
        mw.MeshwrightWarning, match=r"rule 0 `k` matches inside a word of `block/bias`.*\(\^\|/\)k\(/\|\$\)"
    ):
        mw.match_partition_rules([("k", P()), (".*", P())], {"block": {"bias": host(4)}})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        specs = mw.match_partition_rules(
            [("(^|/)k(/|$)", P("tp")), (".*", P())], {"block": {"bias": host(4)}, "attn": {"k": host(4)}}
        )
    assert specs == {"block": {"bias": P()}, "attn": {"k": P("tp")}}


def test_item_13_python_numbers_are_leaves():
    tree = {"w": host(4), "step": 3, "scale": 0.5, "on": True}
    specs = mw.match_partition_rules([("w", P("tp"))], tree)
    assert specs == {"w": P("tp"), "step": P(), "scale": P(), "on": P()}


def test_item_13_all_unmatched_leaves_are_listed():
    with pytest.raises(mw.LayoutError) as caught:
        mw.match_partition_rules([("x", P())], {"x": host(2), "a": host(2), "b": host(3), "c": {"d": host(4)}})
    assert all(f"`{name}`" in str(caught.value) for name in ("a", "b", "c/d"))


def test_item_13_dead_rules_are_named():
    with pytest.warns(mw.MeshwrightWarning, match="rule 1 `nothing/here` matches no leaf"):
        mw.match_partition_rules([("w", P()), ("nothing/here", P("tp"))], {"w": host(4)})


# --- 14: constraints ---


def test_item_14_misspelled_axis_is_an_error_and_set_mesh_works(assert_placed):
    mesh, value = mw.create_mesh("dp:4,tp:2"), host(8, 6)
    with jax.set_mesh(mesh):
        with pytest.raises(mw.MeshError, match=r"names axis 'ttp'.*\nhint: did you mean 'tp'"):
            jax.jit(lambda x: mw.with_sharding_constraint(x, P("dp", "ttp")))(value)
        placed = jax.jit(lambda x: mw.with_sharding_constraint(x, P("dp", "tp")))(value)
    assert_placed(placed, mesh, P("dp", "tp"), value)


def test_item_14_unconstrained_dims_stay_free(assert_placed):
    mesh, value = mw.create_mesh("dp:4,tp:2"), host(8, 6)
    with jax.set_mesh(mesh):
        x = mw.with_sharding_constraint(value, P(None, "tp"))
        placed = jax.jit(lambda x: mw.with_sharding_constraint(x, P("dp", P.UNCONSTRAINED)))(x)
    assert_placed(placed, mesh, P("dp", "tp"), value)


# --- 15: moving trees ---


def test_item_15_trees_of_numpy_dtypes_work():
    shard, gather = mw.make_shard_and_gather_fns(
        {"a": P("tp"), "b": P()}, {"a": np.dtype("float16"), "b": None}, mesh=mw.create_mesh("tp:8")
    )
    placed = mw.tree_apply(shard, {"a": host(8), "b": host(8)})
    assert (placed["a"].dtype, placed["b"].dtype) == (np.float16, np.float32)
    assert mw.tree_apply(gather, placed)["a"].dtype == np.float16


def test_item_15_integers_are_never_cast():
    tree = {"ids": host(8, dtype=np.int32), "mask": host(8) > 3, "w": host(8)}
    shard, gather = mw.make_shard_and_gather_fns(dict.fromkeys(tree, P("tp")), "bfloat16", mesh=mw.create_mesh("tp:8"))
    back = mw.tree_apply(gather, mw.tree_apply(shard, tree))
    assert {name: str(leaf.dtype) for name, leaf in back.items()} == {"ids": "int32", "mask": "bool", "w": "bfloat16"}
    np.testing.assert_array_equal(back["ids"], tree["ids"])
    np.testing.assert_array_equal(back["mask"], tree["mask"])


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", ml_dtypes.float8_e5m2])
def test_item_15_narrow_floats_by_name(dtype):
    shard, gather = mw.make_shard_and_gather_fns({"w": P("tp")}, dtype, mesh=mw.create_mesh("tp:8"))
    back = mw.tree_apply(gather, mw.tree_apply(shard, {"w": host(8)}))["w"]
    np.testing.assert_array_equal(back, host(8).astype(jnp.dtype(dtype)), strict=True)


def test_item_15_functions_work_outside_of_their_mesh_context(assert_placed):
    mesh = mw.create_mesh("tp:8")
    with jax.set_mesh(mesh):
        shard, gather = mw.make_shard_and_gather_fns({"w": P("tp")})
    placed = mw.tree_apply(shard, {"w": host(8)})
    assert_placed(placed["w"], mesh, P("tp"), host(8))
    np.testing.assert_array_equal(mw.tree_apply(gather, placed)["w"], host(8))


def test_item_15_one_program_for_a_whole_tree(count_programs):
    mesh = mw.create_mesh("dp:4,tp:2")
    tree = {f"w{i}": jnp.asarray(host(8, 2 * i + 2)) for i in range(9)}
    specs = {name: P("dp", "tp") for name in tree}
    on_mesh = mw.tree_apply(mw.make_shard_and_gather_fns(specs, mesh=mesh)[0], tree)
    shard, gather = mw.make_shard_and_gather_fns({name: P("tp") for name in tree}, "bfloat16", mesh=mesh)
    with count_programs() as from_one_device:
        mw.tree_apply(shard, tree)
    with count_programs() as from_the_mesh:
        placed = mw.tree_apply(shard, on_mesh)
    with count_programs() as gathering:
        mw.tree_apply(gather, placed)
    with count_programs() as again:
        mw.tree_apply(shard, on_mesh)
    counts = [len(programs) for programs in (from_one_device, from_the_mesh, gathering, again)]
    assert counts == [0, 1, 0, 0]


# --- 16: keys, metrics, names ---


def test_item_16_wrapped_function_draws_new_keys_under_jit_and_leaks_nothing():
    @mw.wrap_function_with_rng(jax.random.key(3))
    def draw(key):
        return jax.random.bits(key)

    with jax.checking_leaks():
        traced = jax.jit(draw)
        values = [int(traced()) for _ in range(3)]
    assert values == [int(jax.random.bits(jax.random.fold_in(jax.random.key(3), n))) for n in range(3)]


def test_item_16_metrics_nest_and_stack():
    steps = [{"loss": jnp.float32(i), "grad": {"norm": jnp.float32(2 * i)}} for i in range(3)]
    assert mw.get_metrics(steps[1]) == {"loss": 1.0, "grad": {"norm": 2.0}}
    stacked = mw.get_metrics(steps, stack=True)
    assert (stacked["loss"].tolist(), stacked["grad"]["norm"].tolist()) == ([0.0, 1.0, 2.0], [0.0, 2.0, 4.0])


def test_item_16_flatten_tree_refuses_to_lose_a_leaf():
    with pytest.raises(mw.TreeError, match=r"both named 'a/b': \['a'\]\['b'\] and \['a/b'\]\.\nhint: rename"):
        mw.flatten_tree({"a": {"b": 1}, "a/b": 2}, sep="/")
    assert mw.flatten_tree({"a": {"b": 1}, "a/b": 2}) == {("a", "b"): 1, ("a/b",): 2}


# --- 17: the same order on every host ---


def test_item_17_axis_names_keep_their_order_for_any_hash_seed(run_python):
    code = """
    import meshwright as mw
    from meshwright import P
    print(mw.get_names_from_partition_spec({"w": P(("zeta", "dp"), "alpha"), "b": {"tp", "sp", "ep", "cp"}}))
    mesh = mw.create_abstract_mesh("a:2,b:2")
    rules = mw.Rules([("w", P("gone", "a", "lost"))], optional_axes=("lost", "gone"))
    print(rules.on(mesh)[0])
    """
    results = [run_python(code, PYTHONHASHSEED=seed) for seed in ("1", "77")]
    assert [result.stderr for result in results] == ["", ""]
    assert results[0].stdout == results[1].stdout
    names, rule = results[0].stdout.splitlines()
    assert names == "['zeta', 'dp', 'alpha', 'cp', 'ep', 'sp', 'tp']"
    assert rule == "('w', P(None, 'a', None))"
