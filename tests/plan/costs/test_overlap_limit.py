"""XLA overlaps less on a GPU whose memory is nearly full, and plans and searches say so."""

import pytest

from meshwright.models import Decoder
from meshwright.plan import Setup, make_plan
from meshwright.plan.costs.memory import GATHERED_WEIGHTS, MemoryPlan, Part
from meshwright.plan.costs.overlap_limit import SLOP_OPTION, overlap_limit
from meshwright.plan.target import parse_target
from meshwright.train import language_job

GIB = 2**30
# Of a chip with 139.8 GiB, as compiled for h200:8x8 and h200:1x8 with jax 0.10.2: total, gathered weights, slop factor,
# share of the bytes that was hidden.
COMPILED = [
    (87.1, 7.1, 95, 0.968),  # 70B decoder, remat="dots"
    (93.0, 7.1, 95, 0.728),  # 70B, 2816 tokens in a row, and so on
    (104.6, 7.1, 95, 0.245),
    (110.5, 7.1, 95, 0.244),
    (116.3, 7.1, 95, 0.11),
    (122.2, 7.1, 95, 0.0),
    (122.2, 7.1, 115, 0.247),
    (122.2, 7.1, 150, 0.968),
    (101.6, 1.6, 95, 0.946),  # 7B
    (118.8, 1.6, 95, 0.0),
]


def memory_of(total, gathered):
    parts = (
        Part("activations", (total - gathered) * GIB, "computed"),
        Part(GATHERED_WEIGHTS, gathered * GIB, "computed"),
    )
    return MemoryPlan(parts, total * GIB, "computed", round(139.8 * GIB))


def setup(slop, sync=None):
    return Setup(mesh="fsdp:64", num_minibatches=4, sync=sync, compiler_options={SLOP_OPTION: slop})


@pytest.mark.parametrize(("total", "gathered", "slop", "hidden"), COMPILED)
def test_the_limit_is_that_of_compiled_programs(total, gathered, slop, hidden):
    most, note = overlap_limit(memory_of(total, gathered), parse_target("h200:8x8"), setup(slop))
    assert min(0.9, most) == pytest.approx(hidden, abs=0.2)
    assert bool(note) == (hidden < 0.3)


def test_only_gpus_have_it():
    assert overlap_limit(memory_of(139.0, 7.1), parse_target("v5p:4x4x4"), setup(95)) == (1.0, "")


def test_weights_gathered_once_need_no_second_copy():
    """Their memory is in the total, and no gather overlaps."""
    memory, target = memory_of(105.0, 7.1), parse_target("h200:8x8")
    assert overlap_limit(memory, target, setup(95, "once")) == (1.0, "")
    assert overlap_limit(memory, target, setup(95, "hybrid"))[0] < 1


def test_plans_without_communication_have_no_note():
    job = language_job(Decoder.named("tiny", d_model=4096, d_ff=16384, num_layers=2), batch_size=8, num_tokens=4096)
    plan = make_plan(job, "h200:1x1", Setup(mesh="dp:1", rows=25))
    assert plan.memory.total / plan.memory.capacity > 0.76
    assert not plan.sent
    assert not any("XLA schedules programs for" in note for note in plan.notes)


def test_plans_follow_it():
    """The same step with more rows: less of its gathers is hidden, then none."""
    job = language_job(Decoder.named("tiny", d_model=4096, d_ff=16384, num_layers=2), batch_size=8, num_tokens=4096)
    found = {}
    for rows in (8, 8 * 26, 8 * 33):
        plan = make_plan(job, "h200:1x8", Setup(mesh="fsdp:8", rows=rows))
        share = plan.memory.total / plan.memory.capacity
        assert plan.memory.fits
        gathers = [item.hidden for item in plan.sent if item.kind == "all-gather" and item.hidden]
        found[round(share, 2)] = (max(gathers, default=0.0), sum("XLA schedules programs for" in n for n in plan.notes))
    assert list(found.values()) == [(0.9, 0), (0.25, 1), (0.0, 1)], found
