"""A job with its own data in two real processes, resumed by one: the same rows, losses, metrics and predictions."""

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

JOB = Path(__file__).parent / "tiny_job.py"
OPTIONS = [
    "--mesh", "dp:8", "--eval-every", "2", "--eval-batches", "9", "--schedule", "constant", "--warmup", "0", "--ledger",
    "--no-report", "--no-tensorboard", "--hang", "0",
]  # fmt: skip


def start(folder, run, *options):
    command = [sys.executable, "-W", "ignore", "-m", "meshwright", "train", "--run", str(folder / run), *options]
    env = os.environ | {"JAX_PLATFORMS": "cpu"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env)


def finish(*processes):
    for process in processes:
        said, _ = process.communicate(timeout=240)
        assert process.returncode == 0, said


def numbers(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    names = ("loss", "accuracy", "eval/loss", "eval/accuracy")
    return [[line["step"], *(line[name] for name in names if name in line)] for line in lines]


@pytest.mark.slow
@pytest.mark.parametrize("form", ["map_dataset", "factory"])
def test_two_processes_train_a_job_and_one_resumes_it(tmp_path, form):
    shutil.copy(JOB, tmp_path / "job.py")
    with (tmp_path / "job.py").open("a") as file:
        file.write(f"shown = make({form}.data, predict=predict)\n")
    shared = [*OPTIONS, "--job", f"{tmp_path}/job.py:shown"]
    alone = start(tmp_path, "alone", *shared, "--steps", "8", "--devices", "8")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = ["--coordinator", f"127.0.0.1:{port}", "--num-processes", "2"]
    both = [
        start(tmp_path, "two", *shared, "--steps", "4", "--devices", "4", *place, "--process-id", str(rank))
        for rank in range(2)
    ]
    finish(alone, *both)
    finish(start(tmp_path, "two", "--resume", "--steps", "8", "--devices", "8"))
    wanted, found = (numbers(tmp_path / run) for run in ("alone", "two"))
    assert [line[0] for line in found] == [line[0] for line in wanted]
    for line, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(line, other, rtol=1e-5)
    done = subprocess.run(
        [sys.executable, "-m", "meshwright", "ledger", str(tmp_path / "two")], capture_output=True, text=True
    )
    assert done.stdout.startswith("ok: 8 steps, 2 starts, 64 rows"), done.stdout + done.stderr
    shown = [json.loads((tmp_path / run / "predictions" / "8.json").read_text()) for run in ("alone", "two")]
    assert shown[0] == shown[1]
