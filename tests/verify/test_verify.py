"""Correct jobs must be equal on every mesh; the cause of each broken job must be named."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import meshwright as mw
from meshwright import P
from meshwright.models import Decoder
from meshwright.train import language_job
from meshwright.verify import VerifyReport, verify
from meshwright.verify.example_batch import example_batch
from meshwright.verify.mesh_choices import all_meshes, each_axis_alone, rule_axes
from meshwright.verify.reference import row_blocks

from .small_job import RULES, init, linear, make_job, model, some_batch, squares, sum_twice

# --- Correct jobs ---


def test_a_correct_job():
    def loss(params, batch, rng):
        h = model(params, batch["x"])
        if rng is not None:
            h = mw.parallel.dropout(h, 0.5, rng)
        errors = ((h - batch["y"]) ** 2).sum(-1) * batch["mask"]
        return (errors.sum(), batch["mask"].sum()), {}

    report = verify(make_job(loss), meshes="dp:2,fsdp:2,tp:2", num_minibatches=(1, 2))
    report.require()
    assert [(case.view, case.num_minibatches) for case in report.cases] == [
        ("global", 1), ("global", 2), ("local", 1), ("local", 2)
    ]  # fmt: skip
    for case in report.cases:
        assert case.mesh == "dp:2,fsdp:2,tp:2"
        assert case["initial parameters"].error == 0
        assert 0 < case["gradients"].error < 1e-6
        assert case["parameters"].num_leaves == 3
        assert not case.causes
    summary = "4 equal; 3 parameters, 16 rows, 3 steps, relative tolerance 1e-05 (0.0001 after the last step)"
    assert summary in str(report)


def decoder_job():
    model = Decoder.named("tiny", vocab_size=64, num_layers=1, d_model=16, d_ff=32, dropout=0.1)
    return language_job(model, batch_size=16, num_tokens=8)


def tokens():
    generator = np.random.default_rng(0)
    batch = {name: generator.integers(0, 64, (16, 8)).astype(np.int32) for name in ("inputs", "targets")}
    return batch | {"weights": (generator.random((16, 8)) < 0.7).astype(np.float32)}


def test_a_decoder():
    verify(decoder_job(), meshes="fsdp:2,tp:4", views="local", batch=tokens(), num_steps=2).require()


@pytest.mark.slow
def test_a_decoder_on_each_axis():
    report = verify(decoder_job(), meshes=["dp:8", "fsdp:8", "tp:8"], batch=tokens())
    report.require()
    assert len(report.cases) == 6


def test_an_optimizer_that_uses_whole_parameters():
    optimizer = optax.adafactor(1e-2, min_dim_size_to_factor=4)
    verify(make_job(), meshes="fsdp:4,tp:2", views="global", optimizer=optimizer, tolerance=1e-4).require()


def test_each_case_is_traced_once_and_the_reference_shared():
    traces = []

    def loss(params, batch, rng):
        traces.append(batch["x"].shape)
        return squares(params, batch, rng)

    report = verify(make_job(loss), meshes=["dp:2", "tp:2"], num_steps=2)
    assert report.ok
    assert len(traces) == 1 + len(report.cases)


# --- Views ---


def test_a_loss_of_whole_parameters_is_compared_in_the_views_it_runs_in():
    job = make_job(functools.partial(squares, reduce=lambda y: y), local_axes=())
    report = verify(job, meshes=["dp:2,tp:4", "fsdp:2"], num_steps=1)
    assert [(case.view, case.verdict) for case in report.cases] == [
        ("global", "equal"), ("local", "skipped"), ("global", "equal"), ("local", "equal")
    ]  # fmt: skip
    assert report.ok
    assert "skipped dp:2,tp:4: the local view: the loss does not communicate over tp." in str(report)
    forced = verify(job, meshes="dp:2,tp:4", views="local", num_steps=1)
    assert forced.cases[0].message.startswith("the loss does not communicate over mesh axis 'tp' (4 devices)")
    assert forced.cases[0].verdict == "failed"


def test_an_axis_that_splits_nothing_is_not_compared():
    job = make_job(rules=mw.Rules(list(RULES), optional_axes=("fsdp", "tp", "sp")))
    by_name = verify(job, meshes="dp:2,sp:4", views="global", num_steps=1)
    assert by_name.cases[0].verdict == "failed"
    assert "this job does not use mesh axis 'sp'" in by_name.cases[0].message
    found = verify(job, meshes="all", views="global", num_steps=1, devices=2)
    assert {case.mesh: case.verdict for case in found.cases}["sp:2"] == "skipped"


# --- Meshes ---


def test_meshes_that_a_job_does_not_fit_are_skipped_or_fail():
    rules = mw.Rules([("odd", P("pp")), *RULES], optional_axes=("fsdp", "tp", "pp"))
    job = make_job(init=lambda key: init(key) | {"odd": jnp.ones(3)}, rules=rules, batch=some_batch(rows=3))
    report = verify(job, meshes="all", views="global", devices=2, num_steps=1)
    assert {case.mesh: case.verdict for case in report.cases} == {
        "tp:2": "equal", "pp:2": "skipped", "fsdp:2": "skipped", "dp:2": "skipped"
    }  # fmt: skip
    assert report.ok
    text = str(report)
    assert "skipped fsdp:2, dp:2: a batch of 3 rows cannot be split over 2 devices." in text
    assert "3 % 2 = 1" in text
    by_name = verify(job, meshes=["dp:2", "pp:2"], views="global", num_steps=1)
    assert [case.verdict for case in by_name.cases] == ["failed", "failed"]
    assert not by_name.ok


def test_ways_to_split_devices():
    axes = rule_axes([("w", P("fsdp", ("tp", "x")))])
    assert axes == {"dp": False, "fsdp": True, "tp": True, "x": True}
    assert list(rule_axes(RULES)) == ["dp", "fsdp", "tp"]
    assert list(rule_axes([("w", P("model"))], data_axes=("data",))) == ["data", "model"]
    assert len(all_meshes(8, rule_axes(RULES))) == 10
    assert all_meshes(6, {"dp": False, "tp": True}) == ["tp:6", "dp:2,tp:3", "dp:3,tp:2", "dp:6,tp:1"]
    assert each_axis_alone(8, axes) == ["dp:8,fsdp:1,tp:1,x:1", "fsdp:8,tp:1,x:1", "fsdp:1,tp:8,x:1", "fsdp:1,tp:1,x:8"]


def test_the_job_s_own_mesh_by_default():
    report = verify(make_job(mesh="fsdp:2,tp:2"), views="global", num_steps=1)
    assert [case.mesh for case in report.cases] == ["fsdp:2,tp:2"]
    assert report.ok


def test_rows_are_cut_as_the_step_cuts_them():
    batch = {"x": np.arange(8), "scalar": np.float32(2)}

    def rows(*args):
        return [part["x"].tolist() for part, _ in row_blocks(batch, jax.random.key(0), *args)]

    assert rows("local", 2, 1) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert rows("local", 2, 2) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert rows("global", 2, 2) == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert rows("global", 1, 2) == [[0, 1, 2, 3], [4, 5, 6, 7]]


# --- Batches ---


def test_batches():
    struct = {"tokens": jax.ShapeDtypeStruct((64,), jnp.int32), "mask": jax.ShapeDtypeStruct((4, 2), jnp.float32)}
    drawn = example_batch(make_job(batch=struct), seed=1)
    assert set(drawn["tokens"].tolist()) == {0, 1}
    assert drawn["tokens"].dtype == np.int32
    assert ((drawn["mask"] >= 0) & (drawn["mask"] < 1)).all()
    assert np.array_equal(drawn["mask"], example_batch(make_job(batch=struct), seed=1)["mask"])
    assert not np.array_equal(drawn["mask"], example_batch(make_job(batch=struct), seed=2)["mask"])
    given = some_batch()
    assert example_batch(make_job(batch=given))["x"] is given["x"]
    with pytest.raises(mw.JobError, match="no batch to compare"):
        example_batch(make_job(batch=None))


@pytest.mark.parametrize("name", ["make_batch", "example_batch"])
def test_a_job_that_draws_its_batches(name):
    class Own:
        batch = None

    setattr(Own, name, staticmethod(lambda seed: {"drawn from": seed}))
    drawn = example_batch(Own(), seed=3)["drawn from"]
    assert drawn == (3 if name == "make_batch" else jax.random.key(3))


# --- Errors ---


@pytest.mark.parametrize(
    ("changes", "options", "text"),
    [
        ({}, {"tolerance": 0.0}, "tolerance=0.0"),
        ({}, {"num_steps": 0}, "num_steps=0"),
        ({}, {"devices": 1}, "at least 2 devices, but there is only one"),
        ({}, {"devices": 99}, "devices=99, but 8 are available"),
        ({}, {"meshes": "dp:3,tp:4"}, "dp=3 x tp=4 needs 12 devices"),
        ({"loss": None}, {}, "verify: the job has no loss"),
    ],
)
def test_bad_arguments(changes, options, text):
    with pytest.raises(mw.MeshwrightError, match=text):
        verify(make_job(**changes), **options)


def test_a_step_that_fails_on_one_device_raises():
    def loss(params, batch, rng):
        raise RuntimeError("not written yet")

    with pytest.raises(RuntimeError, match="not written yet") as raised:
        verify(make_job(loss))
    assert any("the step on one device" in note for note in raised.value.__notes__)


def test_a_batch_without_gradients_is_refused():
    batch = {name: np.zeros_like(leaf) for name, leaf in some_batch().items()}
    with pytest.raises(mw.MeshwrightError, match="every gradient is zero on one device"):
        verify(make_job(batch=batch), meshes="fsdp:8", views="global")


def test_notes_say_which_differences_a_batch_cannot_show():
    same = {name: np.broadcast_to(leaf[:1], leaf.shape) for name, leaf in some_batch().items()}
    job = make_job(lambda params, batch, rng: squares(params | {"bias": 0.0}, batch, rng), batch=same)
    report = verify(job, meshes="dp:8", views="global", num_steps=1)
    assert report.ok
    assert "note: the gradient of 1 of 3 parameters is zero on this batch (`bias`)" in str(report)
    assert "note: all 16 rows of the batch are equal" in str(report)
    assert verify(make_job(), meshes="dp:8", views="global", num_steps=1).notes == ()


def test_a_reference_that_is_not_finite():
    with pytest.raises(mw.MeshwrightError, match="the loss is not finite on one device"):
        verify(make_job(lambda params, batch, rng: (jnp.nan * params["up"].sum(), {})))


# --- The report ---


def test_a_report_is_data(capsys):
    from rich.console import Console

    report = verify(
        make_job(functools.partial(linear, reduce=sum_twice)), meshes="dp:2,tp:4", views="local", num_steps=1
    )
    data = json.loads(report.to_json())
    assert data["ok"] is False
    (case,) = data["cases"]
    assert (case["mesh"], case["view"], case["verdict"]) == ("dp:2,tp:4", "local", "different")
    assert case["comparisons"][1]["first"]["ratio"]["median"] == pytest.approx(4)
    assert case["causes"][0]["kind"] == "reduction"
    Console(width=200).print(report)
    shown = capsys.readouterr().out
    assert "DIFFERENT" in shown
    assert "likely cause: the loss is 4x" in shown


def test_nothing_compared_is_not_ok():
    report = VerifyReport((), 1e-5, 3, 0, 0)
    assert not report.ok
    assert "nothing was compared" in report.summary()
