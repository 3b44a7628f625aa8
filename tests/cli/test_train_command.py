"""`meshwright train`: the order of option sources, errors and exit codes."""

import os
import signal
import subprocess
import sys

import pytest
import yaml

from meshwright.cli import main
from meshwright.loop.settings.config import TrainConfig
from meshwright.loop.settings.presets import PRESETS, preset


@pytest.fixture
def cli(capsys):
    def run(*args):
        with pytest.raises(SystemExit) as ended:
            main(list(args))
        captured = capsys.readouterr()
        return ended.value.code or 0, captured.out, captured.err

    return run


def test_print_config_round_trips(cli, tmp_path):
    code, out, _ = cli("train", "--preset", "smoke", "--print-config")
    assert code == 0
    assert TrainConfig().changed(yaml.safe_load(out)) == preset("smoke")


def test_the_command_line_overrides_the_file_and_the_file_the_preset(cli, tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("steps: 7\nbatch_size: 32\n")
    args = ("--preset", "smoke", f"--config={file}", "--steps", "9", "--mesh", "dp:2,fsdp:4", "--clip", "None")
    code, out, _ = cli("train", *args, "--print-config")
    found = yaml.safe_load(out)
    assert code == 0
    assert found["steps"] == 9
    assert found["batch_size"] == 32
    assert found["num_tokens"] == PRESETS["smoke"]["num_tokens"]
    assert (found["mesh"], found["clip"]) == ("dp:2,fsdp:4", None)


def test_every_option_is_a_flag(cli):
    code, out, err = cli("train", "--help")
    assert code == 0
    for name in TrainConfig().flat():
        assert f"--{name.replace('_', '-')}" in out + err, name


def test_resuming_starts_from_the_options_of_the_run(cli, tmp_path):
    def options(*args):
        code, out, err = cli("train", *args, "--print-config")
        assert (code, err) == (0, "")
        return TrainConfig().changed(yaml.safe_load(out))

    (tmp_path / "config.yaml").write_text(preset("smoke").to_yaml())
    here = {"run": str(tmp_path), "resume": True}
    assert options("--run", str(tmp_path), "--resume") == preset("smoke").changed(here)
    # The command line counts even if it equals the default.
    assert options("--run", str(tmp_path), "--resume", "--steps", "300").run.steps == 300
    # With --or-start, the options of the existing run count, not the preset.
    again = ("--preset", "small", f"--run={tmp_path}", "--resume", "--or-start")
    assert options(*again) == preset("smoke").changed({**here, "or_start": True})
    new = {"run": str(tmp_path / "new"), "resume": True, "or_start": True}
    assert options("--preset", "small", "--run", new["run"], "--resume", "--or-start") == preset("small").changed(new)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--preset", "smok"), "did you mean 'smoke'"),
        (("--config", "none.yaml"), "cannot read none.yaml"),
        (("--run", "nowhere", "--resume"), "nowhere holds no run to resume"),
        (("--learning-rate", "nan"), "learning_rate=nan is out of range"),
        (("--steps", "-3"), "steps=-3 is out of range"),
        (("--model", "decoder-tinny"), "did you mean 'decoder-tiny'"),
        (("--data", "no/such/*.txt"), "no/such"),
        (("--job", "no.such.module:job"), "no module named 'no.such.module'"),
        (("--mesh", "dp:3"), "error: the mesh dp=3 needs 3 devices, but there are 8."),
        (("--mesh", "fdsp:8"), "this job does not use mesh axis 'fdsp'"),
        (("--batch-size", "6", "--mesh", "dp:8"), "6 rows cannot be split over 8"),
    ],
)
def test_wrong_options_are_errors_and_leave_nothing_behind(cli, args, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    code, _, err = cli("train", *args)
    assert code == 1
    assert message in err
    assert "hint:" in err or "cannot read" in err
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--data", ""), "data is empty."),
        (("--run", ""), "--run is empty."),
        (("--run=", "--resume"), "--run is empty."),
        (("--data", "x" * 300), ": File name too long.\nhint: pass a file"),
        (("--model-options", "num_layers=0"), "num_layers of Decoder must be a positive integer; got 0."),
        (("--model-options", "num_heads=3"), "d_model of Decoder is 128, which is not a multiple of num_heads (3)."),
        (("--steps", "9" * 23), "hint: use a whole number below 2**31."),
        (("--profile", "400:500"), "--profile 400:500 starts after the last step (300)."),
    ],
)
def test_invalid_options_are_reported_before_text_is_read(cli, args, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    code, _, err = cli("train", *args)
    assert code == 1
    assert message in err
    assert "hint:" in err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("number", "code", "text"),
    [
        (signal.SIGINT, 130, "interrupted\n"),
        (signal.SIGTERM, 75, "stopped by SIGTERM before training started\n"),
        (signal.SIGHUP, 75, "stopped by SIGHUP before training started\n"),
    ],
)
@pytest.mark.usefixtures("usual_signals")
def test_a_signal_before_the_run_ends_the_command_in_one_line(cli, monkeypatch, number, code, text):
    before = signal.getsignal(number)
    monkeypatch.setattr("meshwright.cli.train.run", lambda options: signal.raise_signal(number))
    assert cli("train") == (code, "", text)
    assert signal.getsignal(number) is before


@pytest.mark.usefixtures("usual_signals")
def test_ctrl_c_shows_no_traceback_in_other_commands(cli, monkeypatch):
    monkeypatch.setattr("meshwright.cli.report.build_report", lambda *_, **__: signal.raise_signal(signal.SIGINT))
    assert cli("report", "somewhere") == (130, "", "interrupted\n")


def test_an_unsaved_or_skipped_run_exits_with_1(cli, monkeypatch):
    from meshwright.loop import run as run_module
    from meshwright.loop.fit import Result

    for why in ("finished", "out of data", "preempted"):
        monkeypatch.setattr(run_module, "train", lambda config, why=why, **_: Result(None, 3, why, {}, saved=False))
        assert cli("train")[0] == 1
    monkeypatch.setattr(run_module, "train", lambda config, **_: Result(None, 3, "finished", {}, saved=True, skipped=3))
    assert cli("train")[0] == 1


@pytest.mark.parametrize("where", ["head", "/dev/full"])
def test_failing_output_does_not_stop_a_run(where, tmp_path, text_folder, token_cache):
    command = [sys.executable, "-m", "meshwright", "train", "--preset", "smoke", "--run", str(tmp_path / "run")]
    command += ["--steps", "2", "--sample-tokens", "0", "--no-tensorboard", "--no-report", "--devices", "2"]
    command += ["--data", str(text_folder), "--data-cache", str(token_cache)]
    if where == "head":
        reads, out = os.pipe()
        os.close(reads)
    else:
        out = os.open(where, os.O_WRONLY)
    done = subprocess.run(command, stdout=out, stderr=out, timeout=300)
    os.close(out)
    assert done.returncode == 0
    assert (tmp_path / "run" / "checkpoints" / "2" / "manifest.json").is_file()


def test_a_stopped_run_exits_with_75(cli, monkeypatch):
    from meshwright.loop import run as run_module
    from meshwright.loop.fit import Result

    for why, code in (("finished", 0), ("out of data", 0), ("preempted", 75)):
        monkeypatch.setattr(run_module, "train", lambda config, why=why, **_: Result(None, 1, why, {}, saved=True))
        assert cli("train")[0] == code
