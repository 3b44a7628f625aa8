"""The loop alone, with a step that computes nothing: the order of its calls."""

import types

import numpy as np
import pytest

from meshwright.loop.callbacks import Callback, Checkpointing, Evaluation
from meshwright.loop.fit import Loop, fit
from meshwright.loop.logging.run_log import RunLog, read_lines
from meshwright.loop.logging.step_log import StepLog


class Batches:
    """A number of batches of one row each."""

    def __init__(self, count):
        self.left, self.row, self.is_closed = count, 0, False

    @property
    def state(self):
        return {"next_row": self.row}

    def __next__(self):
        if not self.left:
            raise StopIteration
        self.left, self.row = self.left - 1, self.row + 1
        return types.SimpleNamespace(arrays={}, first_row=self.row - 1)

    def close(self):
        self.is_closed = True


class Recorder(Callback):
    def __init__(self, stop_at=None, due_at=()):
        self.calls, self.stop_at, self.due_at = [], stop_at, due_at

    def before_step(self, loop):
        self.calls.append(("before", loop.number + 1))

    def on_metrics(self, loop, record):
        self.calls.append(("metrics", record.number))

    def wants_stop(self, loop):
        return loop.number == self.stop_at

    def is_due(self, loop):
        return loop.number in self.due_at

    def after_step(self, loop):
        self.calls.append(("after", loop.number))
        return False

    def on_end(self, loop, why):
        self.calls.append(("end", why))

    def on_exit(self, loop):
        self.calls.append(("exit", loop.number))


def step(state, batch):
    number = state.step + 1
    return types.SimpleNamespace(step=number, skipped=0), {"loss": np.float32(1 / number), "tokens": np.int32(4)}


step.layout = None


@pytest.fixture
def run(tmp_path):
    def start(num_steps, *callbacks, batches=None, step=step):
        with RunLog(tmp_path, tensorboard=False) as log:
            loop = Loop(step, num_steps, log, [StepLog(), *callbacks])
            return fit(loop, types.SimpleNamespace(step=0, skipped=0), batches or Batches(99))

    return start


def test_metrics_arrive_one_step_late_but_before_due_callbacks(run, tmp_path):
    recorder = Recorder(due_at=(2,))
    result = run(3, recorder)
    assert recorder.calls == [
        ("before", 1), ("after", 1),
        ("before", 2), ("metrics", 1), ("metrics", 2), ("after", 2),
        ("before", 3), ("metrics", 3), ("after", 3),
        ("end", "finished"), ("exit", 3),
    ]  # fmt: skip
    assert (result.why, result.step, result.saved, result.metrics["loss"]) == ("finished", 3, False, np.float32(1 / 3))
    assert [line["step"] for line in read_lines(tmp_path / "metrics.jsonl")] == [1, 2, 3]


def test_a_stop_and_the_end_of_the_data_fetch_pending_metrics(run, tmp_path):
    stopped = Recorder(stop_at=2)
    assert run(9, stopped).why == "preempted"
    assert stopped.calls[-4:] == [("metrics", 1), ("metrics", 2), ("end", "preempted"), ("exit", 2)]
    ended, batches = Recorder(), Batches(2)
    assert run(9, ended, batches=batches).why == "out of data"
    assert ended.calls[-4:] == [("before", 3), ("metrics", 2), ("end", "out of data"), ("exit", 2)]
    assert batches.is_closed
    assert run(2, Recorder(stop_at=2)).why == "finished"


def test_an_error_is_logged_and_everything_is_closed(run, tmp_path):
    def breaks(state, batch):
        raise RuntimeError("the machine went away")

    recorder, batches = Recorder(), Batches(9)
    with pytest.raises(RuntimeError, match="went away"):
        run(3, recorder, batches=batches, step=breaks)
    assert recorder.calls == [("before", 1), ("exit", 0)]
    assert batches.is_closed
    assert [event["kind"] for event in read_lines(tmp_path / "events.jsonl")] == ["error"]


class Store:
    """Stands in for `Checkpoints`, and records the log at each save."""

    def __init__(self, folder):
        self.folder, self.saved, self.logged, self.facts = folder, [], {}, {}

    def save(self, state, *, step, layout, facts):
        self.saved.append(step)
        self.logged[step] = [line["step"] for line in read_lines(self.folder / "metrics.jsonl") if "loss" in line]
        self.facts[step] = facts

    def wait(self):
        pass

    def make_durable(self, step):
        pass

    def durable_steps(self):
        return self.saved


def test_a_checkpoint_comes_after_its_evaluation_and_its_log_lines(run, tmp_path):
    store, evaluated = Store(tmp_path), []

    def evaluate(state):
        evaluated.append((state.step, list(store.saved)))
        return {"loss": 0.5}

    saving = Checkpointing(store, every=2, facts=lambda: {"model": "small"})
    result = run(5, Evaluation(evaluate, 2), saving)
    assert (store.saved, result.saved, result.last_saved) == ([2, 4, 5], True, 5)
    assert evaluated == [(2, []), (4, [2]), (5, [2, 4])]
    assert store.logged == {2: [1, 2], 4: [1, 2, 3, 4], 5: [1, 2, 3, 4, 5]}
    assert store.facts[4] == {"model": "small", "data": {"next_row": 4}}
    assert result.metrics["eval/loss"] == 0.5
