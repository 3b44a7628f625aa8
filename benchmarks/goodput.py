"""Kills a training run three times, resumes it, and compares the accounts of its log with the script's own clock.

    python benchmarks/goodput.py --kills 3

The categories must add up to the wall time from the first start to the end within 1%, and each pause between two
processes must show up as idle. The accounts are read from the run folder alone.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from measure import ROOT, machine, table, verdict, versions

sys.path.insert(0, str(ROOT / "src"))

JOB = """
import time
import numpy as np
import meshwright as mw


def make_batch(seed):
    time.sleep(0.02)  # reading data takes time too
    return {"x": np.random.default_rng(seed).normal(size=(8, 64)).astype(np.float32)}


job = mw.Job(
    init=lambda key: {"w": np.zeros((64, 64), np.float32)},
    rules=[("w", mw.P())],
    mesh="dp:2",
    loss=lambda params, batch, rng: (((batch["x"] @ params["w"] - 1) ** 2).mean(), {}),
    batch=make_batch(0),
    make_batch=make_batch,
    eval_data=[{"x": row} for row in make_batch(1)["x"]],
)
"""
PAUSE = 2.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=3, help="number of kills (default: 3)")
    parser.add_argument("--steps", type=int, default=300, help="steps of the run (default: 300)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the instants (default: 0)")
    parser.add_argument("--keep", type=Path, help="folder to keep the run in")
    args = parser.parse_args()
    rng = random.Random(args.seed)
    with tempfile.TemporaryDirectory() as name:
        home = args.keep or Path(name)
        home.mkdir(parents=True, exist_ok=True)
        (home / "job.py").write_text(JOB)
        began, pauses, lost = time.time(), 0.0, 0
        for number in range(args.kills):
            # Kill in the middle of the next stretch between two checkpoints, to lose steps.
            target = args.steps * (number + 1) // (args.kills + 1) + rng.randrange(5, 20)
            lost += kill_at(start(home, args.steps), home / "run", target)
            time.sleep(PAUSE)
            pauses += PAUSE
        if start(home, args.steps).wait() != 0:
            sys.exit((home / "log").read_text()[-3000:])
        wall = time.time() - began
        report(home / "run", wall, pauses, lost, args)


def start(home: Path, steps: int) -> subprocess.Popen[bytes]:
    command = [
        sys.executable, "-m", "meshwright", "train", "--job", "job.py:job", "--view", "global", "--devices", "2",
        "--run", "run", "--resume", "--or-start", "--steps", str(steps), "--checkpoint-every", "25",
        "--eval-every", "50", "--no-tensorboard",
    ]  # fmt: skip
    variables = os.environ | {"PYTHONPATH": str(ROOT / "src"), "JAX_PLATFORMS": "cpu"}
    with (home / "log").open("ab") as log:
        return subprocess.Popen(command, cwd=home, env=variables, stdout=log, stderr=log)


def kill_at(process: subprocess.Popen[bytes], run: Path, step: int) -> int:
    """Kills a run once its log holds this step, and returns the last step in the log."""
    last = 0
    while last < step and process.poll() is None:
        time.sleep(0.05)
        lines = (run / "metrics.jsonl").read_bytes().splitlines() if (run / "metrics.jsonl").exists() else []
        with_step = [line for line in lines[-1:] if line.startswith(b"{") and line.endswith(b"}")]
        last = json.loads(with_step[0])["step"] if with_step else last
    if process.poll() is not None:
        sys.exit((run.parent / "log").read_text()[-3000:])
    process.send_signal(signal.SIGKILL)
    process.wait()
    return last % 25


def report(run: Path, wall: float, pauses: float, lost: int, args: argparse.Namespace) -> None:
    from meshwright.loop.logging.goodput import read_goodput

    found = read_goodput(run)
    rows = [
        [name, *(f"{attempt.seconds[name]:.2f}" for attempt in found.attempts), f"{total:.2f}"]
        for name, total in found.seconds.items()
    ]
    print(table(["seconds", *(f"attempt {n + 1}" for n in range(len(found.attempts))), "run"], rows))
    total = sum(found.seconds.values())
    print(f"{found}\n{machine()}; {versions('jax')}; about {lost} steps lost in {args.kills} kills")
    apart, idle = abs(total - wall) / wall, found.seconds["idle"]
    checks = [
        (f"categories sum to {total:.2f} s of {wall:.2f} s measured outside ({apart:.2%} apart)", apart <= 0.01),
        (f"idle {idle:.2f} s covers {pauses:.2f} s of pauses", pauses <= idle <= pauses + 2.5 * args.kills + 2),
        (f"recomputed {found.seconds['recomputed']:.2f} s is above 0", found.seconds["recomputed"] > 0),
        (f"{len(found.attempts)} attempts", len(found.attempts) == args.kills + 1),
    ]
    for text, met in checks:
        print(verdict(text, met))
    sys.exit(not all(met for _, met in checks))


if __name__ == "__main__":
    main()
