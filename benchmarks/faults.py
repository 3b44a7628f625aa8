"""Kills, stops, terminates and cuts off ranks under the supervisor, and compares with an undisturbed run.

    python benchmarks/faults.py --kills 50

Two ranks of two simulated devices each train under `meshwright launch`. Every run must finish with exit code 0, with
the losses, parameters, optimizer state, random key and data position of an undisturbed run, bit for bit, and with every
row used once. No traceback may reach the terminal. Linux only; the cut network needs root and `ip`.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from kill import compare, variables, write_text
from measure import ROOT, machine, median, verdict, versions

TRAIN = [
    "--mesh", "dp:2,fsdp:2", "--model", "decoder-tiny", "--model-options", "num_layers=1", "d_model=32", "d_ff=32",
    "num_heads=2", "dropout=0.1", "--eval-every", "0",
    "--sample-tokens", "0", "--no-report", "--no-tensorboard", "--ledger", "--log-seconds", "0", "--hang", "20",
]  # fmt: skip
LAUNCH = [
    "--processes", "2", "--devices-per-process", "2", "--max-failures", "1000", "--backoff", "0.2",
    "--silent-seconds", "10", "--quarantine-after", "0",
]  # fmt: skip
FAST = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}  # compiling is most of the time of so short a run
WRONG = ("steps with another loss", "leaves with other bits", "ledgers wrong", "runs not finished", "tracebacks")
FAULTS = ("kill", "coordinator", "stop", "term", "disk", "network")


def main() -> None:
    args = arguments()
    rng, found, waits = random.Random(args.seed), Counter[str](), dict[str, list[Wait]]()
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        write_text(home / "text", rng)
        reference = home / "straight"
        for run in (reference, home / "again"):  # the second one finds compiled programs, like a resumed run
            began = time.monotonic()
            Launched(run, home, args).finish(found)
            whole = time.monotonic() - began
        compare(reference, home / "again", found)
        print(f"undisturbed: {args.steps} steps, {args.steps // args.every} checkpoints, {whole:.0f} s", flush=True)
        for fault in args.faults:
            number = 0
            while found[fault] < (args.kills if fault == "kill" else args.others):
                run = home / f"{fault}-{number}"
                number += 1
                if not disturb(fault, run, home, args, rng, whole, found, waits.setdefault(fault, [])):
                    break
                compare(reference, run, found)
                print(f"{fault}, run {number}: {dict(found)}; {waits[fault]}", flush=True)
                shutil.rmtree(run, ignore_errors=True)
    print(f"{machine()}; {versions('jax', 'orbax-checkpoint', 'grain')}")
    print(f"snapshots: {f'every {args.snapshot_every} steps' if args.snapshot_every else 'none'}")
    for fault, seen in waits.items():
        print(f"{fault}: {found[fault]} times")
        for name, what in (("to the next step", 0), ("until the step of the death was passed", 1)):
            if seconds := [wait[what] for wait in seen]:
                print(f"  median {median(seconds):.1f} s {name} ({min(seconds):.1f}-{max(seconds):.1f})")
        if seen:
            print(f"  median {median([wait.again for wait in seen]):.0f} steps computed again, of {len(seen)} deaths")
    for what in WRONG:
        print(verdict(f"{what}: {found[what]}", found[what] == 0))
    sys.exit(any(found[what] for what in WRONG))


def disturb(fault, run, home, args, rng, whole, found, waits) -> bool:
    """Disturbs one run until it finishes or there were enough faults; returns False if this machine cannot do it."""
    network = None
    if fault == "network":
        network = Namespaces.make()
        if network is None:
            print("network: left out, because it needs root and `ip`", flush=True)
            return False
    launched = Launched(run, home, args, network)
    try:
        limit = args.kills if fault == "kill" else args.others
        while found[fault] < limit:
            if fault == "kill" and args.at_steps:
                if not launched.wait_for_step(rng.randrange(launched.reached + 2, launched.reached + args.steps // 3)):
                    break
            elif fault == "kill":
                launched.sleep(rng.uniform(0.02, 0.8) * whole)
            elif not launched.wait_for_step(rng.randrange(args.every + 1, args.steps - 4)):
                break
            rank = {"kill": rng.randrange(2), "coordinator": 0}.get(fault, 1)
            process = launched.rank(rank)
            if process is None or launched.process.poll() is not None:
                if launched.process.poll() is not None:
                    break
                continue
            launched.disturbed()
            if fault == "disk":  # every file of this rank is limited, as on a full disk
                resource.prlimit(process, resource.RLIMIT_FSIZE, (16384, resource.RLIM_INFINITY))
            elif fault == "network":
                assert network is not None
                network.cut()
            else:
                number = {"stop": signal.SIGSTOP, "term": signal.SIGTERM}.get(fault, signal.SIGKILL)
                os.kill(process, number)
            found[fault] += 1
            if not launched.wait_for_restart():
                break
            if network is not None:
                network.heal()
            waits += launched.wait_for_progress()
            if fault != "kill":
                break
        launched.finish(found)
    finally:
        launched.kill()
        if network is not None:
            network.remove()
    return True


class Wait(NamedTuple):
    """Seconds from a fault to the first step after the restart, and to the first one that had not been printed before.

    `again` is the number of printed steps that were computed again.
    """

    first: float
    new: float
    again: int


class Launched:
    """A run under `meshwright launch`, whose terminal this script reads."""

    def __init__(self, run: Path, home: Path, args: argparse.Namespace, network: Namespaces | None = None) -> None:
        train = [*TRAIN, "--run", str(run), "--data", str(home / "text"), "--data-cache", str(home / "tokens")]
        train += ["--steps", str(args.steps), "--checkpoint-every", str(args.every)]
        train += ["--batch-size", str(args.rows), "--num-tokens", str(args.tokens)]
        program = [sys.executable, "-m", "meshwright", "launch"] if network is None else network.program
        if args.snapshot_every:
            program = [*program, "--snapshot-every", str(args.snapshot_every)]
        command = [*program, *LAUNCH, "--logs", str(run.with_suffix(".logs")), "--", "train", *train]
        self.lines: list[tuple[float, str]] = []
        self.restarts, self._since, self._at = 0, 0, 0.0
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=variables(home) | FAST)
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append((time.monotonic(), line.rstrip()))

    def rank(self, rank: int) -> int | None:
        """Returns the process id of a rank, or None if it is not there now."""
        try:
            children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
            for child in children:
                if f"MESHWRIGHT_RANK={rank}\0".encode() in Path(f"/proc/{child}/environ").read_bytes():
                    return int(child)
        except OSError:
            pass
        return None

    def sleep(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and self.process.poll() is None:
            time.sleep(0.01)

    def wait_for(self, found, seconds: float = 300.0):
        """Waits until `found()` is true or the launcher has ended; returns its value."""
        deadline = time.monotonic() + seconds
        while not (value := found()) and self.process.poll() is None:
            if time.monotonic() > deadline:
                sys.exit("no progress:\n" + "\n".join(line for _, line in self.lines[-30:]))
            time.sleep(0.01)
        return value

    def wait_for_step(self, step: int) -> bool:
        return bool(self.wait_for(lambda: any(line.startswith(f"step {step}/") for _, line in self.lines)))

    @property
    def reached(self) -> int:
        """The last step that was printed."""
        return max((number for number, _ in steps_of(list(self.lines))), default=0)

    def disturbed(self) -> None:
        self._since, self._at = len(self.lines), time.monotonic()

    def wait_for_restart(self) -> bool:
        return bool(self.wait_for(lambda: any("The run restarts" in line for _, line in self.lines[self._since :])))

    def wait_for_progress(self) -> list[Wait]:
        """Returns how long the run took to get back to work after the fault, if it did and had made a step before."""

        def progress() -> list[Wait]:
            lines = list(self.lines)
            again = next(place for place in range(self._since, len(lines)) if "The run restarts" in lines[place][1])
            before = max(number for number, _ in steps_of(lines[:again]) or [(0, 0.0)])
            after = steps_of(lines[again:])
            new = [at for number, at in after if number > before]
            return [Wait(after[0][1] - self._at, new[0] - self._at, before + 1 - after[0][0])] if new else []

        return list(self.wait_for(progress))

    def finish(self, found: Counter[str]) -> None:
        """Waits for the end, and counts what must not be in the terminal."""
        self.process.wait()
        self._thread.join()
        text = "\n".join(line for _, line in self.lines)
        found["runs not finished"] += self.process.returncode != 0
        # A rank that notices the death before the launcher stops it may say so, in one line.
        noise = [line for _, line in self.lines if "Traceback (most" in line or "Gloo all-reduce failed" in line]
        noise = [line for line in noise if not re.match(r"rank \d+ stopped: it lost another rank", line)]
        found["tracebacks"] += bool(noise)
        if self.process.returncode or noise:
            print(text[-3000:], flush=True)

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait()


def steps_of(lines: list[tuple[float, str]]) -> list[tuple[int, float]]:
    """Returns the printed steps, with the time of each."""
    return [(int(step[1]), at) for at, line in lines if (step := re.match(r"step (\d+)/", line))]


class Namespaces:
    """Two network namespaces with one cable between them; each rank runs in its own."""

    def __init__(self) -> None:
        self.names = [f"mw{os.getpid()}-{number}" for number in range(2)]
        self.program = [sys.executable, __file__, "--inside", *self.names]

    @classmethod
    def make(cls) -> Namespaces | None:
        self = cls()
        if os.geteuid() != 0 or shutil.which("ip") is None:
            return None
        cables = [f"mwv{number}-{os.getpid() % 10000}" for number in range(2)]
        commands = [["netns", "add", name] for name in self.names]
        commands += [["link", "add", cables[0], "type", "veth", "peer", "name", cables[1]]]
        for number, (name, cable) in enumerate(zip(self.names, cables, strict=True)):
            inside = ["-n", name]
            commands += [["link", "set", cable, "netns", name], [*inside, "link", "set", cable, "name", "cable"]]
            commands += [[*inside, "addr", "add", f"10.77.0.{number + 1}/24", "dev", "cable"]]
            commands += [[*inside, "link", "set", "cable", "up"], [*inside, "link", "set", "lo", "up"]]
        for command in commands:
            if subprocess.run(["ip", *command], stderr=subprocess.DEVNULL).returncode:
                self.remove()
                return None
        for number, name in enumerate(self.names):  # Gloo connects to the address of the host's name
            folder = Path("/etc/netns") / name
            folder.mkdir(parents=True)
            (folder / "hosts").write_text(f"127.0.0.1 localhost\n10.77.0.{number + 1} {os.uname().nodename}\n")
        return self

    def cut(self) -> None:
        subprocess.run(["ip", "-n", self.names[1], "link", "set", "cable", "down"], check=True)

    def heal(self) -> None:
        subprocess.run(["ip", "-n", self.names[1], "link", "set", "cable", "up"], check=True)

    def remove(self) -> None:
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], stderr=subprocess.DEVNULL)
            shutil.rmtree(Path("/etc/netns") / name, ignore_errors=True)


def launch_inside(names: list[str], words: list[str]) -> int:
    """Runs `meshwright launch`, with each rank in its own network namespace."""
    sys.path.insert(0, str(ROOT / "src"))
    from meshwright.cli import launch as command
    from meshwright.launch.backends.local import LocalRanks

    class Apart(LocalRanks):
        def words(self, rank: int, number: int, port: int, extra: object) -> list[str]:
            found = [*super().words(rank, number, port, extra)]
            found = [word.replace("127.0.0.1", "10.77.0.1") for word in found]
            return ["ip", "netns", "exec", names[rank], *found]

    command.LocalRanks = Apart
    return command.main(words)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50, help="SIGKILLs of a random rank at random instants")
    parser.add_argument("--others", type=int, default=1, help="repetitions of every other fault")
    parser.add_argument("--faults", nargs="+", default=list(FAULTS), choices=FAULTS)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--every", type=int, default=4, help="steps between checkpoints")
    parser.add_argument("--rows", type=int, default=4, help="rows of a batch, which make a step take longer")
    parser.add_argument("--tokens", type=int, default=16, help="tokens of a row")
    parser.add_argument("--at-steps", action="store_true", help="kill at random steps, not while a run starts")
    parser.add_argument("--snapshot-every", type=int, default=0, help="steps between snapshots in host memory; 0: none")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--inside"]:
        sys.exit(launch_inside(sys.argv[2:4], sys.argv[4:]))
    main()
