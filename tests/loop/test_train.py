"""Whole runs: training, stopping, and resuming bit for bit or on another mesh."""

import signal

import numpy as np
import pytest

from meshwright.checkpoint.manifest import model_fact
from meshwright.errors import ConfigError
from meshwright.loop import run_callbacks
from meshwright.loop.logging.step_log import StepLog
from meshwright.loop.run import train

from .tiny_run import QUIET, StopAt, bits, fit_folder


def values(steps):
    return [(line["step"], line["loss"], line["grad_norm"], line["learning_rate"], line["tokens"]) for line in steps]


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """The uninterrupted run, trained once per module."""
    made = {}

    def run(config, read_run):
        if not made:
            result = train(config, **QUIET)
            made["it"] = (result, *read_run(fit_folder(config)))
        return made["it"]

    return run


def test_a_run_trains_and_writes_every_step_once(make_config, read_run, straight, tmp_path_factory):
    folder = tmp_path_factory.mktemp("straight") / "run"
    result, steps, evaluations, events = straight(make_config(run=str(folder)), read_run)
    assert (result.why, result.step, int(result.state.step)) == ("finished", 12, 12)
    assert [line["step"] for line in steps] == list(range(1, 13))
    assert sorted(evaluations) == [6, 12]
    assert steps[-1]["loss"] < 0.8 * steps[0]["loss"]
    assert [event["step"] for event in events if event["kind"] == "checkpoint"] == [4, 8, 12]
    assert events[0]["kind"] == "start"
    assert events[-1]["kind"] == "finish"
    for line in steps:
        assert line["seconds"]["step"] > 0
        assert line["tokens_per_second"] > 0


def test_a_resumed_run_is_bitwise_equal_to_an_uninterrupted_one(
    make_config, read_run, straight, stop_at, tmp_path_factory
):
    whole, steps, evaluations, _ = straight(make_config(run=str(tmp_path_factory.mktemp("straight") / "run")), read_run)
    config = make_config()
    for at, resume in ((3, False), (6, True), (9, True)):  # at 6 an evaluation was due
        stop_at(at)
        result = train(config.changed({"resume": resume}), **QUIET)
        assert (result.why, result.step) == ("preempted", at)
    stop_at()
    result = train(config.changed({"resume": True}), **QUIET)
    again, again_evaluations, events = read_run(fit_folder(config))
    assert bits(result.state) == bits(whole.state)
    assert values(again) == values(steps)
    assert again_evaluations == evaluations
    assert [event["step"] for event in events if event["kind"] == "resume"] == [3, 6, 9]
    assert [event["step"] for event in events if event["kind"] == "preempted"] == [3, 6, 9]


@pytest.mark.parametrize(
    "changes",
    [
        {"mesh": "dp:8"},
        {"mesh": "fsdp:8", "view": "global"},
        {"mesh": "fsdp:4,tp:2", "minibatches": 2, "zero_axis": None},
    ],
)
def test_a_run_resumes_on_another_mesh(make_config, read_run, straight, stop_at, tmp_path_factory, changes):
    _, steps, _, _ = straight(make_config(run=str(tmp_path_factory.mktemp("straight") / "run")), read_run)
    config = make_config()
    stop_at(5)
    before = train(config, **QUIET)
    stop_at(6)
    said = []
    train(config.changed({"resume": True, **changes}), say=said.append)
    again, _, _ = read_run(fit_folder(config))
    np.testing.assert_allclose(again[5]["loss"], steps[5]["loss"], rtol=1e-5)
    assert any("resharded" in line for line in said)
    assert int(before.state.step) == 5


def test_a_step_after_the_last_checkpoint_is_computed_again(make_config, read_run, stop_at, monkeypatch, tmp_path):
    """As after a kill: the log is ahead of the last checkpoint."""
    config = make_config()
    stop_at(4)
    train(config, **QUIET)
    log = fit_folder(config) / "metrics.jsonl"
    with log.open("a") as file:
        file.write('{"step": 5, "loss": 99.0}\n{"step": 6, "lo')
    stop_at(7)
    train(config.changed({"resume": True}), **QUIET)
    steps, _, _ = read_run(fit_folder(config))
    assert [line["step"] for line in steps] == list(range(1, 8))
    assert all(line["loss"] < 10 for line in steps)


def test_a_run_without_a_checkpoint_starts_again(make_config, read_run, monkeypatch):
    config = make_config()

    class Breaks(StopAt):
        def wants_stop(self, loop):
            if loop.number == 2:
                raise RuntimeError("the machine went away")
            return False

    with monkeypatch.context() as patch:
        patch.setattr("meshwright.loop.setup.Preemption", Breaks)
        with pytest.raises(RuntimeError, match="went away"):
            train(config, **QUIET)
    result = train(config.changed({"resume": True, "steps": 4}), **QUIET)
    steps, _, events = read_run(fit_folder(config))
    assert result.step == 4
    assert [line["step"] for line in steps] == [1, 2, 3, 4]
    assert {"start", "error", "resume"} <= {event["kind"] for event in events}


def test_a_damaged_checkpoint_is_named_and_passed_over(make_config, stop_at):
    config = make_config()
    stop_at(10)
    train(config, **QUIET)
    folder = fit_folder(config) / "checkpoints" / "10"
    largest = max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    raw = bytearray(largest.read_bytes())
    raw[len(raw) // 2] ^= 1
    largest.write_bytes(bytes(raw))
    said = []
    stop_at(9)
    result = train(config.changed({"resume": True}), say=said.append)
    assert result.step == 9
    assert any(largest.name in line and "10" in line for line in said), said


def test_epochs_end_a_run_everywhere_at_once(make_config, read_run):
    result = train(make_config(epochs=1, steps=10_000, num_tokens=64, eval_every=0, checkpoint_every=0), **QUIET)
    assert result.why == "out of data"
    assert 2 < result.step < 30
    _, _, events = read_run(fit_folder(make_config()))
    assert any("out of data" in event["text"] for event in events)


def test_sigterm_saves_and_stops(make_config, monkeypatch):
    config = make_config(steps=500, eval_every=0, checkpoint_every=0)

    class SignalsAtFive(StepLog):
        def on_metrics(self, loop, record):
            if record.number == 5:
                signal.raise_signal(signal.SIGTERM)
            super().on_metrics(loop, record)

    monkeypatch.setattr("meshwright.loop.run_callbacks.StepLog", SignalsAtFive)
    result = train(config, **QUIET)
    assert result.why == "preempted"
    assert result.step == 6  # the step that was running when the signal arrived
    assert (fit_folder(config) / "checkpoints" / "6" / "manifest.json").is_file()


def older_text(model):
    """The model as in older checkpoints: its `repr`, without a newer field."""
    return repr(model).replace(", attention_soft_cap=None", "").replace("dropout=0.1", "dropout=0.0")


def older_fields(model):
    fact = model_fact(model)
    del fact["fields"]["attention_soft_cap"]
    return fact


@pytest.mark.parametrize("older", [older_text, older_fields])
def test_checkpoints_of_a_model_with_fewer_fields_are_resumed(make_config, stop_at, monkeypatch, older):
    config = make_config(steps=2, checkpoint_every=0, eval_every=0)
    stop_at(1)
    with monkeypatch.context() as patch:
        facts = run_callbacks.checkpoint_facts
        patch.setattr(run_callbacks, "checkpoint_facts", lambda run: facts(run) | {"model": older(run.model)})
        train(config, **QUIET)
    stop_at()
    sizes = [*config.model.model_options, "attention_soft_cap=30.0"]
    with pytest.raises(
        ConfigError, match=r"different model.\n  saved: Decoder\(.*\)\n  now: .*attention_soft_cap=30.0"
    ):
        train(config.changed({"resume": True, "model_options": sizes}), **QUIET)
    assert train(config.changed({"resume": True}), **QUIET).step == 2


def test_one_command_starts_and_resumes_a_run(make_config, read_run, stop_at):
    config = make_config(steps=4, eval_every=0, resume=True, or_start=True, sample_tokens=4)
    stop_at(2)
    said = []
    assert train(config, say=said.append).step == 2
    assert any("starting a new run" in line and "holds none to resume" in line for line in said)
    stop_at()
    assert train(config, **QUIET).why == "finished"
    assert train(config, **QUIET).why == "finished"  # complete: no more training or sampling
    steps, _, events = read_run(fit_folder(config))
    assert [line["step"] for line in steps] == [1, 2, 3, 4]
    assert [event["when"] for event in events if event["kind"] == "sample"] == ["before", "after"]
    assert [event["kind"] for event in events if event["kind"] in ("start", "resume")] == ["start", "resume", "resume"]
    assert events[-1]["go_on"].endswith("--resume --steps 8")
    assert "or_start: false" in (fit_folder(config) / "config.yaml").read_text()
    with pytest.raises(ConfigError, match="--or-start needs --run and --resume"):
        train(make_config(or_start=True), **QUIET)


def test_a_stop_request_in_the_last_step_finishes_and_saves(make_config, stop_at):
    config = make_config(steps=2, checkpoint_every=0, eval_every=0)
    stop_at(2)
    result = train(config, **QUIET)
    assert (result.why, result.step, result.saved) == ("finished", 2, True)
    assert (fit_folder(config) / "checkpoints" / "2" / "manifest.json").is_file()


def test_samples_of_a_model_with_a_larger_vocabulary_than_the_tokenizer(make_config, read_run):
    sizes = ["num_layers=1", "d_model=16", "d_ff=16", "num_heads=2", "vocab_size=5000"]
    config = make_config(model_options=sizes, steps=1, sample_tokens=30, eval_every=0)
    train(config, **QUIET)
    _, _, events = read_run(fit_folder(config))
    assert [event["when"] for event in events if event["kind"] == "sample"] == ["before", "after"]
