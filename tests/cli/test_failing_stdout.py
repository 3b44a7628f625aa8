"""A full or closed stdout: one line and a non-zero exit code."""

import os
import sys

import pytest

from meshwright.cli import main
from meshwright.cli.stdout import Checked, OutputError

JOB = """
import numpy as np, meshwright as mw
job = mw.Job(init=lambda key: {"w": np.ones((8, 8), np.float32)}, rules=[("w", mw.P("tp"))], mesh="tp:2")
"""
COMMANDS = [
    ["train", "--print-config"],
    ["rules", "job.py:job"],
    ["rules", "job.py:job", "--json"],
    ["rules", "--help"],
    ["--help"],
]


@pytest.fixture
def cli(tmp_path, monkeypatch, capfd):
    (tmp_path / "job.py").write_text(JOB)
    monkeypatch.chdir(tmp_path)

    def run(arguments, stdout):
        before = sys.stdout
        sys.stdout = stdout
        try:
            with pytest.raises(SystemExit) as ended:
                main(arguments)
        finally:
            sys.stdout = before
        return ended.value.code, capfd.readouterr().err

    return run


def full_disk():
    return open("/dev/full", "w")


def closed_pipe():
    reads, writes = os.pipe()
    os.close(reads)
    return open(writes, "w")


@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
@pytest.mark.parametrize(
    ("make", "why"),
    [
        (full_disk, "No space left on device"),
        (closed_pipe, "Broken pipe"),
        (lambda: None, "it is closed"),
    ],
    ids=["full", "pipe", "closed"],
)
def test_every_command_reports_it(cli, arguments, make, why):
    stdout = make()
    assert cli(arguments, stdout) == (1, f"error: cannot write to stdout: {why}.\n")
    if stdout is not None:
        stdout.close()  # Python's own flush at exit finds nothing left to fail


def test_only_the_first_failure_is_reported():
    with open("/dev/full", "w") as full:
        output = Checked(full)
        output.write("text")
        with pytest.raises(OutputError, match="No space left"):
            output.flush()
        output.write("more")
        output.flush()
        assert not output.isatty()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["rules", "job.py:job", "--mesh", ""], "--mesh is empty"),
        (["plan", "job.py:job", "--mesh", " "], "--mesh is empty"),
        (["report", ".", "--out", ""], "--out is empty"),
        (["train", "--devices", "100000"], "devices=100000 is out of range"),
        (["verify", "job.py:job", "--devices", "100000"], "cannot simulate 100000 devices"),
        (["train", "--sample-tokens", "1000000000"], "sample_tokens=1000000000 is out of range"),
        (["train", "--run", "runs/\udcff"], "cannot be a file name here"),
        (["train", "--run", "a\0b"], "cannot be a file name here"),
        (["train", "--compile-cache", ""], "compile_cache is empty"),
    ],
)
def test_empty_and_absurd_options(cli, arguments, text):
    code, error = cli(arguments, sys.stdout)
    assert code == 1
    assert error.startswith("error: ")
    assert text in error
