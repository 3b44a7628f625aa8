"""Runs the GPU measurements that are still open, in three parts of under ten minutes each.

    PYTHONPATH=src python3 benchmarks/gpu_session.py --parts 1 --out results    # one H200
    PYTHONPATH=src python3 benchmarks/gpu_session.py --tiny                     # all commands at small sizes, on a CPU

1. Generation: one step of the mLSTM recurrence, an xLSTM and the 956M decoder, each beside its earlier forms.
2. The mLSTM cell at six shapes: the XLA form, which was changed after it was last timed, and the kernels.
3. Losses in fp8 for a third seed, and the step with Muon.

Each command runs in its own process, under a time limit; its output goes to `<out>/<name>.txt`. A command that would
not fit in `--seconds` is not started. Exits with 1 if a command failed or was not run.
"""

from __future__ import annotations

import argparse
import os
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


PARTS = {
    1: (
        Command("mlstm_step", "mlstm_step.py", "", 120),
        Command("generate_decoder", "generate.py", "--batches 1", 130),
        Command("generate_xlstm", "generate.py", "--model xlstm --batches 1 8", 230),
        Command("generate_xlstm_32", "generate.py", "--model xlstm --batches 32 --only meshwright", 60),
    ),
    2: (
        Command("mlstm_cell", "mlstm_h200.py", "--chunks 256 --rounds 9 --inner 3 --shapes 0 1 2", 280),
        Command("mlstm_cell_long", "mlstm_h200.py", "--chunks 256 --rounds 9 --inner 3 --shapes 3 4 5", 280),
    ),
    3: (
        Command(
            "fp8_seed_2",
            "fp8_h200.py",
            "--parts curves --variants bf16 fp8 --curve-steps 200 --shared 100 --batch 8 --seeds 2 --rate 1e-4 "
            "--seconds 230",
            260,
        ),
        Command("muon", "muon_h200.py", "--rounds 3", 330),
    ),
}
# In place of the options that choose sizes.
TINY = {
    "mlstm_step": "--tiny --rounds 3 --tokens 4",
    "generate_xlstm": "--tiny --model xlstm --batches 1",
    "generate_xlstm_32": "--tiny --model xlstm --batches 4 --only meshwright",
    "generate_decoder": "--tiny --batches 1 --only meshwright before",
    "mlstm_cell": "--tiny --rounds 2 --inner 1",
    "mlstm_cell_long": "--tiny --rounds 1 --inner 1",
    "fp8_seed_2": "--tiny --parts curves --variants bf16 fp8 --curve-steps 4 --shared 2 --seeds 2",
    "muon": "--tiny --rounds 1 --steps 1",
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
    begun = time.monotonic()
    with (args.out / f"{command.name}.txt").open("w") as out:
        given = [sys.executable, str(HERE / command.script), *options.split()]
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
    parser.add_argument("--seconds", type=float, default=570, help="time limit of the whole run (default: 570)")
    parser.add_argument("--tail", type=int, default=2500, help="characters of each output to print (default: 2500)")
    parser.add_argument("--tiny", action="store_true", help="small sizes, to test the commands on a CPU")
    return parser.parse_args()


if __name__ == "__main__":
    main()
