"""The page about a plan, in a browser and as text: charts, no network requests, and a basis for every figure."""

import dataclasses
import functools
import re
import runpy
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import meshwright as mw
from meshwright.errors import MeshwrightError
from meshwright.layout import format_bytes
from meshwright.models import Decoder
from meshwright.pages import percent
from meshwright.pages.colors import NUM_FILLS, NUM_TONES
from meshwright.plan.compiled.compile import Compiled
from meshwright.plan.compiled.verdict import CompiledCollective
from meshwright.plan.costs.job_costs import profile_job
from meshwright.plan.costs.memory import Part
from meshwright.plan.output.commands import PlannedJob
from meshwright.plan.output.plan_diff import diff_plans
from meshwright.plan.output.plan_page import build_diff_page, build_plan_page, render_diff, render_plan
from meshwright.plan.output.sections.communication_section import sending_section
from meshwright.plan.output.sections.memory_section import _bar_parts
from meshwright.plan.output.sections.time_section import BETWEEN, EXPOSED, HIDDEN, _lanes
from meshwright.plan.output.summary import plan_summary, ranking_table
from meshwright.plan.plan import make_plan
from meshwright.plan.search import search
from meshwright.plan.step_setup import Setup
from meshwright.train import language_job

SUBJECT = PlannedJob(model="decoder-7b", num_tokens=4096)


@pytest.fixture
def browse(tmp_path):
    """Opens a page in Chromium; see tests/browser.py."""
    module = runpy.run_path(str(Path(__file__).parents[2] / "browser.py"))

    def look(path, **options):
        return module["browse"](path, tmp_path, **options)

    return look


@functools.cache
def big_job():
    return language_job(Decoder.named("7b"), batch_size=256, num_tokens=4096)


@functools.cache
def big_profile():
    return profile_job(big_job(), platform="tpu")


@functools.cache
def tiny_job():
    return language_job(Decoder.named("tiny"), batch_size=64, num_tokens=32)


def compiled(setup):
    """Returns made-up collectives, as many as in the program of a 7B decoder."""
    kinds = [
        ("all-gather", "fsdp", True, 1),
        ("collective-permute", "tp", True, 2),
        ("reduce-scatter", "fsdp", True, 0),
    ]
    kinds += [("all-reduce", "fsdp", False, 0), ("all-reduce", "tp", False, 0)]
    collectives = tuple(
        CompiledCollective(
            kind,
            (axis,),
            2**25,
            2.0**24,
            4,
            is_async,
            between,
            32,
            f"jit(step)/while/body/{kind}",
            flops_between=between * 1e9,
            serves=f"params/layers/{number}",
            line=f"models/<layer {number}>.py:7",
            transfer_s=1e-4,
            share=0.4 * between,
        )
        for number in range(20)
        for kind, axis, is_async, between in kinds
    )
    memory = {"argument": 600 * 2**20, "temp": 33 * 2**30}
    return Compiled("v5p:4x4x8", setup, peak_bytes=34 * 2**30, memory=memory, collectives=collectives)


def big_plan(**changes):
    setup = Setup(**({"mesh": "fsdp:32,tp:4", "remat": "dots", "rows": 256} | changes))
    return make_plan(big_job(), "v5p:4x4x8", setup, profile=big_profile(), compiled=compiled(setup), price=4.2)


def words(html):
    """Returns the visible text of a page."""
    body = re.sub(r"<(style|script)\b.*?</\1>", " ", html, flags=re.S).replace("<wbr>", "")
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", body))


def test_the_page_of_a_7b_decoder_and_its_search(browse, tmp_path):
    found = search(big_job(), "v5p:4x4x8", constraints="pp=1, tp<=8, remat=dots|full", profile=big_profile())
    path = build_plan_page(
        big_plan(), tmp_path / "out" / "plan.html", job=big_job(), subject=SUBJECT, others=found.ranked[:3], found=found
    )
    assert path.stat().st_size < 3e6
    text = words(path.read_text())
    assert "The best 4 are shown. 1 of them was compiled; the chart has the computed figures of all others" in text
    assert "the plans below, compiled" in text
    seen = browse(path)
    assert seen.console == []
    assert seen.found["problems"] == []
    assert seen.found["network"] == []
    # Memory and its course, activations, time, axes, mesh, torus, four leaves, candidates and four bars of plans.
    assert seen.found["pictures"] == 16
    assert seen.found["buttons"] == ["Copy"] * 6  # train, reproduce, and one per plan
    # Device 0 in the mesh and in each of the four pictures of leaves.
    assert seen.found["lit"] == ["0"] * 5


def test_all_bytes_are_in_the_bar():
    parts = (Part("bookkeeping", 20, "computed"), Part("parameters", 10**6, "computed"))
    assert _bar_parts(parts) == (["parameters", "bookkeeping"], [10**6, 20])
    names = ("bookkeeping", "parameters", "optimizer", "gradients", "gathered weights", "activations", "temporaries")
    parts = tuple(Part(name, 100, "computed") for name in names)
    assert _bar_parts(parts) == (list(names[1:]), [100, 200, 100, 100, 100, 100])
    more = tuple(Part(f"part {number}", 50, "computed") for number in range(NUM_FILLS - 6))
    shown, values = _bar_parts((*parts, *more))
    assert ("rest" not in shown, sum(values), len(shown)) == (True, 700 + 50 * len(more), NUM_FILLS)
    shown, values = _bar_parts((*parts, *more, Part("another", 40, "computed")))
    assert (shown[-1], sum(values), len(shown)) == ("rest", 740 + 50 * len(more), NUM_FILLS)


def test_the_text_of_the_page():
    html = render_plan(big_plan(), job=big_job(), subject=SUBJECT, notes=["a remark"])
    text = words(html)
    assert "It fits: 34.0 GiB of 95.7 GiB (36%), 61.7 GiB free." in text
    assert "meshwright train --model decoder-7b --num-tokens 4096 --batch-size 256 --mesh fsdp:32,tp:4" in text
    assert "Other plans" not in text
    assert "Pipeline" not in text
    assert "a remark" in text
    assert "exposed: no matmul between its start and its end" in text
    assert "All 100 collectives of the compiled program, 100 kinds" in text
    assert "params/layers/mlp/gate" in text
    assert "Chips are linked along x (4, a ring), y (4, a ring), z (8, a ring)." in text
    assert "chip 3,3,7: x 3, y 3, z 7" in html
    # Chips have another order than devices, so they are not highlighted together.
    assert 'data-devices="0"' not in html[html.index("chip 0,0,0: x 0") : html.index("chip 3,3,7: ")]
    assert "&lt;layer 19&gt;" in html
    # Every row of the tables of figures names its basis.
    for heading in ("Where the figures come from", "One step on one device"):
        rows = re.findall(r"<tr>(.*?)</tr>", html[html.index(heading) :].partition("</table>")[0], flags=re.S)[1:]
        assert rows
        assert all(re.search("compiled|computed|assumed", row) for row in rows)


def test_a_narrow_dark_page_with_a_pipeline_on_slices(browse, tmp_path):
    setup = Setup(mesh="dp:2@dcn,fsdp:4,pp:2,tp:2", remat="full", rows=64)
    plan = make_plan(tiny_job(), "v5e:4x4*2", setup)
    path = build_plan_page(plan, tmp_path / "plan.html", job=tiny_job(), subject=PlannedJob(job="my.module:job"))
    text = words(path.read_text())
    assert "2 stages process 4 microbatches; each is idle 20.0% of the time (computed)." in text
    # On v5e only dims of size 16 wrap around.
    assert "Chips of each of 2 slices are linked along x (4, a line), y (4, a line)." in text
    seen = browse(path, width=390, dark=True)
    assert seen.console == []
    assert seen.found["squeezed"] == []
    assert seen.found["problems"] == []
    assert seen.found["network"] == []
    assert seen.found["paper"] == "rgb(19, 21, 25)"


def test_gpus_are_drawn_by_host_and_cpus_without_times(browse, tmp_path):
    plan = make_plan(tiny_job(), "h200:2x4", Setup(mesh="dp:2,fsdp:4"))
    assert "host: 2" in words(render_plan(plan, job=tiny_job(), subject=SUBJECT))
    plan = make_plan(tiny_job(), "cpu:8", Setup(mesh="fsdp:8"))
    path = build_plan_page(plan, tmp_path / "plan.html", job=tiny_job(), subject=SUBJECT)
    text = words(path.read_text())
    assert "Each device needs " in text
    assert "Step time is not estimated for CPUs." in text
    seen = browse(path)
    assert seen.console == []
    assert seen.found["problems"] == []


def test_a_plan_that_does_not_fit_gives_advice():
    setup = Setup(mesh="fsdp:4", remat="dots", rows=256)
    plan = make_plan(big_job(), "v5p:2x2x1", setup, profile=big_profile())
    text = words(render_plan(plan, job=big_job(), subject=SUBJECT))
    assert "✕ does not fit" in text
    assert "the largest part is activations with" in text
    assert "Train this plan anyway (run on every host)" in text
    assert "Use more remat, more minibatches, fewer rows or a larger tp axis to reduce it." in text


def test_titles_tell_plans_apart():
    """Also plans of one mesh, and models with other sizes than their names say."""

    def title(subject, **options):
        plan = make_plan(big_job(), "v5p:4x4x8", Setup(mesh="fsdp:128", **options), profile=big_profile())
        html = render_plan(plan, job=big_job(), subject=subject)
        found = re.search(r"<title>(.*?) · plan</title>", html)[1]
        assert f"<h1>{found} " in html
        return found

    assert title(SUBJECT) == "decoder-7b (6.7B parameters) as fsdp:128 on v5p:4x4x8"
    full = title(SUBJECT, remat="full", num_minibatches=2, sync="once", overlap=False)
    assert (
        full
        == "decoder-7b (6.7B parameters) as fsdp:128, remat=full, 2 minibatches, sync=once, no overlap on v5p:4x4x8"
    )
    other = PlannedJob(model="decoder-70b", model_options=("num_layers=126",), num_tokens=4096)
    assert title(other) == "decoder (6.7B parameters) as fsdp:128 on v5p:4x4x8"


def test_jobs_without_tokens_count_rows():
    def loss(params, batch, rng):
        return jnp.mean((batch["x"] @ params["w"]) ** 2), {}

    batch = {"x": jax.ShapeDtypeStruct((8, 64), "float32")}
    job = mw.Job(init=lambda key: {"w": jnp.zeros((64, 64))}, loss=loss, rules=[("w", P("fsdp"))], batch=batch)
    plan, other = (
        make_plan(job, "v5p:2x2x2", Setup(mesh="fsdp:8", remat=remat), price=2.0) for remat in ("none", "full")
    )
    subject = PlannedJob(job="train.py:job")
    said = words(render_plan(plan, job=job, subject=subject)) + str(plan_summary(plan, subject))
    said += str(ranking_table([plan])) + str(diff_plans(plan, other))
    assert "Rows per second" in said
    assert "rows/s" in said
    assert not re.search(r"tokens (per|/s)|tokens/s|billion tokens", said)


def test_large_replicated_parameters_are_named():
    def init(key):
        return {"table": jnp.zeros((4096, 512)), "head": jnp.zeros((512, 512))}

    def loss(params, batch, rng):
        return (params["table"][batch] @ params["head"]).mean(), {}

    batch = jax.ShapeDtypeStruct((8,), "int32")
    job = mw.Job(init=init, loss=loss, rules=[("table", P()), ("head", P("fsdp"))], batch=batch)
    plan = make_plan(job, "cpu:8", Setup(mesh="fsdp:8"))
    text = words(render_plan(plan, job=job, subject=SUBJECT))
    assert "Every device holds a full copy of params/table (8.0 MiB)." in text


def test_every_collective_has_its_data_hidden_share_and_source():
    text = words(render_plan(big_plan(), job=big_job(), subject=SUBJECT))
    row = "all-gather fsdp params/layers/0 512.0 MiB 32 32.0 MiB 1 40.0% partly hidden: the transfer takes longer"
    assert row in text
    assert "models/&lt;layer 0&gt;.py:7" in text
    assert "exposed: no matmul between its start and its end" in text
    # Each of five kinds sends 10 GiB: 60% of the first is exposed, 20% of the second, and all of the others.
    assert "38.0 GiB of it is exposed (compiled)." in text


def test_judged_transfers_of_different_axes_are_drawn_in_parallel():
    plan = big_plan()
    lanes = {lane.name: lane.spans for lane in _lanes(plan, plan.time)}
    hidden = {name: [span for span in spans if span.tone == HIDDEN] for name, spans in lanes.items()}
    assert [hidden[f"links of {axis}"][0].start for axis in ("fsdp", "tp")] == [0.0, 0.0]
    exposed = sum(span.end - span.start for spans in lanes.values() for span in spans if span.tone == EXPOSED)
    assert exposed == pytest.approx(plan.time.exposed.value, rel=1e-6)


def test_a_page_that_cannot_be_written(tmp_path):
    plan = make_plan(tiny_job(), "cpu:8", Setup(mesh="fsdp:8"))
    (tmp_path / "folder").mkdir()
    with pytest.raises(MeshwrightError, match="cannot be written"):
        build_plan_page(plan, tmp_path / "folder", job=tiny_job(), subject=SUBJECT)
    assert [one.name for one in tmp_path.iterdir()] == ["folder"]


def test_the_page_of_a_difference(browse, tmp_path):
    plans = [big_plan(), big_plan(mesh="fsdp:128", remat="full")]
    seen = browse(build_diff_page(diff_plans(*plans), tmp_path / "diff.html"))
    assert seen.console == []
    assert seen.found["problems"] == []
    assert seen.found["network"] == []
    assert seen.found["pictures"] == 4  # time and memory, a bar for each plan


def test_the_bars_of_a_difference_add_up_to_the_plans():
    """Also with more parts than colors."""
    mesh = "fsdp:16,pp:2,tp:4"
    plans = [big_plan(mesh="fsdp:128"), big_plan(mesh=mesh, pipeline="1f1b", num_microbatches=8, num_minibatches=2)]
    assert len({part.name for plan in plans for part in plan.memory.parts}) > NUM_TONES
    html = render_diff(diff_plans(*plans))
    totals = re.findall(r'class="bar-name"><b>[AB]: [^<]*</b> ([\d.]+ GiB)', html)
    assert totals == [format_bytes(plan.memory.total) for plan in plans]


def test_transfers_that_exceed_the_compute_are_not_called_overlapped():
    plan = make_plan(big_job(), "h100:16x8", Setup(mesh="fsdp:128", num_minibatches=2), profile=big_profile())
    hideable = sum(item.seconds * item.hidden for item in plan.sent)
    compute = plan.time.matmul.value + plan.time.memory.value
    assert hideable < compute
    assert f"{percent(plan.hidden_share)} of it overlaps with compute." in sending_section(plan).body
    short = dataclasses.replace(plan.time, matmul=dataclasses.replace(plan.time.matmul, value=0.0))
    said = sending_section(dataclasses.replace(plan, time=short)).body
    assert f"{percent(plan.hidden_share)} of it could overlap, but takes" in said


def test_the_host_between_steps_is_no_wait_for_communication():
    spans = next(lane for lane in _lanes(big_plan(), big_plan().time) if lane.name == "compute").spans
    assert [span.label for span in spans if span.tone == BETWEEN] == ["between steps"]
    assert spans[-1].tone == BETWEEN
