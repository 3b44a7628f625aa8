"""Presses Ctrl-C at random instants: in `meshwright train` before its first step, and in other commands.

    python benchmarks/interrupts.py --train 60 --others 20

As in a terminal, the whole process group receives SIGINT. Each process must end within 2 seconds, with exit code 130
and one line of text, and without a traceback. `--startup N` also measures how early that holds: N more processes are
interrupted within their first 0.15 seconds, in which Python itself is still starting, and N with SIGINT blocked until
Meshwright's first line, as `dev.py` starts them.
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
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from measure import ROOT, machine, verdict, versions

FIRST, LIMIT = 0.02, 2.0
_SHARED = [
    "--steps", "100000", "--checkpoint-every", "0", "--eval-every", "0", "--no-report", "--no-tensorboard",
    "--log-seconds", "0",
]  # fmt: skip
DECODER = [
    "train", "--model", "decoder-tiny", "--devices", "4", "--mesh", "dp:4", "--data", "text", "--batch-size", "4",
    "--num-tokens", "32", "--sample-tokens", "8", *_SHARED,
]  # fmt: skip
LINEAR = ["train", "--job", "job.py:job", "--view", "global", *_SHARED]
JOB = """
import numpy as np, meshwright as mw
make_batch = lambda seed: {"x": np.ones((8, 4), np.float32)}
job = mw.Job(
    init=lambda key: {"w": np.zeros(4, np.float32)}, rules=[("w", mw.P())], mesh="dp:8",
    loss=lambda params, batch, rng: (((batch["x"] @ params["w"] - 1) ** 2).mean(), {}),
    batch=make_batch(0), make_batch=make_batch,
)
"""
OTHERS = [
    ["rules", "job.py:job"],
    ["verify", "job.py:job", "--view", "global"],
    ["plan", "--model", "decoder-tiny", "--target", "v5e:2x4", "--mesh", "fsdp:8"],
    ["doctor"],
    ["train", "--print-config"],
    ["report", "run"],
    ["checkpoint", "ls", "run/checkpoints"],
    ["generate", "--run", "run", "--prompt", "def ", "--max-tokens", "200"],
]


@dataclass(frozen=True)
class Outcome:
    """How a process ended: its exit code, the seconds after Ctrl-C, and its output."""

    code: int
    seconds: float
    text: str

    @property
    def kind(self) -> str:
        if self.seconds > LIMIT:
            return "late"
        if "Traceback" in self.text or "Exception ignored" in self.text:
            return "traceback"
        if self.code == -signal.SIGINT and not self.text:
            return "ended by the signal itself"
        if self.code == 130 and self.text.count("interrupted") == 1 and self.text.endswith("interrupted\n"):
            return "130 and one line"
        if self.code == 75 and "Stopping after this step and saving" in self.text:
            return "saved and stopped, as after any finished step"  # the machine was faster than when it was measured
        return f"exit code {self.code}"


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "meshwright", *arguments]


def start(arguments: list[str], folder: Path, output: int, *, blocked: bool = False) -> subprocess.Popen[bytes]:
    variables = os.environ | {"PYTHONPATH": str(ROOT / "src"), "JAX_PLATFORMS": "cpu"}
    return subprocess.Popen(
        command(*arguments), cwd=folder, env=variables, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        stderr=output, start_new_session=True, preexec_fn=block if blocked else None,
    )  # fmt: skip


def block() -> None:
    """Blocks SIGINT, as `dev.py` does before it becomes the command."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])


def interrupt(arguments: list[str], folder: Path, delay: float, *, blocked: bool = False) -> Outcome | None:
    """Presses Ctrl-C after `delay` seconds; returns None if the process ended before."""
    with tempfile.TemporaryFile() as output:
        process = start(arguments, folder, output.fileno(), blocked=blocked)
        time.sleep(delay)
        if process.poll() is not None:
            return None
        os.killpg(process.pid, signal.SIGINT)
        began = time.perf_counter()
        try:
            code = process.wait(timeout=LIMIT + 8)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            code = process.wait()
        seconds = time.perf_counter() - began
        output.seek(0)
        return Outcome(code, seconds, output.read().decode(errors="replace"))


def seconds_to_first_step(arguments: list[str], folder: Path) -> float:
    """Trains until the first step is shown, and returns how long that took."""
    began = time.perf_counter()
    reads, writes = os.pipe()
    process = start([*arguments, "--run", f"measured-{len(arguments)}"], folder, writes)
    os.close(writes)
    with os.fdopen(reads) as lines:
        seen = any(line.startswith("step 1/") for line in lines)
        seconds = time.perf_counter() - began
        process.kill()
    process.wait()
    if not seen:
        sys.exit("error: the run that measures the first step failed.")
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", type=int, default=60, help="interrupts of train (default: 60)")
    parser.add_argument("--others", type=int, default=20, help="interrupts of other commands (default: 20)")
    parser.add_argument("--startup", type=int, default=0, help="interrupts within the first 0.15 s (default: 0)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the instants (default: 0)")
    args = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # shells start background jobs with an ignored SIGINT
    rng, found = random.Random(args.seed), dict[str, list[Outcome]]()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "job.py").write_text(JOB)
        (folder / "text").mkdir()
        for page in range(40):
            (folder / "text" / f"{page}.txt").write_text("all work and no play makes a dull run. " * 50)
        setup = [*DECODER, "--steps", "2", "--run", "run"]
        if args.others and start(setup, folder, subprocess.DEVNULL).wait() != 0:
            sys.exit("error: the run that other commands read failed.")
        jobs = [DECODER, LINEAR, LINEAR] if args.train else []
        last = [0.9 * seconds_to_first_step(arguments, folder) for arguments in jobs[:2]]
        for number in range(args.train):
            delay = rng.uniform(FIRST, last[min(number % 3, 1)])
            ended = interrupt([*jobs[number % 3], "--run", f"run-{number}"], folder, delay)
            show("train", DECODER, delay, ended, found)
        number = 0
        while number < args.others:
            arguments, delay = OTHERS[number % len(OTHERS)], rng.uniform(FIRST, 2.5)
            ended = interrupt(arguments, folder, delay)
            number += ended is not None  # a command that had already ended was not interrupted
            show("other commands", arguments, delay, ended, found)
        for number in range(args.startup):
            delay = 0.15 * (number + 0.5) / args.startup
            for name in ("startup", "startup, blocked"):
                ended = interrupt(["rules", "job.py:job"], folder, delay, blocked=name != "startup")
                show(name, ["rules"], delay, ended, found)
    print(f"{machine()}; {versions('jax')}; train until {[round(each, 1) for each in last]} s")
    for name, outcomes in found.items():
        counts = Counter(outcome.kind for outcome in outcomes)
        slowest = max(outcome.seconds for outcome in outcomes)
        print(f"{name}: {len(outcomes)} interrupted, slowest end {slowest:.2f} s, {json.dumps(counts)}")
    checked = [outcome for name, outcomes in found.items() if name != "startup" for outcome in outcomes]
    wrong = [outcome for outcome in checked if not outcome.kind.startswith(("130 and", "saved and"))]
    print(verdict(f"not 130 and one line within {LIMIT:.0f} s: {len(wrong)} of {len(checked)}", not wrong))
    sys.exit(bool(wrong))


def show(name: str, arguments: list[str], delay: float, ended: Outcome | None, found: dict[str, list[Outcome]]) -> None:
    if ended is None:
        print(f"{arguments[0]:12} {delay:6.3f} s: had already ended", flush=True)
        return
    found.setdefault(name, []).append(ended)
    print(f"{arguments[0]:12} {delay:6.3f} s: {ended.kind} after {ended.seconds:.2f} s", flush=True)
    if ended.kind != "130 and one line":
        print(ended.text[-1500:], flush=True)


if __name__ == "__main__":
    main()
