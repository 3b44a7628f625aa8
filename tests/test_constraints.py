import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

import meshwright as mw
from meshwright import P

from .meshes import AUTO, EXPLICIT, host, legacy, mesh

KINDS = {"auto": AUTO, "explicit": EXPLICIT, "mixed": (EXPLICIT, AUTO), "mixed other way": (AUTO, EXPLICIT)}


def constrained(x, specs, **options):
    """Returns the results of an eager and a traced call."""
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
def test_arrays_are_sharded_as_the_spec_says(kind, spec, assert_placed):
    value, where = host(8, 8), mesh(kind)
    auto_before_explicit = kind == (AUTO, EXPLICIT) and ("dp", "tp") in tuple(spec)
    with jax.set_mesh(where):
        if auto_before_explicit:
            with pytest.raises(
                mw.PlacementError, match=r"lists an Auto axis before an Explicit.*\nhint: list the Explicit"
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
    # JAX accepts shardings over Explicit axes only if their mesh is set.
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
    with jax.set_mesh(mesh()), pytest.raises(mw.PlacementError, match="the NamedSharding is on the mesh x=8"):
        mw.with_sharding_constraint(jnp.ones((8, 8)), sharding)


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT], ids=["auto", "explicit"])
def test_unconstrained_dims_do_not_change(kind, assert_placed):
    where, value = mesh(kind), host(8, 8)
    with jax.set_mesh(where):
        x = mw.with_sharding_constraint(jnp.asarray(value), P(None, "tp"))
        for result in constrained(x, P("dp", P.UNCONSTRAINED)):
            assert_placed(result, where, P("dp", "tp"), value)
        for result in constrained(x, P(P.UNCONSTRAINED, None)):
            assert_placed(result, where, P(), value)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_unconstrained_beside_a_split_dim(kind):
    # With both types of axes, the compiler chooses the unconstrained dim only.
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


def test_none_skips_a_tree():
    x = jnp.ones(3)
    assert mw.with_sharding_constraint(x, None) is x
    assert mw.with_sharding_constraint({"a": [x]}, None)["a"][0] is x


def test_without_a_mesh_only_empty_specs_are_accepted():
    x = jnp.ones((4, 4))
    assert mw.with_sharding_constraint(x, P()) is x
    assert mw.with_sharding_constraint(x, P(None, P.UNCONSTRAINED)) is x
    assert mw.with_sharding_constraint(x, P("tp"), optional_axes=("tp",)) is x
    with pytest.raises(mw.MeshError, match="none is set"):
        jax.jit(lambda x: mw.with_sharding_constraint(x, P("tp")))(x)


def test_optional_axes_are_skipped_and_others_are_not(assert_placed):
    with jax.set_mesh(mesh()):
        for result in constrained(jnp.asarray(host(8, 8)), P("dp", ("sp", "tp")), optional_axes=("sp", "ep")):
            assert_placed(result, mesh(), P("dp", "tp"), host(8, 8))
        with pytest.raises(mw.MeshError, match=r"names axis 'sp'; the mesh has axes: dp, tp\.\nhint: "):
            mw.with_sharding_constraint(jnp.ones((8, 8)), P("dp", ("sp", "tp")), optional_axes=("ep",))


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_indivisible_dims_are_an_error(kind):
    # Some versions of JAX silently replicate such an array.
    with jax.set_mesh(mesh(kind)):
        for act in (mw.with_sharding_constraint, jax.jit(mw.with_sharding_constraint, static_argnums=1)):
            with pytest.raises(
                mw.PlacementError, match=r"with_sharding_constraint: dim 0 has size 6; `dp`.*\nhint: pad to 8"
            ):
                act(jnp.ones((6, 8)), P("dp"))
            with pytest.raises(mw.PlacementError, match=r"has 3 entries; the shape \(6, 8\)"):
                act(jnp.ones((6, 8)), P(None, None, "tp"))


@pytest.mark.parametrize("spec", [("dp",), ["dp"], "dp"])
def test_objects_that_are_not_specs(spec):
    with jax.set_mesh(mesh()), pytest.raises(ValueError, match=r"not a PartitionSpec|structure|None for|Expected"):
        mw.with_sharding_constraint(jnp.ones((8, 8)), spec)


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT], ids=["auto", "explicit"])
@pytest.mark.parametrize(
    "spec", [P("dp", "tp"), P(None, "tp"), P("tp", "dp"), P(("dp", "tp"), P.UNCONSTRAINED)], ids=str
)
def test_inside_partly_manual_shard_map(kind, spec, assert_placed):
    """Manual axes are skipped; the other axes constrain the device's slice."""
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
def test_inside_fully_manual_shard_map_nothing_changes(kind):
    value, jaxprs = host(8, 8), []

    def inner(x):
        jaxprs.append(jax.make_jaxpr(lambda x: mw.with_sharding_constraint(x, P("dp", "tp")))(x))
        return mw.with_sharding_constraint(x, P("dp", "tp")) + 1

    placed = jax.device_put(value, NamedSharding(mesh(kind), P("dp", "tp")))
    with jax.set_mesh(mesh(kind)):
        result = jax.jit(jax.shard_map(inner, in_specs=P("dp", "tp"), out_specs=P("dp", "tp")))(placed)
    np.testing.assert_array_equal(result, value + 1)
    assert len(jaxprs[0].eqns) == 0


def test_misspelled_axis_inside_shard_map():
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
