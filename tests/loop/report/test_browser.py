"""The report page in a real browser: everything is drawn, without network access or errors."""

import json

from meshwright.loop.report import build_report


def test_a_finished_run(fake_run, browse):
    seen = browse(build_report(fake_run(restarts=(100, 200))))
    assert seen.console == []
    assert seen.found["problems"] == []
    assert seen.found["network"] == []
    # Loss with its mean and evaluations (a line and dots), learning rate, gradient norm, accuracy with its evaluations,
    # throughput with its mean, memory.
    assert seen.found["curves"] == 12
    assert seen.found["pictures"] >= 12
    assert seen.found["last"][0].startswith("step 300\neach step 1.968\nsmoothed 1.968\nheld-out 2.038")
    assert len(seen.found["last"]) == 7  # all charts over steps read out the same place
    assert seen.found["after_escape"] == []
    assert seen.found["buttons"] == ["Copy"]
    # Device 0 in the mesh, and in a tile of each of the four pictures of leaves.
    assert seen.found["lit"] == ["0"] + ["0 4"] * 4


def test_a_narrow_dark_page_of_a_run_that_was_killed(fake_run, browse):
    folder = fake_run(steps=120, finished=False, mfu=True, mesh="dp:2,fsdp:4,tp:8")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 121, "loss": NaN}\n{"step": 122, "lo')
    seen = browse(build_report(folder), width=390, dark=True)
    assert seen.console == []
    assert seen.found["problems"] == []
    assert seen.found["network"] == []
    assert seen.found["paper"] == "rgb(19, 21, 25)"


def test_a_run_that_recorded_almost_nothing(tmp_path, browse):
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "loss": 3.0}) + "\n")
    seen = browse(build_report(tmp_path))
    assert seen.console == []
    assert seen.found["problems"] == []
    assert seen.found["curves"] == 1
