"""Rollback after a loss spike, also if the run is stopped and resumed afterwards."""

import json
from pathlib import Path

import pytest

from meshwright.loop.callbacks import Checkpointing
from meshwright.loop.run import train
from meshwright.loop.safety.spike import SpikeGuard

QUIET = {"say": lambda text: None}


@pytest.fixture
def jump_at(monkeypatch):
    """Makes the guard see one huge loss, once."""

    def jump(step):
        seen = []

        class Guard(SpikeGuard):
            def check(self, loss):
                seen.append(loss)
                return super().check(1e6 if len(seen) == step else loss) or len(seen) == step

        monkeypatch.setattr("meshwright.loop.run_callbacks.SpikeGuard", Guard)

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


def test_a_run_rolls_back_and_continues_with_new_data(run_of, read_run, jump_at):
    config = run_of("run")
    jump_at(10)
    assert train(config, **QUIET).why == "finished"
    _, _, events = read_run(Path(config.run.run))
    assert [step for step, _ in losses(config, read_run)] == list(range(1, 15))
    (back,) = [event for event in events if event["kind"] == "rollback"]
    assert (back["step"], back["to"]) == (11, 8)  # step 11 had started when the loss of step 10 arrived
    # The rows of the three undone steps are not used again.
    assert facts(config, 14)["data"]["next_row"] == 8 * (14 + 3)
    # The guard's window holds no losses of undone steps.
    assert facts(config, 14)["spikes"]["losses"] == [loss for _, loss in losses(config, read_run)]


def test_a_run_killed_after_a_rollback_resumes_bit_for_bit(run_of, read_run, jump_at, monkeypatch):
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
        patch.setattr("meshwright.loop.run_callbacks.Checkpointing", Dies)
        with pytest.raises(Killed):
            train(stopped, **QUIET)
    monkeypatch.setattr("meshwright.loop.run_callbacks.SpikeGuard", SpikeGuard)
    train(stopped.changed({"resume": True}), **QUIET)
    assert losses(stopped, read_run) == losses(straight, read_run)
    for name in ("data", "spikes"):
        assert facts(stopped, 14)[name] == facts(straight, 14)[name]


def test_a_spike_without_a_checkpoint_loses_no_log_lines(run_of, read_run, jump_at):
    jump_at(3)
    config = run_of("run", steps=5, eval_every=4)
    said = []
    train(config, say=said.append)
    steps, evaluations, _ = read_run(Path(config.run.run))
    assert [line["step"] for line in steps] == [1, 2, 3, 4, 5]
    assert sorted(evaluations) == [4, 5]
    assert any("there is no checkpoint yet" in line for line in said)
    assert any("evaluation loss" in line for line in said)
