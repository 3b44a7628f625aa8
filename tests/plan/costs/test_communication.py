"""Bytes sent per step: derived here, computed by a plan, and read from the compiled program; all three agree."""

import functools
import math
from collections import Counter

import pytest

import meshwright as mw
from meshwright.mesh.string import parse_mesh
from meshwright.models import Decoder, Execution
from meshwright.plan.compiled.collectives import read_schedule
from meshwright.plan.costs.job_costs import profile_job
from meshwright.plan.plan import make_plan
from meshwright.plan.step_setup import Setup, build_step
from meshwright.train.jobs.language_job import language_job

ROWS, TOKENS, WIDTH, LAYERS, VOCAB, HIDDEN = 16, 64, 64, 2, 256, 128
MATRICES = 4 * WIDTH * WIDTH + 3 * WIDTH * HIDDEN  # of one layer
ENDS = 2 * VOCAB * WIDTH  # embedding and head
NORMS = (2 * LAYERS + 1) * WIDTH  # replicated everywhere
FLOAT = 4


def share(ways):
    return (ways - 1) / ways


def fsdp_gathers(ways, tp=1, times=1):
    """Forward, backward, and one prefetched layer; embedding and head are gathered once."""
    return times * FLOAT * share(ways) * ((2 * LAYERS + 1) * MATRICES + ENDS) / tp


def fsdp_scatters(ways, tp=1, times=1):
    return times * FLOAT * share(ways) * (LAYERS * MATRICES + ENDS) / tp


def sums(ways, elements, times=1):
    return times * 2 * FLOAT * share(ways) * elements


def tp_rows(ways, data, transfers_per_layer):
    """Activations between blocks, at embedding and head, and five floats per token for the loss."""
    tokens = ROWS // data * TOKENS
    return FLOAT * share(ways) * tokens * ((LAYERS * transfers_per_layer + 4) * WIDTH + 5 * ways)


ALL = LAYERS * MATRICES + ENDS
# Pipelines of two stages of two layers, with four microbatches in five ticks; bytes of the last stage.
STAGES, DEEP, MICROBATCHES, TICKS = 2, 4, 4, 5


def handed_on(data, tp=1):
    """One microbatch per tick, forward and backward."""
    return 2 * TICKS * FLOAT * ROWS // data // MICROBATCHES * TOKENS * WIDTH / tp


def sliced(ways, elements):
    """Embedding and head are stored in slices: one gather and one scatter per step."""
    return 2 * FLOAT * share(ways) * elements


def stage_gathers(ways):
    """For every microbatch: forward, in the recomputed tick, and there again for each layer's gradient."""
    return MICROBATCHES * FLOAT * share(ways) * (3 * DEEP / STAGES * MATRICES + 2 * ENDS / 2)


def stage_scatters(ways):
    return MICROBATCHES * FLOAT * share(ways) * (DEEP / STAGES * MATRICES + ENDS / 2)


def stage_tp_rows(ways, data, transfers_per_layer):
    """The loss's rows and statistics twice, as its tick is recomputed, and the gradient of its rows once."""
    tokens = ROWS // data * TOKENS
    return FLOAT * share(ways) * tokens * ((DEEP / STAGES * transfers_per_layer + 3) * WIDTH + 2 * 5 * ways)


ROWS_OR_TABLE = FLOAT * VOCAB * WIDTH  # bytes of the embedding, of the head, and of a microbatch's rows
STAGE_NORMS = 2 * DEEP / STAGES * WIDTH
# Bytes along each axis, without sums of scalars.
CASES = {
    "dp": (Setup(mesh="dp:8"), {"dp": sums(8, ALL + NORMS)}),
    "fsdp": (Setup(mesh="fsdp:8"), {"fsdp": fsdp_gathers(8) + fsdp_scatters(8) + sums(8, NORMS)}),
    "tp + sp": (Setup(mesh="tp:8"), {"tp": tp_rows(8, 1, 10) + sums(8, NORMS)}),
    "fsdp, tp, full remat": (
        Setup(mesh="fsdp:2,tp:4", remat="full"),
        {"fsdp": fsdp_gathers(2, 4) + fsdp_scatters(2, 4) + sums(2, NORMS), "tp": tp_rows(4, 2, 11) + sums(4, NORMS)},
    ),
    "fsdp, tp, remat dots": (
        Setup(mesh="fsdp:2,tp:4", remat="dots"),
        {"fsdp": fsdp_gathers(2, 4) + fsdp_scatters(2, 4) + sums(2, NORMS), "tp": tp_rows(4, 2, 10) + sums(4, NORMS)},
    ),
    "accumulated, hybrid": (
        Setup(mesh="dp:2,fsdp:4", num_minibatches=2, sync="hybrid"),
        {
            "fsdp": fsdp_gathers(4, times=2) + fsdp_scatters(4, times=2),
            "dp": sums(2, ALL / 4),
            "dp+fsdp": sums(8, NORMS),
        },
    ),
    "accumulated, every": (
        Setup(mesh="dp:2,fsdp:4", num_minibatches=2, sync="every"),
        {
            "fsdp": fsdp_gathers(4, times=2) + fsdp_scatters(4, times=2),
            "dp": sums(2, ALL / 4, times=2),
            "dp+fsdp": sums(8, NORMS, times=2),
        },
    ),
    "accumulated, once": (
        Setup(mesh="dp:2,fsdp:4", num_minibatches=2, sync="once"),
        {"fsdp": 2 * fsdp_scatters(4), "dp": sums(2, ALL / 4), "dp+fsdp": sums(8, NORMS)},
    ),
    "accumulated, tp": (
        Setup(mesh="dp:4,tp:2", num_minibatches=2),
        # Gradients of norms are summed over tp in every minibatch.
        {"dp": sums(4, ALL / 2 + NORMS), "tp": tp_rows(2, 4, 10) + sums(2, NORMS, times=2)},
    ),
    "ZeRO-1": (Setup(mesh="dp:8", zero_axis="dp"), {"dp": sums(8, ALL + NORMS)}),
}

PIPELINES = {
    "pp:2": (Setup(mesh="pp:2"), {"pp": handed_on(1) + sliced(2, ENDS) + sums(2, WIDTH)}),
    "dp:4,pp:2": (
        Setup(mesh="dp:4,pp:2"),
        {
            "pp": handed_on(4) + sliced(2, ENDS),
            "dp": sums(4, DEEP / STAGES * MATRICES + STAGE_NORMS + ENDS / STAGES),
            "dp+pp": sums(8, WIDTH),
        },
    ),
    "fsdp:2,pp:2": (
        Setup(mesh="fsdp:2,pp:2", remat="full"),
        {
            "pp": handed_on(2) + sliced(2, ENDS / 2),
            "fsdp": stage_gathers(2) + stage_scatters(2) + sums(2, STAGE_NORMS),
            "fsdp+pp": sums(4, WIDTH),
        },
    ),
    "pp:2,tp:2": (
        Setup(mesh="pp:2,tp:2"),
        {
            "pp": handed_on(1, 2) + sliced(2, ENDS / 2) + sums(2, WIDTH),
            # Gradients of norms are summed in every microbatch.
            "tp": stage_tp_rows(2, 1, 14) + sums(2, STAGE_NORMS + WIDTH, times=MICROBATCHES),
        },
    ),
    "pp:2,tp:2, full remat": (
        Setup(mesh="pp:2,tp:2", remat="full"),
        {
            "pp": handed_on(1, 2) + sliced(2, ENDS / 2) + sums(2, WIDTH),
            "tp": stage_tp_rows(2, 1, 15) + sums(2, STAGE_NORMS + WIDTH, times=MICROBATCHES),
        },
    ),
}
CASES |= PIPELINES


@functools.cache
def job(save_gathered=False, num_layers=LAYERS, num_kv_heads=None):
    run = Execution(save_gathered=save_gathered)
    model = Decoder.named("tiny", num_layers=num_layers, num_kv_heads=num_kv_heads)
    return language_job(model, batch_size=ROWS, num_tokens=TOKENS, run=run)


@functools.cache
def profile(num_layers=LAYERS):
    return profile_job(job(num_layers=num_layers), precision="float32", platform="cpu")


def plan_of(case):
    setup, layers = setup_of(case), DEEP if case in PIPELINES else LAYERS
    devices = math.prod(parse_mesh(setup.mesh).sizes)
    return make_plan(job(num_layers=layers), f"cpu:{devices}", setup, profile=profile(layers))


def setup_of(case):
    return Setup.from_json({**CASES[case][0].to_json(), "precision": "float32"})


@pytest.mark.parametrize("case", CASES)
def test_computed_bytes_match_the_formulas(case):
    plan = plan_of(case)
    found = Counter()
    for item in plan.sent:
        found[item.axis] += item.wire_bytes
    assert dict(found) == pytest.approx(CASES[case][1])
    assert all(item.basis == "computed" for item in plan.sent)


def test_saved_rows_are_not_gathered_again():
    setup = setup_of("tp + sp")
    kept = profile_job(job(save_gathered=True), precision="float32", platform="cpu", remats=("none",))
    sent = [sum(i.wire_bytes for i in make_plan(job(), "cpu:8", setup, profile=p).sent) for p in (profile(), kept)]
    assert sent[0] - sent[1] == pytest.approx(tp_rows(8, 1, 10) - tp_rows(8, 1, 8))


def test_bfloat16_halves_gathers_but_not_reductions():
    mixed = profile_job(job(), precision="mixed", platform="cpu", remats=("none",))
    plan = make_plan(job(), "cpu:8", Setup(mesh="fsdp:8"), profile=mixed)
    by_kind = {(item.kind, item.what): item.wire_bytes for item in plan.sent}
    assert by_kind["all-gather", "parameters of layers, prefetched"] == pytest.approx(fsdp_gathers(8) / 2)
    assert by_kind["reduce-scatter", "gradients of parameters"] == pytest.approx(fsdp_scatters(8))


def collectives_of(case, num_layers=LAYERS):
    return compiled_collectives(job(num_layers=num_layers), setup_of(case))


def compiled_collectives(job, setup):
    mesh = mw.create_mesh(setup.mesh, devices=math.prod(parse_mesh(setup.mesh).sizes))
    step, batch = build_step(job, mesh, setup)
    return read_schedule(step.lower(batch).compile().as_text()).collectives


@pytest.mark.parametrize("case", [case for case in CASES if case not in PIPELINES])
def test_compiled_bytes_match_the_computed_ones(case):
    compiled = sum(c.trips * c.wire_bytes for c in collectives_of(case))
    computed = sum(item.wire_bytes for item in plan_of(case).sent)
    # The difference is sums of scalars (loss, count, norms).
    assert abs(compiled - computed) < 1024
    assert computed > 100 * 4096 / 8


def bytes_of_a_stage(collectives):
    compiled = 0.0
    for c in collectives:
        share = MICROBATCHES / TICKS if "cond/branch" in c.source else 1.0
        if c.source.count("cond/branch") == 2 and c.bytes_moved == ROWS_OR_TABLE:
            share /= 2  # half of these are the embedding's, on the first stage
        compiled += share * c.trips * c.wire_bytes
    return compiled


@pytest.mark.parametrize("case", PIPELINES)
def test_compiled_bytes_of_a_pipeline_match_the_computed_ones(case):
    """The program has every branch at every tick; a device takes only its own branches, and none while idle."""
    compiled = bytes_of_a_stage(collectives_of(case, DEEP))
    computed = sum(item.wire_bytes for item in plan_of(case).sent)
    assert abs(compiled - computed) < 1024
    assert computed > 100 * 4096 / 8


# 8 devices share 2 key/value heads of 8 features, or 2 devices share 1: they gather each head and sum its gradient,
# and gather it again in a recomputed layer or pipeline tick.
SHARED = [("tp:8", "none", 4), ("tp:8", "full", 6), ("pp:2,tp:2", "none", 6), ("pp:2,tp:2", "dots", 8)]


@pytest.mark.parametrize(("mesh", "remat", "times"), SHARED)
def test_shared_key_value_heads(mesh, remat, times):
    layers, piped = (DEEP, True) if "pp" in mesh else (LAYERS, False)
    few, setup = job(num_layers=layers, num_kv_heads=1 if piped else 2), Setup(mesh=mesh, remat=remat)
    setup = Setup.from_json({**setup.to_json(), "precision": "float32"})
    devices, together = math.prod(parse_mesh(mesh).sizes), 2 if piped else 4
    sent = make_plan(few, f"cpu:{devices}", setup).sent
    shared = sum(item.wire_bytes for item in sent if item.what == "shared key/value heads")
    here = layers / (STAGES if piped else 1)
    assert shared == pytest.approx(here * times * FLOAT * share(together) * ROWS * TOKENS * 8)


@pytest.mark.parametrize(("mesh", "remat"), [case[:2] for case in SHARED])
def test_compiled_bytes_of_shared_heads_match_the_computed_ones(mesh, remat):
    piped, setup = "pp" in mesh, Setup(mesh=mesh, remat=remat, precision="float32")
    few = job(num_layers=DEEP, num_kv_heads=1) if piped else job(num_kv_heads=2)
    found = compiled_collectives(few, setup)
    compiled = bytes_of_a_stage(found) if piped else sum(c.trips * c.wire_bytes for c in found)
    plan = make_plan(few, f"cpu:{4 if piped else 8}", setup)
    assert abs(compiled - sum(item.wire_bytes for item in plan.sent)) < 1024


def test_devices_that_share_a_head_hold_all_of_it():
    """Each of 8 devices has one key and one value head, even if there are fewer heads."""
    setup = Setup(mesh="tp:8", remat="none", precision="float32")
    plans = [make_plan(job(num_kv_heads=count), "cpu:8", setup) for count in (1, 2, 8)]
    kept = [part.bytes for plan in plans for part in plan.memory.parts if part.name == "activations"]
    assert kept == pytest.approx(3 * [kept[-1]])


PROGRAMS = [("dp:2", "full"), ("pp:2", "full"), ("pp:2", "none"), ("fsdp:2,pp:2", "full"), ("pp:2,tp:2", "full")]


@pytest.mark.parametrize(("mesh", "remat"), PROGRAMS)
def test_computed_memory_matches_the_compiled(mesh, remat):
    model = Decoder.named("tiny", num_layers=4, d_model=256, d_ff=512, vocab_size=1024)
    deep = language_job(model, batch_size=32, num_tokens=128)
    setup = Setup(mesh=mesh, remat=remat, precision="float32")
    devices = math.prod(parse_mesh(mesh).sizes)
    step, batch = build_step(deep, mw.create_mesh(mesh, devices=devices), setup)
    found = step.lower(batch).compile().memory_analysis()
    peak = found.argument_size_in_bytes + found.output_size_in_bytes - found.alias_size_in_bytes
    peak += found.temp_size_in_bytes
    assert make_plan(deep, f"cpu:{devices}", setup).memory.total == pytest.approx(peak, rel=0.12)
