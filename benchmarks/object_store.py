"""Trains to S3 by moto's server on this machine: kills, flipped bits, two writers, and the time it costs.

    pip install 'meshwright[s3]' 'moto[server]'
    python benchmarks/object_store.py

Runs are killed with SIGKILL and resumed, sometimes with an empty local folder, as on another machine. The finished run
must equal an undisturbed one in a local folder bit for bit. The time of a run in the store may be 1.2x that of a run in
a local folder, plus the time that the server's own process computes.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import kill
from measure import ROOT, machine, median, verdict, versions

URL = "s3://bucket/runs/killed"


def main() -> None:
    args = arguments()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2)
    sys.path.insert(0, str(ROOT / "src"))
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        server = Server(home)
        try:
            os.environ |= server.settings | {"XDG_CACHE_HOME": str(home / "cache")}
            kill.write_text(home / "text", random.Random(0))
            met = []
            if "kills" in args.parts:
                met += [killed_runs(home, args), flipped_bits(args)]
            if "writers" in args.parts:
                met += [two_writers(home, args)]
            if "time" in args.parts:
                met += [throughput(home, server, args)]
        finally:
            server.process.kill()
    print(f"{machine()}; {versions('jax', 'orbax-checkpoint', 'fsspec', 's3fs', 'moto')}")
    sys.exit(not all(met))


class Server:
    """moto's S3 server in a process of its own."""

    def __init__(self, home: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        endpoint = f"http://127.0.0.1:{port}"
        self.settings = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "y", "AWS_DEFAULT_REGION": "us-east-1"}
        self.settings |= {"AWS_ENDPOINT_URL": endpoint, "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
        with (home / "server.log").open("wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        for _ in range(600):
            try:
                urllib.request.urlopen(f"{endpoint}/moto-api/").close()
                break
            except OSError:
                time.sleep(0.1)
        request = urllib.request.Request(f"{endpoint}/bucket", method="PUT", headers={"Authorization": _ANYONE})
        urllib.request.urlopen(request).close()

    def seconds(self) -> float:
        """Returns the time that the server computed so far."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


_ANYONE = "AWS4-HMAC-SHA256 Credential=x/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=0"


def start(url: str, home: Path, args: argparse.Namespace, **more: Any) -> subprocess.Popen[bytes]:
    """Starts a run, or resumes it."""
    options = {"steps": args.steps, "checkpoint-every": args.every} | more
    command = [sys.executable, "-m", "meshwright", "train", "--run", url]
    command += [*kill.OPTIONS, *kill.TEXT, "--data", str(home / "text"), "--data-cache", str(home / "tokens")]
    command += ["--resume", "--or-start"]
    for name, value in options.items():
        command += [f"--{name.replace('_', '-')}", str(value)]
    programs = {"JAX_COMPILATION_CACHE_DIR": str(home / "programs"), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    paths = {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])}
    with (home / "runs.log").open("ab") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | programs | paths)


def finish(process: subprocess.Popen[bytes], home: Path) -> None:
    if process.wait() != 0:
        sys.exit((home / "runs.log").read_text()[-3000:])


# --- Kills ---


def killed_runs(home: Path, args: argparse.Namespace) -> bool:
    rng, found = random.Random(args.seed), Counter[str]()
    finish(start(str(home / "straight"), home, args), home)
    began = time.monotonic()
    finish(start(str(home / "again"), home, args), home)
    whole = time.monotonic() - began
    while found["kills"] < args.kills:
        found["runs"] += 1
        url = f"{URL}-{found['runs']}"
        one_run(url, home, args, rng, whole, found)
        compare(url, home, found)
    text = f"{found['kills']} kills of {found['runs']} runs, {found['during an upload']} during an upload"
    print(f"{text}, {found['moves']} resumed with an empty folder")
    wrong = ("finished steps lost", "steps with another loss", "leaves with other bits", "ledgers wrong")
    wrong = (*wrong, "steps not verified")
    for what in wrong:
        print(verdict(f"{what}: {found[what]}", found[what] == 0))
    return not any(found[what] for what in wrong)


def one_run(
    url: str, home: Path, args: argparse.Namespace, rng: random.Random, whole: float, found: Counter[str]
) -> None:
    """Kills and resumes one run until it completes."""
    from meshwright.cli.remote_steps import find_steps

    more, seen = {"upload_every": 2 * args.every, "keep_last": 1000}, set[int]()
    while True:
        elsewhere = found["kills"] >= (found["moves"] + 1) * args.kills // (args.moves + 1)
        if elsewhere:  # the local folder is lost, and with it the steps that were not uploaded
            shutil.rmtree(home / "cache" / "meshwright" / "runs")
            found["moves"] += 1
        process = start(url, home, args, **more)
        steps = find_steps(url)[0]
        before, passes, in_upload = named(steps.store), rng.randrange(3), rng.random() < 0.8
        last = time.monotonic() + rng.uniform(0.5, 1.5) * whole + (70 if elsewhere else 0)
        while process.poll() is None:
            new = len(named(steps.store) - before)
            if found["kills"] < args.kills and (new > passes if in_upload else time.monotonic() > last):
                time.sleep(rng.uniform(0, 0.3))
                break
            time.sleep(0.02)
        if process.poll() is not None:
            finish(process, home)
            return
        process.send_signal(signal.SIGKILL)
        process.wait()
        found["kills"] += 1
        found["during an upload"] += bool(steps.unfinished())
        found["finished steps lost"] += not seen <= set(steps.steps())
        seen = set(steps.steps())
        print(f"kill {found['kills']}: finished {sorted(seen)}, unfinished {steps.unfinished()}", flush=True)


def named(store: Any) -> set[str]:
    """Returns the steps that have objects, finished or not."""
    return {name.split("/")[0] for name in store.list()}


def compare(url: str, home: Path, found: Counter[str]) -> None:
    """Counts the differences between a finished run in the store and the undisturbed one."""
    from meshwright.loop.folder.remote_run import read_remote

    folder, checkpoints = read_remote(url)
    found["steps not verified"] += bool(checkpoints.verify(max(checkpoints.steps())))
    kill.compare(home / "straight", folder, found)
    command = [sys.executable, "-m", "meshwright", "checkpoint", "verify", url]
    paths = {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | paths)
    found["steps not verified"] += done.returncode


# --- Two writers ---


def two_writers(home: Path, args: argparse.Namespace) -> bool:
    from meshwright.errors import StoreError
    from meshwright.remote import open_store, take_lease

    url = "s3://bucket/runs/held"
    holder = start(url, home, args, steps=10**6, checkpoint_every=10**5)
    while b"in s3://bucket/runs/held; the first step" not in (home / "runs.log").read_bytes():
        if holder.poll() is not None:
            sys.exit((home / "runs.log").read_text()[-3000:])
        time.sleep(0.5)
    refused = 0
    for local in (home / "cache-of-another", None):
        size = (home / "runs.log").stat().st_size
        extra = {} if local is None else {"local_run": local}
        code = start(url, home, args, steps=10**6, checkpoint_every=10**5, **extra).wait()
        text = (home / "runs.log").read_bytes()[size:].decode()
        refused += code == 1 and "another process is training in" in text
    holder.send_signal(signal.SIGKILL)
    holder.wait()

    most = 0
    for number in range(args.rounds):
        held: list[Any] = []

        def take(url: str = f"s3://bucket/leases/{number}", held: list[Any] = held) -> None:
            try:
                lease = take_lease(open_store(url, writes=True), seconds=5)
                lease.keep(seconds=0.2)
                held.append(lease)
            except StoreError:
                pass

        threads = [threading.Thread(target=take) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        most = max(most, len(held)) if held else 99
        for lease in held:
            lease.release()
    print(verdict(f"second writers refused: {refused} of 2", refused == 2))
    print(verdict(f"holders of one lease, of 8 at once, {args.rounds} times: {most}", most == 1))
    return refused == 2 and most == 1


# --- Flipped bits ---


def flipped_bits(args: argparse.Namespace) -> bool:
    from meshwright.cli.remote_steps import find_steps

    rng, found = random.Random(args.seed), 0
    durable = find_steps(f"{URL}-1")[0]
    names = [name for name, size in durable.store.list().items() if size]
    for _ in range(args.flips):
        name = rng.choice(names)
        kept = durable.store.read(name)
        data = bytearray(kept)
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        durable.store.put(name, bytes(data))
        step, _, file = name.partition("/")
        found += any(file in problem for problem in durable.problems(int(step)))
        durable.store.put(name, kept)
    intact = all(not durable.problems(step) for step in durable.steps())
    print(verdict(f"flipped bits found, with the object's name: {found} of {args.flips}", found == args.flips))
    return found == args.flips and intact


# --- Time ---


def throughput(home: Path, server: Server, args: argparse.Namespace) -> bool:
    from meshwright.loop.folder.remote_run import read_remote

    more = {"model": "decoder-small", "num_tokens": 64, "batch_size": 8, "steps": 120, "checkpoint_every": 20}
    more |= {"model_options": "dropout=0.0"}
    times: dict[str, list[float]] = {"local": [], "s3": [], "server": [], "local cpu": [], "s3 cpu": []}
    for number in range(args.repeats):
        for kind in ("local", "s3") if number % 2 == 0 else ("s3", "local"):
            url = str(home / f"timed-{number}") if kind == "local" else f"s3://bucket/runs/timed-{number}"
            busy, computed = server.seconds(), child_seconds()
            finish(start(url, home, args, **more), home)
            times["server"] += [round(server.seconds() - busy, 2)] if kind == "s3" else []
            times[f"{kind} cpu"].append(round(child_seconds() - computed, 2))
            times[kind].append(training_seconds(Path(url) if kind == "local" else read_remote(url)[0]))
    local, s3, own, local_cpu, s3_cpu = (median(found) for found in times.values())
    print(f"119 steps of decoder-small, 6 checkpoints of 10.5 MiB, seconds: {json.dumps(times)}")
    ratio, cpu = (s3 - own) / local, s3_cpu / local_cpu
    text = f"local {local:.2f} s, s3 {s3:.2f} s, of which the server's {own:.2f} s: {ratio:.3f}x"
    print(verdict(f"{text} (at most 1.2x)", ratio <= 1.2))
    print(f"processor time of a run with its start: local {local_cpu:.2f} s, s3 {s3_cpu:.2f} s: {cpu:.3f}x")
    return ratio <= 1.2


def training_seconds(run: Path) -> float:
    """Returns the time from the first step to the end, when the last checkpoint is where it should be."""
    first = json.loads((run / "metrics.jsonl").read_text().splitlines()[0])
    last = json.loads((run / "events.jsonl").read_text().splitlines()[-1])
    assert (first["step"], last["kind"]) == (1, "finish")
    return round(last["time"] - first["time"], 2)


def child_seconds() -> float:
    """Returns the processor time of the finished runs."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=12)
    parser.add_argument("--moves", type=int, default=2, help="resumes with an empty local folder; each waits a minute")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--every", type=int, default=3, help="steps between checkpoints; every second is uploaded")
    parser.add_argument("--flips", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=10, help="races for a lease")
    parser.add_argument("--repeats", type=int, default=3, help="timed runs of each kind")
    parser.add_argument("--parts", nargs="+", default=["kills", "writers", "time"], help="what to measure")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
