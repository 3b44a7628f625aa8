"""Runs the GPU measurements that are still open, in two parts of under ten minutes each.

    PYTHONPATH=src python3 benchmarks/gpu_session.py --parts 1 --out results    # one H200
    PYTHONPATH=src python3 benchmarks/gpu_session.py --parts 2 --peers FOLDER   # with the peers of decoder_h200.py
    PYTHONPATH=src python3 benchmarks/gpu_session.py --tiny                     # all commands at small sizes, on a CPU

1. Values and times of the mLSTM's kernels for heads of several sizes, and losses in fp8 for a third seed from a shared
   start.
2. An xLSTM that generates 32 rows, which use the kernel for a token, and the 956M decoder beside torch.

Each command runs in its own process, under a time limit; its output goes to `<out>/<name>.txt`. A command that would
not fit in `--seconds` is not started. Exits with 1 if a command failed or was not run.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Command:
    """A benchmark with its options, and its time limit in seconds."""

    name: str
    script: str
    options: str
    limit: int


CURVES = "--parts curves --seeds 2 --variants bf16 fp8"
SHARED = f"{CURVES} --curve-steps 200 --shared 100 --batch 8 --rate 1e-4 --seconds 265"
PARTS = {
    1: (
        Command("mlstm_sizes", "mlstm_sizes.py", "", 260),
        Command("fp8_shared", "fp8_h200.py", SHARED, 280),
    ),
    2: (
        Command("generate_xlstm", "generate.py", "--model xlstm --batches 32", 200),
        Command("decoder", "decoder_h200.py", "--programs torch meshwright", 300),
    ),
}
# In place of the options that choose sizes.
TINY = {
    "mlstm_sizes": "--tiny --rounds 1 --inner 1",
    "generate_xlstm": "--tiny --model xlstm --batches 1",
    "fp8_shared": f"--tiny {CURVES} --curve-steps 4 --shared 2",
    "decoder": "--tiny --programs meshwright --steps 1",
}


def main() -> None:
    args = arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    begun, failed = time.monotonic(), list[str]()
    variables = os.environ | {"PYTHONUNBUFFERED": "1"} | ({"JAX_PLATFORMS": "cpu"} if args.tiny else {})
    for command in (command for part in args.parts for command in PARTS[part]):
        left = args.seconds - (time.monotonic() - begun)
        if left < command.limit and not args.tiny:
            print(f"{command.name}: not run, {left:.0f} s are left and it may take {command.limit} s", flush=True)
            failed.append(command.name)
            continue
        status, seconds = run(command, args, variables)
        text = (args.out / f"{command.name}.txt").read_text()
        print(f"== {command.name}: status {status}, {seconds:.0f} s\n{text[-args.tail :]}", flush=True)
        if status:
            failed.append(command.name)
    if failed:
        sys.exit(f"error: failed or not run: {', '.join(failed)}.")


def run(command: Command, args: argparse.Namespace, variables: dict[str, str]) -> tuple[int | str, float]:
    options = TINY[command.name] if args.tiny else command.options
    if args.peers is not None and command.name == "decoder" and not args.tiny:
        options += f" --peers {shlex.quote(str(args.peers.resolve()))}"
    begun = time.monotonic()
    with (args.out / f"{command.name}.txt").open("w") as out:
        given = [sys.executable, str(HERE / command.script), *shlex.split(options)]
        limit = None if args.tiny else command.limit
        try:
            done = subprocess.run(given, env=variables, stdout=out, stderr=subprocess.STDOUT, timeout=limit)
            status: int | str = done.returncode
        except subprocess.TimeoutExpired:
            status = f"over {command.limit} s"
    return status, time.monotonic() - begun


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", type=int, nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--out", type=Path, default=Path("gpu_session"), help="a folder for the output of each command")
    parser.add_argument("--peers", type=Path, help="folder with torch's program for the decoder (default: without it)")
    parser.add_argument("--seconds", type=float, default=570, help="time limit of the whole run (default: 570)")
    parser.add_argument("--tail", type=int, default=2500, help="characters of each output to print (default: 2500)")
    parser.add_argument("--tiny", action="store_true", help="small sizes, to test the commands on a CPU")
    return parser.parse_args()


if __name__ == "__main__":
    main()
