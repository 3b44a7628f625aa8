"""Jobs that hold their data: every form trains, stops and resumes at the exact row, on any mesh."""

import json
import shutil

import numpy as np
import pytest

from meshwright.data import check_ledger
from meshwright.errors import ConfigError, DataError

FORMS = ["arrays", "map_dataset", "source", "iter_dataset", "batched", "factory", "path"]


@pytest.fixture
def arrays_on_disk(tmp_path):
    """The arrays of the job, for its form `path`."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(40, 8)).astype(np.float32)
    (tmp_path / "arrays").mkdir()
    np.save(tmp_path / "arrays" / "x.npy", x)
    np.save(tmp_path / "arrays" / "y.npy", x[:, :4].argmax(1).astype(np.int32))


def logged(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [
        {
            name: value
            for name, value in line.items()
            if name not in ("time", "seconds", "memory_bytes", "rows_per_second", "goodput", "crc")
        }
        for line in lines
    ]


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_data_resumes_bitwise_and_on_another_mesh(desk, arrays_on_disk, form):
    shared = {"steps": 7, "eval_every": 3, "ledger": True}  # 7 steps span two epochs
    whole = desk.run(form, name="whole", **shared)
    assert (whole.why, whole.step) == ("finished", 7)
    assert desk.run(form, stop=3, **shared).why == "preempted"  # an evaluation was due
    shutil.copytree(desk.folder(), desk.folder("moved"))
    again = desk.run(form, resume=True, **shared)
    assert desk.bits(again.state) == desk.bits(whole.state)
    assert logged(desk.folder()) == logged(desk.folder("whole"))
    report = check_ledger(desk.folder() / "ledger").require()
    assert (report.num_steps, report.num_rows) == (7, 56)
    # The same rows on another mesh give the same losses.
    desk.run(form, name="moved", resume=True, mesh="dp:2,fsdp:4", **shared)
    losses = [[line["loss"] for line in logged(desk.folder(name)) if "loss" in line] for name in ("moved", "whole")]
    np.testing.assert_allclose(*losses, rtol=1e-5)


@pytest.mark.slow
def test_epochs_and_batch_sizes(desk):
    result = desk.run("arrays", epochs=2, steps=1000, eval_every=0, checkpoint_every=0)
    assert (result.why, result.step) == ("out of data", 10)
    said = []
    result = desk.run("arrays", name="larger", epochs=2, batch_size=16, steps=1000, eval_every=0, say=said.append)
    assert (result.why, result.step) == ("out of data", 5)
    assert "data: 40 rows, in batches of 16" in said
    assert desk.run("factory", name="rows", epochs=1, steps=1000, batch_size=16, eval_every=0).step == 2
    assert desk.run("batched", name="batches", epochs=2, steps=1000, eval_every=0).step == 10
    with pytest.raises(ConfigError, match=r"batch_size is 16, which would have no effect: .* gives whole batches"):
        desk.run("batched", name="x", batch_size=16)


@pytest.mark.slow
def test_evaluation_on_the_data_and_with_the_loss_of_the_job(desk):
    desk.add(
        "def eval_loss(params, batch, rng):\n"
        "    assert rng is None\n"
        "    value, metrics = loss(params, batch, None)\n"
        "    return value, {'mean_y': (batch['y'].astype(jnp.float32).sum(), jnp.float32(batch['y'].size))}\n"
        "other = make(eval_loss=eval_loss)\n"
        "drawn = make(data=None, make_batch=lambda seed: ARRAYS_OF(seed))\n"
        "def ARRAYS_OF(seed):\n"
        "    rows = np.random.default_rng(seed).integers(0, NUM_ROWS, 8)\n"
        "    return {'x': X[rows], 'y': Y[rows]}\n"
        "iterated = make(eval_data=DATASET.to_iter_dataset())\n"
    )
    said = []
    desk.run("other", steps=2, eval_every=2, say=said.append)
    line = logged(desk.folder())[-1]
    y = np.random.default_rng(0).normal(size=(40, 8)).astype(np.float32)[:16, :4].argmax(1)
    assert line["eval/mean_y"] == pytest.approx(y.mean(), rel=1e-6)  # 16 of 20 rows, in two batches
    assert "evaluation leaves out 4 of 20 rows, which do not fill a batch of 8" in said
    assert "eval/accuracy" not in line
    desk.run("drawn", name="drawn", steps=2, eval_every=2)
    assert 0 <= logged(desk.folder("drawn"))[-1]["eval/accuracy"] <= 1
    desk.run("iterated", name="iterated", steps=1, eval_every=1, eval_batches=3)
    assert "eval/accuracy" in logged(desk.folder("iterated"))[-1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_tokens": 64}, "num_tokens is 64, which would have no effect: the job's data is not text"),
        ({"validation": 0.5}, "validation is 0.5, which would have no effect: the job's data is not text"),
        ({"batch_size": 48}, r"the job's data has 40 rows, fewer than one batch of 48"),
        ({"data": "nowhere"}, "--data: nowhere does not exist"),
    ],
)
def test_options_without_effect_and_wrong_data(desk, changes, message):
    with pytest.raises((ConfigError, DataError), match=message):
        desk.run("arrays", **changes)
    assert not desk.folder().exists()


def test_the_old_default_of_the_tokenizer_is_accepted(desk):
    """Configurations of older runs hold `tokenizer: bytes`, also for jobs without text."""
    desk.run("arrays", steps=1, tokenizer="bytes")
    assert desk.folder().exists()
