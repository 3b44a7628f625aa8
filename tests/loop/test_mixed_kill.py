"""A real run on three sources, killed five times with SIGKILL while its weights change twice."""

import json
import os
import subprocess
import sys
import time

import pytest

from meshwright.data import check_ledger

OPTIONS = [
    "--model", "decoder-tiny", "--devices", "1", "--mesh", "dp:1", "--batch-size", "4", "--num-tokens", "16",
    "--validation", "0", "--eval-every", "0", "--sample-tokens", "0", "--no-report", "--no-tensorboard", "--ledger",
    "--checkpoint-every", "5",
]  # fmt: skip
# Weights of each start; None keeps those of the last one.
WEIGHTS = [
    ["web=0.5", "code=0.3", "math=0.2"],
    None,
    ["web=0.1", "code=0.3", "math=0.6"],
    None,
    ["web=2", "code=1", "math=1"],
    None,
]


def steps_in(path):
    try:
        lines = path.read_bytes().split(b"\n")[:-1]
    except FileNotFoundError:
        return 0
    return max((json.loads(line).get("step", 0) for line in lines), default=0)


@pytest.mark.slow
def test_a_mixture_killed_five_times_with_weights_changed_twice(tmp_path):
    for name, size in {"web": 40, "code": 24, "math": 9}.items():
        lines = [json.dumps({"text": f"{name} {number} " * 9}) + "\n" for number in range(size)]
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
    run = tmp_path / "run"
    common = [sys.executable, "-m", "meshwright", "train", "--run", str(run)]
    data = ["--data", *(f"{name}={tmp_path}/{name}.jsonl" for name in ("web", "code", "math"))]
    first = [*common, *OPTIONS, *data, "--data-cache", str(tmp_path / "cache")]
    cache = {"JAX_COMPILATION_CACHE_DIR": str(tmp_path / "programs"), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    environment = os.environ | {"JAX_PLATFORMS": "cpu"} | cache
    for life, weights in enumerate(WEIGHTS):
        command = [*common, "--resume"] if life else first
        command = [*command, "--mixture-weights", *weights] if weights else list(command)
        is_last = life == len(WEIGHTS) - 1
        goal = steps_in(run / "metrics.jsonl") + 27
        command += ["--steps", str(goal if is_last else 10_000)]
        with (tmp_path / f"{life}.log").open("w") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
            try:
                while process.poll() is None and (is_last or steps_in(run / "metrics.jsonl") < goal):
                    time.sleep(0.002)
            finally:
                if process.poll() is None:
                    process.kill()
                process.wait()
        assert process.returncode == (0 if is_last else -9), (tmp_path / f"{life}.log").read_text()[-3000:]
    report = check_ledger(run / "ledger").require()
    assert report.num_starts == 6
    assert report.num_redone > 0
    for name, counts in report.sources.items():
        assert counts[:-1] == [report.source_rows[name]] * (len(counts) - 1)
    assert max(map(len, report.sources.values())) > 2
    print(report)
