"""TensorBoard files, and the calls to wandb and trackio, which are faked."""

import errno
import json
import sys
from types import ModuleType

import pytest
from tensorboardX.proto.event_pb2 import Event, SessionLog

import meshwright as mw
from meshwright.loop.logging.run_log import RunLog
from meshwright.loop.logging.trackers import numbers


def records(path):
    """Reads a file of length-prefixed records with checksums after length and content."""
    data, place = path.read_bytes(), 0
    while place < len(data):
        length = int.from_bytes(data[place : place + 8], "little")
        event = Event()
        event.ParseFromString(data[place + 12 : place + 12 + length])
        yield event
        place += 16 + length


def scalars(path):
    return [
        (event.step, value.tag, round(value.simple_value, 6))
        for event in records(path)
        for value in event.summary.value
        if not value.HasField("tensor")
    ]


def test_tensorboard_gets_scalars_with_their_steps_and_times(tmp_path):
    with RunLog(tmp_path, flush_seconds=0) as log:
        log.metrics(1, {"loss": 2.5, "seconds": {"data": 0.25}, "note": "x", "time": 1000.0})
        log.event("sample", 1, "def f()")
    (path,) = (tmp_path / "tensorboard").iterdir()
    assert scalars(path) == [(1, "loss", 2.5), (1, "seconds/data", 0.25)]
    first, second = list(records(path))[1:]
    assert first.wall_time == 1000.0
    (text,) = second.summary.value
    assert (text.tag, text.tensor.string_val[0]) == ("sample/text_summary", b"def f()")


def test_after_a_rewind_tensorboard_hides_recomputed_steps(tmp_path):
    for start, stop in ((0, 5), (2, 4)):
        with RunLog(tmp_path, flush_seconds=0) as log:
            if start:
                log.rewind(start)
            for step in range(start + 1, stop + 1):
                log.metrics(step, {"loss": float(stop * step)})
    first, second = sorted((tmp_path / "tensorboard").iterdir(), key=lambda path: path.stat().st_mtime_ns)
    assert [step for step, *_ in scalars(first)] == [1, 2, 3, 4, 5]
    assert [step for step, *_ in scalars(second)] == [3, 4]
    purge = [event for event in records(second) if event.HasField("session_log")]
    assert [(event.step, event.session_log.status) for event in purge] == [(3, SessionLog.START)]


def test_a_full_disk_stops_neither_the_run_nor_tensorboard(tmp_path, monkeypatch):
    told = []

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with RunLog(tmp_path, flush_seconds=0, tell=told.append) as log:
        log.metrics(1, {"loss": 1.0})
        with monkeypatch.context() as patch:
            patch.setattr("tensorboardX.event_file_writer.EventsWriter.write_event", full)
            log.metrics(2, {"loss": 1.0})
        log.metrics(3, {"loss": 1.0})
    assert [text.partition(":")[0] for text in told] == [
        "cannot write TensorBoard",
        "writing TensorBoard works again.",
    ]
    files = list((tmp_path / "tensorboard").iterdir())
    assert sorted(step for path in files for step, *_ in scalars(path)) == [1, 3]


class FakeRun:
    def __init__(self, options):
        self.options, self.logged, self.finished = options, [], False

    def log(self, values, step):
        self.logged.append((step, values))

    def finish(self):
        self.finished = True


@pytest.fixture(params=["wandb", "trackio"])
def fake(request, monkeypatch):
    module = ModuleType(request.param)
    module.runs = []

    def init(**options):
        module.runs.append(FakeRun(options))
        return module.runs[-1]

    module.init = init
    monkeypatch.setitem(sys.modules, request.param, module)
    return module


def identity(run):
    return run.options.get("id") or run.options["name"]


def test_a_resumed_run_continues_the_online_run_and_sends_nothing_twice(fake, tmp_path):
    name = fake.__name__
    folder = tmp_path / "small-3"
    for start, stop in ((0, 6), (3, 5), (4, 8)):  # killed twice; the second time at an earlier step
        with RunLog(folder, tensorboard=False, **{name: "my-project"}) as log:
            if start:
                log.rewind(start)
            for step in range(start + 1, stop + 1):
                log.metrics(step, {"loss": 1.0 / step, "seconds": {"data": 0.5}})
    assert len({identity(run) for run in fake.runs}) == 1
    assert identity(fake.runs[0]).startswith("small-3-") == (name == "trackio")
    assert all(run.options["project"] == "my-project" and run.options["resume"] == "allow" for run in fake.runs)
    assert [[step for step, _ in run.logged] for run in fake.runs] == [[1, 2, 3, 4, 5, 6], [], [7, 8]]
    assert fake.runs[0].logged[1] == (2, {"loss": 0.5, "seconds/data": 0.5})
    assert all(run.finished for run in fake.runs)
    assert set(json.loads((folder / "trackers.json").read_text())) == {name}


def test_options_are_passed_on(fake, tmp_path):
    options = {"project": "p", "name": "mine", "group": "g"}
    RunLog(tmp_path, tensorboard=False, **{fake.__name__: options}).close()
    assert fake.runs[0].options.items() >= options.items()
    with pytest.raises(mw.MeshwrightError, match=rf"{fake.__name__}= has no project"):
        RunLog(tmp_path, tensorboard=False, **{fake.__name__: {"name": "mine"}})


def test_a_failing_tracker_is_reported_and_the_run_continues(fake, tmp_path):
    told = []
    with RunLog(tmp_path, tensorboard=False, tell=told.append, flush_seconds=0, **{fake.__name__: "p"}) as log:

        def offline(*_, **__):
            raise ConnectionError("no network")

        fake.runs[0].log = offline
        log.metrics(1, {"loss": 1.0})
        log.metrics(2, {"loss": 1.0})
    assert told[0] == f"cannot write {fake.__name__.capitalize()}: no network. Training continues."
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


def test_numbers_of_any_kind_are_found():
    import numpy as np

    assert dict(numbers({"a": np.float32(0.5), "b": True, "c": [1], "eval": {"time": 3}})) == {
        "a": 0.5,
        "b": 1.0,
        "eval/time": 3.0,
    }
