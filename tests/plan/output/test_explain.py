"""Explanations of differences: the causes add up, the largest first, with the right sign."""

import functools
import re

import pytest

from meshwright.models import Decoder
from meshwright.plan.costs.job_costs import profile_job
from meshwright.plan.output.explain import explain
from meshwright.plan.output.plan_diff import diff_plans
from meshwright.plan.plan import make_plan
from meshwright.plan.step_setup import Setup
from meshwright.train.jobs.language_job import language_job


@functools.cache
def job():
    return language_job(Decoder.named("7b", num_layers=4), batch_size=512, num_tokens=8192, packed=True)


@functools.cache
def profile():
    return profile_job(job(), platform="gpu")


def plan(mesh, **options):
    return make_plan(job(), "h100:32x8", Setup(mesh=mesh, **options), profile=profile()).to_json()


SETUPS = {
    "published": ("dp:32,fsdp:8", {"remat": "full"}),
    "found": ("fsdp:256", {"num_minibatches": 2, "sync": "once"}),
    "tensor": ("fsdp:32,tp:8", {"remat": "dots"}),
    "pipeline": ("dp:16,fsdp:8,pp:2", {"remat": "full"}),
}


@pytest.mark.parametrize("after", SETUPS)
@pytest.mark.parametrize("before", SETUPS)
def test_causes_add_up_to_the_difference_with_the_largest_first(before, after):
    old, new = (plan(SETUPS[name][0], **SETUPS[name][1]) for name in (before, after))
    time, memory = explain(old, new)
    assert (time.unit, memory.unit) == ("s", "bytes")
    assert time.after - time.before == new["time"]["step"]["value"] - old["time"]["step"]["value"]
    for one in (time, memory):
        assert sum(cause.more for cause in one.causes) == pytest.approx(one.after - one.before, rel=1e-9, abs=1e-9)
        sizes = [abs(cause.more) for cause in one.causes if cause.what != "other causes"]
        assert sizes == sorted(sizes, reverse=True)
        assert bool(one.causes) == (before != after)


def test_the_published_setup_against_the_result_of_a_search():
    time, memory = explain(*(plan(*[SETUPS[n][0]], **SETUPS[n][1]) for n in ("published", "found")))
    causes = {cause.what: cause for cause in (*time.causes, *memory.causes)}
    assert causes["recomputation"].more < 0
    assert "(remat=none)" in causes["recomputation"].why
    assert "(remat=full)" in causes["recomputation"].why
    assert causes["all-reduce over dp"].more < 0
    assert "devices wait for 0 s in B" in causes["all-reduce over dp"].why
    assert "over network, 0% hidden" in causes["all-reduce over dp"].why
    assert causes["reduce-scatter over fsdp"].more > 0  # full gradients cross the network at once
    assert causes["activations"].more > 0
    assert re.search(
        r"; from (attention|feed-forward) \+[\d.]+ GiB, (attention|feed-forward|norms) \+", causes["activations"].why
    )
    assert causes["gradients"].more > 0
    assert causes["parameters"].more < 0
    assert "(256 shards)" in causes["parameters"].why


def test_on_one_mesh_additional_matmul_time_is_recomputation():
    """Recomputed matmuls may be attention, which is slower than the others."""
    (time, _) = explain(plan("fsdp:256"), plan("fsdp:256", remat="dots"))
    causes = {cause.what: cause.more for cause in time.causes}
    both = [plan("fsdp:256", remat=remat)["time"]["matmul"]["value"] for remat in ("none", "dots")]
    assert causes["recomputation"] == pytest.approx(both[1] - both[0])
    assert "model matmuls" not in causes


def test_other_chips_are_named_as_a_cause():
    setup = Setup(mesh="fsdp:256", remat="full")
    old, new = (make_plan(job(), target, setup).to_json() for target in ("h100:32x8", "v5e:16x16"))
    (time, _) = explain(old, new)
    causes = {cause.what: cause.why for cause in time.causes}
    assert "in B (fsdp:256 on v5e:16x16, 256 x 197 TFLOP/s)" in causes["model matmuls"]
    assert "in A (fsdp:256 on h100:32x8, 256 x 989 TFLOP/s)" in causes["model matmuls"]
    assert "(remat=full on v5e:16x16, 256 x 819 GB/s)" in causes["memory traffic"]


def test_microbatches_and_the_schedule_are_named():
    small = language_job(Decoder.named("tiny", num_layers=4), batch_size=32, num_tokens=64)
    setups = (Setup(mesh="dp:4"), Setup(mesh="pp:4", pipeline="1f1b", num_microbatches=8))
    time, _ = explain(*(make_plan(small, "h100:1x4", setup).to_json() for setup in setups))
    why = next(cause.why for cause in time.causes if cause.what == "memory traffic")
    assert "in B (remat=none, 8 microbatches in 1f1b)" in why
    assert "in A (remat=none)" in why


def test_zero_1_is_a_cause_of_optimizer_memory():
    _, memory = explain(plan("dp:256"), plan("dp:256", zero_axis="dp"))
    (cause,) = [cause for cause in memory.causes if cause.what == "optimizer"]
    assert "(replicated, ZeRO-1 over dp)" in cause.why
    assert "in A (replicated)" in cause.why


def test_swapping_the_plans_flips_the_signs():
    old, new = (plan(SETUPS[name][0], **SETUPS[name][1]) for name in ("published", "found"))
    there, back = ({c.what: c.more for c in explain(*pair)[0].causes} for pair in ((old, new), (new, old)))
    assert there == pytest.approx({what: -more for what, more in back.items()})


def test_communication_that_exceeds_compute_is_a_separate_cause():
    short = language_job(Decoder.named("7b", num_layers=4), batch_size=512, num_tokens=64)
    made = [make_plan(short, "h100:32x8", Setup(mesh=mesh, remat="full")).to_json() for mesh in ("dp:256", "fsdp:256")]
    time, _ = explain(*made)
    busy = next(cause for cause in time.causes if cause.what == "busy links")
    assert busy.before == pytest.approx(0, abs=1e-12)
    assert busy.after > 1e-3
    assert sum(cause.more for cause in time.causes) == pytest.approx(time.after - time.before, rel=1e-9)


def test_sentences_and_data():
    diff = diff_plans(plan("dp:32,fsdp:8", remat="full"), plan("dp:32,fsdp:8"))
    text = str(diff)
    assert "ms less" in text
    assert "recomputation: the backward pass recomputes for" in text
    assert "GiB activations: " in text
    data = diff.to_json()["explanations"]
    assert [one["about"] for one in data] == ["step time", "memory per device"]
    assert sum(cause["more"] for cause in data[1]["causes"]) == pytest.approx(data[1]["more"])


def test_plans_without_a_time_explain_their_memory():
    small = language_job(Decoder.named("tiny"), batch_size=8, num_tokens=16)
    made = [make_plan(small, "cpu:8", Setup(mesh=mesh)).to_json() for mesh in ("dp:8", "fsdp:8")]
    (memory,) = explain(*made)
    assert memory.about == "memory per device"
