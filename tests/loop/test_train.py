"""Whole runs: training, stopping, and resuming bit for bit or on another mesh."""

import errno
import signal
from pathlib import Path

import jax
import numpy as np
import pytest

from meshwright.checkpoint import Checkpoints
from meshwright.checkpoint.manifest import model_fact
from meshwright.errors import CheckpointError, ConfigError, DataError, MeshwrightError, TrainingError
from meshwright.loop import setup
from meshwright.loop.callbacks import Callback, StepLog, StepRecord
from meshwright.loop.fit import Loop
from meshwright.loop.logging.run_log import RunLog, read_lines
from meshwright.loop.run import train

QUIET = {"say": lambda text: None}


def bits(state):
    state = jax.tree.map(
        lambda leaf: jax.random.key_data(leaf) if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf,
        state,
    )
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(state)]


def values(steps):
    return [(line["step"], line["loss"], line["grad_norm"], line["learning_rate"], line["tokens"]) for line in steps]


class StopAt(Callback):
    """Asks a run to stop at given steps, as SIGTERM does."""

    def __init__(self, *steps):
        self.steps = steps

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def wants_stop(self, loop):
        return loop.ticks in self.steps


@pytest.fixture
def stop_at(monkeypatch):
    def stop(*steps):
        monkeypatch.setattr("meshwright.loop.setup.Preemption", lambda: StopAt(*steps))

    return stop


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


def fit_folder(config):
    return Path(config.run.run)


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

    monkeypatch.setattr("meshwright.loop.setup.StepLog", SignalsAtFive)
    result = train(config, **QUIET)
    assert result.why == "preempted"
    assert result.step == 6  # the step that was running when the signal arrived
    assert (fit_folder(config) / "checkpoints" / "6" / "manifest.json").is_file()


def test_non_finite_steps_stop_a_run(make_config, read_run):
    config = make_config(learning_rate=1e30, warmup=0, clip=None, max_skipped=3, steps=50, eval_every=0)
    with pytest.raises(TrainingError, match="3 steps in a row were skipped"):
        train(config, **QUIET)
    _, _, events = read_run(fit_folder(config))
    skipped = [event["text"] for event in events if event["kind"] == "skipped"]
    assert len(skipped) == 2
    assert "batch starting at row" in skipped[0]
    assert events[-1]["kind"] == "error"


def test_wrong_folders_are_rejected_and_stay_unchanged(make_config, stop_at):
    config = make_config()
    with pytest.raises(ConfigError, match="holds no run to resume"):
        train(config.changed({"resume": True}), **QUIET)
    stop_at(2)
    train(config, **QUIET)
    with pytest.raises(ConfigError, match=r"already holds a run.\nhint: resume it with --resume"):
        train(config, **QUIET)
    before = (fit_folder(config) / "config.yaml").read_text()
    with pytest.raises(ConfigError, match="is already at step 2, beyond --steps 1"):
        train(config.changed({"resume": True, "steps": 1}), **QUIET)
    other = ["num_layers=1", "d_model=16", "d_ff=16", "num_heads=4", "dropout=0.1"]  # of the same shapes
    with pytest.raises(ConfigError, match=r"holds a different model.\n  saved: .*num_heads=2.*\n  now: .*num_heads=4"):
        train(config.changed({"resume": True, "model_options": other}), **QUIET)
    with pytest.raises(DataError, match="seed"):
        train(config.changed({"resume": True, "seed": 3}), **QUIET)
    with pytest.raises(CheckpointError, match=r"missing|shape"):
        train(config.changed({"resume": True, "model_options": ["num_layers=2", "d_model=16", "num_heads=2"]}), **QUIET)
    assert (fit_folder(config) / "config.yaml").read_text() == before
    stop_at()
    said = []
    assert train(config.changed({"resume": True, "steps": 3, "clip": None}), say=said.append).step == 3
    assert any("changed since the checkpoint: clip from 1.0 to None; steps from 12 to 3" in line for line in said), said
    assert any("the schedule now ends at step 3; the learning rate" in line for line in said)
    # Resuming a complete run only writes its end again.
    result = train(config.changed({"resume": True, "steps": 3}), **QUIET)
    assert (result.why, result.step, result.saved) == ("finished", 3, True)


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
        facts = setup.checkpoint_facts
        patch.setattr(setup, "checkpoint_facts", lambda run: facts(run) | {"model": older(run.model)})
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


def test_a_batch_that_cannot_be_split_is_an_error_before_anything_is_written(make_config):
    config = make_config(batch_size=6, mesh="dp:8")
    with pytest.raises(MeshwrightError, match=r"6 rows cannot be split over 8 devices"):
        train(config, **QUIET)
    assert not fit_folder(config).exists()


def test_only_one_process_trains_in_a_folder(make_config, run_python):
    from meshwright.loop.run_dir import RunFolder

    folder = RunFolder.open(make_config(), name="x")
    done = run_python(
        """
        import sys
        from meshwright.loop.config import TrainConfig
        from meshwright.loop.run_dir import RunFolder
        RunFolder.open(TrainConfig().changed({"run": sys.argv[1]}), name="x")
        """,
        str(folder.path),
    )
    folder.close()
    assert "another process is training in" in done.stderr


def test_a_stop_request_in_the_last_step_finishes_and_saves(make_config, stop_at):
    config = make_config(steps=2, checkpoint_every=0, eval_every=0)
    stop_at(2)
    result = train(config, **QUIET)
    assert (result.why, result.step, result.saved) == ("finished", 2, True)
    assert (fit_folder(config) / "checkpoints" / "2" / "manifest.json").is_file()


def test_a_failed_save_is_reported(make_config, stop_at, monkeypatch):
    config = make_config(steps=9, checkpoint_every=0, eval_every=0)
    stop_at(2)
    monkeypatch.setattr("meshwright.checkpoint.store.Checkpoints.save", lambda self, state, **_: False)
    said = []
    result = train(config, say=said.append)
    assert (result.why, result.saved) == ("preempted", False)
    assert "error: could not save step 2; no step is saved, so steps 1-2 are lost" in said


def test_a_failed_last_save_is_reported_last_even_if_the_report_fails_too(make_config, read_run, monkeypatch):
    save = Checkpoints.save
    monkeypatch.setattr(Checkpoints, "save", lambda self, *a, step, **k: step < 4 and save(self, *a, step=step, **k))
    monkeypatch.setattr("meshwright.loop.report.build_report", _refuse)
    said = []
    config = make_config(steps=4, checkpoint_every=2, eval_every=0, report=True)
    result = train(config, say=said.append)
    assert (result.why, result.saved, result.last_saved) == ("finished", False, 2)
    assert said[-1] == "error: could not save step 4; the last saved step is 2, so steps 3-4 are lost"
    folder = fit_folder(config)
    hint = f"hint: run meshwright report {folder} --out FILE."
    assert said[-3] == f"warning: could not write the report page: the disk is full.\n{hint}"
    assert said[-2].endswith("--resume")  # without more steps
    assert read_run(folder)[2][-1]["kind"] == "error"


def _refuse(folder):
    raise MeshwrightError("the disk is full.", hint="name another file with --out.")


def test_a_run_of_skipped_steps_ends_with_an_error(make_config, read_run):
    said = []
    config = make_config(learning_rate=1e30, warmup=0, clip=None, steps=4, eval_every=0)
    result = train(config, say=said.append)
    assert (result.skipped, result.mostly_skipped, result.saved) == (3, True, True)
    assert said[-1].startswith(
        "error: 3 of 4 steps were skipped because of non-finite values, so the model learned little"
    )
    assert read_run(fit_folder(config))[2][-1]["kind"] == "error"


def test_a_rejected_resume_changes_nothing(make_config, stop_at):
    config = make_config(steps=4, checkpoint_every=0, eval_every=0)
    train(config, **QUIET)
    folder = fit_folder(config)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "loss": 9.0}\n')  # a resumed run drops this line
    before = {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
    for changes in ({"seed": 3}, {"num_tokens": 8}, {"validation": 0.5}, {"steps": 3}):
        said = []
        with pytest.raises(MeshwrightError):
            train(config.changed({"resume": True, **changes}), say=said.append)
        assert not any("resumed" in line or "changed since" in line for line in said)
        assert {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()} == before


def test_a_full_disk_at_the_start_is_an_error_with_a_hint(make_config, monkeypatch):
    def full(path, data):
        raise OSError(errno.ENOSPC, "No space left on device")

    config = make_config(steps=2)
    with monkeypatch.context() as patch:
        patch.setattr("meshwright.loop.run_dir.write_atomically", full)
        with pytest.raises(ConfigError, match=r"cannot write .*: No space left on device.\nhint: free some space"):
            train(config, **QUIET)
    assert train(config, **QUIET).step == 2  # the failed attempt left nothing in the way


def test_profiled_steps_after_the_last_step_are_an_error(make_config):
    with pytest.raises(ConfigError, match=r"--profile 100:200 starts after the last step \(2\)"):
        train(make_config(steps=2, profile="100:200"), **QUIET)
    assert not fit_folder(make_config()).exists()


def test_skipped_steps_do_not_advance_the_schedule(tmp_path):
    record = StepRecord(5, {"loss": 1.0, "skipped": 2}, first_row=0, seconds=1.0, spent={})
    with RunLog(tmp_path, tensorboard=False) as log:
        StepLog(np.arange(9) / 10).on_metrics(Loop(None, 9, log), record)
    (line,) = read_lines(tmp_path / "metrics.jsonl")
    assert (line["step"], line["learning_rate"]) == (5, 0.2)


JOBS = """
import jax, jax.numpy as jnp, numpy as np
import meshwright as mw

def init(key):
    return {"w": jax.random.normal(key, (8, 4))}

def loss(params, batch, rng):
    keep = 1.0 if rng is None else jax.random.bernoulli(rng, 0.5, ())  # needs a key in training
    return jnp.mean((batch["x"] @ params["w"] * keep) ** 2) * batch["a"], {}

def make_batch(seed):
    return {"a": np.float32(1.0), "x": np.random.default_rng(seed).normal(size=(16, 8)).astype(np.float32)}

rules = mw.Rules([("w", mw.P("fsdp"))], optional_axes=("fsdp",))
job = mw.Job(init=init, rules=rules, loss=loss, batch=make_batch(0), make_batch=make_batch)
alone = mw.Job(init=init, rules=rules, loss=loss, batch=make_batch(0))
"""


def test_a_custom_job_is_trained_and_resumed(make_config, read_run, stop_at, tmp_path):
    (tmp_path / "jobs.py").write_text(JOBS)
    plain = {"model_options": [], "data": None, "batch_size": 16, "num_tokens": 128, "job": f"{tmp_path}/jobs.py:job"}
    config = make_config(**plain, steps=4, eval_every=0, view="global", learning_rate=0.1, weight_decay=0.0)
    whole = train(config, **QUIET)
    straight, _, _ = read_run(fit_folder(config))
    again = config.changed({"run": str(tmp_path / "again")})
    stop_at(2)
    train(again, **QUIET)
    stop_at()
    result = train(again.changed({"resume": True}), **QUIET)
    steps, _, _ = read_run(fit_folder(again))
    assert bits(result.state) == bits(whole.state)
    assert [line["loss"] for line in steps] == [line["loss"] for line in straight]
    assert "tokens_per_second" not in steps[0]
    with pytest.raises(ConfigError, match="epochs is 1, which would have no effect: the job makes its own batches"):
        train(again.changed({"epochs": 1, "run": str(tmp_path / "x")}), **QUIET)
    with pytest.raises(ConfigError, match="batch_size is 64, which would have no effect"):
        train(again.changed({"batch_size": 64, "run": str(tmp_path / "x")}), **QUIET)
    with pytest.raises(MeshwrightError, match="the job has no data and no make_batch"):
        train(again.changed({"job": f"{tmp_path}/jobs.py:alone", "run": str(tmp_path / "x")}), **QUIET)


def test_a_loss_that_does_not_know_tp_is_trained_in_the_global_view(make_config, read_run, tmp_path):
    source = JOBS.replace('P("fsdp"))], optional_axes=("fsdp",)', 'P("fsdp", "tp"))], optional_axes=("fsdp", "tp")')
    (tmp_path / "jobs.py").write_text(source)
    plain = {"model_options": [], "data": None, "batch_size": 16, "num_tokens": 128, "job": f"{tmp_path}/jobs.py:job"}
    losses, views = [], []
    for mesh, view in (("dp:8", "global"), ("dp:2,fsdp:2,tp:2", "auto")):
        config = make_config(**plain, steps=2, eval_every=0, mesh=mesh, view=view, run=str(tmp_path / mesh[:4]))
        said = []
        train(config, say=said.append)
        losses.append([line["loss"] for line in read_run(fit_folder(config))[0]])
        views += [line for line in said if line.startswith("view: ")]
    assert views == ["view: global (as requested)", "view: global (the loss does not communicate over tp)"]
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)
    with pytest.raises(MeshwrightError, match="does not communicate over mesh axis 'tp'"):
        train(config.changed({"view": "local", "run": str(tmp_path / "x")}), **QUIET)
    assert not (tmp_path / "x").exists()


def test_text_beyond_the_vocabulary_of_a_job_is_rejected(make_config, tmp_path):
    """JAX would silently clamp such tokens to the last one."""
    (tmp_path / "jobs.py").write_text(
        "import dataclasses\n"
        "from meshwright.models import Decoder\n"
        "from meshwright.train import language_job\n"
        "model = Decoder(vocab_size=100, num_layers=1, d_model=16, num_heads=2, d_ff=16)\n"
        "job = language_job(model, batch_size=8, num_tokens=16, packed=True)\n"
        "silent = dataclasses.replace(job, vocab_size=None)\n"
    )
    config = make_config(job=f"{tmp_path}/jobs.py:job", model_options=[], steps=1)
    with pytest.raises(DataError, match=r"the data has token 120; the model's vocabulary has 100 tokens"):
        train(config, **QUIET)
    assert not fit_folder(config).exists()
    said = []
    train(config.changed({"job": f"{tmp_path}/jobs.py:silent", "eval_every": 0}), say=said.append)
    assert any("the job has no vocab_size" in line for line in said)


def test_samples_of_a_model_with_a_larger_vocabulary_than_the_tokenizer(make_config, read_run):
    sizes = ["num_layers=1", "d_model=16", "d_ff=16", "num_heads=2", "vocab_size=5000"]
    config = make_config(model_options=sizes, steps=1, sample_tokens=30, eval_every=0)
    train(config, **QUIET)
    _, _, events = read_run(fit_folder(config))
    assert [event["when"] for event in events if event["kind"] == "sample"] == ["before", "after"]


def test_minibatches_need_rows_for_every_device(make_config):
    config = make_config(batch_size=8, minibatches=2, mesh="dp:8")
    message = r"cannot split a batch of 8 rows into 2 minibatches for 8 devices.\nhint: use --batch-size 16"
    with pytest.raises(ConfigError, match=message):
        train(config, **QUIET)
    assert not fit_folder(config).exists()
