"""A loss that jumps: the run goes back, and what comes after does not depend on when it was stopped."""

import json
from pathlib import Path

import pytest

from meshwright.loop.callbacks import Checkpointing
from meshwright.loop.run import train
from meshwright.loop.safety.spike import SpikeGuard

QUIET = {"say": lambda text: None}


@pytest.fixture
def jump_at(monkeypatch):
    """The loss of one step is made to look terrible, once: all else is the guard's own doing."""

    def jump(step):
        seen = []

        class Guard(SpikeGuard):
            def check(self, loss):
                seen.append(loss)
                return super().check(1e6 if len(seen) == step else loss) or len(seen) == step

        monkeypatch.setattr("meshwright.loop.setup.SpikeGuard", Guard)

    return jump


@pytest.fixture
def run_of(make_config, tmp_path):
    def make(name, **changes):
        options = {"rollback": 50.0, "steps": 14, "eval_every": 0, "checkpoint_every": 4, "ledger": True}
        return make_config(**options | {"run": str(tmp_path / name)} | changes)

    return make


def facts(config, step):
    path = Path(config.run.run) / "checkpoints" / str(step) / "manifest.json"
    return json.loads(path.read_text())["facts"]


def losses(config, read_run):
    steps, _, _ = read_run(Path(config.run.run))
    return [(line["step"], line["loss"]) for line in steps]


def test_a_run_goes_back_and_on_with_other_data(run_of, read_run, jump_at):
    config = run_of("run")
    jump_at(10)
    assert train(config, **QUIET).why == "finished"
    _, _, events = read_run(Path(config.run.run))
    assert [step for step, _ in losses(config, read_run)] == list(range(1, 15))
    (back,) = [event for event in events if event["kind"] == "rollback"]
    assert (back["step"], back["to"]) == (11, 8)  # the next step had been started when that of the tenth was seen
    # The data of the steps that were undone is not used again: rows of three steps more than there are.
    assert facts(config, 14)["data"]["next_row"] == 8 * (14 + 3)
    # It remembers what it did at that checkpoint, and what came after: nothing of what was undone.
    assert facts(config, 14)["spikes"]["losses"] == [loss for _, loss in losses(config, read_run)]


def test_stopped_after_going_back_it_goes_on_as_if_it_had_not_been(run_of, read_run, jump_at, monkeypatch):
    straight, stopped = run_of("straight"), run_of("stopped")
    jump_at(10)
    train(straight, **QUIET)

    class Killed(BaseException):
        pass

    class Dies(Checkpointing):
        went_back = False

        def on_rollback(self, loop):
            self.went_back = True

        def after_step(self, loop):
            if loop.number == 10 and self.went_back:
                raise Killed
            return super().after_step(loop)

    jump_at(10)
    with monkeypatch.context() as patch:
        patch.setattr("meshwright.loop.setup.Checkpointing", Dies)
        with pytest.raises(Killed):
            train(stopped, **QUIET)
    monkeypatch.setattr("meshwright.loop.setup.SpikeGuard", SpikeGuard)
    train(stopped.changed({"resume": True}), **QUIET)
    assert losses(stopped, read_run) == losses(straight, read_run)
    for name in ("data", "spikes"):
        assert facts(stopped, 14)[name] == facts(straight, 14)[name]


def test_without_a_checkpoint_it_goes_on_and_loses_no_line(run_of, read_run, jump_at):
    jump_at(3)
    config = run_of("run", steps=5, eval_every=4)
    said = []
    train(config, say=said.append)
    steps, evaluations, _ = read_run(Path(config.run.run))
    assert [line["step"] for line in steps] == [1, 2, 3, 4, 5]
    assert sorted(evaluations) == [4, 5]
    assert any("there is no checkpoint yet" in line for line in said)
    assert any("evaluation loss" in line for line in said)
