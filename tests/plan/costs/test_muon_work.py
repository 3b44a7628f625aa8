"""Plans count what Muon's update computes and sends."""

import collections
import math

import jax
import jax.numpy as jnp
import optax
import pytest

import meshwright as mw
from meshwright.models import Decoder
from meshwright.plan import Setup, make_plan
from meshwright.plan.compiled.collectives import read_schedule
from meshwright.plan.costs.muon_work import muon_work
from meshwright.train import language_job, muon, orthogonalize, state_layout
from meshwright.train.optimizer.muon import orthogonalized_names

MODEL = Decoder(vocab_size=64, num_layers=3, d_model=32, num_heads=4, d_ff=64)


@pytest.mark.parametrize("mesh", ["fsdp:8", "dp:2,fsdp:2,tp:2", "dp:8"])
def test_the_bytes_are_those_of_the_compiled_update(mesh):
    """Three layers leave gaps in the stacks of all meshes."""
    job, optimizer = language_job(MODEL, batch_size=8, num_tokens=16), muon(1e-3)
    placed = mw.create_mesh(mesh)
    layout = state_layout(job, optimizer, placed)
    chosen = set(orthogonalized_names(layout.abstract.opt_state))
    leaves = {leaf.name.removeprefix("params/"): leaf for leaf in layout.leaves if leaf.name.startswith("params/")}
    leaves = {name: leaf for name, leaf in leaves.items() if name in chosen}
    shardings = {name: jax.NamedSharding(placed, leaf.spec) for name, leaf in leaves.items()}
    given = {
        name: jax.ShapeDtypeStruct(leaf.shape, jnp.float32, sharding=shardings[name]) for name, leaf in leaves.items()
    }
    specs = {name: leaf.spec for name, leaf in leaves.items()}
    with jax.sharding.use_abstract_mesh(placed.abstract_mesh):
        program = jax.jit(lambda tree: orthogonalize(tree, specs=specs), out_shardings=shardings).lower(given).compile()
    found = collections.Counter()
    for one in read_schedule(program.as_text()).collectives:
        found[one.kind] += one.wire_bytes
    expected = collections.Counter()
    for item in muon_work(layout, "cpu").traffic:
        expected[item.kind] += item.wire_bytes
    assert set(found) == set(expected)
    assert all(math.isclose(found[kind], expected[kind], rel_tol=1e-6) for kind in expected)


def test_other_optimizers_have_none():
    job = language_job(MODEL, batch_size=8, num_tokens=16)
    assert muon_work(state_layout(job, optax.adam(1e-3), mw.create_abstract_mesh("fsdp:8")), "tpu").flops == 0


def test_a_step_with_muon_is_planned_as_long_as_it_was_measured():
    """On one H200, the 956M decoder's step took 371.3 ms with Muon and 339.1 ms with AdamW (results/muon.md)."""
    job = language_job(Decoder.named("956m"), batch_size=16, num_tokens=2048)
    times = {name: make_plan(job, "h200:1x1", Setup(mesh="dp:1", optimizer=name)).time for name in ("adamw", "muon")}
    assert times["muon"].step.value / times["adamw"].step.value == pytest.approx(371.3 / 339.1, abs=0.01)
    assert "34.6 TFLOP of muon's iterations" in times["muon"].optimizer.note
