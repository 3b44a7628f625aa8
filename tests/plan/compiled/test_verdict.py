"""Verdicts on collectives: hidden shares, states and reasons."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.mesh.string import parse_mesh
from meshwright.models import Decoder
from meshwright.plan.compiled.collectives import Collective, ProgramSchedule, Stretch
from meshwright.plan.compiled.compile import Compiled
from meshwright.plan.compiled.verdict import CompiledCollective, hidden_seconds, judge, link_names, sync_advice
from meshwright.plan.costs.links import axis_links
from meshwright.plan.plan import make_plan
from meshwright.plan.step_setup import Setup
from meshwright.plan.target import parse_target
from meshwright.train import language_job

RATE = parse_target("v5p:4x4x4").matmul_rate("bfloat16")
MESH = "fsdp:4,tp:4"
ALONG_TP, ALONG_FSDP = ((0, 1, 2, 3),), ((0, 4, 8, 12),)


def gather(partners=ALONG_FSDP, **changes):
    values = {"kind": "all-gather", "name": "g", "bytes_moved": 2**24, "group_size": 4, "is_async": True}
    values |= {"matmuls_between": 1, "partners": partners}
    return Collective(**(values | changes))


def seconds_of(one):
    along = one.axes({"fsdp": 4, "tp": 4})[0]
    return axis_links(parse_target("v5p:2x2x4"), parse_mesh(MESH))[along].seconds(one.kind, one.wire_bytes)


def judged(collectives, *stretches, **options):
    made = tuple(Stretch(tuple(in_flight), seconds * RATE, 0) for in_flight, seconds in stretches)
    return judge(ProgramSchedule(tuple(collectives), 1, 0, made), "v5p:2x2x4", MESH, **options)


def test_the_three_states():
    one = gather()
    needs = seconds_of(one)
    for part, words in ((1.5, "hidden"), (0.25, "partly hidden (25.0%): the transfer takes longer"), (0, "")):
        (verdict,) = judged([one], ([0], part * needs))
        assert verdict.share == pytest.approx(min(part, 1))
        assert verdict.transfer_s == pytest.approx(needs)
        assert str(verdict).startswith(words)
    (nothing,) = judged([replace(one, matmuls_between=0)])
    assert str(nothing) == "exposed: no matmul between its start and its end"


def test_collectives_on_one_link_share_the_compute():
    one = gather()
    needs = seconds_of(one)
    first, second = judged([one, one], ([0, 1], needs))
    assert (first.share, second.share) == (pytest.approx(0.5), pytest.approx(0.5))
    # Compute that one of them no longer needs goes to the other.
    first, second = judged([one, one], ([0], needs), ([0, 1], needs / 2))
    assert (first.share, second.share) == (pytest.approx(1), pytest.approx(0.5))
    # Compute is shared in proportion to the remaining time.
    large = gather(bytes_moved=2**26)
    shares = [verdict.share for verdict in judged([one, large], ([0, 1], (needs + seconds_of(large)) / 2))]
    assert shares == [pytest.approx(0.5), pytest.approx(0.5)]


def test_other_compute_counts_by_its_cycles():
    """The length of a cycle makes the matmuls run at the chip's rate."""
    one = gather(matmuls_between=0, cycles_between=1000)
    cycle = seconds_of(one) / 4000
    beside = Stretch((0,), 0.0, 1000)
    found = judge(ProgramSchedule((one,), 1, 0, (beside,), 10_000 * cycle * RATE, 10_000), "v5p:2x2x4", MESH)
    assert str(found[0]) == "partly hidden (25.0%): the transfer takes longer than the compute it overlaps with"
    # Without an estimate for any matmul, the length of a cycle is unknown.
    (unknown,) = judge(ProgramSchedule((one,), 1, 0, (beside,)), "v5p:2x2x4", MESH)
    assert unknown.share == 0


def test_collectives_on_different_links_do_not_share_compute():
    one, other = gather(ALONG_FSDP), gather(ALONG_TP)
    shares = [verdict.share for verdict in judged([one, other], ([0, 1], max(seconds_of(one), seconds_of(other))))]
    assert shares == [pytest.approx(1), pytest.approx(1)]
    links = axis_links(parse_target("h200:1x8"), parse_mesh("fsdp:4,tp:2"))
    # Inside a host, all axes share NVLink.
    assert link_names(("fsdp",), links) == link_names(("tp",), links) == ("nvlink",)


stretches_of_three = st.lists(
    st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=3, unique=True), st.floats(0, 10)), max_size=8
)


@given(stretches_of_three, st.lists(st.floats(0.001, 20), min_size=3, max_size=3))
def test_a_second_of_compute_hides_at_most_a_second_of_a_link(stretches, seconds):
    lanes = [("a",), ("b",), ("a", "b")]
    made = tuple(Stretch(tuple(in_flight), lasts, 0) for in_flight, lasts in stretches)
    hidden = hidden_seconds(ProgramSchedule((gather(),) * 3, 0, 0, made), seconds, lanes, 1.0)
    total = sum(lasts for _, lasts in stretches)
    assert all(-1e-9 <= part <= whole + 1e-9 for part, whole in zip(hidden, seconds, strict=True))
    for lane in ("a", "b"):
        assert sum(part for part, on in zip(hidden, lanes, strict=True) if lane in on) <= total + 1e-6


def test_without_a_chip_shares_are_all_or_nothing():
    found = judge(ProgramSchedule((gather(), gather(is_async=False)), 1, 0), "cpu:16", MESH)
    assert [str(verdict) for verdict in found] == ["hidden", "exposed: synchronous, the device waits for it"]
    assert [verdict.transfer_s for verdict in found] == [None, None]


OFFLOAD = "xla_tpu_enable_sparse_core_collective_offload_"


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"is_async": False}, f"synchronous, the default on v5p; the option {OFFLOAD}all_gather (with its 2d_ and 3d_"),
        ({"is_async": False, "kind": "all-reduce"}, f"synchronous, the default on v5p; the option {OFFLOAD}all_reduce"),
        ({"is_async": False, "kind": "all-to-all"}, "synchronous, the device waits for it"),
        ({"matmuls_between": 0}, "no matmul between its start and its end"),
        ({"matmuls_between": 0, "merged": 8}, "8 matmuls of its ring were merged into one"),
        ({"is_async": False, "merged": 8}, "synchronous: 8 matmuls of its ring were merged into one"),
        (
            {"is_async": False, "kind": "all-reduce", "source": "jit(f)/reduce_scatter"},
            f"a reduce-scatter was compiled to an all-reduce, which sends twice the bytes; the option {OFFLOAD}reduce_",
        ),
    ],
)
def test_reasons(changes, why):
    (verdict,) = judged([gather(**changes)])
    assert verdict.state == "exposed"
    assert verdict.why.startswith(why)


def test_a_hidden_all_reduce_also_reports_twice_the_bytes():
    one = gather(kind="all-reduce", source="jit(f)/psum_scatter")
    (verdict,) = judged([one], ([0], 10 * seconds_of(one)))
    assert str(verdict).startswith("hidden: a reduce-scatter was compiled to an all-reduce")


def test_an_option_that_is_set_is_not_suggested():
    (verdict,) = judged([gather(is_async=False)], options={f"{OFFLOAD}all_gather": "true"})
    assert verdict.why == f"synchronous, even though the option {OFFLOAD}all_gather is set"
    assert sync_advice("v5p", "tpu", "all-reduce", "reduce_scatter", {f"{OFFLOAD}reduce_scatter": "true"}) == ""


def test_synchronous_collectives_on_gpus_have_no_matmul_to_overlap_with():
    found = judge(ProgramSchedule((gather(is_async=False),), 1, 0), "h200:2x8", "fsdp:4,tp:4")
    assert found[0].why == "synchronous, because the compiler found no matmul to overlap with"


def test_a_compiled_collective_reports_its_verdict():
    values = ("all-gather", ("fsdp",), 8000, 7000.0, 8, True, 2, 10, "jit(step)/all_gather")
    assert CompiledCollective(*values).verdict == "hidden"
    partly = CompiledCollective(*values, share=0.25, transfer_s=1e-3, why="the compute is shorter.")
    assert (partly.state, partly.hidden, partly.hidden_share) == ("partly hidden", False, 0.25)
    assert partly.verdict == "partly hidden (25.0%): the compute is shorter."


def plan_with(*collectives):
    job = language_job(Decoder.named("tiny"), batch_size=16, num_tokens=64)
    setup = Setup(mesh=MESH)
    return make_plan(job, "v5p:2x2x4", setup, compiled=Compiled("v5p:2x2x4", setup, collectives=collectives))


def test_step_time_includes_exposed_communication_once():
    """Judged transfers already overlap with matmuls, however long they are in total."""
    links = axis_links(parse_target("v5p:2x2x4"), parse_mesh(MESH))

    def sends(axis, share):
        lasts = links[axis].seconds("all-gather", 2.0**24)
        facts = ("all-gather", (axis,), 2**25, 2.0**24, 4, True, 1, 8, "all_gather")
        return CompiledCollective(*facts, share=share, transfer_s=None if share is None else lasts), 8 * lasts

    (half, lasts), (whole, _) = sends("fsdp", 0.5), sends("tp", 1.0)
    plan = plan_with(half, whole)
    assert plan.time.exposed.value == pytest.approx(lasts / 2)
    assert plan.time.communication.value > 10 * (plan.time.matmul.value + plan.time.memory.value)
    assert {item.axis: item.hidden for item in plan.sent} == {"fsdp": pytest.approx(0.5), "tp": pytest.approx(1.0)}
    # Without shares, at most the total compute is hidden.
    (unknown, lasts), compute = sends("fsdp", None), plan.time.matmul.value + plan.time.memory.value
    assert plan_with(unknown).time.exposed.value == pytest.approx(lasts - compute)
