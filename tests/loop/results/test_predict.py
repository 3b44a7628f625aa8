"""Predictions for the report, metrics that are arrays, and their sections of the page."""

import json

import jax
import numpy as np
import pytest

from meshwright.errors import JobError
from meshwright.loop.report import build_report
from meshwright.loop.report.run_record import read_run
from meshwright.loop.results.predict import is_image, make_table, to_pngs

from ...pages.png_file import decode


def test_labels_are_integers_or_the_largest_output():
    y = np.int32([0, 2, 1])
    scores = np.float32([[3, 1, 2], [0, 1, 2], [5, 4, 3]])
    found = make_table({"x": np.zeros((3, 2), np.float32), "y": y}, scores)
    assert (found.predicted, found.true, found.num_right) == (["0", "2", "0"], ["0", "2", "1"], 2)
    found = make_table({"x": np.zeros((3, 2), np.float32)}, scores)  # nothing to compare with
    assert (found.predicted, found.num_right) == (None, None)
    assert found.outputs[0].values[0] == "[3, 1, 2]"
    found = make_table({"a": y, "b": y}, {"c": y})  # which of them is the label?
    assert (found.predicted, found.true) == (["0", "2", "1"], None)
    assert make_table({"a": y, "label": y}, {"c": y}).num_right == 3
    assert make_table({"x": np.zeros((3, 9), np.float32)}, {"z": np.float32([1, 2, 3])}).inputs[0].values[0] == (
        "[0, 0, 0, 0, 0, 0, … 9 values]"
    )


@pytest.mark.parametrize(
    ("images", "size", "first"),
    [
        (np.full((2, 4, 5, 1), 200, np.uint8), (5, 4, 0), 200),
        (np.full((2, 4, 5, 3), 0.5, np.float32), (5, 4, 2), 128),
        (np.stack([np.full((3, 4, 5), -2.0), np.full((3, 4, 5), 2.0)]), (5, 4, 2), 0),  # channels first, scaled
        (np.full((1, 200, 100, 1), 1.0, np.float32), (33, 66, 0), 255),
    ],
)
def test_images_become_png_files(images, size, first):
    assert is_image(images.shape)
    width, height, color, pixels = decode(to_pngs(images)[0])
    assert (width, height, color) == size
    assert pixels[0] == first


CONFUSED = """
from meshwright.metrics import Sum, Max
def counted(params, batch, rng):
    value, metrics = loss(params, batch, rng)
    guess = (batch["x"] @ params["w"] + params["b"]).argmax(-1)
    table = jnp.zeros((NUM_CLASSES, NUM_CLASSES), jnp.int32).at[batch["y"], guess].add(1)
    return value, {**metrics, "confusion": Sum(table), "largest": Max(jnp.abs(batch["x"]).max())}
confused = make(loss=counted, predict=predict)
def stateful_loss(params, state, batch, rng):
    value, metrics = loss(params, batch, rng)
    return value, metrics, {"seen": state["seen"] + 1.0}
stateful = make(
    loss=stateful_loss, model_state=lambda key: {"seen": jnp.zeros(())},
    predict=lambda params, state, batch: {"seen": state["seen"] + 0.0 * batch["x"][:, 0]},
)
bad = make(predict=lambda params, batch: {"w": params["b"]})
images = make(
    data={"x": X, "y": Y, "image": rng.random((NUM_ROWS, 6, 6, 1)).astype(np.float32)}, eval_data=None,
    batch={**BATCH, "image": np.zeros((8, 6, 6, 1), np.float32)}, predict=predict,
)
"""


@pytest.mark.slow
def test_a_job_with_array_metrics_and_predictions(desk):
    desk.add(CONFUSED)
    said = []
    desk.run("confused", stop=2, steps=4, eval_every=2, report=True, say=said.append)
    assert any(line.startswith("predicted 8 rows of an evaluation batch: ") for line in said)
    desk.run("confused", resume=True, steps=4, eval_every=2, report=True)
    last = desk.run("confused", resume=True, steps=4, eval_every=2, report=True)  # complete: predicts nothing more
    folder = desk.folder()
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert all(np.sum(line["confusion"]) == 8 for line in lines if "confusion" in line)
    held_out = next(line for line in lines if "eval/confusion" in line)
    x = np.random.default_rng(0).normal(size=(40, 8)).astype(np.float32)
    y = x[:16, :4].argmax(1)  # 16 of the 20 rows fill two batches
    assert np.sum(held_out["eval/confusion"], 1).tolist() == np.bincount(y, minlength=4).tolist()
    assert held_out["eval/accuracy"] == pytest.approx(np.trace(held_out["eval/confusion"]) / 16)
    assert held_out["eval/largest"] == np.abs(x[:16]).max()
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    assert [event["when"] for event in events if event["kind"] == "prediction"] == ["before", "after"]
    # The same predictions as on one device.
    after = json.loads((folder / "predictions" / "4.json").read_text())
    right = sum(a == b for a, b in zip(after["predicted"], after["true"], strict=True))
    params = jax.device_get(last.state.params)
    assert after["predicted"] == [str(label) for label in (x[:8] @ params["w"] + params["b"]).argmax(1)]
    assert after["true"] == [str(label) for label in y[:8]]
    assert any(f"{right} of 8 labels are right" in event["text"] for event in events if event.get("when") == "after")
    run = read_run(folder)
    assert set(run.arrays) == {"confusion", "eval/confusion"}
    html = (folder / "report.html").read_text()
    for text in ("Predictions", "Before training", "After 4 steps", "predicted class", "eval/confusion", "4 x 4"):
        assert text in html, text


def test_images_are_drawn_with_predictions_on_training_rows(desk):
    desk.add(CONFUSED)
    desk.run("images", steps=1, eval_every=0, report=True)
    html = build_report(desk.folder()).read_text()
    assert html.count("<img") == 16
    assert "a training batch" in html
    (desk.folder() / "predictions" / "1.json").write_text("{")
    assert "Cannot read predictions/1.json" in build_report(desk.folder()).read_text()


def test_predictions_see_the_model_state(desk):
    desk.add(CONFUSED)
    desk.run("stateful", steps=3, eval_every=0, view="global")
    after = json.loads((desk.folder() / "predictions" / "3.json").read_text())
    assert after["outputs"][0]["values"] == ["3"] * 8


def test_outputs_without_rows_are_an_error(desk):
    desk.add(CONFUSED)
    with pytest.raises(JobError, match=r"`predict` returned `w` of shape \[4\] for a batch of 8 rows"):
        desk.run("bad", steps=1, eval_every=0)
