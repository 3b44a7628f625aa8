"""What Muon adds to a plan: exchanges as compiled, matmuls by hand, and a measured step."""

import functools

import jax
import pytest

import meshwright as mw
from meshwright.models import Decoder
from meshwright.plan.compiled.collectives import read_schedule
from meshwright.plan.costs.job_costs import profile_job
from meshwright.plan.costs.muon_work import iteration_flops, muon_work
from meshwright.plan.plan import make_plan
from meshwright.plan.step_setup import Setup
from meshwright.plan.target import parse_target
from meshwright.train import muon, orthogonalize, state_layout
from meshwright.train.jobs.language_job import language_job

LAYERS, D_MODEL, D_FF = 3, 16, 32


@functools.cache
def small():
    model = Decoder.named("tiny", num_layers=LAYERS, d_model=D_MODEL, num_heads=4, d_ff=D_FF)
    job = language_job(model, batch_size=8, num_tokens=16)
    return job, profile_job(job, optimizer="muon", remats=("none",))


@pytest.mark.parametrize("mesh", ["fsdp:4,tp:2", "dp:2,fsdp:4", "dp:1"])
def test_exchanges_are_those_of_the_compiled_update(mesh):
    job, profile = small()
    real = mw.create_mesh(mesh, devices=1 if mesh == "dp:1" else None)
    layout = state_layout(job, muon(0.1), real)
    names = ("attn", "mlp")
    layers, specs, shardings = (
        {name: tree["layers"][name] for name in names}
        for tree in (layout.abstract.params, layout.specs.params, layout.shardings.params)
    )
    run = jax.jit(functools.partial(orthogonalize, specs=specs), in_shardings=(shardings,), out_shardings=shardings)
    with jax.sharding.use_abstract_mesh(real.abstract_mesh):
        compiled = read_schedule(run.lower(layers).compile().as_text()).collectives
    work = muon_work(profile, layout, parse_target("cpu:8"))
    for kind in ("all-to-all", "all-gather"):
        planned = [item for item in work.traffic if item.kind == kind]
        found = [one for one in compiled if one.kind == kind]
        assert sum(item.wire_bytes for item in planned) == sum(one.wire_bytes for one in found)
        assert sum(item.count for item in planned) == len(found)
    assert mesh == "dp:1" or work.traffic


def test_matmuls_by_hand():
    job, profile = small()
    tpu = parse_target("v5p:2x2x2")
    # Twelve square matrices and nine wide ones, filled up to 16 each: two for each of eight devices. An iteration is a
    # Gram matrix, its square, and a product with the matrix.
    one = [4 * 2 * (D_MODEL**2 * columns + D_MODEL**3 + D_MODEL**2 * columns) for columns in (D_MODEL, D_FF)]
    layout = state_layout(job, muon(0.1), mw.create_abstract_mesh("fsdp:4,tp:2"))
    assert muon_work(profile, layout, tpu).flops == 2 * sum(one)
    alone = state_layout(job, muon(0.1), mw.create_abstract_mesh("dp:1"))
    assert muon_work(profile, alone, tpu).flops == 4 * LAYERS * one[0] + 3 * LAYERS * one[1]
    # On GPUs, the Gram matrix of a wide matrix iterates: 13 products of m x m x m.
    wide = 2 * 100**2 * 200
    assert iteration_flops(100, 200, parse_target("a100:1x8")) == 2 * wide + 13 * 2 * 100**3
    assert iteration_flops(128, 256, parse_target("h200:1x8")) < iteration_flops(128, 256, parse_target("a100:1x8"))


def test_a_measured_step_is_planned():
    """The 956M decoder at 16 x 2048 tokens on one H200: 339.1 ms with AdamW and 371.3 ms with Muon."""
    job = language_job(Decoder.named("956m"), batch_size=16, num_tokens=2048)
    plans = {name: make_plan(job, "h200:1x1", Setup(mesh="dp:1", optimizer=name)) for name in ("adamw", "muon")}
    seconds = {name: plan.time.step.value for name, plan in plans.items()}
    assert seconds["muon"] / seconds["adamw"] == pytest.approx(371.3 / 339.1, rel=0.02)
    assert "and matmuls of " in plans["muon"].time.optimizer.note
    assert plans["muon"].mfu < plans["adamw"].mfu
