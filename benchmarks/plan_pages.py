"""Builds plan pages for 7B and 70B decoders on four machines, and measures the time and memory of each search.

    PYTHONPATH=src python benchmarks/plan_pages.py --out docs/plans --tpu PYTHON --gpu PYTHON

PYTHON is an interpreter with the compiler for TPUs or GPUs. Each plan is one call of `meshwright plan search` in a
separate process: thousands of candidates by arithmetic, the best of them compiled. Reports the time of the whole call
and the sampled peak memory of it and the compiler together.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from measure import machine, table, verdict, versions

MACHINES = {"v5p:4x4x8": "1M", "v5e:16x16": "1M", "h200:8x8": "1M", "v5p:16x16x16": "16M"}
# libtpu 0.0.42 divides by zero for an axis of 4096 chips; two axes compile.
LIMITS = {"v5p:16x16x16": ", fsdp<=512"}
MODELS = ("7b", "70b")
LIMIT_S, LIMIT_BYTES, GIB = 180, 8 * 2**30, 2**30


def main() -> None:
    args = arguments()
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    rows, slow, large = [], [], []
    for model in args.models:
        for target, tokens in MACHINES.items():
            if args.only and target not in args.only:
                continue
            name = f"decoder-{model}-{target.replace(':', '-')}"
            command = [sys.executable, "-m", "meshwright", "plan", "search", "--model", f"decoder-{model}"]
            limits = f"batch={tokens} tokens{LIMITS.get(target, '')}"
            command += ["--target", target, "--top", str(args.top), "--constraints", limits]
            command += ["--python", args.gpu if target.startswith("h") else args.tpu, "--timeout", "600"]
            command += ["--html", str(out / f"{name}.html"), "--json"]
            began = time.monotonic()
            with tempfile.TemporaryFile("w+") as said:  # an unread pipe would block it
                process = subprocess.Popen(command, stdout=said)
                peak = watch(process)
                seconds = time.monotonic() - began
                said.seek(0)
                best = json.load(said)["plans"][0]
            slow += [name] if seconds > LIMIT_S else []
            large += [name] if peak > LIMIT_BYTES else []
            rows.append(row(name, best, seconds, peak))
            print(" | ".join(rows[-1]), file=sys.stderr, flush=True)
    print(f"{machine()}; {versions('jax')}")
    print(table(["page", "plan", "memory", "step", "MFU", "hidden", "rests on", "took", "held"], rows))
    print(verdict(f"over {LIMIT_S} s: {', '.join(slow) or 'none'}", not slow))
    print(verdict(f"over 8 GiB: {', '.join(large) or 'none'}", not large))


def row(name: str, plan: dict[str, Any], seconds: float, peak: int) -> list[str]:
    setup = " ".join(f"{key}={value}" for key, value in plan["setup"].items() if value is not None and key != "rows")
    sent = sum(item["wire_bytes"] for item in plan["sent"])
    hidden = sum(item["wire_bytes"] * item["hidden"] for item in plan["sent"]) / sent
    memory = f"{plan['memory']['total'] / GIB:.1f} of {plan['memory']['capacity'] / GIB:.0f} GiB"
    step = f"{plan['time']['step']['value']:.3g} s"
    basis = "compiled" if plan["compiled"] is not None else "computed"
    shares = [f"{plan['mfu']:.1%}", f"{hidden:.0%}"]
    return [name, setup, memory, step, *shares, basis, f"{seconds:.0f} s", f"{peak / GIB:.1f} GiB"]


def watch(process: subprocess.Popen[bytes]) -> int:
    """Returns the peak resident bytes of a process and its children."""
    most = 0
    while process.poll() is None:
        most = max(most, sum(held(pid) for pid in family(process.pid)))
        time.sleep(0.5)
    return most


def family(pid: int) -> list[int]:
    found = [pid]
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found += [inner for child in task.read_text().split() for inner in family(int(child))]
        except OSError:  # it has exited
            continue
    return found


def held(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096
    except OSError:
        return 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="docs/plans")
    parser.add_argument("--tpu", default=sys.executable, help="interpreter with libtpu (default: this one)")
    parser.add_argument("--gpu", default=sys.executable, help="interpreter with JAX's CUDA plugin (default: this one)")
    parser.add_argument("--top", type=int, default=2, help="number of plans to compile per page (default: 2)")
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--only", nargs="*", choices=MACHINES)
    return parser.parse_args()


if __name__ == "__main__":
    main()
