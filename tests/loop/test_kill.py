"""Runs killed without warning and resumed; `benchmarks/kill.py` does this two hundred times."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "kill.py"


JOB = Path(__file__).parent / "tiny_job.py"


@pytest.mark.slow
def test_a_killed_run_of_a_job_with_its_own_data():
    """With evaluations and early stopping, whose history is part of a checkpoint."""
    command = [sys.executable, str(SCRIPT), "--kills", "2", "--steps", "12", "--every", "2", "--job", f"{JOB}:factory"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^2 kills", done.stdout, re.MULTILINE)
    assert done.stdout.count("met:") == 4


@pytest.mark.slow
def test_a_killed_run_is_bitwise_equal_to_an_uninterrupted_one():
    command = [sys.executable, str(SCRIPT), "--kills", "3", "--steps", "18", "--every", "3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^3 kills", done.stdout, re.MULTILINE)
    assert done.stdout.count("met:") == 4
