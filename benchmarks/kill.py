"""Kills training runs at random times, also during saves, resumes them, and compares with an undisturbed run.

    python benchmarks/kill.py --kills 200

Runs are killed with SIGKILL. After each kill, every finished checkpoint must still exist. At the end of each run, the
losses, parameters, optimizer state, random key and data position must equal the undisturbed run's bit for bit, and the
ledger must show every row once.
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
from pathlib import Path

from measure import ROOT, machine, verdict, versions

OPTIONS = [
    "--devices", "2", "--mesh", "dp:1,fsdp:2", "--no-report", "--no-tensorboard", "--ledger", "--log-seconds", "0",
]  # fmt: skip
TEXT = [
    "--model", "decoder-tiny", "--model-options", "dropout=0.1", "--batch-size", "4", "--num-tokens", "32",
    "--eval-every", "0", "--sample-tokens", "0",
]  # fmt: skip
# A job also evaluates and watches its evaluations, so that their history is compared too.
JOB = ["--eval-every", "3", "--patience", "1000"]


def main() -> None:
    args = arguments()
    rng = random.Random(args.seed)
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        write_text(home / "text", rng)
        found: Counter[str] = Counter()
        reference = home / "straight"
        for run in (reference, home / "again"):
            # The second run finds compiled programs, so it takes as long as a resumed run.
            began = time.time()
            if start(run, home, args).wait() != 0:
                sys.exit(run.with_suffix(".log").read_text()[-3000:])
            whole = time.time() - began
        compare(reference, home / "again", found)
        print(f"undisturbed: {args.steps} steps, {args.steps // args.every} checkpoints, {whole:.0f} s", flush=True)
        number = 0
        while found["kills"] < args.kills:
            number += 1
            one_run(home / f"run-{number}", home, args, rng, whole, found)
            compare(reference, home / f"run-{number}", found)
            print(f"run {number}: {dict(found)}", flush=True)
    print(f"{machine()}; {versions('jax', 'orbax-checkpoint', 'grain')}")
    print(
        f"{found['kills']} kills ({found['in a save']} during a save, {found['before a save']} before the first save "
        f"after a start), {number} complete runs"
    )
    wrong = ("finished steps lost", "steps with another loss", "leaves with other bits", "ledgers wrong")
    for what in wrong:
        print(verdict(f"{what}: {found[what]}", found[what] == 0))
    sys.exit(any(found[what] for what in wrong))


def one_run(
    run: Path, home: Path, args: argparse.Namespace, rng: random.Random, whole: float, found: Counter[str]
) -> None:
    """Kills and resumes one run until it completes."""
    for _ in range(1000):
        process = start(run, home, args, resume=(run / "config.yaml").exists())
        in_save = rng.random() < 0.5
        deadline = time.time() + rng.uniform(0.05, 0.95) * whole
        saves_to_pass = rng.randrange(0, 4)
        seen: set[int] = set()
        before = steps(run)
        killed = False
        while process.poll() is None:
            finished, unfinished = steps(run), saving(run)
            seen |= finished
            new = len(finished - before)
            if found["kills"] < args.kills and (
                (in_save and unfinished and new >= saves_to_pass) or (not in_save and time.time() > deadline)
            ):
                time.sleep(rng.uniform(0, 0.05) if in_save else 0)
                killed = process.poll() is None
                process.send_signal(signal.SIGKILL)
                process.wait()
                break
            time.sleep(0.002)
        if not killed:
            if process.returncode:
                sys.exit(f"the run failed:\n{run.with_suffix('.log').read_text()[-3000:]}")
            return
        found["kills"] += 1
        found["in a save"] += bool(saving(run))
        found["before a save"] += not steps(run) - before and not saving(run)
        found["finished steps lost"] += bool(seen) and max(steps(run), default=0) < max(seen)


def compare(reference: Path, run: Path, found: Counter[str]) -> None:
    """Counts the differences between a run and the undisturbed one."""
    left, right = losses(reference), losses(run)
    found["steps with another loss"] += sum(left.get(step) != right.get(step) for step in left | right)
    theirs, ours = leaves(reference), leaves(run)
    found["leaves with other bits"] += sum(theirs.get(name) != ours.get(name) for name in theirs | ours)
    found["leaves compared"] += len(ours)
    done = subprocess.run(
        [sys.executable, "-m", "meshwright", "ledger", str(run)], capture_output=True, text=True, env=variables(run)
    )
    found["ledgers wrong"] += done.returncode != 0
    if done.returncode:
        print(done.stdout, done.stderr)


def losses(run: Path) -> dict[int, str]:
    """Returns the logged loss, gradient norm and tokens of every step, and its evaluation."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    evaluations = {line["step"]: f" {line['eval/loss']!r}" for line in lines if "eval/loss" in line}
    lines = [line for line in lines if "loss" in line]
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1)), "steps missing or repeated in the log"
    return {
        line["step"]: f"{line['loss']!r} {line['grad_norm']!r} {line['tokens']!r}{evaluations.get(line['step'], '')}"
        for line in lines
    }


def leaves(run: Path) -> dict[str, bytes]:
    """Returns the bytes of the last checkpoint, read by Orbax alone, and the data position."""
    import jax
    import numpy as np

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2)
    from orbax.checkpoint import v1 as ocp

    folder = run / "checkpoints" / str(max(steps(run)))
    place = folder.absolute() / "state"
    # On one device, whatever the devices and processes of the run.
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    known = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=here), ocp.metadata(place).metadata
    )
    tree = ocp.load(place, known)
    found = {jax.tree_util.keystr(path): np.asarray(leaf).tobytes() for path, leaf in jax.tree.leaves_with_path(tree)}
    manifest = json.loads((folder / "manifest.json").read_text())
    facts = {name: manifest["facts"].get(name) for name in ("data", "evaluations")}
    return {**found, "facts": json.dumps(facts, sort_keys=True).encode()}


def steps(run: Path) -> set[int]:
    return {
        int(path.parent.name) for path in (run / "checkpoints").glob("*/manifest.json") if path.parent.name.isdigit()
    }


def saving(run: Path) -> list[Path]:
    return [path for path in (run / "checkpoints").glob("*") if not (path / "manifest.json").exists()]


def start(run: Path, home: Path, args: argparse.Namespace, *, resume: bool = False) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "meshwright", "train", "--run", str(run)]
    if resume:
        command += ["--resume"]
    else:
        own = ["--job", args.job, *JOB] if args.job else [*TEXT, "--data", str(home / "text")]
        command += [*OPTIONS, *own, "--data-cache", str(home / "tokens")]
        command += ["--steps", str(args.steps), "--checkpoint-every", str(args.every)]
    with run.with_suffix(".log").open("ab") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, env=variables(home))


def variables(home: Path) -> dict[str, str]:
    kept = {"JAX_COMPILATION_CACHE_DIR": str(home / "programs"), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    return os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT / "src")} | kept


def write_text(folder: Path, rng: random.Random) -> None:
    folder.mkdir()
    words = ["".join(rng.choices("abcdefghij", k=rng.randint(1, 8))) for _ in range(200)]
    for number in range(40):
        (folder / f"{number}.txt").write_text(" ".join(rng.choices(words, k=400)))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--every", type=int, default=3, help="steps between checkpoints")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--job", help="a job with its own data, as file.py:attribute (default: a decoder on text)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
