"""The picture of a scheduled program: its bars add up to the plan's figures, and its memory peaks at the plan's."""

import dataclasses
import functools
import itertools
import math
import re

import pytest

from meshwright.mesh.string import parse_mesh
from meshwright.models import Decoder
from meshwright.pages import timeline
from meshwright.plan.compiled.collectives import read_schedule
from meshwright.plan.compiled.compile import Compiled
from meshwright.plan.compiled.verdict import CompiledCollective, judge, timed_schedule
from meshwright.plan.costs.job_costs import profile_job
from meshwright.plan.costs.links import axis_links
from meshwright.plan.output.axes_picture import axes_picture, places
from meshwright.plan.output.memory_levels import compiled_levels, computed_levels, memory_chart
from meshwright.plan.output.schedule_picture import (
    BETWEEN,
    EXPOSED,
    HIDDEN,
    KINDS,
    WAITING,
    lanes,
    scheduled_step,
    words,
)
from meshwright.plan.plan import make_plan
from meshwright.plan.step_setup import Setup
from meshwright.plan.target import parse_target
from meshwright.train import language_job

SHAPE = "bf16[2048,2048]{1,0}"
GROUPS = "replica_groups={{0,1,2,3,4,5,6,7}}"
# Per round: a gather that one matmul hides in part, and an all-reduce that stalls.
PROGRAM = f"""HloModule m, is_scheduled=true

%body (p: (s32[], {SHAPE})) -> (s32[], {SHAPE}) {{
  %p = (s32[], {SHAPE}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = {SHAPE} get-tuple-element(%p), index=1
  %s = ({SHAPE}, bf16[16384,2048]{{1,0}}) all-gather-start(%x), {GROUPS}, metadata={{op_name="jvp(params[mlp])/g"}}
  %d = {SHAPE} dot(%x, %x), lhs_contracting_dims={{1}}, metadata={{op_name="jvp(mlp)/dot"}} CYCLES(1000000)
  %n = {SHAPE} negate(%d), metadata={{op_name="transpose(jvp(norm))/neg"}} CYCLES(100000)
  %e = bf16[16384,2048]{{1,0}} all-gather-done(%s)
  %r = {SHAPE} all-reduce(%n), {GROUPS}, to_apply=%sum
  ROOT %t = (s32[], {SHAPE}) tuple(%i, %r)
}}

ENTRY %main (w: {SHAPE}) -> {SHAPE} {{
  %w = {SHAPE} parameter(0), metadata={{op_name="state.params['w']"}}
  %z = s32[] constant(0)
  %c = (s32[], {SHAPE}) tuple(%z, %w)
  %l = (s32[], {SHAPE}) while(%c), body=%body, backend_config={{"known_trip_count":{{"n":"TRIPS"}}}}
  %y = {SHAPE} get-tuple-element(%l), index=1
  ROOT %u = {SHAPE} add(%y, %w), metadata={{op_name="jit(step)/add"}} CYCLES(300000)
}}
"""


@functools.cache
def tiny():
    job = language_job(Decoder.named("tiny"), batch_size=8, num_tokens=64)
    return job, profile_job(job, platform="tpu")


def plan_of(trips=32, *, target="v5p:2x2x2", cycles=True, peak=2**27):
    text = PROGRAM.replace("TRIPS", str(trips))
    text = re.sub(r" CYCLES\((\d+)\)", r', backend_config={"estimated_cycles":"\1"}' if cycles else "", text)
    schedule, setup = read_schedule(text, with_steps=True), Setup(mesh="fsdp:8", rows=8)
    where = parse_target(target)
    collectives = tuple(
        CompiledCollective(
            one.kind, one.axes({"fsdp": 8}), one.bytes_moved, one.wire_bytes, one.group_size, one.is_async,
            one.matmuls_between, one.trips, one.source, transfer_s=verdict.transfer_s,
            share=verdict.share if where.chip else None,
        )
        for one, verdict in zip(schedule.collectives, judge(schedule, where, "fsdp:8"), strict=True)
    )  # fmt: skip
    steps = timed_schedule(schedule, where, "fsdp:8", dtype="bfloat16")
    compiled = Compiled(target, setup, peak_bytes=peak, collectives=collectives, steps=steps)
    job, profile = tiny()
    return make_plan(job, where, setup, profile=profile, compiled=compiled)


@pytest.mark.parametrize("cycles", [True, False])
@pytest.mark.parametrize("target", ["v5p:2x2x2", "h200:1x8"])
@pytest.mark.parametrize("trips", [1, 3, 32])
def test_the_bars_add_up_to_the_figures_of_the_plan(trips, target, cycles):
    plan = plan_of(trips, target=target, cycles=cycles)
    made, time = scheduled_step(plan), plan.time
    close = functools.partial(pytest.approx, rel=1e-9)
    assert made.total(EXPOSED) == close(time.exposed.value)
    assert made.total(HIDDEN) == close(time.communication.value - time.exposed.value)
    assert min(made.total(EXPOSED), made.total(HIDDEN)) > 0
    assert sum(map(made.total, KINDS[:3])) == close(time.matmul.value + time.memory.value + time.optimizer.value)
    assert made.seconds == close(time.step.value + made.late)
    # While nothing is sent, something is computed; compute waits for exposed transfers. No step overlaps with the host.
    assert made.total(WAITING) == pytest.approx(time.exposed.value + made.late, rel=1e-9)
    assert made.total(BETWEEN) == close(time.fixed.value)
    compute = next(lane for lane in lanes(made) if lane.name == "compute").spans
    assert sum(span.end - span.start for span in compute) == close(made.seconds)
    for lane in lanes(made):
        assert lane.spans[-1].end <= made.seconds * (1 + 1e-9)
        ends = [span.end for span in lane.spans]
        assert all(span.start >= end - 1e-12 for span, end in zip(lane.spans[1:], ends, strict=False)), lane.name
    # The bars have these lengths too, up to the three decimals of the picture.
    html = timeline("t", lanes(made), keys=dict.fromkeys(KINDS, 0))
    for name, kind in (("fsdp", EXPOSED), ("fsdp", HIDDEN)):
        pattern = rf'width="([\d.]+)%"[^>]*class="span[^"]*"><title>[^<]*{kind}'
        drawn = math.fsum(map(float, re.findall(pattern, html))) * made.seconds / 100
        assert drawn == pytest.approx(made.total(kind), abs=1e-5 * made.seconds * 8), name
    said = " ".join(words(made))
    assert ("Of each loop (32 rounds), the first 2 rounds" in said) == (trips == 32)
    # The loop's matmuls belong to the forward pass.
    assert any(span.label == "30 more rounds, forward" for span in compute) == (trips == 32)


@pytest.mark.parametrize("peak", [2**26, 2**27, 2**31])
def test_memory_peaks_where_the_plan_does(peak):
    """Also if the compiler's peak is below or above that of the schedule."""
    plan = plan_of(peak=peak)
    levels, _ = compiled_levels(plan, scheduled_step(plan))
    assert max(level.total for level in levels) == pytest.approx(plan.memory.total) == peak
    assert min(min(level.amounts.values()) for level in levels) >= 0
    assert "compiled" in memory_chart(plan, scheduled_step(plan))


@pytest.mark.parametrize("mesh", ["fsdp:8", "pp:2,fsdp:2,tp:2"])
def test_computed_memory_peaks_where_the_plan_does_and_says_that_it_is_computed(mesh):
    job, profile = tiny()
    plan = make_plan(job, "v5p:2x2x2", Setup(mesh=mesh, rows=8), profile=profile)
    assert scheduled_step(plan) is None
    assert max(level.total for level in computed_levels(plan)) == pytest.approx(plan.memory.total)
    assert "Computed: the sizes" in memory_chart(plan, None)


@pytest.mark.parametrize(("count", "cycles"), [(1, 1), (4, 4), (16, 3)])
def test_computed_memory_has_a_cycle_per_minibatch(count, cycles):
    job = language_job(Decoder.named("tiny"), batch_size=128, num_tokens=64)
    plan = make_plan(job, "v5p:2x2x2", Setup(mesh="fsdp:8", num_minibatches=count))
    levels = computed_levels(plan)
    activations = [level.amounts["activations"] for level in levels]
    rises = [a < b for a, b in itertools.pairwise(activations)]
    assert sum(now and not before for before, now in itertools.pairwise([False, *rises])) == cycles + (count > cycles)
    gradients = [level.amounts["gradients"] > 0 for level in levels]
    assert gradients == sorted(gradients)  # they stay from the first backward pass on
    assert all(one.end == pytest.approx(two.start) for one, two in itertools.pairwise(levels))
    assert levels[-1].end == pytest.approx(plan.time.step.value)
    said = memory_chart(plan, None)
    assert (f"once for each of {count} minibatches" in said) == (count > 1)
    assert ("The first 3 are drawn one by one" in said) == (count > cycles)


def test_the_memory_of_a_scheduled_pipeline_is_flat():
    job = language_job(Decoder.named("tiny", num_layers=4), batch_size=64, num_tokens=64)
    plan = make_plan(job, "v5p:2x2x1", Setup(mesh="fsdp:2,pp:2", pipeline="1f1b"))
    ticks, _ = computed_levels(plan)
    assert ticks.total == pytest.approx(plan.memory.total)
    assert "memory is flat until the update" in memory_chart(plan, None)


@pytest.mark.parametrize(
    ("seconds", "unit"), [(1e-3, "ms"), (0.5, "ms"), (17.4, "s"), (75, "s"), (266, "min"), (2e4, "h")]
)
def test_the_time_axis_of_memory_has_a_readable_unit(seconds, unit):
    job, profile = tiny()
    plan = make_plan(job, "v5p:2x2x2", Setup(mesh="fsdp:8", rows=8), profile=profile)
    step = dataclasses.replace(plan.time.step, value=seconds)
    html = memory_chart(dataclasses.replace(plan, time=dataclasses.replace(plan.time, step=step)), None)
    assert f"time, {unit}</text>" in html


def test_the_parts_of_the_chart_are_related_to_those_of_the_bar():
    plan = plan_of(peak=2**27)
    said = compiled_levels(plan, scheduled_step(plan))[1]
    assert "The parts are read from the names in the program." in said
    assert re.search(r"here and in the bar: temporaries [\d.]+ \w+ and [\d.]+ MiB", said) or "rest" in said


def test_transfers_that_do_not_fit_beside_the_compute_are_late():
    plan = plan_of()
    slower = [dataclasses.replace(plan.compiled, steps=())]
    assert scheduled_step(dataclasses.replace(plan, compiled=slower[0])) is None
    tight = dataclasses.replace(
        plan, time=dataclasses.replace(plan.time, matmul=dataclasses.replace(plan.time.matmul, value=1e-9))
    )
    made = scheduled_step(tight)
    assert made.late > 0
    assert made.total(HIDDEN) == pytest.approx(scheduled_step(plan).total(HIDDEN))
    assert "do not fit beside the plan's compute" in " ".join(words(made))


@pytest.mark.parametrize(
    ("target", "mesh"),
    [
        ("v5p:4x4x8", "fsdp:32,tp:4"),
        ("v5p:4x4x8", "dp:2,fsdp:8,tp:8"),
        ("v5e:16x16", "fsdp:256"),
        ("v5e:8x8*2", "dp:2@dcn,fsdp:16,tp:4"),
        ("h200:8x8", "dp:2,fsdp:8,tp:4"),
        ("h200:8x8", "fsdp:64"),
        ("tpu7x:4x4x4", "fsdp:64,tp:2"),
    ],
)
def test_the_places_of_the_axes_multiply_to_the_machine_and_agree_with_their_links(target, mesh):
    where = parse_target(target)
    spec = parse_mesh(mesh).resolve(where.num_devices)
    found = places(where, spec)
    drawn = axes_picture(where, spec)
    width = int(re.search(r'<svg width="(\d+)"[^>]*role="img"', drawn)[1])
    labels = re.findall(r'<text x="0"[^>]*>([^<]*)</text>', drawn)
    assert len(labels) == len(found)
    assert all(7.5 * len(label) < width for label in labels)  # a letter takes about 7 pixels
    assert all(math.prod(ways for _, ways in place.axes) == place.size for place in found)
    for axis in spec.axes:
        assert math.prod(ways for place in found for name, ways in place.axes if name == axis.name) == axis.size
    for name, link in axis_links(where, spec).items():
        over_network = any("network" in place.name for place in found for axis, _ in place.axes if axis == name)
        assert over_network == (link.name == "network")
