"""Bytes, ticks and memory of pipeline schedules: computed from the table, and read from compiled programs."""

import functools

import pytest

from meshwright.errors import MeshError
from meshwright.models import Decoder
from meshwright.parallel import make_schedule
from meshwright.parallel.pipeline.slots import assign_slots
from meshwright.plan.compiled.compile import compile_step
from meshwright.plan.costs.job_costs import profile_job
from meshwright.plan.costs.stages import Stages
from meshwright.plan.plan import make_plan
from meshwright.plan.step_setup import Setup
from meshwright.train.jobs.language_job import language_job

NAMES = ("1f1b", "interleaved-1f1b", "zb-h1", "zb-v")


@functools.cache
def job():
    return language_job(Decoder.named("tiny", num_layers=8), batch_size=16, num_tokens=32)


@functools.cache
def profile():
    return profile_job(job(), precision="float32", platform="cpu", remats=("none", "full"))


def plan_of(name, mesh="pp:2", target="cpu:2", **options):
    setup = Setup(mesh=mesh, pipeline=name, precision="float32", **options)
    return make_plan(job(), target, setup, profile=profile())


def rounds_of(name):
    return 2 if name in ("zb-v", "interleaved-1f1b", "circular") else 1


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("again", [True, False])
def test_idle_time_is_that_of_the_table(name, again):
    stages = Stages(4, 8, name, rounds_of(name), again)
    table = make_schedule(name, 4, 8)
    assert (stages.ticks, stages.live) == (table.num_ticks, max(table.peak_residuals))
    backward = 2 + again - table.splits_backward
    span = table.makespan(forward=1, backward=backward, weights=1)
    assert stages.idle == pytest.approx(1 - 8 * stages.rounds * (3 + again) / span)


@pytest.mark.parametrize("name", [*NAMES, "circular"])
@pytest.mark.parametrize("microbatches", [23, 64])
def test_figures_of_many_microbatches_are_those_of_the_whole_table(name, microbatches):
    for again in (True, False):
        stages, table = Stages(4, microbatches, name, rounds_of(name), again), make_schedule(name, 4, microbatches)
        span = table.makespan(forward=1, backward=2 + again - table.splits_backward, weights=1)
        assert (stages.ticks, stages.live) == (table.num_ticks, max(table.peak_residuals))
        assert stages.idle == pytest.approx(1 - microbatches * stages.rounds * (3 + again) / span, abs=1e-9)
        slots = assign_slots(table, saves=not again)
        assert stages.slots == (slots.num_inbox + 1, max(slots.num_stored, 1))


@pytest.mark.parametrize("name", NAMES)
def test_memory_does_not_grow_with_microbatches(name):
    """A microbatch has a half or a quarter of the rows, but as many are in memory."""
    plans = [plan_of(name, num_microbatches=count, rows=4 * count) for count in (4, 8)]
    kept = [[part.bytes for part in plan.memory.parts if part.name in ("activations", "ticks")] for plan in plans]
    assert kept[0] == kept[1]
    piped = [plan_of("gpipe", num_microbatches=count, rows=4 * count) for count in (4, 8)]
    assert sum(part.bytes for part in piped[0].memory.parts if part.name == "ticks") < sum(
        part.bytes for part in piped[1].memory.parts if part.name == "ticks"
    )


def test_schedules_that_cannot_run():
    with pytest.raises(MeshError, match=r"has no effect: the mesh has no axis pp[\s\S]*hint: leave it out"):
        plan_of("zb-v", "fsdp:2")
    with pytest.raises(MeshError, match=r"zb-v cuts 8 layers into 8 x 2 stages[\s\S]*set pp to 1, 2 or 4"):
        plan_of("zb-v", "pp:8", "cpu:8")


# The meshes and policies whose programs differ: gathers in the cells, rings in the cells, layers that move.
COMPILED = [("1f1b", "fsdp:2,pp:2", "none"), ("zb-v", "fsdp:2,pp:2", "full"), ("zb-h1", "pp:2,tp:2", "none")]


@pytest.mark.parametrize(("name", "mesh", "remat"), COMPILED)
def test_compiled_bytes_match_the_computed_ones(name, mesh, remat, tmp_path):
    """A compiled plan counts the branches that a device takes."""
    path = tmp_path / "piped_job.py"
    path.write_text(
        "from meshwright.models import Decoder\nfrom meshwright.train import language_job\n"
        "job = language_job(Decoder.named('tiny', num_layers=8), batch_size=16, num_tokens=32)\n"
    )
    plan = plan_of(name, mesh, "cpu:4", remat=remat)
    found = compile_step(f"{path}:job", "cpu:4", plan.setup)
    computed = sum(item.wire_bytes for item in plan.sent)
    assert found.wire_bytes == pytest.approx(computed, rel=0.02)
