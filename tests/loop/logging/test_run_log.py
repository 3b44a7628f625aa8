"""The run log holds every step once, over restarts."""

import errno
import json
import os
import threading

import pytest

from meshwright.loop.logging.run_log import RunLog, read_lines


def steps(folder):
    return [line["step"] for line in read_lines(folder / "metrics.jsonl")]


def test_lines_start_with_step_and_time_and_are_buffered(tmp_path):
    log = RunLog(tmp_path, tensorboard=False, flush_seconds=1e9)
    log.metrics(1, {"loss": 2.5, "seconds": {"data": 0.25}})
    assert steps(tmp_path) == []
    log.flush(durable=True)
    (line,) = read_lines(tmp_path / "metrics.jsonl")
    assert list(line) == ["step", "time", "loss", "seconds"]
    log.metrics(2, {"loss": 2.0})
    log.event("sample", 2, "def f():", prompt="def")
    assert steps(tmp_path) == [1, 2]
    (event,) = read_lines(tmp_path / "events.jsonl")
    assert {name: event[name] for name in ("step", "kind", "text", "prompt")} == {
        "step": 2, "kind": "sample", "text": "def f():", "prompt": "def",
    }  # fmt: skip
    log.metrics(3, {})
    log.close()
    assert steps(tmp_path) == [1, 2, 3]


def test_metrics_are_flushed_periodically(tmp_path):
    with RunLog(tmp_path, tensorboard=False, flush_seconds=0) as log:
        log.metrics(1, {})
        assert steps(tmp_path) == [1]


def test_two_restarts_in_a_row_leave_every_step_once(tmp_path):
    with RunLog(tmp_path, tensorboard=False) as log:
        for step in range(1, 8):
            log.metrics(step, {"loss": 10.0 + step})
        log.metrics(4, {"eval/loss": 3.0})
    for start in (4, 4, 2):  # the second start got no further than the first
        with (tmp_path / "metrics.jsonl").open("ab") as file:
            file.write(b'{"step": 9, "lo')  # a torn line, as after a kill
        with RunLog(tmp_path, tensorboard=False) as log:
            log.rewind(start)
            log.event("resume", start, "again")
    with RunLog(tmp_path, tensorboard=False) as log:
        log.rewind(4)
        for step in range(3, 6):
            log.metrics(step, {"loss": 20.0 + step})
    lines = list(read_lines(tmp_path / "metrics.jsonl"))
    assert [(line["step"], line["loss"]) for line in lines] == [(1, 11.0), (2, 12.0), (3, 23.0), (4, 24.0), (5, 25.0)]
    assert [event["kind"] for event in read_lines(tmp_path / "events.jsonl")] == ["resume"] * 3


def test_a_rewind_keeps_the_evaluation_of_the_kept_step(tmp_path):
    with RunLog(tmp_path, tensorboard=False) as log:
        log.metrics(4, {"loss": 1.0})
        log.metrics(4, {"eval/loss": 3.0})
        log.metrics(5, {"loss": 1.0})
        assert log.rewind(4) == 1
    assert [set(line) - {"time"} for line in read_lines(tmp_path / "metrics.jsonl")] == [
        {"step", "loss"},
        {"step", "eval/loss"},
    ]


def test_unreadable_lines_are_reported_in_an_event(tmp_path):
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1}\n\x00\x00\n')
    with RunLog(tmp_path, tensorboard=False) as log:
        log.rewind(1)
    (event,) = read_lines(tmp_path / "events.jsonl")
    assert (event["kind"], event["text"]) == ("error", "dropped 1 unreadable line(s) of metrics.jsonl: 2")


def test_only_rank_0_writes(tmp_path):
    with RunLog(tmp_path / "a", rank=1, wandb="not imported") as log:
        log.metrics(1, {"loss": 1.0})
        log.event("start", 0, "x")
        assert log.rewind(0) == 0
        log.flush()
    assert not (tmp_path / "a").exists()


def test_a_full_disk_is_reported_once_and_loses_nothing(tmp_path, monkeypatch):
    told = []
    log = RunLog(tmp_path, tensorboard=False, tell=told.append, flush_seconds=0)
    log.metrics(1, {})

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        log.metrics(2, {})
        log.metrics(3, {})
        log.event("checkpoint_failed", 3, "no space")
    assert told == [
        "cannot write metrics.jsonl: [Errno 28] No space left on device. Training continues.",
        "cannot write events.jsonl: [Errno 28] No space left on device. Training continues.",
    ]
    log.metrics(4, {})
    assert told[2:] == ["writing metrics.jsonl works again.", "writing events.jsonl works again."]
    log.close()
    assert steps(tmp_path) == [1, 2, 3, 4]
    assert len(list(read_lines(tmp_path / "events.jsonl"))) == 1


def test_threads_do_not_tear_each_others_lines(tmp_path):
    with RunLog(tmp_path, tensorboard=False, flush_seconds=0) as log:

        def tell(kind):
            for step in range(100):
                log.event(kind, step, "x" * 200)
                log.metrics(step, {"loss": 1.0})

        threads = [threading.Thread(target=tell, args=(kind,)) for kind in "abcd"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    log.event("hang", 0, "a late event of another thread")
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [[event["step"] for event in events if event["kind"] == kind] for kind in "abcd"] == [list(range(100))] * 4
    assert len(steps(tmp_path)) == 400


def test_a_missing_package_is_named_with_its_installation(tmp_path):
    with pytest.raises(ValueError, match=r"trackio is not installed.\nhint: run pip install trackio."):
        RunLog(tmp_path, tensorboard=False, trackio="project")
