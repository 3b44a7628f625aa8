"""Bytes, ticks and memory of pipeline schedules: computed from the table, and read from compiled programs."""

import functools
from dataclasses import replace

import jax
import pytest

from meshwright.errors import MeshError
from meshwright.models import Decoder, Execution
from meshwright.parallel import make_schedule
from meshwright.parallel.pipeline.named_schedules import check_rounds
from meshwright.parallel.pipeline.slots import assign_slots
from meshwright.plan.compiled.compile import compile_step
from meshwright.plan.costs.job_costs import profile_job
from meshwright.plan.costs.stages import Stages
from meshwright.plan.plan import make_plan
from meshwright.plan.step_setup import Setup, with_schedule
from meshwright.train.jobs.job_loading import load_job
from meshwright.train.jobs.language_job import language_job

NAMES = ("1f1b", "aligned-1f1b", "interleaved-1f1b", "zb-h1", "zb-v")


@functools.cache
def job(num_layers=8):
    return language_job(Decoder.named("tiny", num_layers=num_layers), batch_size=16, num_tokens=32)


@functools.cache
def profile(num_layers=8):
    return profile_job(job(num_layers), precision="float32", platform="cpu", remats=("none", "full"))


def plan_of(name, mesh="pp:2", target="cpu:2", num_layers=8, **options):
    setup = Setup(mesh=mesh, pipeline=name, precision="float32", **options)
    return make_plan(job(num_layers), target, setup, profile=profile(num_layers))


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
    with pytest.raises(MeshError, match=r"8 layers cannot be cut into 8 x 2 pipeline stages[\s\S]*set pp to 1, 2 or 4"):
        plan_of("zb-v", "pp:8", "cpu:8")
    with pytest.raises(MeshError, match=r"pp=4 does not divide 7 layers[\s\S]*set pp to 1, or pass --pad layers/"):
        plan_of("1f1b", "pp:4", "cpu:4", num_layers=7)
    with pytest.raises(MeshError, match=r"3 layers cannot be cut into 4 x 1 pipeline stages"):
        plan_of("1f1b", "pp:4", "cpu:4", num_layers=3, pad=("layers/",))


def test_stages_of_different_lengths_take_as_long_as_the_longest():
    """Seven layers on four devices: each computes two for a microbatch, and the last one ignores the second."""
    uneven = plan_of("1f1b", "pp:4", "cpu:4", num_layers=7, pad=("layers/",), num_microbatches=8)
    even = plan_of("1f1b", "pp:4", "cpu:4", num_microbatches=8)
    layer = (profile(8).needs["none"].flops.matmul - profile(7).needs["none"].flops.matmul) * 16
    assert uneven.flops.matmul == pytest.approx(even.flops.matmul, rel=1e-6)
    assert even.flops.model - uneven.flops.model == pytest.approx(
        layer - (even.flops.masked - uneven.flops.masked), rel=1e-6
    )
    parts = [part for part in uneven.memory.parts if part.name != "layers of the stages"]
    assert len(parts) == len(uneven.memory.parts) - 1
    for part, other in zip(parts, even.memory.parts, strict=True):
        assert part.bytes == pytest.approx(other.bytes, rel=0.01), part.name
    assert "7 layers in 4 x 1 pipeline stages of different lengths: devices compute as many as in 8" in uneven.notes
    assert not any("different lengths" in note for note in even.notes)


def test_a_setup_keeps_the_stages_per_device_of_its_job_only_with_its_schedule():
    run = Execution(pipeline="interleaved-1f1b", pipeline_rounds=4)
    own = language_job(Decoder.named("tiny", num_layers=8), batch_size=16, num_tokens=32, run=run)
    costs = profile_job(own, precision="float32", platform="cpu", remats=("none",))
    asked = [("interleaved-1f1b", None, 4), (None, None, 4), (None, 2, 2), ("1f1b", None, 1), ("circular", None, 2)]
    for name, rounds, expected in asked:
        setup = Setup(mesh="pp:2", pipeline=name, pipeline_rounds=rounds)
        execution = with_schedule(own, setup).execution
        assert check_rounds(execution.pipeline, execution.pipeline_rounds) == expected
        assert costs.stages({"pp": 2}, setup).rounds == expected


@pytest.mark.parametrize(("pp", "target", "times"), [(2, "v5p:2x2x1", 3), (4, "v5p:2x2x2", 2), (4, "cpu:8", 3)])
def test_libtpu_gathers_a_recomputed_stage_of_one_layer_once(pp, target, times):
    """Read from six programs for v5p (benchmarks/results/plan_search.md)."""
    model = Decoder.named("tiny", num_layers=8)
    own = language_job(model, batch_size=16, num_tokens=32)
    costs = profile_job(own, precision="float32", platform=target[:3].replace("v5p", "tpu"), remats=("none", "full"))
    setup = Setup(mesh=f"pp:{pp},fsdp:2", pipeline="interleaved-1f1b", num_microbatches=8, precision="float32")
    setups = setup, replace(setup, remat="full")
    none, full = (make_plan(own, target, each, profile=costs) for each in setups)
    gathered = [
        sum(item.wire_bytes for item in plan.sent if (item.axis, item.kind) == ("fsdp", "all-gather"))
        for plan in (none, full)
    ]
    layer = sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(model.init_layer, jax.random.key(0))))
    norms = 2 * model.d_model  # replicated
    assert gathered[1] - gathered[0] == (times - 2) * 8 * 8 / pp * (layer - norms) * 4 / 2


# The meshes and policies whose programs differ: gathers in the cells, rings in the cells, layers that move. With 6 or 7
# layers, stages are longer than what a device stores, places are empty, and layers move one by one. With "once",
# gathered layers move.
COMPILED = [
    ("1f1b", "fsdp:2,pp:2", "none", 8, None),
    ("zb-v", "fsdp:2,pp:2", "full", 8, None),
    ("zb-h1", "pp:2,tp:2", "none", 8, None),
    ("gpipe", "fsdp:2,pp:2", "full", 7, None),
    ("interleaved-1f1b", "fsdp:2,pp:2", "full", 7, None),
    ("zb-v", "pp:2,tp:2", "none", 6, None),
    ("1f1b", "pp:4", "none", 6, None),
    ("gpipe", "pp:4", "full", 6, None),
    ("circular", "fsdp:2,pp:2", "full", 8, "once"),
]


@pytest.mark.parametrize(("name", "mesh", "remat", "num_layers", "sync"), COMPILED)
def test_compiled_bytes_match_the_computed_ones(name, mesh, remat, num_layers, sync, tmp_path):
    """A compiled plan counts the branches that a device takes."""
    path = tmp_path / "piped_job.py"
    path.write_text(
        "from meshwright.models import Decoder\nfrom meshwright.train import language_job\n"
        f"job = language_job(Decoder.named('tiny', num_layers={num_layers}), batch_size=16, num_tokens=32)\n"
    )
    pad = ("layers/",) if num_layers % int(mesh.partition("pp:")[2][0]) else ()
    plan = plan_of(name, mesh, "cpu:4", num_layers, remat=remat, pad=pad, sync=sync)
    found = compile_step(f"{path}:job", "cpu:4", plan.setup)
    computed = sum(item.wire_bytes for item in plan.sent)
    assert found.wire_bytes == pytest.approx(computed, rel=0.02)


@pytest.mark.parametrize(
    ("name", "mesh", "num_layers"), [("gpipe", "pp:4", 7), ("1f1b", "pp:4", 7), ("zb-v", "pp:2", 8)]
)
def test_layers_that_move_or_have_empty_places_are_in_memory_twice(name, mesh, num_layers, tmp_path):
    """Of a decoder that is nearly all weights, 16 MiB per layer, nothing else grows."""
    sizes = f"num_layers={num_layers}, d_model=512, d_ff=2048, num_heads=8"
    path = tmp_path / "piped_job.py"
    path.write_text(
        "from meshwright.models import Decoder\nfrom meshwright.train import language_job\n"
        f"job = language_job(Decoder.named('tiny', {sizes}), batch_size=8, num_tokens=16)\n"
    )
    target = f"cpu:{mesh[-1]}"
    setup = Setup(mesh=mesh, pipeline=name, num_microbatches=8, precision="float32", optimizer="sgd", pad=("layers/",))
    plan = make_plan(load_job(f"{path}:job"), target, setup)
    compiled = compile_step(f"{path}:job", target, setup)
    assert 0.8 <= plan.memory.total / compiled.peak_bytes <= 1.05
