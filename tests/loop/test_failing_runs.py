"""Runs that are refused before they change anything, and runs that end with an error."""

import errno

import pytest

from meshwright.checkpoint import Checkpoints
from meshwright.errors import CheckpointError, ConfigError, DataError, MeshwrightError, TrainingError
from meshwright.loop.run import train

from .tiny_run import QUIET, fit_folder


def test_non_finite_steps_stop_a_run(make_config, read_run):
    config = make_config(learning_rate=1e30, warmup=0, clip=None, max_skipped=3, steps=50, eval_every=0)
    with pytest.raises(TrainingError, match="3 steps in a row were skipped"):
        train(config, **QUIET)
    _, _, events = read_run(fit_folder(config))
    skipped = [event["text"] for event in events if event["kind"] == "skipped"]
    assert len(skipped) == 2
    assert "batch starting at row" in skipped[0]
    assert events[-1]["kind"] == "error"


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


def test_a_batch_that_cannot_be_split_is_an_error_before_anything_is_written(make_config):
    config = make_config(batch_size=6, mesh="dp:8")
    with pytest.raises(MeshwrightError, match=r"6 rows cannot be split over 8 devices"):
        train(config, **QUIET)
    assert not fit_folder(config).exists()


def test_only_one_process_trains_in_a_folder(make_config, run_python):
    from meshwright.loop.folder.run_dir import RunFolder

    folder = RunFolder.open(make_config(), name="x")
    done = run_python(
        """
        import sys
        from meshwright.loop.settings.config import TrainConfig
        from meshwright.loop.folder.run_dir import RunFolder
        RunFolder.open(TrainConfig().changed({"run": sys.argv[1]}), name="x")
        """,
        str(folder.path),
    )
    folder.close()
    assert "another process is training in" in done.stderr


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
        patch.setattr("meshwright.loop.folder.run_dir.write_atomically", full)
        with pytest.raises(ConfigError, match=r"cannot write .*: No space left on device.\nhint: free some space"):
            train(config, **QUIET)
    assert train(config, **QUIET).step == 2  # the failed attempt left nothing in the way


def test_profiled_steps_after_the_last_step_are_an_error(make_config):
    with pytest.raises(ConfigError, match=r"--profile 100:200 starts after the last step \(2\)"):
        train(make_config(steps=2, profile="100:200"), **QUIET)
    assert not fit_folder(make_config()).exists()


def test_minibatches_need_rows_for_every_device(make_config):
    config = make_config(batch_size=8, minibatches=2, mesh="dp:8")
    message = r"cannot split a batch of 8 rows into 2 minibatches for 8 devices.\nhint: use --batch-size 16"
    with pytest.raises(ConfigError, match=message):
        train(config, **QUIET)
    assert not fit_folder(config).exists()
