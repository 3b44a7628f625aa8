import json
import math

import pytest

from meshwright.errors import MeshwrightError
from meshwright.loop.report.run_record import read_run


def write(folder, metrics=b"", events=b"", facts=b"{}"):
    folder.mkdir()
    (folder / "metrics.jsonl").write_bytes(metrics)
    (folder / "events.jsonl").write_bytes(events)
    (folder / "run.json").write_bytes(facts)
    return folder


def lines(*entries):
    return b"".join(json.dumps(entry).encode() + b"\n" for entry in entries)


def test_steps_and_evaluations_are_separated(tmp_path):
    metrics = lines(
        {"step": 1, "loss": 2.5, "seconds": {"data": 0.5}}, {"step": 1, "eval/loss": 3.0}, {"step": 2, "loss": 2.0}
    )
    run = read_run(write(tmp_path / "run", metrics))
    assert run.steps.known("loss") == [(1, 2.5), (2, 2.0)]
    assert run.steps.known("seconds/data") == [(1, 0.5)]
    assert run.evals.known("eval/loss") == [(1, 3.0)]
    assert run.notes == []


def test_the_last_values_of_a_recomputed_step_count(tmp_path):
    metrics = lines(
        *({"step": step, "loss": float(step)} for step in (1, 2, 3)), {"step": 2, "loss": 9.0}, {"step": 4, "x": 1}
    )
    run = read_run(write(tmp_path / "run", metrics))
    assert run.steps.steps == [1, 2, 3, 4]
    assert run.steps.known("loss") == [(1, 1.0), (2, 9.0), (3, 3.0)]
    assert math.isnan(run.steps["x"][0])


def test_a_torn_last_line_is_ignored_and_noted(tmp_path):
    run = read_run(write(tmp_path / "run", lines({"step": 1, "loss": 1.0}) + b'{"step": 2, "los'))
    assert run.steps.steps == [1]
    assert run.notes == ["Ignored the unfinished last line of metrics.jsonl."]


def test_invalid_lines_are_noted_by_number(tmp_path):
    metrics = lines({"step": 1, "loss": 1.0}) + b"\x00\x00\xff\n" + b"[1]\n" + lines({"step": 2, "loss": 1.0})
    run = read_run(write(tmp_path / "run", metrics))
    assert run.steps.steps == [1, 2]
    assert run.notes == ["Ignored 2 lines (2, 3) of metrics.jsonl: damaged, or not JSON objects."]


def test_odd_values_do_not_break_it(tmp_path):
    metrics = (
        b'{"step": 1, "loss": NaN, "name": "x", "big": 1' + b"0" * 400 + b', "ok": true, "none": null}\n{"loss": 1}\n'
    )
    run = read_run(write(tmp_path / "run", metrics, events=lines({"kind": 3}, {"no": "kind"}, {"kind": "start"})))
    assert run.steps.steps == [1]
    assert run.notes == ["Ignored 1 line of metrics.jsonl without a step."]
    assert run.steps.known("loss") == []
    assert run.steps["big"][0] == math.inf
    assert [event["kind"] for event in run.events] == ["start"]
    assert run.last_time is None


@pytest.mark.parametrize("facts", [b"", b"{", b"[]", b'"text"'])
def test_unreadable_facts_are_empty(tmp_path, facts):
    run = read_run(write(tmp_path / "run", facts=facts))
    assert run.facts == {}
    assert run.name == "run"


def test_missing_files_are_noted(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("")
    assert read_run(folder).notes == [
        "events.jsonl is missing.",
        "run.json is missing: mesh, layout, configuration and versions are unknown.",
    ]


def test_a_missing_folder_is_an_error_with_a_hint(tmp_path):
    (tmp_path / "decoder-001").mkdir()
    with pytest.raises(MeshwrightError, match=r"(?s)there is no run folder .*decoder-01.*did you mean 'decoder-001'"):
        read_run(tmp_path / "decoder-01")


def test_a_folder_without_a_run_is_an_error(tmp_path):
    with pytest.raises(MeshwrightError, match=r"holds no run: it has no run.json, metrics.jsonl or events.jsonl"):
        read_run(tmp_path)
