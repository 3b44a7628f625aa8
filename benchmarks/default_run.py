"""Held-out loss of the default run of `meshwright train` on several meshes, against a model that counts bytes.

    python benchmarks/default_run.py

The baseline is the cross-entropy of a unigram model of bytes. All meshes start from the same parameters and see the
same data.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from measure import ROOT, machine, table, verdict, versions

WANTED = 2.2  # nats per byte on held-out text


def main() -> None:
    args = arguments()
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        unigram = counted(home)
        rows, losses = [], []
        for mesh in args.mesh:
            began = time.time()
            found = last_evaluation(run(home, mesh, args))
            losses.append(found)
            rows.append([mesh, f"{found:.4f}", f"{found / unigram:.2f}", f"{time.time() - began:.0f}"])
            print(f"{mesh}: {found:.4f}", flush=True)
    print(f"{machine()}; {versions('jax', 'grain')}")
    print(f"counting bytes: {unigram:.4f} nats per byte on the held-out text")
    print(table(["mesh", "held-out loss", "of counting", "seconds"], rows))
    print(verdict(f"all below {WANTED}", max(losses) < WANTED))
    apart = (max(losses) - min(losses)) / min(losses)
    print(verdict(f"meshes are {apart:.1e} apart (1e-2 allowed)", apart < 1e-2))


def counted(home: Path) -> float:
    """Returns the held-out cross-entropy of a unigram model of bytes."""
    sys.path.insert(0, str(ROOT / "src"))
    from meshwright.data import Rows, load_tokenizer, open_documents, prepare_tokens
    from meshwright.loop.settings.options import NUM_ROWS, DataOptions

    options = DataOptions()
    tokens = prepare_tokens(open_documents(), load_tokenizer("bytes"), folder=home / "tokens")
    train, held_out = tokens.split(options.validation)
    counts = np.bincount(train.read(0, train.num_tokens)[0], minlength=256) + 1.0
    rows = Rows(held_out, options.num_tokens)
    seen = [rows[number] for number in range(4 * NUM_ROWS)]  # the rows of the run's evaluation
    targets = np.concatenate([row["targets"][row["weights"] > 0] for row in seen])
    return float(-np.log(counts / counts.sum())[targets].mean())


def run(home: Path, mesh: str, args: argparse.Namespace) -> Path:
    place = home / mesh.replace(":", "").replace(",", "-")
    command = [sys.executable, "-m", "meshwright", "train", "--run", str(place), "--mesh", mesh, "--no-report"]
    command += ["--data-cache", str(home / "tokens"), "--sample-tokens", "0", "--steps", str(args.steps)]
    variables = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, env=variables, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr[-3000:])
    return place


def last_evaluation(place: Path) -> float:
    lines = [json.loads(line) for line in (place / "metrics.jsonl").read_text().splitlines()]
    return float([line["eval/loss"] for line in lines if "eval/loss" in line][-1])


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mesh", nargs="*", default=["dp:8", "fsdp:8", "tp:8", "dp:2,fsdp:2,tp:2"])
    parser.add_argument("--steps", type=int, default=300)
    return parser.parse_args()


if __name__ == "__main__":
    main()
