"""What a step sends, counted by hand, by arithmetic, and on the compiled program: all three agree to the byte."""

import functools
from collections import Counter

import pytest

import meshwright as mw
from meshwright.models import Decoder, Run
from meshwright.plan.cost import make_plan
from meshwright.plan.profile import profile_job
from meshwright.plan.schedule import read_schedule
from meshwright.plan.setup import Setup, build_step
from meshwright.train.language import language_job

ROWS, TOKENS, WIDTH, LAYERS, VOCAB, HIDDEN = 16, 64, 64, 2, 256, 128
MATRICES = 4 * WIDTH * WIDTH + 3 * WIDTH * HIDDEN  # of one layer
ENDS = 2 * VOCAB * WIDTH  # embedding and head
NORMS = (2 * LAYERS + 1) * WIDTH  # replicated everywhere
FLOAT = 4


def share(ways):
    return (ways - 1) / ways


def fsdp_gathers(ways, tp=1, times=1):
    """Forwards, backwards, and one layer more, which is gathered ahead; the ends are kept."""
    return times * FLOAT * share(ways) * ((2 * LAYERS + 1) * MATRICES + ENDS) / tp


def fsdp_scatters(ways, tp=1, times=1):
    return times * FLOAT * share(ways) * (LAYERS * MATRICES + ENDS) / tp


def sums(ways, elements, times=1):
    return times * 2 * FLOAT * share(ways) * elements


def tp_rows(ways, data, transfers_per_layer):
    """Rows of activations between blocks, those of the ends, and five numbers of every token for the loss."""
    tokens = ROWS // data * TOKENS
    return FLOAT * share(ways) * tokens * ((LAYERS * transfers_per_layer + 4) * WIDTH + 5 * ways)


ALL = LAYERS * MATRICES + ENDS
# For each way of running: what is sent along each axis, without sums of single numbers.
CASES = {
    "dp": (Setup(mesh="dp:8"), {"dp": sums(8, ALL + NORMS)}),
    "fsdp": (Setup(mesh="fsdp:8"), {"fsdp": fsdp_gathers(8) + fsdp_scatters(8) + sums(8, NORMS)}),
    "tp + sp": (Setup(mesh="tp:8"), {"tp": tp_rows(8, 1, 10) + sums(8, NORMS)}),
    "fsdp, tp, all recomputed": (
        Setup(mesh="fsdp:2,tp:4", remat="full"),
        {
            "fsdp": fsdp_gathers(2, 4) + fsdp_scatters(2, 4) + sums(2, NORMS),
            "tp": tp_rows(4, 2, 11) + sums(4, NORMS),
        },
    ),
    "fsdp, tp, matmuls kept": (
        Setup(mesh="fsdp:2,tp:4", remat="dots"),
        {
            "fsdp": fsdp_gathers(2, 4) + fsdp_scatters(2, 4) + sums(2, NORMS),
            "tp": tp_rows(4, 2, 10) + sums(4, NORMS),
        },
    ),
    "accumulated, hybrid": (
        Setup(mesh="dp:2,fsdp:4", num_minibatches=2, sync="hybrid"),
        {
            "fsdp": fsdp_gathers(4, times=2) + fsdp_scatters(4, times=2) + sums(4, NORMS),
            "dp": sums(2, ALL / 4 + NORMS),
        },
    ),
    "accumulated, every": (
        Setup(mesh="dp:2,fsdp:4", num_minibatches=2, sync="every"),
        {
            "fsdp": fsdp_gathers(4, times=2) + fsdp_scatters(4, times=2) + sums(4, NORMS, times=2),
            "dp": sums(2, ALL / 4 + NORMS, times=2),
        },
    ),
    "accumulated, once": (
        Setup(mesh="dp:2,fsdp:4", num_minibatches=2, sync="once"),
        {"fsdp": 2 * fsdp_scatters(4) + sums(4, NORMS), "dp": sums(2, ALL / 4 + NORMS)},
    ),
    "ZeRO-1": (Setup(mesh="dp:8", zero_axis="dp"), {"dp": sums(8, ALL + NORMS)}),
}


@functools.cache
def job(save_gathered=False):
    run = Run(save_gathered=save_gathered)
    return language_job(Decoder.named("tiny"), batch_size=ROWS, num_tokens=TOKENS, run=run)


@functools.cache
def profile():
    return profile_job(job(), precision="float32", platform="cpu")


def setup_of(case):
    return Setup.from_json({**CASES[case][0].to_json(), "precision": "float32"})


@pytest.mark.parametrize("case", CASES)
def test_computed_bytes_are_those_counted_by_hand(case):
    plan = make_plan(job(), "cpu:8", setup_of(case), profile=profile())
    found = Counter()
    for item in plan.sent:
        found[item.axis] += item.wire_bytes
    assert dict(found) == pytest.approx(CASES[case][1])
    assert all(item.basis == "computed" for item in plan.sent)


def test_rows_that_are_kept_are_not_gathered_again():
    setup = setup_of("tp + sp")
    kept = profile_job(job(save_gathered=True), precision="float32", platform="cpu", remats=("none",))
    sent = [sum(i.wire_bytes for i in make_plan(job(), "cpu:8", setup, profile=p).sent) for p in (profile(), kept)]
    assert sent[0] - sent[1] == pytest.approx(tp_rows(8, 1, 10) - tp_rows(8, 1, 8))


def test_bfloat16_halves_what_is_gathered_and_not_what_is_summed():
    mixed = profile_job(job(), precision="mixed", platform="cpu", remats=("none",))
    plan = make_plan(job(), "cpu:8", Setup(mesh="fsdp:8"), profile=mixed)
    by_kind = {(item.kind, item.what): item.wire_bytes for item in plan.sent}
    assert by_kind["all-gather", "parameters of layers, ahead of their use"] == pytest.approx(fsdp_gathers(8) / 2)
    assert by_kind["reduce-scatter", "gradients of parameters"] == pytest.approx(fsdp_scatters(8))


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_compiled_bytes_are_the_computed_ones(case):
    setup = setup_of(case)
    mesh = mw.create_mesh(setup.mesh)
    step, batch = build_step(job(), mesh, setup)
    schedule = read_schedule(step.lower(batch).compile().as_text())
    compiled = sum(c.trips * c.wire_bytes for c in schedule.collectives)
    computed = sum(item.wire_bytes for item in make_plan(job(), "cpu:8", setup, profile=profile()).sent)
    # Beyond it: sums of single numbers (loss, count, norms), and sums over two axes at once instead of one by one.
    assert abs(compiled - computed) < 4096
    assert computed > 100 * 4096 / 8
