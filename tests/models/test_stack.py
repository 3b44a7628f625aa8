"""Prefetched layers have the same values and gradients as layers gathered on use, with one extra gather."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

import meshwright as mw
from meshwright.models.execution import PROJECTION
from meshwright.models.stack import run_layers
from meshwright.parallel.fsdp import Gather
from meshwright.plan.compiled.collectives import read_schedule

NUM_LAYERS, DIM, HIDDEN = 5, 16, 32
SPECS = {"up": P(None, "fsdp"), "down": P(None, None, "fsdp"), "scale": P()}


def block(layer, h, number):
    hidden = checkpoint_name((h * layer["scale"]) @ layer["up"], PROJECTION)
    return h + jnp.tanh(hidden + number) @ layer["down"]


def inputs():
    keys = jax.random.split(jax.random.key(0), 3)
    layers = {
        "up": jax.random.normal(keys[0], (NUM_LAYERS, DIM, HIDDEN)) / 4,
        "down": jax.random.normal(keys[1], (NUM_LAYERS, HIDDEN, DIM)) / 6,
        "scale": jnp.linspace(0.5, 1.5, NUM_LAYERS * DIM).reshape(NUM_LAYERS, DIM),
    }
    return layers, jax.random.normal(keys[2], (16, DIM))


def make_step(mesh, *, remat, prefetch, form="scan", dtype="float32"):
    gather = Gather(SPECS, ("fsdp",), dict.fromkeys(SPECS, jnp.dtype(dtype)))

    def step(layers, h):
        def loss(layers, h):
            layers = mw.parallel.pcast_varying(layers, "fsdp")
            return (run_layers(block, layers, h, form=form, remat=remat, gather=gather, prefetch=prefetch) ** 2).sum()

        value, grads = jax.value_and_grad(loss, argnums=(0, 1))(layers, h)
        return jax.lax.psum(value, "fsdp"), grads

    return jax.jit(
        mw.parallel.local_map(step, mesh=mesh, in_specs=(SPECS, P("fsdp")), out_specs=(P(), (SPECS, P("fsdp"))))
    )


@functools.cache
def expected():
    """Loss and gradients in float64, so that the reference adds no rounding error."""
    layers, h = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), inputs())

    def loss(layers, h):
        return (run_layers(block, layers, h, form="unroll") ** 2).sum()

    with jax.enable_x64(True):
        return jax.device_get(jax.value_and_grad(loss, argnums=(0, 1))(layers, h))


@pytest.mark.parametrize("remat", ["none", "dots", "full"])
@pytest.mark.parametrize(("prefetch", "form"), [(True, "scan"), (True, "unroll"), (False, "scan")])
def test_equals_one_device(remat, prefetch, form):
    value, grads = make_step(mw.create_mesh("fsdp:8"), remat=remat, prefetch=prefetch, form=form)(*inputs())
    np.testing.assert_allclose(value, expected()[0], rtol=1e-5)
    for got, want in zip(jax.tree.leaves(grads), jax.tree.leaves(expected()[1]), strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=5e-6 * np.abs(want).max())


@pytest.mark.parametrize("remat", ["none", "full"])
def test_gathers_one_layer_more_and_keeps_no_weights(remat):
    compiled = make_step(mw.create_mesh("fsdp:8"), remat=remat, prefetch=True).lower(*inputs()).compile()
    schedule = read_schedule(compiled.as_text())
    assert schedule.count("all-gather") <= 2 * (2 * NUM_LAYERS + 1)
    assert schedule.count("reduce-scatter") <= 2 * NUM_LAYERS
    plain = make_step(mw.create_mesh("fsdp:8"), remat=remat, prefetch=False).lower(*inputs()).compile()
    one_layer = 4 * 2 * DIM * HIDDEN
    more = compiled.memory_analysis().temp_size_in_bytes - plain.memory_analysis().temp_size_in_bytes
    assert more < 3 * one_layer, f"prefetch takes {more} more bytes; a layer has {one_layer}"


@pytest.mark.parametrize("form", ["scan", "unroll"])
def test_keeps_no_weights_without_prefetch_either(form):
    """The cast after a gather would be saved for all layers, which is the whole model in bfloat16."""
    layers, h = inputs()
    kept = jax.make_jaxpr(
        make_step(mw.create_mesh("fsdp:8"), remat="none", prefetch=False, form=form, dtype="bfloat16")
    )
    text = str(kept(layers, h.astype(jnp.bfloat16)))
    assert f"bf16[{NUM_LAYERS},{DIM},{HIDDEN}]" not in text


@pytest.mark.parametrize("form", ["scan", "unroll", 1, 2, 4])
@pytest.mark.parametrize("remat", ["none", "full"])
def test_entries_beside_layers_are_never_slices_of_blocks(form, remat):
    """XLA:GPU widens what it slices: of a stack of weights in fp8, all of it, to bfloat16."""
    layers, h = inputs()
    layers = jax.tree.map(lambda leaf: leaf[:4], layers)
    narrow = layers.pop("down").astype(jnp.float8_e4m3fn)

    def run(layers, h, **options):
        return run_layers(wide_block, layers, h, remat=remat, **options).sum()

    def wide_block(layer, h, number):
        return block({**layer, "down": layer["down"].astype(jnp.float32)}, h, number)

    apart = [{"down": leaf} for leaf in narrow]
    got = jax.value_and_grad(run)(layers, h, form=form, beside=apart)
    want = jax.value_and_grad(lambda layers: run({**layers, "down": narrow}, h, form="scan"))(layers)
    for leaf, leaf_1 in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert np.linalg.norm(leaf - leaf_1) <= 1e-5 * np.linalg.norm(leaf_1)
    (scan,) = [
        eqn
        for eqn in jax.make_jaxpr(functools.partial(run, form=form, beside=apart))(layers, h).eqns
        if eqn.primitive.name == "scan"
    ] or [None]
    if scan is not None:
        inside = [var.aval for var in scan.params["jaxpr"].jaxpr.invars if var.aval.dtype == narrow.dtype]
        assert [aval.shape for aval in inside] == [narrow.shape[1:]] * (form if isinstance(form, int) else 1)
